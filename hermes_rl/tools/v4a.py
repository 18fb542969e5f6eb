"""The patch format V4A (`*** Begin Patch` to `*** End Patch`): read a patch, apply it to texts.

It is the format of OpenAI's tool `apply_patch`. A hunk has no line numbers: it is found by its
lines, from the top of the file to its end, and lines `@@ TEXT` before it say below which line. A
hunk without them that fits several places is refused, and so is a patch that lacks its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hermes_rl.errors import ToolError
from hermes_rl.tools.matching import PUNCTUATION, indentation, nearest, reindented

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File:\s*(\S.*?)\s*")
_MOVE = re.compile(r"\*\*\* Move to:\s*(\S.*?)\s*")
_LINE_NUMBERS = re.compile(r"-\d+(,\d+)? \+\d+(,\d+)? @@ ?")
"""Of unified diffs, which models write here too."""

Lines = Sequence[tuple[str, str]]
"""Lines of a hunk: `" "`, `"-"` or `"+"`, and the text."""


@dataclass(frozen=True)
class Hunk:
    """One change of a file."""

    place: str
    """Names it in messages."""
    anchors: tuple[str, ...]
    """Lines above it, from the outside in."""
    lines: Lines
    at_end: bool = False
    """It is the end of the file."""


@dataclass(frozen=True)
class FileChange:
    """What a patch does with one file."""

    action: str
    """`add`, `update` or `delete`."""
    path: str
    content: str = ""
    """Of an added file."""
    move_to: str | None = None
    """New path of an updated file."""
    hunks: tuple[Hunk, ...] = ()
    """Of an updated file, from top to bottom."""


def parse_patch(text: str) -> list[FileChange]:
    """Read a patch.

    Raises: ToolError that names the line of the patch.
    """
    lines = text.replace("\r\n", "\n").strip().split("\n")
    if lines[0].strip() != BEGIN:
        raise ToolError(f"the patch must begin with the line '{BEGIN}', not {lines[0][:80]!r}")
    if lines[-1].strip() != END:
        raise ToolError(f"the patch must end with the line '{END}': is it cut off?")
    last = len(lines) - 1
    starts = [i for i in range(1, last) if _HEADER.fullmatch(lines[i])]
    for number, line in enumerate(lines[1 : starts[0] if starts else last], 2):
        if line.strip():
            raise _fault(number, line, "expected '*** Add File: PATH', 'Update' or 'Delete'")
    if not starts:
        raise ToolError("the patch has no file: begin with '*** Update File: PATH'")
    changes = []
    for start, end in zip(starts, [*starts[1:], last], strict=True):
        header = _HEADER.fullmatch(lines[start])
        assert header is not None, "it matched above"
        changes.append(_READERS[header[1]](header[2], lines[start + 1 : end], start + 2))
    return changes


def _fault(number: int, line: str, why: str) -> ToolError:
    return ToolError(f"line {number} of the patch: {why}, not {line[:80]!r}")


def _added(path: str, body: list[str], first: int) -> FileChange:
    while body and not body[-1].strip():
        body = body[:-1]
    for number, line in enumerate(body, first):
        if not line.startswith("+"):
            raise _fault(number, line, "each line of an added file begins with '+'")
    return FileChange("add", path, content="".join(f"{line[1:]}\n" for line in body))


def _deleted(path: str, body: list[str], first: int) -> FileChange:
    for number, line in enumerate(body, first):
        if line.strip():
            raise _fault(number, line, "a deleted file has no lines; expected the next file")
    return FileChange("delete", path)


def _updated(path: str, body: list[str], first: int) -> FileChange:
    move = _MOVE.fullmatch(body[0]) if body else None
    if move is not None:
        body, first = body[1:], first + 1
    found = _Found(path)
    for number, line in enumerate(body, first):
        if line.startswith("@@"):
            found.anchor(number, line)
        elif line.rstrip() == END_OF_FILE:
            found.close(at_end=True)
        elif line[:1] in ("", " ", "-", "+"):
            found.line(number, line)
        else:
            raise _fault(number, line, "a line of a hunk begins with ' ', '-' or '+'")
    found.close()
    if not found.hunks and move is None:
        raise ToolError(f"'{path}': the patch has no lines for it")
    return FileChange("update", path, move_to=move and move[1], hunks=tuple(found.hunks))


class _Found:
    """The hunks of a file as they are read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.hunks: list[Hunk] = []
        self._anchors: list[str] = []
        self._lines: list[tuple[str, str]] = []
        self._start = 0

    def anchor(self, number: int, line: str) -> None:
        """A line `@@`, which begins a hunk unless it follows another one."""
        if self._lines:
            self.close()
        self._start = self._start or number
        text = _LINE_NUMBERS.sub("", line[2:].strip() + " ").removesuffix(" @@ ")
        self._anchors.append(text.strip())

    def line(self, number: int, line: str) -> None:
        """A line of the present hunk; an empty one is context."""
        self._start = self._start or number
        self._lines.append((line[:1] or " ", line[1:]))

    def close(self, at_end: bool = False) -> None:
        """End the present hunk; blank lines alone are not one. Raises: ToolError."""
        if self._anchors or any(line != (" ", "") for line in self._lines):
            number = len(self.hunks) + 1
            place = f"'{self.path}', hunk {number} (line {self._start} of the patch)"
            if all(mark == " " for mark, _ in self._lines):
                raise ToolError(f"{place}: it has no line that begins with '-' or '+'")
            anchors = tuple(filter(None, self._anchors))
            self.hunks.append(Hunk(place, anchors, tuple(self._lines), at_end))
        self._anchors, self._lines, self._start = [], [], 0


_READERS: dict[str, Callable[[str, list[str], int], FileChange]] = {
    "Add": _added,
    "Delete": _deleted,
    "Update": _updated,
}


def apply_hunks(content: str, hunks: Sequence[Hunk]) -> str:
    """The text after all hunks. Its last line has a newline if it had one before, or was empty.

    Raises: ToolError that names the hunk, and the line that is most like its first one.
    """
    lines = content.split("\n")
    ended = not lines[-1]
    if ended:
        lines.pop()
    edits: list[tuple[int, int, list[str]]] = []
    at = 0
    for hunk in hunks:
        start, size, new = _edit(lines, hunk, at)
        edits.append((start, size, new))
        at = start + size
    for start, size, new in reversed(edits):
        lines[start : start + size] = new
    return "".join(f"{line}\n" for line in lines) if ended else "\n".join(lines)


def _same(line: str) -> str:
    return line


def _typed(line: str) -> str:
    return line.translate(PUNCTUATION).rstrip()


_LEVELS: tuple[Callable[[str], str], ...] = (_same, str.rstrip, _typed, lambda x: _typed(x).strip())
"""How lines are compared, from strict to tolerant: the first that finds a place decides."""


def _edit(lines: list[str], hunk: Hunk, at: int) -> tuple[int, int, list[str]]:
    """First line, number of lines, and what replaces them: without the context around."""
    at, below = _below(lines, hunk, at)
    body = list(hunk.lines)
    if all(mark == "+" for mark, _ in body):
        return (below if hunk.anchors else len(lines)), 0, [text for _, text in body]
    while (start := _place(lines, hunk, body, at)) is None:
        if body[-1] != (" ", "") or len(body) == 1:
            raise _not_found(lines, hunk, at)
        body.pop()  # a blank line that only separates the hunk from what follows
    old = [text for mark, text in body if mark != "+"]
    first = next((i for i, text in enumerate(old) if text.strip()), 0)
    was, there = indentation(old[first]), indentation(lines[start + first])
    new: list[str] = []
    for mark, text in body:
        if mark == "+":
            new.append(reindented(text, was, there))
        elif mark == " ":
            new.append(lines[start])
        start += mark != "+"
    return _trimmed(body, new, start - len(old))


def _trimmed(body: Lines, new: list[str], start: int) -> tuple[int, int, list[str]]:
    marks = "".join(mark for mark, _ in body)
    head = len(marks) - len(marks.lstrip(" "))
    tail = len(marks) - len(marks.rstrip(" "))
    size = len(marks) - marks.count("+") - head - tail
    return start + head, size, new[head : len(new) - tail]


def _below(lines: list[str], hunk: Hunk, at: int) -> tuple[int, int]:
    """From which line a hunk is looked for: that of its last anchor; and the line below that."""
    below = at
    for anchor in hunk.anchors:
        wanted = anchor.strip()
        found = [i for i, line in enumerate(lines) if line.strip() == wanted]
        found = found or [i for i, line in enumerate(lines) if line.strip().startswith(wanted)]
        if not found:
            near = nearest("\n".join(lines), anchor)
            raise ToolError(f"{hunk.place}: no line is '@@ {wanted[:200]}'{near}")
        if after := [i for i in found if i >= below]:  # else the hunk before is below it too
            at, below = after[0], after[0] + 1
    return at, below


def _place(lines: list[str], hunk: Hunk, body: Lines, at: int) -> int | None:
    """The first line of a hunk. Raises: ToolError when it may be several."""
    old = [text for mark, text in body if mark != "+"]
    for level in _LEVELS:
        wanted, have = [level(x) for x in old], [level(x) for x in lines]
        first = max(at, len(lines) - len(old)) if hunk.at_end else at
        places = [
            i
            for i in range(first, len(have) - len(wanted) + 1)
            if have[i] == wanted[0] and have[i : i + len(wanted)] == wanted
        ]
        if len(places) > 1 and not hunk.anchors:
            shown = ", ".join(str(i + 1) for i in places[:5])
            raise ToolError(
                f"{hunk.place}: its lines occur {len(places)} times, at the lines {shown}. Add "
                "lines around it, or a line '@@ TEXT' with a line above it, such as its function"
            )
        if places:
            return places[0]
    return None


def _not_found(lines: list[str], hunk: Hunk, at: int) -> ToolError:
    anywhere = replace(hunk, anchors=("any",), at_end=False)
    if hunk.at_end and _place(lines, anywhere, hunk.lines, at) is not None:
        return ToolError(f"{hunk.place}: its lines are not the end of the file")
    if at and (above := _place(lines, anywhere, hunk.lines, 0)) is not None:
        return ToolError(
            f"{hunk.place}: its lines are at line {above + 1}, above the hunk before it or its "
            "'@@' line; hunks go from the top of the file to its end"
        )
    old = "\n".join(text for mark, text in hunk.lines if mark != "+")
    near = nearest("\n".join(lines), old)
    return ToolError(f"{hunk.place}: its lines are not in the file{near}")
