"""A file that is read again."""

from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.agent import PRESETS
from hermes_rl.messages import ToolMessage, text_of

from .conftest import Rig


def read(path: str = "f", **more: Any) -> dict[str, Any]:
    return {"calls": [{"name": "read_file", "arguments": {"path": path, **more}}]}


def run(command: str) -> dict[str, Any]:
    return {"calls": [{"name": "terminal", "arguments": {"command": command}}]}


async def results(rig: Rig, *steps: Any, **changes: Any) -> tuple[list[str], Any]:
    assert rig.sandbox is not None
    await rig.sandbox.run("seq 100 200 > f; cp f g", timeout_s=30)
    ran = await rig.play(*steps, "done", **changes)
    reads = [m for m in ran.result.messages if isinstance(m, ToolMessage) and m.name != "terminal"]
    return ["short" if '"unchanged":true' in text_of(m) else "whole" for m in reads], ran


@pytest.mark.parametrize(("preset", "second"), [("datagen", "short"), ("rl", "whole")])
async def test_an_unchanged_file_is_answered_shortly(rig: Rig, preset: str, second: str) -> None:
    seen, ran = await results(rig, read(), read(), policy=PRESETS[preset])
    assert seen == ["whole", second]
    assert ran.row().metrics.get("short_rereads", 0) == (second == "short")


async def test_a_change_is_always_shown(rig: Rig) -> None:
    """Also one that keeps the size and the times; other lines and files are shown too."""
    change = "touch -r f t; sed -i s/150/151/ f; touch -r t f"
    steps = (read(), read("g"), read(offset=1), run(change), read(), read(), read(offset=1))
    seen, _ = await results(rig, *steps)
    assert seen == ["whole", "whole", "whole", "whole", "short", "whole"]
    back = (read(), run("sed -i s/150/151/ f"), read(), run("sed -i s/151/150/ f"), read())
    assert (await results(rig, *back))[0] == ["whole", "whole", "whole"]


async def test_what_is_no_longer_before_the_model_is_shown_again(rig: Rig) -> None:
    """A result that was saved to a file was not shown; neither is one of another conversation."""
    tools = {n: replace(t, max_chars=300) for n, t in rig.tools.items()}
    assert (await results(rig, read(), read(), tools=tools))[0] == ["whole", "whole"]
    assert (await results(rig, read()))[0] == ["whole"]
