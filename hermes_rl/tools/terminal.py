"""The tool `terminal`: run a command in the sandbox's shell session."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.sandboxes import CommandResult
from hermes_rl.text import cut_middle, json_result, strip_ansi
from hermes_rl.tools.base import Tool, ToolContext, ToolResult, schema, tool
from hermes_rl.tools.process import start

DEFAULT_TIMEOUT_S = 180
MAX_TIMEOUT_S = 600
MAX_OUTPUT_CHARS = 50_000
MAX_RESULT_CHARS = 60_000


@tool(
    name="terminal",
    **schema("terminal"),
    toolset="terminal",
    max_chars=MAX_RESULT_CHARS,
    command_argument="command",
)
async def terminal(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Run `command`; in the foreground, ok when it exits with 0."""
    pty, notify = args.get("pty", False), args.get("notify_on_complete", False)
    if args.get("background", False):
        return await start(ctx, args["command"], cwd=args.get("workdir"), pty=pty, notify=notify)
    if pty or notify:
        raise ToolError("pty and notify_on_complete need background: true")
    timeout = args.get("timeout", DEFAULT_TIMEOUT_S)
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ToolError(f"timeout must be above 0 and at most {MAX_TIMEOUT_S} s")
    timeout = min(timeout, ctx.max_timeout_s)
    assert ctx.sandbox is not None, "the agent refuses tools that lack their sandbox"
    result = await ctx.sandbox.run(
        args["command"],
        timeout_s=timeout,
        cwd=args.get("workdir"),
        max_output_bytes=MAX_OUTPUT_CHARS - 100,  # room for the mark of a cut
    )
    fields = _fields(result, timeout)
    return ToolResult(
        text=json_result(fields, "output", MAX_RESULT_CHARS),
        ok=result.exit_code == 0 and not result.timed_out,
        data=fields,
    )


def with_timeout(tools: Mapping[str, Tool], seconds: int) -> dict[str, Tool]:
    """The tools, with another default timeout for `terminal`."""
    tool = tools.get("terminal")
    if tool is None or seconds == DEFAULT_TIMEOUT_S:
        return dict(tools)
    seconds = min(seconds, MAX_TIMEOUT_S)

    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return await tool.handler(ctx, {"timeout": seconds, **args})

    parameters = deepcopy(tool.parameters)
    timeout = parameters["properties"]["timeout"]
    timeout["description"] = timeout["description"].replace(
        f"Default {DEFAULT_TIMEOUT_S}", f"Default {seconds}"
    )
    return {**tools, "terminal": replace(tool, parameters=parameters, handler=handler)}


def _fields(result: CommandResult, timeout_s: float) -> dict[str, Any]:
    output = cut_middle(strip_ansi(result.output), MAX_OUTPUT_CHARS)
    fields: dict[str, Any] = {"output": output, "exit_code": result.exit_code}
    if result.timed_out:
        fields["exit_code"] = 124
        fields["error"] = (
            f"timed out after {timeout_s:g} s; the command and everything it started were stopped"
        )
    return fields
