"""The end of a background process, as the agent reads it."""

from typing import Any

import pytest

from hermes_rl.agent import PRESETS
from hermes_rl.messages import text_of
from hermes_rl.tools import function_tool

from .conftest import Rig

BUILT = "[Background process proc_1 ended with exit code 0. The end of its output:\nbuilt]"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


START = call("terminal", command="read -r; echo built", background=True, notify_on_complete=True)


@pytest.mark.parametrize(("preset", "outline"), [("datagen", "suatatUa"), ("rl", "suatata")])
async def test_the_end_of_a_process_is_a_marked_message(
    rig: Rig, preset: str, outline: str
) -> None:
    async def look_elsewhere() -> str:
        """Let the process end."""
        assert rig.sandbox is not None
        process = rig.sandbox.attached["processes"]["proc_1"].process
        await process.close_input()
        await process.wait(60)
        return "seen"

    tools = {**rig.tools, "look_elsewhere": function_tool(look_elsewhere)}
    steps = (START, call("look_elsewhere"), "It was built.")
    ran = await rig.play(*steps, tools=tools, policy=PRESETS[preset])
    assert ran.outline() == outline
    notices = [text for m in ran.result.messages if "[Background" in (text := text_of(m))]
    assert notices == ([BUILT] if preset == "datagen" else [])
    assert ran.row().end_reason == "answered"


async def test_an_end_that_the_model_has_read_is_not_repeated(rig: Rig) -> None:
    go = call("process", action="submit", session_id="proc_1", data="go")["calls"]
    wait = call("process", action="wait", session_id="proc_1")["calls"]
    ran = await rig.play(START, {"calls": go + wait}, "It was built.")
    assert ran.outline() == "suatatta"
