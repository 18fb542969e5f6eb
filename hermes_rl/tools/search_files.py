"""The tool `search_files`: by content (grep) or by name (find), inside the sandbox."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.shell import quote, run_script

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
MAX_LINE_CHARS = 500
MAX_SCAN_BYTES = 2_000_000
"""Bytes of the output of grep or find that are read."""
MAX_RESULT_CHARS = 100_000

SKIPPED = (".git", "node_modules", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache")
"""Directories that are not searched."""

_NEEDS_PERL = re.compile(r"\\[dDhHRK]|\(\?|[*+?}]\?|[*+?}]\+")
_RECORD = re.compile(rb"([^\0\n]+)\0(?:(\d+)([:-]))?([^\n]*)\n")

Fields = dict[str, Any]


@tool(
    name="search_files",
    **schema("search_files"),
    toolset="file",
    parallel=True,
    max_chars=MAX_RESULT_CHARS,
)
async def search_files(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {matches | files | counts, total_count, truncated, hint?}."""
    if not args["pattern"]:
        raise ToolError("pattern must not be empty")
    if args.get("target", "content") == "files":
        fields = await _by_name(ctx, args)
    else:
        fields = await _by_content(ctx, args)
    return ToolResult(text=to_json(fields), data=fields)


async def _by_name(ctx: ToolContext, args: dict[str, Any]) -> Fields:
    pattern = args["pattern"]
    if not re.search(r"[*?\[]", pattern):
        pattern = f"*{pattern}*"
    test = f"-path {shlex.quote('*' + pattern)}" if "/" in pattern else f"-name {_quoted(pattern)}"
    skip = " -o ".join(f"-name {_quoted(name)}" for name in SKIPPED)
    where = quote(args.get("path", "."))
    script = f"""set -o pipefail; p={where}; [[ $p = -* ]] && p=./$p
[[ -e $p ]] || {{ exit 99; }}
command find -H "$p" -type d \\( {skip} \\) -prune -o \\( -type f -o -type l \\) {test} -print0 \
2>/dev/null | command head -c {MAX_SCAN_BYTES}"""
    raw = await _scan(ctx, script, args)
    names = [n.decode("utf-8", "replace") for n in raw.split(b"\0")[:-1]]
    return _page(sorted(map(_plain, names)), "files", args, complete=len(raw) < MAX_SCAN_BYTES)


async def _by_content(ctx: ToolContext, args: dict[str, Any]) -> Fields:
    mode, context = args.get("output_mode", "content"), args.get("context", 0)
    kind = "P" if _NEEDS_PERL.search(args["pattern"]) else "E"
    flags = {"files_only": "l", "count": "c"}.get(mode, "n")
    around = f"-C {context}" if context and mode == "content" else ""
    only = f"--include={_quoted(args['file_glob'])}" if args.get("file_glob") else ""
    skip = " ".join(f"--exclude-dir={_quoted(name)}" for name in SKIPPED)
    script = f"""set -o pipefail; p={quote(args.get("path", "."))}; [[ $p = -* ]] && p=./$p
[[ -e $p ]] || {{ exit 99; }}
command grep -rHIsZ{flags}{kind} --color=never --no-group-separator {around} {only} {skip} \
-e {_quoted(args["pattern"])} -- "$p" | command head -c {MAX_SCAN_BYTES}"""
    raw = await _scan(ctx, script, args)
    complete = len(raw) < MAX_SCAN_BYTES
    if mode == "files_only":
        names = sorted(_plain(n.decode("utf-8", "replace")) for n in raw.split(b"\0")[:-1])
        return _page(names, "files", args, complete=complete)
    records = [_record(m) for m in _RECORD.finditer(raw)]
    if mode == "count":
        counts = [(p, int(text)) for p, _, _, text in records if text.isdigit() and text != "0"]
        return _counts(sorted(counts), args, complete=complete)
    records.sort(key=lambda r: r[0])  # stable: the lines of a file keep their order
    return _matches(records, args, complete=complete)


def _quoted(text: str) -> str:
    if "\0" in text:
        raise ToolError("pattern must not contain NUL characters")
    return shlex.quote(text)


async def _scan(ctx: ToolContext, script: str, args: dict[str, Any]) -> bytes:
    result = await run_script(ctx, script, max_output_bytes=MAX_SCAN_BYTES)
    if result.exit_code == 99:
        raise ToolError(f"no such file or directory: '{args.get('path', '.')}'")
    if result.exit_code == 2 and result.data.startswith(b"grep:"):
        message = result.text.removeprefix("grep: ")
        raise ToolError(f"invalid regular expression: {message[:300]}")
    if result.exit_code in (126, 127):
        raise ToolError(f"cannot search: {result.text}")
    return result.data


_Record = tuple[str, int, bool, str]


def _record(found: re.Match[bytes]) -> _Record:
    """(path, line number, is a match and no context line, text) of one line of grep's output."""
    path, line, sign, text = found.groups()
    return (
        _plain(path.decode("utf-8", "replace")),
        int(line or 0),
        sign != b"-",
        text.decode("utf-8", "replace").rstrip("\r"),
    )


def _plain(path: str) -> str:
    return path.removeprefix("./")


def _bounds(args: dict[str, Any]) -> tuple[int, int]:
    first = args.get("offset", 0)
    return first, first + min(args.get("limit", DEFAULT_LIMIT), MAX_LIMIT)


def _page(names: list[str], key: str, args: dict[str, Any], *, complete: bool) -> Fields:
    first, last = _bounds(args)
    return _closed({key: names[first:last]}, key, len(names), last, complete)


def _counts(counts: list[tuple[str, int]], args: dict[str, Any], *, complete: bool) -> Fields:
    first, last = _bounds(args)
    fields = _closed({"counts": dict(counts[first:last])}, "counts", len(counts), last, complete)
    fields["total_count"] = sum(n for _, n in counts)
    return fields


def _matches(records: list[_Record], args: dict[str, Any], *, complete: bool) -> Fields:
    first, last = _bounds(args)
    total = sum(is_match for _, _, is_match, _ in records)
    shown: list[Fields] = []
    for (path, line, is_match, text), match in zip(records, _owners(records), strict=True):
        if first <= match < last:
            cut = (
                text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + " ... [truncated]"
            )
            extra = {} if is_match else {"context": True}
            shown.append({"path": path, "line": line, "content": cut, **extra})
    return _closed({"matches": shown}, "matches", total, last, complete)


def _owners(records: list[_Record]) -> list[int]:
    """For each record the number of the match that it belongs to: the nearest one in its file."""
    owners: list[int] = [0] * len(records)
    seen = Counter[str]()
    places: dict[str, list[tuple[int, int]]] = {}
    number = 0
    for path, line, is_match, _ in records:
        if is_match:
            places.setdefault(path, []).append((line, number))
            number += 1
    for i, (path, line, _, _) in enumerate(records):
        near = places.get(path) or [(line, number)]
        at = seen[path]
        while at + 1 < len(near) and abs(near[at + 1][0] - line) <= abs(near[at][0] - line):
            at += 1
        seen[path] = at
        owners[i] = near[at][1]
    return owners


def _closed(fields: Fields, key: str, total: int, last: int, complete: bool) -> Fields:
    """The result with its count, fitted into the size that a model sees."""
    size = len(to_json(fields))
    if size > MAX_RESULT_CHARS - 1_000:
        items = fields[key]
        keep = max(1, len(items) * (MAX_RESULT_CHARS - 2_000) // size)
        fields[key] = dict(list(items.items())[:keep]) if isinstance(items, dict) else items[:keep]
        return {
            **fields,
            "total_count": total,
            "truncated": True,
            "hint": "too many results; narrow the search",
        }
    fields |= {"total_count": total, "truncated": last < total or not complete}
    if not complete:
        fields["hint"] = "too many matches: the search stopped early; narrow the search"
    elif last < total:
        fields["hint"] = f"continue with offset={last}"
    return fields
