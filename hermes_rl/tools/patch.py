"""The tool `patch`: replace a piece of a text file, forgiving small differences in the quote, or
apply a patch of the format V4A to several files, all or none."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import json_result
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.matching import find, nearest, replace
from hermes_rl.tools.shell import (
    FileBytes,
    quote,
    read_bytes,
    resolve_paths,
    run_script,
    write_bytes,
)
from hermes_rl.tools.v4a import FileChange, apply_hunks, parse_patch

MAX_DIFF_CHARS = 20_000
MAX_RESULT_CHARS = 30_000
_DIFF_LINES = 20_000
_CUT = "\n... [diff truncated]"
_ASIDE = ".hermes-deleted"
"""Joins the name of a file that is about to be removed, until all of them are."""


@tool(
    name="patch",
    **schema("patch"),
    toolset="file",
    max_chars=MAX_RESULT_CHARS,
    path_argument="path",
    writes=True,
)
async def patch(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {success, diff, replacements, strategy}; of a patch {success, diff, files}."""
    if text := args.get("patch"):
        if args.get("path") or args.get("old_string") or args.get("new_string"):
            raise ToolError("give either patch alone, or path, old_string and new_string")
        return await _apply(ctx, parse_patch(text))
    for name in ("path", "old_string", "new_string"):
        if name not in args:
            raise ToolError(f"missing argument '{name}' (or give patch alone)")
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
        raise ToolError(f"old_string was not found in '{path}'{nearest(content, old)}")
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


@dataclass(frozen=True)
class _Step:
    """What is done with one file of a patch: everything is known before the first is written."""

    change: FileChange
    before: bytes
    after: bytes
    diff: str

    @property
    def target(self) -> str:
        """Where it is afterwards."""
        return self.change.move_to or self.change.path

    @property
    def outcome(self) -> dict[str, str]:
        """As the model reads it."""
        moved = {"moved_to": self.change.move_to} if self.change.move_to else {}
        return {"path": self.change.path, "action": self.change.action, **moved}


async def _apply(ctx: ToolContext, changes: list[FileChange]) -> ToolResult:
    """Apply a patch to all of its files or to none."""
    paths = [c.path for c in changes] + [c.move_to for c in changes if c.move_to]
    resolved = await resolve_paths(ctx, paths)
    for number, place in enumerate(resolved):
        if place in resolved[:number]:
            raise ToolError(f"'{paths[number]}' is in the patch twice; put its hunks together")
    await _check_new(ctx, [c.move_to or c.path for c in changes if c.move_to or c.action == "add"])
    steps = [await _prepared(ctx, change) for change in changes]
    undo: list[tuple[str, bytes | None]] = []
    try:
        for step in steps:
            await _write(ctx, step, undo)
        gone = [s.change.path for s in steps if s.change.action == "delete" or s.change.move_to]
        await _remove(ctx, gone)
    except ToolError as error:
        lost = await _undone(ctx, undo)
        state = f"these could not be restored: {', '.join(lost)}" if lost else "nothing was changed"
        raise ToolError(f"{error}; {state}") from None
    diff = "\n".join(step.diff for step in steps if step.diff)
    if len(diff) > MAX_DIFF_CHARS:
        diff = diff[:MAX_DIFF_CHARS] + _CUT
    fields = {"success": True, "diff": diff, "files": [step.outcome for step in steps]}
    return ToolResult(text=json_result(fields, "diff", MAX_RESULT_CHARS), data=fields)


async def _check_new(ctx: ToolContext, paths: list[str]) -> None:
    for path in paths:
        result = await run_script(ctx, f"f={quote(path)}; [[ -e $f || -L $f ]]")
        if result.exit_code == 0:
            raise ToolError(f"'{path}' exists already; use '*** Update File', or delete it first")


async def _prepared(ctx: ToolContext, change: FileChange) -> _Step:
    if change.action == "add":
        data = change.content.encode("utf-8", "replace")
        return _Step(change, b"", data, _diff(change.path, "", change.content))
    file = await read_bytes(ctx, change.path)
    if change.action == "delete":
        return _Step(change, b"", b"", f"--- a/{change.path.lstrip('/')}\n+++ /dev/null")
    if not change.hunks:
        return _Step(change, b"", b"", "")
    content, crlf = _text_of(file, change.path)
    changed = apply_hunks(content, change.hunks)
    if changed == content and not change.move_to:
        raise ToolError(f"'{change.path}': nothing to change: the file is like that already")
    diff = _diff(change.move_to or change.path, content, changed)
    return _Step(change, file.data, _bytes_of(changed, crlf), diff)


async def _write(ctx: ToolContext, step: _Step, undo: list[tuple[str, bytes | None]]) -> None:
    """Write a file; what undoes it is noted first, because a write may end in the middle."""
    change = step.change
    if change.action == "delete":
        return
    undo.append((step.target, None if change.action == "add" or change.move_to else step.before))
    if change.move_to:  # a copy keeps the mode
        old, new = quote(change.path), quote(change.move_to)
        script = f"""f={new}; d=${{f%/*}}
[[ $d = "$f" || -z $d || -d $d ]] || command mkdir -p -- "$d" || exit 1
command cp -p -- {old} "$f"
"""
        result = await run_script(ctx, script)
        if result.exit_code:
            raise ToolError(f"cannot write '{change.move_to}': {result.text}")
    if change.action == "add" or change.hunks:
        await write_bytes(ctx, step.target, step.after)


async def _remove(ctx: ToolContext, paths: list[str]) -> None:
    """Remove files, all or none. Raises: ToolError with the system's reason."""
    script = f"""files=({" ".join(map(quote, paths))})
for ((i = 0; i < ${{#files[@]}}; i++)); do
  f=${{files[i]}}
  command mv -- "$f" "$f{_ASIDE}" && continue
  while ((i--)); do command mv -- "${{files[i]}}{_ASIDE}" "${{files[i]}}"; done
  exit 1
done
for f in "${{files[@]}}"; do command rm -f -- "$f{_ASIDE}"; done"""
    if paths and (result := await run_script(ctx, script)).exit_code:
        raise ToolError(f"cannot delete: {result.text}")


async def _undone(ctx: ToolContext, undo: list[tuple[str, bytes | None]]) -> list[str]:
    """Restore files, the latest first; the ones that could not be."""
    lost = []
    for path, before in reversed(undo):
        try:
            if before is not None:
                await write_bytes(ctx, path, before)
            elif (await run_script(ctx, f"command rm -f -- {quote(path)}")).exit_code:
                lost.append(path)
        except ToolError:
            lost.append(path)
    return lost


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
    return text if len(text) <= MAX_DIFF_CHARS else text[:MAX_DIFF_CHARS] + _CUT
