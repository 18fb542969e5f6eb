"""The tool `write_file`: create a file or replace all of it."""

from __future__ import annotations

from typing import Any

from hermes_rl.text import to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.shell import write_bytes


@tool(name="write_file", **schema("write_file"), toolset="file", path_argument="path", writes=True)
async def write_file(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {bytes_written, created}."""
    data = args["content"].encode("utf-8", "replace")
    created = await write_bytes(ctx, args["path"], data)
    fields = {"bytes_written": len(data), "created": created}
    return ToolResult(text=to_json(fields), data=fields)
