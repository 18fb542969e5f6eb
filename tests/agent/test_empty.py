"""Empty answers: the ladder, rung by rung."""

from typing import Any

import pytest

from hermes_rl.agent import EMPTY, LATEST, PRESETS, WORDINGS, Limits
from hermes_rl.models.base import Completion, ModelRequest, Sampling
from hermes_rl.models.calls.retry import ModelCaller
from hermes_rl.models.calls.route import Route
from hermes_rl.models.rate.limiter import Limiter
from hermes_rl.tools.base import Tool, ToolContext, ToolResult

TEXTS = WORDINGS[LATEST].messages

DATAGEN, RL = PRESETS["datagen"], PRESETS["rl"]
NOTHING = {"text": ""}
THOUGHT = {"text": "\n", "reasoning": "It must be 4."}
LS = {"run": "ls"}


def only(**switches: Any) -> Any:
    """The rl preset with some switches on."""
    return RL.switched(switches)


async def test_plain_retries(rig: Any) -> None:
    ran = await rig.play([NOTHING, NOTHING, NOTHING, "there"])
    assert (ran.result.end_reason, ran.result.turns) == ("answered", 1)
    assert ran.outline() == "sua"
    assert ran.errors() == ["discarded: empty answer"] * 3 + [None]
    row = ran.row()
    assert [c.turn for c in row.calls] == [1] * 4
    assert row.turns == 1
    served = rig.server.entries
    assert row.usage.total_tokens == sum(e.prompt_tokens + e.completion_tokens for e in served)


class Seeds:
    """A caller that notes the seeds it is asked with."""

    def __init__(self, caller: Any) -> None:
        self.caller = caller
        self.seen: list[int | None] = []

    async def call(self, request: ModelRequest, **more: Any) -> Completion:
        self.seen.append(request.sampling.seed)
        answer: Completion = await self.caller.call(request, **more)
        return answer


@pytest.mark.parametrize(
    ("seed", "seen"),
    [(5, [5, 6, 7, 5]), (2**31 - 1, [2**31 - 1, 0, 1, 2**31 - 1]), (None, [None] * 4)],
)
async def test_each_retry_has_another_seed(rig: Any, seed: int | None, seen: list[Any]) -> None:
    seeds = Seeds(rig.parts().caller)
    await rig.play([NOTHING, NOTHING, LS], "done", caller=seeds, sampling=Sampling(seed=seed))
    assert seeds.seen == seen


async def test_after_three_retries_it_is_an_empty_response(rig: Any) -> None:
    ran = await rig.play(NOTHING, "never")
    assert (ran.result.end_reason, ran.result.final_response) == ("empty_response", "")
    assert len(ran.calls()) == 4
    assert ran.outline() == "sua"
    assert ran.errors() == ["discarded: empty answer"] * 3 + [None]


@pytest.mark.parametrize("step", [NOTHING, THOUGHT, {"text": " \n"}])
async def test_rl_ends_at_once(rig: Any, step: Any) -> None:
    for steps in ((step, "never"), (LS, step, "never")):
        ran = await rig.play(*steps, policy=RL)
        assert ran.result.end_reason == "empty_response"
        assert len(ran.calls()) == len(steps) - 1
        assert not any(e.synthetic for e in ran.added())


async def test_a_nudge_after_tool_results(rig: Any) -> None:
    ran = await rig.play(LS, NOTHING, "There is nothing.")
    assert (ran.result.end_reason, ran.result.turns) == ("answered", 3)
    assert ran.outline() == "suatAUa"
    assert [m.content for m in ran.result.messages[4:6]] == [EMPTY, TEXTS.nudge]
    assert ran.errors() == [None, "discarded: empty answer", None]
    assert ran.result.metrics == {"nudges": 1.0, "discarded_answers": 1.0}


async def test_one_nudge_for_each_stretch_of_work(rig: Any) -> None:
    ran = await rig.play(LS, NOTHING, NOTHING, policy=only(nudge_empty=True))
    assert ran.result.end_reason == "empty_response"
    assert ran.outline() == "suatAUa"
    again = (LS, NOTHING, {"run": "pwd"}, NOTHING, "done")
    ran = await rig.play(*again, policy=only(nudge_empty=True))
    assert ran.outline() == "suatAUatAUa"
    assert ran.result.end_reason == "answered"


async def test_no_nudge_without_tool_results(rig: Any) -> None:
    ran = await rig.play(NOTHING, "never", policy=only(nudge_empty=True))
    assert (ran.result.end_reason, ran.outline()) == ("empty_response", "sua")


async def test_a_limit_comes_before_the_nudge(rig: Any) -> None:
    policy = only(nudge_empty=True)
    ran = await rig.play(LS, NOTHING, "x", limits=Limits(max_turns=2), policy=policy)
    assert (ran.result.end_reason, ran.outline()) == ("max_turns", "suat")
    assert ran.errors() == [None, "discarded: empty answer"]


async def test_thoughts_are_gone_on_from(rig: Any) -> None:
    ran = await rig.play([THOUGHT, THOUGHT, "4"])
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "4")
    assert ran.outline() == "suaUaUa"
    assert ran.errors() == [None] * 3
    assert ran.result.messages[2].reasoning_content == "It must be 4."
    note = ran.result.messages[3].content
    assert note == TEXTS.thoughts_note("It must be 4.")
    assert note.endswith("It must be 4.")


async def test_twice_and_then_plain_retries(rig: Any) -> None:
    ran = await rig.play(THOUGHT, "never")
    assert ran.result.end_reason == "empty_response"
    assert ran.outline() == "suaUaUa"
    assert len(ran.calls()) == 6
    ran = await rig.play(*[THOUGHT] * 3, "x", policy=only(prefill_reasoning=True))
    assert (ran.outline(), len(ran.calls())) == ("suaUaUa", 3)


async def test_long_thoughts_are_quoted_in_part() -> None:
    assert len(TEXTS.thoughts_note("word " * 10_000)) < 17_000
    assert TEXTS.thoughts_note(" ") == TEXTS.thoughts_note(None)


def tool(name: str) -> dict[str, Tool]:
    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult("ok")

    return {name: Tool(name, "", {"type": "object"}, handler, "x", needs_sandbox=False)}


async def test_text_before_housekeeping_is_the_answer(rig: Any) -> None:
    steps = ({"text": "It is 4.", "calls": [{"name": "todo"}]}, NOTHING, "never")
    ran = await rig.play(*steps, tools=tool("todo"), policy=PRESETS["interactive"])
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "It is 4.")
    assert ran.row().final_response == "It is 4."
    assert ran.outline() == "suata"
    ran = await rig.play(*steps, tools=tool("todo"), policy=only())
    assert ran.result.end_reason == "empty_response"


@pytest.mark.parametrize("name", ["todo", "look"])
async def test_only_text_before_nothing_but_housekeeping(rig: Any, name: str) -> None:
    calls = [{"name": name}]
    step = {"calls": calls} if name == "todo" else {"text": "It is 4.", "calls": calls}
    ran = await rig.play(step, NOTHING, tools=tool(name), policy=only(reuse_prior_text=True))
    assert ran.result.end_reason == "empty_response"


class Routes:
    """A caller with a second route."""

    def __init__(self, caller: Any, others: int) -> None:
        self.caller, self.others = caller, others

    def fall_back(self) -> bool:
        self.others -= 1
        return self.others >= 0

    async def call(self, request: ModelRequest, **more: Any) -> Completion:
        answer: Completion = await self.caller.call(request, **more)
        return answer


@pytest.mark.parametrize(("others", "calls"), [(0, 4), (1, 8), (2, 12)])
async def test_other_routes_come_last(rig: Any, others: int, calls: int) -> None:
    parts = rig.parts()
    ran = await rig.play(NOTHING, caller=Routes(parts.caller, others))
    assert ran.result.end_reason == "empty_response"
    assert len(rig.server.entries) == calls
    off = Routes(parts.caller, others)
    await rig.play(NOTHING, caller=off, policy=DATAGEN.switched({"fall_back_when_empty": False}))
    assert off.others == others


async def test_a_fallback_model_answers_in_its_place(rig: Any) -> None:
    parts = rig.parts()
    routes = [Route.single(name, rig.client, Limiter(8)) for name in ("one", "two")]
    caller = ModelCaller(routes, rig.log)
    ran = await rig.play([NOTHING] * 4 + ["There."], caller=caller, recorder=parts.recorder)
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "There.")
    assert [e.model for e in rig.server.entries] == ["one"] * 4 + ["two"]


async def test_the_time_limit_does_not_see_what_is_asked_again(rig: Any) -> None:
    late = {"text": "", "latency_s": 0.2}
    ran = await rig.play([late, late, "done"], limits=Limits(max_seconds=0.1))
    assert ran.result.end_reason == "answered"
    assert ran.result.active_seconds == 0.0


async def test_the_token_limit_does(rig: Any) -> None:
    ran = await rig.play(NOTHING, limits=Limits(max_tokens=30))
    assert ran.result.end_reason == "token_limit"
    assert len(ran.calls()) < 4
    assert ran.outline() == "su"
