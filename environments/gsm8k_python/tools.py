"""The tool `python`."""

from __future__ import annotations

from typing import Any

from hermes_rl.rl import ToolContext, ToolError, ToolResult, tool

TIMEOUT_S = 30.0
_SHOWN_BYTES = 4_000


@tool(
    name="python",
    description=(
        "Run a Python program and get its output. Only the standard library is available. Each "
        "call starts a new process without the variables of earlier calls, and is stopped after "
        f"{TIMEOUT_S:g} seconds."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program."}},
        "required": ["code"],
    },
    toolset="gsm8k_python",
)
async def python(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Run `code` in the rollout's sandbox; ok if it exits with 0."""
    if ctx.sandbox is None:
        raise ToolError("there is no sandbox to run Python in")
    done = await ctx.sandbox.run(
        "python3 -I -",
        timeout_s=min(TIMEOUT_S, ctx.max_timeout_s),
        stdin=args["code"].encode("utf-8", "replace"),
        max_output_bytes=_SHOWN_BYTES,
    )
    text = done.output
    if done.timed_out:
        text += f"\n[timed out after {TIMEOUT_S:g} s]"
    elif done.exit_code:
        text += f"\n[exit {done.exit_code}]"
    return ToolResult(text=text or "[no output]", ok=done.exit_code == 0)
