"""The tool that the problems are worked out with."""

from __future__ import annotations

from typing import Any

from hermes_rl.rl import ToolContext, ToolError, ToolResult, tool

TIMEOUT_S = 30.0
_SHOWN_BYTES = 4_000


@tool(
    name="python",
    description=(
        "Run a Python program and get what it prints, standard library only. Every call starts "
        f"anew: nothing stays from the last one. It is stopped after {TIMEOUT_S:g} seconds."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program."}},
        "required": ["code"],
    },
    toolset="gsm8k_python",
)
async def python(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Run `code` in the rollout's sandbox; ok when it ends without an error."""
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
