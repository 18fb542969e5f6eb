"""Answers that are cut: at the output limit, by the network, within a tool call."""

from typing import Any

import pytest

from hermes_rl.agent import LATEST, PRESETS, WORDINGS, Limits
from hermes_rl.models.base import Sampling

TEXTS = WORDINGS[LATEST].messages

CHAT, DATAGEN, RL = (PRESETS[name] for name in ("interactive", "datagen", "rl"))
LONG = "This is the beginning of a long text, and it goes on for quite a while. " * 4
BIG = {"run": "echo " + "x" * 400}


def cut(text: str) -> dict[str, Any]:
    return {"text": text, "finish": "length"}


def without(**switches: Any) -> Any:
    return DATAGEN.switched(switches)


async def test_the_rest_of_a_cut_text_is_asked_for(rig: Any) -> None:
    ran = await rig.play(cut("One, "), cut("two, "), cut("three, "), "four.")
    assert (ran.result.end_reason, ran.result.turns) == ("answered", 4)
    assert ran.result.final_response == ran.row().final_response == "One, two, three, four."
    assert ran.outline() == "suaUaUaUa"
    prompts = [e.message.content for e in ran.added() if e.synthetic]
    assert prompts == [TEXTS.cut_text] * 3
    assert ran.limits() == [None, 8192, 16384, 32768]
    assert ran.result.metrics == {"continued_answers": 3.0}
    assert ran.errors() == [None] * 4
    assert ran.row().turns == 4


async def test_the_fourth_cut_ends_with_the_joined_parts(rig: Any) -> None:
    ran = await rig.play(*[cut(f"{n} ") for n in range(9)])
    assert (ran.result.end_reason, ran.result.turns) == ("output_truncated", 4)
    assert ran.result.final_response == "0 1 2 3 "
    assert ran.outline() == "suaUaUaUa"
    assert ran.row().truncated


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        (1000, [1000, 2000, 4000, 8000]),
        (20_000, [20_000, 32_768, 32_768, 32_768]),
        (50_000, [50_000] * 4),
    ],
)
async def test_the_output_limit_is_doubled_and_never_lowered(
    rig: Any, asked: int, limits: list[int]
) -> None:
    sampling = Sampling(max_tokens=asked)
    ran = await rig.play(*[cut("x")] * 4, sampling=sampling)
    assert ran.limits() == limits


async def test_the_limit_is_as_before_once_an_answer_is_whole(rig: Any) -> None:
    ran = await rig.play(cut("Let me see. "), {"run": "echo 1"}, cut("It is "), "one.")
    assert ran.limits() == [None, 8192, None, 8192]
    assert ran.result.final_response == "It is one."  # what was said before the call is no part
    assert ran.outline() == "suaUataUa"


async def test_a_switch_turns_it_off(rig: Any) -> None:
    for policy in (without(continue_output=False), RL):
        ran = await rig.play(cut("One, "), "two", policy=policy)
        assert (ran.result.end_reason, ran.result.final_response) == ("output_truncated", "One, ")
        assert ran.outline() == "sua"
        assert len(ran.calls()) == 1


async def test_a_turn_limit_stops_it_before_the_harness_speaks(rig: Any) -> None:
    policy = without(summary_on_limit=False)
    ran = await rig.play(cut("1 "), cut("2 "), "3", limits=Limits(max_turns=2), policy=policy)
    assert (ran.result.end_reason, ran.result.final_response) == ("max_turns", "1 2 ")
    assert ran.outline() == "suaUa"
    summed = await rig.play(cut("1 "), cut("2 "), "All.", limits=Limits(max_turns=2))
    assert (summed.result.end_reason, summed.result.final_response) == ("max_turns", "All.")
    assert summed.row().final_response == "All."
    assert summed.outline() == "suaUaUa"


async def test_a_token_limit_stops_it_too(rig: Any) -> None:
    ran = await rig.play(*[cut("x" * 80)] * 9, limits=Limits(max_tokens=1))
    assert ran.result.end_reason == "token_limit"
    assert ran.outline() == "sua"


async def test_an_empty_answer_behind_parts_ends_with_these(rig: Any) -> None:
    ran = await rig.play(cut("All of it."), {"text": " "})
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "All of it.")
    assert ran.row().final_response == "All of it."
    assert ran.outline() == "suaUa"
    ran = await rig.play(cut("Part."), {"text": ""}, policy=without(keep_given_text=False))
    assert (ran.result.end_reason, ran.result.final_response) == ("empty_response", "Part.")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "think"])
@pytest.mark.parametrize("policy", [DATAGEN, RL])
async def test_an_exhausted_thinking_budget_ends_at_once(rig: Any, field: str, policy: Any) -> None:
    step = {"reasoning": "Hm, let me see.", "field": field, "finish": "length"}
    ran = await rig.play(step, "never", policy=policy)
    assert (ran.result.end_reason, len(ran.calls())) == ("output_truncated", 1)
    assert ran.result.metrics == {"thinking_budget_exhausted": 1.0}
    assert ran.row().metrics["thinking_budget_exhausted"] == 1.0
    assert ran.outline() == "sua"


async def test_an_incomplete_response_of_reasoning_alone_is_gone_on_from(rig: Any) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    step = {"reasoning": "Hm.", "details": [item], "finish": "length"}
    ran = await rig.play([step, "Here."])
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "Here.")
    assert ran.outline() == "suaUa"
    assert ran.limits() == [None, 8192]
    assert ran.result.messages[3].content == TEXTS.thoughts_note("Hm.")
    ran = await rig.play(step, "never", policy=RL)
    assert ran.result.end_reason == "output_truncated"


async def test_a_cut_call_is_asked_for_again_and_never_run(rig: Any) -> None:
    bad = {"run": "touch made", "finish": "length"}
    ran = await rig.play([bad, bad, bad, bad, {"run": "ls"}], "done")
    assert (ran.result.end_reason, ran.result.turns) == ("answered", 2)
    assert ran.outline() == "suata"
    assert ran.limits() == [None, 8192, 16384, 32768, 32768, None]
    assert ran.errors() == ["discarded: cut tool call"] * 4 + [None] * 2
    assert '"output":""' in ran.results()[0].message.content
    assert ran.result.metrics == {"discarded_answers": 4.0}
    assert ran.row().turns == 2


async def test_then_smaller_calls_are_asked_for_and_then_it_ends(rig: Any) -> None:
    bad = {"text": "Now I write it.", "run": "touch made", "finish": "length"}
    ran = await rig.play([bad] * 5, {"run": "ls"}, "done")
    assert ran.result.end_reason == "answered"
    assert ran.outline() == "suaUata"
    assert [e.message.content for e in ran.added() if e.synthetic] == [TEXTS.cut_call]
    assert ran.result.messages[2].content == "Now I write it."
    assert ran.result.messages[2].tool_calls == ()
    ran = await rig.play(*[bad] * 9, "x")
    assert (ran.result.end_reason, len(ran.calls())) == ("output_truncated", 8)
    assert (await rig.sandbox.run("ls", timeout_s=5)).output == ""


async def test_a_cut_call_without_a_text_has_a_stand_in(rig: Any) -> None:
    bad = {"run": "touch made", "finish": "length"}
    ran = await rig.play(bad, {"run": "ls"}, "done")
    assert ran.outline() == "suAUata"
    assert ran.errors() == ["discarded: cut tool call"] * 5 + [None] * 2
    assert ran.result.final_response == "done"


@pytest.mark.parametrize("arguments", ['{"command": "touch ma', '{"command"', ' [{"a": 1'])
async def test_arguments_that_break_off_are_a_cut_call(rig: Any, arguments: str) -> None:
    bad = {"calls": [{"arguments": arguments}]}
    ran = await rig.play([bad, {"run": "ls"}], "done")
    assert ran.outline() == "suata"
    assert ran.errors() == ["discarded: cut tool call", None, None]
    ran = await rig.play(bad, "done", policy=RL)
    assert ran.outline() == "suata"
    assert "not valid JSON" in ran.results()[0].message.content


@pytest.mark.parametrize("policy", [without(reask_cut_calls=False), RL])
async def test_cut_calls_end_the_run_without_the_switch(rig: Any, policy: Any) -> None:
    ran = await rig.play({"run": "touch made", "finish": "length"}, "done", policy=policy)
    assert (ran.result.end_reason, len(ran.calls())) == ("output_truncated", 1)
    assert (await rig.sandbox.run("ls", timeout_s=5)).output == ""


async def test_a_broken_stream_is_gone_on_from(rig: Any) -> None:
    heard: list[str] = []
    steps = ({"text": LONG, "fault": "cut"}, "the end.")
    ran = await rig.play(*steps, stream=True, on_delta=heard.append, policy=CHAT)
    first = ran.result.messages[2].content
    assert first
    assert LONG.startswith(first)
    assert ran.result.final_response == first + "the end." == "".join(heard)
    assert ran.outline() == "suaUa"
    assert ran.result.messages[3].content == TEXTS.cut_stream
    assert [end.outcome for _, end in ran.calls()] == ["cut", "ok"]
    assert ran.errors()[0].startswith("BrokenOff: ")
    assert ran.row().usage.unknown_calls == 1


async def test_a_stream_that_breaks_within_a_call_asks_for_smaller_ones(rig: Any) -> None:
    ran = await rig.play(
        {"text": "I write it. ", **BIG, "fault": "cut"}, "done", stream=True, policy=CHAT
    )
    assert ran.outline() == "suaUa"
    assert [m.content for m in ran.result.messages[2:4]] == ["I write it. ", TEXTS.cut_call]


@pytest.mark.parametrize("fault", ["reset", "cut"])
async def test_a_stream_that_breaks_before_a_text_is_asked_for_again(rig: Any, fault: str) -> None:
    step = {**BIG, "reasoning": "x" * 200, "fault": fault}
    ran = await rig.play([step, "done"], stream=True, policy=CHAT)
    assert ran.outline() == "sua"
    assert [end.outcome for _, end in ran.calls()] == ["cut", "ok"]


@pytest.mark.parametrize("policy", [DATAGEN, RL])
async def test_broken_streams_are_asked_for_anew_without_the_switch(rig: Any, policy: Any) -> None:
    ran = await rig.play([{"text": LONG, "fault": "cut"}, "whole"], stream=True, policy=policy)
    assert (ran.outline(), ran.result.final_response) == ("sua", "whole")
    assert [end.outcome for _, end in ran.calls()] == ["cut", "ok"]


async def test_at_most_three_streams_are_gone_on_from(rig: Any) -> None:
    broken = {"text": LONG, "fault": "cut"}
    ran = await rig.play(broken, broken, broken, [broken, "end"], stream=True, policy=CHAT)
    assert ran.outline() == "suaUaUaUa"
    assert ran.result.final_response.endswith("end")
    assert [end.outcome for _, end in ran.calls()] == ["cut"] * 4 + ["ok"]
