"""Scorers that only read the answer's text: exact, includes, choice, number.

An answer commits itself with `\\boxed{...}`, else after `####`, else with "answer is ..." or
"answer: ...". Two different commitments of the same kind score 0: otherwise a model could
list several and let the scorer choose.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any, NamedTuple

MAX_CHOICES = len(string.ascii_uppercase)
MAX_CHARS = 200_000
"""The end of a longer answer is read."""


class Score(NamedTuple):
    """A score from 0 to 1, and why."""

    value: float
    reason: str = ""
    metrics: Mapping[str, float] = {}
    """More figures about the answer, by name."""


def scored(right: bool, reason: str) -> Score:
    """1 or 0."""
    return Score(float(right), reason)


def exact(options: Mapping[str, Any], answer: str) -> Score:
    """The whole answer, without white space around it, is a target."""
    fold = str.casefold if options.get("ignore_case") else str
    found = fold(answer.strip())
    return scored(found in {fold(t.strip()) for t in _targets(options)}, f"answer {answer[:80]!r}")


def includes(options: Mapping[str, Any], answer: str) -> Score:
    """A target occurs, not inside a longer name, and none of `excludes` does."""
    ignore = options.get("ignore_case", True)
    text = _folded(answer, ignore)
    for other in options.get("excludes", ()):
        if _occurs(_folded(other, ignore), text):
            return Score(0.0, f"the answer also contains {other[:80]!r}")
    found = [t for t in _targets(options) if _occurs(_folded(t, ignore), text)]
    return scored(bool(found), f"contains {found[0][:80]!r}" if found else "contains no target")


def _targets(options: Mapping[str, Any]) -> list[str]:
    target = options["target"]
    return [target] if isinstance(target, str) else list(target)


def _folded(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split())
    return plain.casefold() if ignore_case else plain


def _occurs(target: str, text: str) -> bool:
    # 42 is neither in 142 nor in 4.42 or 42.5.
    before = r"(?<!\w)" + r"(?<!\d\.)" * target[:1].isdigit() if target[:1].isalnum() else ""
    after = r"(?!\w)" + r"(?!\.\d)" * target[-1:].isdigit() if target[-1:].isalnum() else ""
    return re.search(before + re.escape(target) + after, text) is not None


_BOXED = re.compile(r"\\f?boxed\s*\{")
_HASHES = re.compile(r"####[ \t]*+(?=\S)")
_ANSWER_IS = r"\banswer\**+[ \t]*+(?:is|:|=|\uff1a)(?!\w)[ \t]*+:?+\**+[ \t]*+"
_THEREFORE = r"(?:(?:so|thus|hence|therefore|the|my|our|final|correct)\b,?[ \t*]*+)*+"
_OPTION = r"[*(]*+[A-Z][).:]"
_STATED = re.compile(
    rf"{_ANSWER_IS}(?:{_THEREFORE}{_ANSWER_IS})*+"
    r"(?:\n\s*+(?:(?:\\\[|\$\$)\s*+|(?=\S{1,30}[ \t]*+$)"
    rf"|(?={_OPTION}[ \t*][^\n]*+(?!\s*+{_OPTION}))))?",
    re.IGNORECASE | re.MULTILINE,
)
"""What follows in the line; or one word, a displayed formula or a choice in the next line.

It always matches after a mark: to fail there takes quadratic time for a text that repeats it."""
_STATED_CHARS = 300


def commitments(answer: str) -> list[str]:
    """What an answer commits itself to, by the strongest kind of mark that it has."""
    text = answer[-MAX_CHARS:]
    if boxed := list(_boxed_contents(text)):
        return boxed
    for mark in (_HASHES, _STATED):
        if found := list(mark.finditer(text)):
            ends = [*(match.start() for match in found[1:]), len(text)]
            lines = [
                text[m.end() : end].split("\n", 1)[0] for m, end in zip(found, ends, strict=True)
            ]
            if stated := [line[:_STATED_CHARS].strip() for line in lines if line.strip()]:
                return stated
    return []


def _boxed_contents(text: str) -> Iterator[str]:
    """The contents of `\\boxed{...}`, with balanced braces."""
    at = 0
    while match := _BOXED.search(text, at):
        depth, at = 1, match.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if not depth:
            yield text[match.end() : at - 1].strip()


def sole(values: Iterable[Any]) -> tuple[Any, str]:
    """The one value of all commitments, or None and why there is none."""
    different = set[Any]()
    for value in values:
        different.add(value)
        if len(different) > 1:
            return None, "several different answers"
    only = next(iter(different), None)
    return only, "no answer found" if only is None else ""


MAX_DIGITS = 1000
"""A longer number is none."""
_NUMBER = r"[-+\u2212]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4})?"
_NUMBERS = re.compile(rf"(?<![\w.])({_NUMBER})(?:[ \t]*/[ \t]*({_NUMBER}))?")
_MIXED = re.compile(r"([-+\u2212]?)[ \t]*(\d{1,9})[ \t]+(\d{1,9})/(\d{1,9})(?![\d.,])")
_GROUPED = re.compile(r"\D*\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,]).*")
_LATEX_FRACTION = re.compile(r"(?:([-+\u2212])[ \t]*+)?\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_POWER_OF_TEN = re.compile(
    r"(?<=\d)[ \t]*+(?:\\times|\\cdot|[*\u00d7\u00b7])[ \t]*10\^\{?([-+\u2212]?\d{1,4})(?!\d)\}?"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(?<![\w./,])(\d[\d,]*(?:\.\d+)?)(?:[ \t-]*+({'|'.join(_SCALES)})|(?-i:k))(?![\w])",
    re.IGNORECASE,
)
_SPACED = re.compile(
    r"(?<![\w.,])(\d{1,3}(?:(?:[ \u00a0\u2009\u202f'\u2019_]|\{,\}|\\ )\d{3})+)(?![\w,-])"
)
"""`42 000`, with any of the characters that separate thousands."""
_SCALED_FRACTION = re.compile(
    rf"(?<![\w./,])(?:(\d{{1,9}})[ \t]+)?(\d{{1,9}})/(\d{{1,9}})[ \t-]+({'|'.join(_SCALES)})(?!\w)",
    re.IGNORECASE,
)
_ROOT_OR_POWER = re.compile(r"\\(?:sqrt|pi|pm)(?![A-Za-z])|[\u221a\u03c0^\u00b1]")
_END = r"(?=[ \t]*(?:[.)\]}$*!?]*\s*\Z|[,;&|]|(?i:and|or)\b))"
_ALSO_NUMBER = re.compile(
    rf"[ \t]*+\(?(?:(?:,[ \t]*)?(?i:or|to|through)\b[ \t]*\\?({_NUMBER})"
    rf"|(?:[,;&|]|(?:,[ \t]*)?(?i:and)\b)[ \t]*\\?({_NUMBER}){_END})"
)
"""Another number of a list such as `42 or 43`, from which the scorer must not choose."""
_DENIED = re.compile(r"(?i:\A(?:is[ \t]+)?not\b)|=[^=]*\bor\b[^=]*=")
"""`not 42`, and `x = 41 or x = 42`."""
_GOES_ON = re.compile(
    r"[ \t]*+(?:\\(?:sqrt|pi|times|cdot|div|pm)(?![A-Za-z])|[\u221a\u03c0\u00d7\u00f7]"
    r"|\^(?!\s*+\{?\s*+\\circ)|[-+*\u2212\u2013][ \t]*[\d\\]|[\u00b2\u00b3]"
    rf"|(?i:{'|'.join(_SCALES)})(?!\w))"
)


def number_of(text: str, *, last: bool = False) -> Fraction | None:
    """The first (or last) number in a text: `1,234.5`, `$3`, `-2e3`, `3/4`, `\\frac{3}{4}`."""
    plain = _plain(text)
    found = list(_NUMBERS.finditer(plain))
    return _value(found[-1 if last else 0]) if found else None


def _scaled_fraction(found: re.Match[str]) -> str:
    """`2 1/2 million` as `5000000/2`."""
    whole, above, below = (int(found[n] or 0) for n in (1, 2, 3))
    return f"{(whole * below + above) * 10 ** _SCALES[found[4].lower()]}/{below}"


def _plain(text: str) -> str:
    text = _SCALED_FRACTION.sub(_scaled_fraction, text)
    text = _SCALED.sub(
        lambda found: f"{found[1]}e{_SCALES[(found[2] or 'thousand').lower()]}", text
    )
    text = _LATEX_FRACTION.sub(r" \1\2/\3 ", text).replace("\\$", "$").replace("\\,", "")
    return _POWER_OF_TEN.sub(lambda found: "e" + found[1].replace("\u2212", "-"), text)


def _value(found: re.Match[str]) -> Fraction | None:
    above, below = found.groups()
    try:
        value = _decimal(above)
        return value if below is None else value / _decimal(below)
    except (DecimalException, ValueError, OverflowError, ZeroDivisionError):
        return None


def _decimal(text: str) -> Fraction:
    text = text.rstrip(",")
    if len(text) > MAX_DIGITS:
        raise ValueError("arithmetic with it takes seconds")
    if "," in text and not _GROUPED.fullmatch(text):
        raise ValueError("a list or a decimal comma")
    return Fraction(Decimal(text.translate({0x2212: "-", ord(","): None, ord("$"): None})))


def number(options: Mapping[str, Any], answer: str) -> Score:
    """The number that the answer commits itself to, else its last one, is the target."""
    stated = commitments(answer)
    if stated:
        value, why = sole(map(_stated_number, dict.fromkeys(stated)))
    else:
        value, why = number_of(answer[-MAX_CHARS:], last=True), "no number found"
    if value is None:
        return Score(0.0, why)
    target = number_of(str(options["target"]))
    assert target is not None
    # As written: 0.3 in binary is less than 0.3.
    tolerance, relative = (Fraction(str(options.get(k, 0))) for k in ("tolerance", "relative"))
    most = tolerance + abs(target) * relative
    return scored(abs(value - target) <= most, f"answer {_shown(value)}")


def _shown(value: Fraction) -> str:
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        return "beyond all floats"


def _stated_number(text: str) -> Fraction | None:
    """The number of a commitment: of its first sentence, after the last equals sign.

    None for a larger expression, such as `2\\sqrt{3}`: its first number is not its value.
    """
    sentence = re.split(r"(?<=\S)\.\s|;(?!\s*[-+$\\.\d])", text)[0]
    if _DENIED.search(sentence):
        return None
    sentence = _SPACED.sub(lambda found: re.sub(r"\D", "", found[1]), sentence)
    plain = _plain(sentence.rpartition("=")[2]).strip()
    if plain[:1] in ("-", "\u2212", "\u2013"):
        plain = f"-{plain[1:].lstrip()}"
    found = _NUMBERS.search(plain)
    if found is None or _ROOT_OR_POWER.search(plain, 0, found.start()):
        return None
    if (mixed := _MIXED.match(plain)) and int(mixed[4]):
        part = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -part if mixed[1] in ("-", "\u2212") else part
    if _GOES_ON.match(plain, found.end()):
        return None
    value, at = _value(found), found.end() - found[0].endswith(",")
    also = _ALSO_NUMBER.match(plain, at)
    return None if also and number_of(also[1] or also[2]) != value else value


_LETTER = re.compile(r"\W*+(?:(?:option|choice)\s\W*+)?([A-Z])(?![A-Za-z'\u2019])", re.IGNORECASE)
_ALSO = re.compile(r"\W*(?:(?i:and|or)\b\W*)?(?:(?i:option)\s+)?([A-Z])(?![\w'\u2019])")
_LISTED = re.compile(r"(?<!\w)([A-Z])[).:]")
_STYLE = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")


def letter_of(text: str, choices: Sequence[str]) -> str | None:
    """The letter that a short text names, by itself or by the text of its choice."""
    letters = string.ascii_uppercase[: len(choices) or MAX_CHOICES]
    plain = _STYLE.sub(r"\1", text).strip()
    bare = plain.strip("\"'`*.() ").casefold()
    same = [i for i, one in enumerate(choices) if one.strip().strip(".").casefold() == bare]
    if len(same) == 1:
        return letters[same[0]]
    found = _LETTER.match(plain)
    # "a" and "i" in lower case are words.
    if found and (found[1].isupper() or len(bare) == 1) and found[1].upper() in letters:
        letter, also = found[1].upper(), _ALSO.match(plain, found.end())
        others = {*_LISTED.findall(plain), also[1] if also else letter} - {letter}
        return None if others.intersection(letters) else letter
    named = [i for i, one in enumerate(choices) if _occurs(_folded(one, True), _folded(text, True))]
    return letters[named[0]] if len(named) == 1 else None


def choice(options: Mapping[str, Any], answer: str) -> Score:
    """The one choice that the answer commits itself to is the target."""
    choices = options.get("choices", ())
    stated = commitments(answer)
    if stated:
        value, why = sole([letter_of(one, choices) for one in stated])
    else:
        lines = [line for line in answer[-MAX_CHARS:].splitlines() if line.strip()]
        value = letter_of(lines[0], choices) if len(lines) == 1 else None
        why = "no choice found: it ends with 'Answer: X'"
    if value is None:
        return Score(0.0, why)
    return scored(value == letter_of(options["target"], choices), f"answer {value}")


READERS: dict[str, Callable[[Mapping[str, Any], str], Score]] = {
    "exact": exact,
    "includes": includes,
    "choice": choice,
    "number": number,
}
"""Scorers in bounded time, of any answer."""
