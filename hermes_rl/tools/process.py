"""The tool `process`, and the background mode of `terminal`: processes of the sandbox.

They belong to the sandbox: they count against its limits and end with it. What a process is called
and how it ended is in the state of the tools, so that a rollout that continues from a checkpoint
can say that a process is lost; the process itself is known by its sandbox.
"""

from __future__ import annotations

import asyncio
import shlex
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.sandboxes import Process
from hermes_rl.text import cut_middle, json_result, strip_ansi, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool

MAX_PROCESSES = 64
"""Processes that one agent has, ended ones that are still known included."""
MAX_BUFFER_CHARS = 200_000
"""Output of one process that is kept: the latest."""
MAX_NEW_CHARS = 20_000
"""New output that one result shows; `log` has the rest."""
DEFAULT_LINES = 200
DEFAULT_WAIT_S = 60
MAX_WAIT_S = 600
MAX_LAST_CHARS = 1_000
"""End of the output that a notice, or a checkpoint, has."""
MAX_RESULT_CHARS = 60_000
_WRITE_S = 10.0
"""How long a process may take to read what is written to it."""
PROCESSES = "processes"
"""Where the state of the tools has them, once one was started."""
PTY = """export TERM=${TERM:-xterm-256color} HX_COMMAND=%s
if script --version 2>/dev/null | grep -q util-linux; then
exec script -qefc 'stty rows 24 cols 80; exec bash -c "$HX_COMMAND"' /dev/null
elif command -v python3 >/dev/null; then
exec python3 -c 'import os, pty, sys
code = pty.spawn(["bash", "-c", "stty rows 24 cols 80; " + os.environ["HX_COMMAND"]])
sys.exit(os.waitstatus_to_exitcode(code) %% 256)'
fi
echo "a terminal needs the program script (util-linux) or python3; run without pty" >&2; exit 127"""
"""Runs a command in a terminal of its own; `%s` is the command as a shell word."""


@dataclass
class _Live:
    """A process that this sandbox has started."""

    process: Process
    output: str = ""
    """The latest of it."""
    dropped_lines: int = 0
    """Lines before those of `output`."""
    new: str = ""
    """What no result has shown yet."""
    decode: Callable[[bytes], str] = field(
        default_factory=lambda: getincrementaldecoder("utf-8")("replace").decode
    )
    """Keeps the beginning of a character until the rest of it is read."""

    async def update(self, record: dict[str, Any]) -> None:
        """Take its output, and how it ended."""
        code = await self.process.poll()
        text = strip_ansi(self.decode(await self.process.read()))
        output = self.output + text.replace("\r\n", "\n")
        cut = len(output) - MAX_BUFFER_CHARS
        if cut > 0:
            cut = output.find("\n", cut - 1) + 1 or cut  # whole lines, where it has any
            self.dropped_lines += output.count("\n", 0, cut)
            output = output[cut:]
        self.new = (self.new + text.replace("\r\n", "\n"))[-MAX_BUFFER_CHARS:]
        self.output = output
        if code is not None and record["exit_code"] is None:
            record["exit_code"] = code
            record["last"] = output[-MAX_LAST_CHARS:]


def _records(ctx: ToolContext) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = ctx.state.setdefault(PROCESSES, {})
    return records


def _of_sandbox(ctx: ToolContext) -> dict[str, _Live]:
    assert ctx.sandbox is not None, "the agent refuses tools that lack their sandbox"
    live: dict[str, _Live] = ctx.sandbox.attached.setdefault(PROCESSES, {})
    return live


async def start(
    ctx: ToolContext, command: str, *, cwd: str | None, pty: bool, notify: bool
) -> ToolResult:
    """Start a command in the background. Raises: ToolError for one too many."""
    records, live = _records(ctx), _of_sandbox(ctx)
    if len(records) >= MAX_PROCESSES:
        for name, record in [*records.items()]:
            if name in live:
                await live[name].update(record)
        ended = (n for n, r in records.items() if n not in live or r["exit_code"] is not None)
        oldest = next(ended, None)
        if oldest is None:
            raise ToolError(f"{MAX_PROCESSES} background processes are running; kill one first")
        del records[oldest]
        live.pop(oldest, None)
    text = PTY % shlex.quote(command) if pty else command
    assert ctx.sandbox is not None
    process = await ctx.sandbox.start_process(text, cwd=cwd)
    number = ctx.state["processes_made"] = ctx.state.get("processes_made", 0) + 1
    name = f"proc_{number}"
    live[name] = _Live(process)
    records[name] = {"command": command, "exit_code": None, "notify": notify}
    fields = {"session_id": name, "pid": process.pid, "status": "running"}
    return ToolResult(text=to_json(fields), data=fields)


async def take_ended(ctx: ToolContext) -> list[str]:
    """What to tell the model of processes that ended since the last time, for those that it wants
    to hear of."""
    records = ctx.state.get(PROCESSES)
    if not records or ctx.sandbox is None:
        return []
    notices, live = [], _of_sandbox(ctx)
    for name, record in records.items():
        if record["notify"] and (found := live.get(name)):
            await found.update(record)
            if (code := record["exit_code"]) is not None:
                record["notify"] = False
                last = record["last"].strip()
                output = f" The end of its output:\n{last}" if last else " It printed nothing."
                notices.append(f"[Background process {name} ended with exit code {code}.{output}]")
    return notices


@tool(
    name="process",
    **schema("process"),
    toolset="terminal",
    max_chars=MAX_RESULT_CHARS,
    command_argument="data",
)
async def process(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Look after background processes; the fields follow from the action."""
    action, name = args["action"], args.get("session_id")
    if action == "list":
        return await _list(ctx)
    if name is None:
        raise ToolError(f"'{action}' needs session_id; 'list' shows the processes")
    record = _records(ctx).get(name)
    if record is None:
        known = ", ".join(_records(ctx)) or "none was started"
        raise ToolError(f"unknown process {name!r} (known: {known})")
    found = _of_sandbox(ctx).get(name)
    if found is None:
        fields = {"session_id": name, **_status(record, None), "output": record.get("last", "")}
        return ToolResult(text=to_json(fields), ok=action in ("poll", "log", "wait"), data=fields)
    await _act(ctx, action, found, args)
    await found.update(record)
    if record["exit_code"] is not None:  # the model reads it now
        record["notify"] = False
    if action == "log":
        return _log(name, record, found, args)
    return _shown(name, record, found)


async def _act(ctx: ToolContext, action: str, found: _Live, args: dict[str, Any]) -> None:
    match action:
        case "wait":
            seconds = min(args.get("timeout", DEFAULT_WAIT_S), MAX_WAIT_S, ctx.max_timeout_s)
            await found.process.wait(seconds)
        case "poll":
            seconds = min(args.get("timeout", 0), MAX_WAIT_S, ctx.max_timeout_s)
            if seconds > 0 and not found.new:
                await found.process.wait(seconds, output=True)
        case "kill":
            await found.process.kill()
        case "write" | "submit":
            await _write(ctx, found, args.get("data", ""), submit=action == "submit")
        case "close":
            await found.process.close_input()


async def _list(ctx: ToolContext) -> ToolResult:
    live, listed = _of_sandbox(ctx), []
    for name, record in _records(ctx).items():
        found = live.get(name)
        if found is not None:
            await found.update(record)
        command = cut_middle(record["command"], 200)
        listed.append({"session_id": name, "command": command, **_status(record, found)})
    fields = {"processes": listed}
    return ToolResult(text=to_json(fields), data=fields)


def _status(record: dict[str, Any], found: _Live | None) -> dict[str, Any]:
    if record["exit_code"] is not None:
        return {"status": "exited", "exit_code": record["exit_code"]}
    if found is None:
        why = "the sandbox was restored or replaced since it was started; start it again"
        return {"status": "lost", "reason": why}
    return {"status": "running", "pid": found.process.pid}


def _shown(name: str, record: dict[str, Any], found: _Live) -> ToolResult:
    fields = {"session_id": name, **_status(record, found)}
    fields["output"] = cut_middle(found.new, MAX_NEW_CHARS)
    found.new = ""
    return ToolResult(text=json_result(fields, "output", MAX_RESULT_CHARS), data=fields)


def _log(name: str, record: dict[str, Any], found: _Live, args: dict[str, Any]) -> ToolResult:
    lines = found.output.split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    total, limit = found.dropped_lines + len(lines), args.get("limit", DEFAULT_LINES)
    first = args.get("offset", max(1, total - limit + 1))
    start = max(0, first - 1 - found.dropped_lines)
    shown = lines[start : start + limit]
    fields: dict[str, Any] = {"session_id": name, **_status(record, found), "total_lines": total}
    if shown:
        fields["first_line"] = found.dropped_lines + start + 1
    if found.dropped_lines:
        fields["dropped_lines"] = found.dropped_lines
    fields["output"] = "\n".join(shown)
    return ToolResult(text=json_result(fields, "output", MAX_RESULT_CHARS), data=fields)


async def _write(ctx: ToolContext, found: _Live, data: str, *, submit: bool) -> None:
    if not data and not submit:
        raise ToolError("'write' needs data")
    sent = (data + "\n" if submit else data).encode("utf-8", "surrogateescape")
    try:
        async with asyncio.timeout(min(_WRITE_S, ctx.max_timeout_s)):
            await found.process.write(sent)
    except BrokenPipeError as error:
        raise ToolError(f"nothing was written: {error}") from None
    except TimeoutError:
        raise ToolError("the process does not read its input; part of it was written") from None
