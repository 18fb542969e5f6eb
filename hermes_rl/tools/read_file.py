"""The tool `read_file`: a window of a text file with line numbers, or what a binary file is."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.file_kinds import Kind, kind_of
from hermes_rl.tools.shell import (
    WHOLE_FILE_BYTES,
    FileBytes,
    names_beside,
    quote,
    read_bytes,
    run_script,
)
from hermes_rl.tools.vision import image_url

DEFAULT_LINES = 500
MAX_LINES = 2_000
MAX_LINE_CHARS = 2_000
MAX_CONTENT_CHARS = 100_000
MAX_RESULT_CHARS = 120_000
_SHOWN_BYTES = 64
"""Of a binary file."""
_LINE_CUT = " ... [line truncated]"


@dataclass(frozen=True)
class _Window:
    lines: list[str]
    total: int


@tool(
    name="read_file",
    **schema("read_file"),
    toolset="file",
    parallel=True,
    max_chars=MAX_RESULT_CHARS,
    path_argument="path",
)
async def read_file(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {content, total_lines, file_size, truncated, hint?}; of a binary file {type,
    file_size, hint}, with {width, height} of an image, else {first_bytes}. The image itself goes to
    models that see."""
    path, offset = args["path"], args.get("offset", 1)
    limit = min(args.get("limit", DEFAULT_LINES), MAX_LINES)
    try:
        file = await read_bytes(ctx, path)
    except ToolError as error:
        raise await _with_similar(ctx, path, error) from None
    if (kind := kind_of(file.data)) is not None:
        return _described(ctx, kind, file)
    window = _window(file, offset, limit) if file.whole else await _far(ctx, file, offset, limit)
    if offset > max(window.total, 1):
        raise ToolError(f"offset {offset} is past the end: '{path}' has {window.total} lines")
    fields = _fields(window, offset, file.size)
    text = to_json(fields)
    while len(text) > MAX_RESULT_CHARS:  # escaping made it longer: give fewer lines
        window = _Window(window.lines[: len(window.lines) // 2], window.total)
        fields = _fields(window, offset, file.size)
        text = to_json(fields)
    return ToolResult(text=text, data=fields)


def _described(ctx: ToolContext, kind: Kind, file: FileBytes) -> ToolResult:
    fields: dict[str, Any] = {"type": kind.name, "file_size": file.size}
    images: dict[str, str] = {}
    if kind.width is not None:
        fields |= {"width": kind.width, "height": kind.height}
    if not kind.image:
        fields["first_bytes"] = file.data[:_SHOWN_BYTES].hex(" ")
        fields["hint"] = "not text; use a program in the terminal"
    elif not ctx.shows_images:
        fields["hint"] = (
            "read_file does not show images; use vision_analyze if you have it, or a program"
        )
    else:
        try:
            images = {file.path: image_url(file.data, file.size)}
            fields["hint"] = "the image is in the next message"
        except ToolError as error:
            fields["hint"] = f"not shown: {error}"
    return ToolResult(text=to_json(fields), data=fields, images=images)


def _split(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _window(file: FileBytes, offset: int, limit: int) -> _Window:
    lines = _split(file.data)
    return _Window(lines[offset - 1 : offset - 1 + limit], len(lines))


async def _far(ctx: ToolContext, file: FileBytes, offset: int, limit: int) -> _Window:
    """The window of a file that is too large to take whole: cut out in the sandbox."""
    path = quote(file.path)
    script = f"""command awk 'END {{ print NR }}' <{path}
command tail -n +{offset} -- {path} | command head -n {limit} | command head -c {WHOLE_FILE_BYTES}
exit 0"""
    result = await run_script(ctx, script, max_output_bytes=WHOLE_FILE_BYTES)
    total, _, rest = result.data.partition(b"\n")
    if not total.isdigit():
        raise ToolError(f"cannot read '{file.path}': {result.text}")
    return _Window(_split(rest), int(total))


def _fields(window: _Window, offset: int, size: int) -> dict[str, Any]:
    shown: list[str] = []
    room = MAX_CONTENT_CHARS
    for number, line in enumerate(window.lines, offset):
        cut = line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + _LINE_CUT
        numbered = f"{number}|{cut}"
        room -= len(numbered) + 1
        if room < 0:
            break
        shown.append(numbered)
    last = offset + len(shown) - 1
    truncated = last < window.total
    fields: dict[str, Any] = {
        "content": "\n".join(shown),
        "total_lines": window.total,
        "file_size": size,
        "truncated": truncated,
    }
    if truncated:
        fields["hint"] = f"showing lines {offset}-{last}; continue with offset={last + 1}"
    return fields


async def _with_similar(ctx: ToolContext, path: str, error: ToolError) -> ToolError:
    if not str(error).startswith("file not found"):
        return error
    directory, slash, name = path.rpartition("/")
    by_lower = {n.lower(): n for n in await names_beside(ctx, path)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=5, cutoff=0.5)
    if not close:
        return error
    return ToolError(
        f"{error}. Did you mean: {', '.join(directory + slash + by_lower[c] for c in close)}"
    )
