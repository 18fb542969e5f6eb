"""Find the text that a model means to replace, also when its copy is not exact.

Strategies are tried from strict to tolerant; the first that finds anything decides. Each returns
spans of the content, so that everything outside them stays byte for byte.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_FUZZY_LINES = 20_000
"""Files with more lines are matched without the two strategies that compare by likeness."""
BLOCK_LIKENESS = 0.7
"""Likeness of the inner lines when the first and last line agree."""
CONTEXT_LIKENESS = 0.9
"""Likeness of whole blocks in the last strategy."""

PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'",
        "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u201f": '"',
        "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "-", "\u2212": "-",
        "\u00a0": " ", "\u2007": " ", "\u202f": " ", "\u200b": None, "\ufeff": None,
    }
)  # fmt: skip
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", '\\"': '"', "\\'": "'", "\\\\": "\\"}


@dataclass(frozen=True)
class Span:
    """A stretch of the content."""

    start: int
    end: int


@dataclass(frozen=True)
class Found:
    """What a strategy found: never empty."""

    strategy: str
    spans: list[Span]
    """In order, without overlap."""


Finder = Callable[[str, str], list[Span]]


def find(content: str, old: str) -> Found | None:
    """Where `old` (not empty) stands in `content`; None when no strategy finds it."""
    for name, strategy in STRATEGIES:
        if spans := strategy(content, old):
            return Found(name, spans)
    return None


def replace(content: str, found: Found, old: str, new: str) -> str:
    """The content with every span replaced; indentation follows the text that was found."""
    out: list[str] = []
    at = 0
    for span in found.spans:
        original = content[span.start : span.end]
        fitted = new if found.strategy == "exact" else _fitted(found.strategy, original, old, new)
        out += [content[at : span.start], fitted]
        at = span.end
    return "".join(out) + content[at:]


def _fitted(strategy: str, original: str, old: str, new: str) -> str:
    """`new` for a tolerant match: read as `old` was read, with the place's indentation."""
    if strategy == "escapes":
        old, new = _unescape(old), _unescape(new)
    if strategy == "boundary_trimmed":
        head, tail = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
        return new.removeprefix(head).removesuffix(tail)
    return reindented(new, indentation(old), indentation(original))


def reindented(new: str, was: str, there: str) -> str:
    """A text whose lines begin with one indentation, with another in its place."""
    if was == there:
        return new
    return "\n".join(
        there + line[len(was) :] if line.strip() and line.startswith(was) else line
        for line in new.split("\n")
    )


def indentation(text: str) -> str:
    """Of the first line that is not blank."""
    for line in text.split("\n"):
        if line.strip():
            return line[: len(line) - len(line.lstrip())]
    return ""


def _exact(content: str, old: str) -> list[Span]:
    spans: list[Span] = []
    at = content.find(old)
    while at >= 0:
        spans.append(Span(at, at + len(old)))
        at = content.find(old, at + len(old))
    return spans


def _by_lines(normal: Callable[[str], str]) -> Finder:
    """A strategy that compares line by line after `normal`."""

    def strategy(content: str, old: str) -> list[Span]:
        wanted = [normal(line) for line in _lines_of(old)]
        if not any(wanted):
            return []
        lines = content.split("\n")
        have = [normal(line) for line in lines]
        spans = _windows(lines, len(wanted), lambda i: have[i : i + len(wanted)] == wanted)
        return _with_newline(content, old, spans)

    return strategy


def _lines_of(old: str) -> list[str]:
    """The lines of the wanted text; a last newline does not make one more."""
    return (old[:-1] if _ends_a_line(old) else old).split("\n")


def _ends_a_line(old: str) -> bool:
    return old.endswith("\n") and bool(old.strip("\n"))


def _with_newline(content: str, old: str, spans: list[Span]) -> list[Span]:
    """The spans of whole lines, with the last newline where the wanted text has one."""
    if not _ends_a_line(old):
        return spans
    return [Span(s.start, s.end + content.startswith("\n", s.end)) for s in spans]


def _windows(lines: list[str], size: int, fits: Callable[[int], bool]) -> list[Span]:
    """Spans of the windows of `size` lines that fit, from the top, without overlap.

    A span ends before the newline of its last line.
    """
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    spans: list[Span] = []
    at = 0
    while at + size <= len(lines):
        if fits(at):
            spans.append(Span(starts[at], starts[at + size] - 1))
            at += size
        else:
            at += 1
    return spans


def _collapse(line: str) -> str:
    return re.sub(r"\s+", " ", line).strip()


def _unescape(text: str) -> str:
    return re.sub(r"\\[ntr\"'\\]", lambda m: _ESCAPES[m.group()], text)


def _escapes(content: str, old: str) -> list[Span]:
    plain = _unescape(old)
    if plain == old or not plain.strip():
        return []
    return _exact(content, plain) or _by_lines(str.strip)(content, plain)


def _boundary(content: str, old: str) -> list[Span]:
    """Without the blank lines around the wanted text, and its outer lines without their margins."""
    trimmed = old.strip()
    if not trimmed or trimmed == old:
        return []
    return _exact(content, trimmed)


def _unicode(content: str, old: str) -> list[Span]:
    """Typographic quotes, dashes and spaces taken for their ASCII forms."""
    return _by_lines(lambda line: _collapse(line.translate(PUNCTUATION)))(content, old)


def _block_anchor(content: str, old: str) -> list[Span]:
    """First and last line agree, and what lies between is alike; the best such block only."""
    wanted = [line.strip() for line in _lines_of(old)]
    size = len(wanted)
    lines = content.split("\n")
    if size < 3 or not wanted[0] or not wanted[-1] or len(lines) > MAX_FUZZY_LINES:
        return []
    have = [line.strip() for line in lines]
    inner = "\n".join(wanted[1:-1])
    scores: dict[int, float] = {}
    for i in range(len(lines) - size + 1):
        if have[i] == wanted[0] and have[i + size - 1] == wanted[-1]:
            between = "\n".join(have[i + 1 : i + size - 1])
            scores[i] = _likeness(inner, between, BLOCK_LIKENESS)
    return _with_newline(content, old, _best(lines, size, scores, BLOCK_LIKENESS))


def _context_aware(content: str, old: str) -> list[Span]:
    """The block that is most alike, when it is alike enough and no other comes near."""
    wanted = [_collapse(line) for line in _lines_of(old)]
    size = len(wanted)
    lines = content.split("\n")
    if size < 2 or len("".join(wanted)) < 20 or len(lines) > MAX_FUZZY_LINES:
        return []
    have = [_collapse(line) for line in lines]
    exact = set(filter(None, wanted))
    scores: dict[int, float] = {}
    for i in range(len(lines) - size + 1):
        window = have[i : i + size]
        if exact.isdisjoint(window):  # at least one line must be as written
            continue
        scores[i] = _likeness("\n".join(wanted), "\n".join(window), CONTEXT_LIKENESS)
    return _with_newline(content, old, _best(lines, size, scores, CONTEXT_LIKENESS))


def _likeness(a: str, b: str, floor: float) -> float:
    """difflib's ratio, or 0 where cheaper bounds already say that it is below `floor`."""
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    if matcher.real_quick_ratio() < floor or matcher.quick_ratio() < floor:
        return 0.0
    return matcher.ratio()


def _best(lines: list[str], size: int, scores: dict[int, float], floor: float) -> list[Span]:
    """The span of the best score, if it reaches the floor and stands apart from other blocks."""
    if not scores:
        return []
    start, score = max(scores.items(), key=lambda item: item[1])
    rivals = [s for i, s in scores.items() if i != start and s >= floor and s > score - 0.05]
    if score < floor or rivals:
        return []
    return _windows(lines, size, lambda i: i == start)


def nearest(content: str, old: str) -> str:
    """Names the line that is most like the first line of a text, for the end of a message."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    lines = content.split("\n")[:5_000]
    near = difflib.get_close_matches(first, [x.strip() for x in lines], n=1, cutoff=0.6)
    if not near:
        return "; read the file and copy the text exactly"
    number = next(i for i, x in enumerate(lines, 1) if x.strip() == near[0])
    shown = near[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:200]
    return f"; the closest line is {number}: {shown!r}"


STRATEGIES: tuple[tuple[str, Finder], ...] = (
    ("exact", _exact),
    ("line_trimmed", _by_lines(str.strip)),
    ("whitespace", _by_lines(_collapse)),
    ("escapes", _escapes),
    ("boundary_trimmed", _boundary),
    ("unicode", _unicode),
    ("block_anchor", _block_anchor),
    ("context_aware", _context_aware),
)
"""From strict to tolerant."""
