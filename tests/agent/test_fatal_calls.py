"""A call under which the sandbox of an earlier attempt died: who is to blame for the next death."""

from typing import Any

import pytest

from hermes_rl.errors import SandboxDied
from hermes_rl.tools import Tool, ToolContext, ToolResult

ANY = {"type": "object", "additionalProperties": True}


def look(*, in_command: bool = True, parallel: bool = False) -> dict[str, Tool]:
    """A tool under which the sandbox dies where it is told to."""

    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        if not args.get("dies"):
            return ToolResult("fine")
        error = SandboxDied("the host is gone")
        error.in_command = in_command
        raise error

    return {"look": Tool("look", "", ANY, handler, "x", parallel=parallel)}


def call(arguments: Any) -> dict[str, Any]:
    return {"name": "look", "arguments": arguments}


async def name_of(rig: Any, *calls: Any, **how: Any) -> str | None:
    """How a turn's death names the call that was running."""
    with pytest.raises(SandboxDied) as caught:
        await rig.play({"calls": [call(c) for c in calls]}, tools=look(**how))
    return caught.value.command


async def test_a_call_is_named_by_tool_and_arguments(rig: Any) -> None:
    name = await name_of(rig, {"dies": 1, "n": 2})
    assert name
    assert await name_of(rig, '{ "n": 2.0, "dies": 1 }') == name
    assert await name_of(rig, {"dies": 1, "n": 3}) != name


@pytest.mark.parametrize("parallel", [False, True])
async def test_of_several_calls_the_one_that_ran(rig: Any, parallel: bool) -> None:
    name = await name_of(rig, {"dies": 1})
    assert await name_of(rig, {"n": 1}, {"dies": 1}, {"n": 2}, parallel=parallel) == name


async def test_a_call_that_found_the_sandbox_dead_has_no_name(rig: Any) -> None:
    assert await name_of(rig, {"dies": 1}, in_command=False) is None
