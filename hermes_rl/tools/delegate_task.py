"""The tool `delegate_task`: give tasks to sub-agents and read what they report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from hermes_rl.errors import ToolError
from hermes_rl.text import to_json
from hermes_rl.tools.base import ChildTask, ToolContext, ToolResult, schema, tool

DELEGATE_TASK = "delegate_task"
MAX_TASKS = 10
MAX_RESULT_CHARS = 100_000


@tool(
    name=DELEGATE_TASK,
    **schema(DELEGATE_TASK),
    toolset="delegation",
    max_chars=MAX_RESULT_CHARS,
)
async def _delegate_task(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {results: [{task, status, end_reason, summary?, turns, error?}]}."""
    if ctx.delegate is None:
        raise ToolError("sub-agents are not available here; do the task yourself")
    results = await ctx.delegate(ctx.call_id, _tasks(args))
    fields = {"results": [msgspec.to_builtins(result) for result in results]}
    completed = all(result.status == "completed" for result in results)
    return ToolResult(text=to_json(fields), ok=completed, data=fields)


delegate_task = replace(_delegate_task, needs_sandbox=False)


def _tasks(args: dict[str, Any]) -> list[ChildTask]:
    """The tasks of a call. Raises: ToolError."""
    listed, goal = args.get("tasks") or [], args.get("goal") or ""
    if bool(listed) == bool(goal.strip()):
        raise ToolError("give either goal (with context), or tasks")
    if len(listed) > MAX_TASKS:
        raise ToolError(f"at most {MAX_TASKS} tasks in one call, not {len(listed)}")
    if not listed:
        listed = [{"goal": goal, "context": args.get("context")}]
    tasks = [ChildTask(goal=one["goal"], context=one.get("context") or "") for one in listed]
    if not all(task.goal.strip() for task in tasks):
        raise ToolError("the goal of a task is empty")
    return tasks
