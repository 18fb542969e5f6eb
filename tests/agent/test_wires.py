"""What is tried for better answers, over all three dialects."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hermes_rl.agent import LATEST, PRESETS, WORDINGS
from hermes_rl.models import DIALECTS, Endpoint, connect

TEXTS = WORDINGS[LATEST].messages

CHAT = PRESETS["interactive"]
LONG = "This is the beginning of a long text, and it goes on for quite a while. " * 4


@pytest.fixture(params=DIALECTS)
async def wired(rig: Any, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    client, first = connect(Endpoint(rig.server.base_url, api_mode=request.param)), rig.client
    rig.client = client
    yield rig
    rig.client = first
    await client.aclose()


async def test_an_incomplete_response_of_reasoning_alone(wired: Any) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    ran = await wired.play([{"reasoning": "Hm.", "details": [item], "finish": "length"}, "Here."])
    if wired.client.api_mode == "anthropic_messages":  # knows no such items
        assert (ran.result.end_reason, ran.outline()) == ("output_truncated", "sua")
        return
    assert (ran.result.final_response, ran.outline()) == ("Here.", "suaUa")
    assert ran.result.messages[2].reasoning_details == [item]


async def test_a_thinking_budget_that_is_used_up(wired: Any) -> None:
    ran = await wired.play({"reasoning": "Hm.", "finish": "length"}, "never")
    assert (ran.result.end_reason, len(ran.calls())) == ("output_truncated", 1)
    assert ran.result.metrics == {"thinking_budget_exhausted": 1.0}


async def test_a_broken_stream_is_gone_on_from(wired: Any) -> None:
    ran = await wired.play({"text": LONG, "fault": "cut"}, "the end.", stream=True, policy=CHAT)
    first = ran.result.messages[2].content
    assert 0 < len(first) < len(LONG)
    assert LONG.startswith(first)
    assert ran.result.final_response == first + "the end."
    assert ran.result.messages[3].content == TEXTS.cut_stream
    assert [end.outcome for _, end in ran.calls()] == ["cut", "ok"]


async def test_a_stream_that_breaks_within_a_call(wired: Any) -> None:
    step = {"text": "I write it. ", "run": "echo " + "x" * 2000, "fault": "cut"}
    ran = await wired.play(step, "done", stream=True, policy=CHAT)
    assert [m.content for m in ran.result.messages[2:4]] == ["I write it. ", TEXTS.cut_call]
