"""The tool `patch`: replace a piece of a text file, forgiving small differences in the quote."""

from __future__ import annotations

import difflib
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import json_result
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.matching import find, replace
from hermes_rl.tools.shell import FileBytes, read_bytes, write_bytes

MAX_DIFF_CHARS = 20_000
MAX_RESULT_CHARS = 30_000
_DIFF_LINES = 20_000


@tool(
    name="patch",
    **schema("patch"),
    toolset="file",
    max_chars=MAX_RESULT_CHARS,
    path_argument="path",
    writes=True,
)
async def patch(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {success, diff, replacements, strategy}."""
    path, old, new = args["path"], args["old_string"], args["new_string"]
    if not old:
        raise ToolError("old_string is empty; use write_file to create a file")
    if old == new:
        raise ToolError("old_string and new_string are the same")
    file = await read_bytes(ctx, path)
    content, crlf = _text_of(file, path)
    old, new = _newlines(old), _newlines(new)
    found = find(content, old)
    if found is None:
        raise ToolError(f"old_string was not found in '{path}'{_nearest(content, old)}")
    if len(found.spans) > 1 and not args.get("replace_all", False):
        raise ToolError(
            f"old_string occurs {len(found.spans)} times in '{path}'. Include more of the lines "
            "around it to make it unique, or set replace_all to true"
        )
    changed = replace(content, found, old, new)
    if changed == content:
        raise ToolError("nothing to change: the file already contains new_string there")
    await write_bytes(ctx, path, _bytes_of(changed, crlf))
    fields = {
        "success": True,
        "diff": _diff(path, content, changed),
        "replacements": len(found.spans),
        "strategy": found.strategy,
    }
    return ToolResult(text=json_result(fields, "diff", MAX_RESULT_CHARS), data=fields)


def _text_of(file: FileBytes, path: str) -> tuple[str, bool]:
    """The file's text with plain newlines, and whether all of them were CRLF.

    Bytes that are no UTF-8 survive (surrogateescape).
    """
    if not file.whole:
        raise ToolError(f"'{path}' is too large for patch ({file.size} bytes); use the terminal")
    if b"\0" in file.data[:8192]:
        raise ToolError(f"'{path}' is a binary file")
    text = file.data.decode("utf-8", "surrogateescape")
    crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
    return (text.replace("\r\n", "\n") if crlf else text), crlf


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _bytes_of(text: str, crlf: bool) -> bytes:
    return (text.replace("\n", "\r\n") if crlf else text).encode("utf-8", "surrogateescape")


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _diff(path: str, before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    if len(old) + len(new) > 2 * _DIFF_LINES:
        return f"(no diff: the file has {len(new)} lines)"
    name = path.lstrip("/")
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
    text = _printable("\n".join(lines))
    return text if len(text) <= MAX_DIFF_CHARS else text[:MAX_DIFF_CHARS] + "\n... [diff truncated]"


def _nearest(content: str, old: str) -> str:
    """The line that is most like the first line of the wanted text, for the message."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    lines = content.split("\n")[:5_000]
    near = difflib.get_close_matches(first, [x.strip() for x in lines], n=1, cutoff=0.6)
    if not near:
        return "; read the file and copy the text exactly"
    number = next(i for i, x in enumerate(lines, 1) if x.strip() == near[0])
    return f"; the closest line is {number}: {_printable(near[0])[:200]!r}"
