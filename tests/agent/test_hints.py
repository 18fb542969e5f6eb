"""What the harness joins to tool results; runs that repeat themselves; the iteration budget."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hermes_rl.agent import PRESETS, Control, IterationBudget, Limits, Policy, run_agent
from hermes_rl.messages import UserMessage
from hermes_rl.tools import Tool, ToolContext, ToolResult

from .conftest import Ran, say

ANY = {"type": "object", "additionalProperties": True}


def tool(name: str = "act", **more: Any) -> Tool:
    """A tool whose result and success are asked for."""

    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult(str(args["n"]), ok=args.get("ok", True))

    return Tool(name, "", ANY, handler, "x", **{"needs_sandbox": False, **more})


def act(n: int, name: str = "act", **more: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": {"n": n, **more}}]}


def texts(ran: Any) -> list[str]:
    return [e.message.content for e in ran.results()]


class Watch:
    """A caller that notes what each request begins with."""

    def __init__(self, caller: Any) -> None:
        self.caller = caller
        self.heads: list[Any] = []

    async def call(self, request: Any, **names: Any) -> Any:
        self.heads.append(msgspec.to_builtins(request.conversation[0]))
        return await self.caller.call(request, **names)


TOOLS = {"act": tool(), "look": tool("look", parallel=True)}
ONLY: dict[str, Any] = {"budget_hints": False}
FAILS = [act(1, ok=False)] * 6


@pytest.mark.parametrize(
    ("steps", "turns", "warned"),
    [
        ([act(1)] * 6, 5, "this call has returned the same result 2 times in a row."),
        (FAILS, 5, "this call with the same arguments has failed 2 times."),
        ([act(n, ok=False) for n in range(9)], 8, "act has failed 3 times"),
        ([act(1), act(2, "look")] * 6, 10, "a cycle of 2 calls with the same results, 2 times"),
        ([act(1), act(1), act(2)] * 6, 15, "this call has returned the same result 2 times"),
    ],
)
async def test_a_model_that_repeats_itself_is_warned_and_then_stopped(
    rig: Any, steps: list[Any], turns: int, warned: str
) -> None:
    policy = PRESETS["datagen"].switched(ONLY)
    ran = await rig.play(*steps, tools=TOOLS, policy=policy, limits=Limits(max_turns=40))
    assert (ran.result.end_reason, ran.result.turns) == ("tool_loop", turns)
    noted = [text for text in texts(ran) if "\n\n[Warning: " in text]
    assert warned in noted[0]
    assert ran.result.metrics["loop_warnings"] == len(noted)
    for text, info in zip(
        texts(ran), (i for i in ran.row().message_info if i.role == "tool"), strict=True
    ):
        assert info.raw_content == (text.partition("\n\n[")[0] if text in noted else None)


@pytest.mark.parametrize(
    "policy",
    [
        PRESETS["rl"],
        Policy("older", tool_loop_limit=None),
        PRESETS["datagen"].switched(
            {"loop_warnings": False, "tool_loop_limit": None, "tool_failure_limit": None, **ONLY}
        ),
    ],
)
async def test_without_the_switches_there_are_no_notes_and_no_end(rig: Any, policy: Policy) -> None:
    ran = await rig.play(*FAILS, *FAILS, "done", tools=TOOLS, policy=policy, limits=Limits(None))
    assert ran.result.end_reason == "answered"
    assert set(texts(ran)) == {"1"}
    assert ran.result.metrics == {}


async def test_a_run_that_began_before_the_switches_ends_only_for_equal_results(rig: Any) -> None:
    older = Policy("older", tool_loop_limit=5)
    steps = [act(n, ok=False) for n in (1, 2)] * 5
    ran = await rig.play(*steps, *FAILS, tools=TOOLS, policy=older, limits=Limits(None))
    assert (ran.result.end_reason, ran.result.turns) == ("tool_loop", 15)
    assert set(texts(ran)) == {"1", "2"}


async def test_hints_tell_at_70_and_90_percent_that_turns_run_out(rig: Any) -> None:
    two = {"calls": [*act(1)["calls"], *act(2)["calls"]]}
    steps = [act(n) for n in range(6)] + [two] + [act(n) for n in range(7, 20)]
    parts = rig.parts(tools=TOOLS, limits=Limits(max_turns=10))
    watch = Watch(parts.caller)
    prompt = [UserMessage(content=say(*steps))]
    ran = Ran(await run_agent(replace(parts, caller=watch), prompt), rig.log)
    assert ran.result.end_reason == "max_turns"
    hints = {n: t for n, t in enumerate(texts(ran)) if "[" in t}
    assert list(hints) == [7, 9]  # the last result of turn 7, and the one of turn 9
    assert hints[7].endswith("\n\n[You have used 7 of your 10 turns. Start to wrap up the work.]")
    assert "You have used 9 of your 10 turns. Finish what is essential" in hints[9]
    row = ran.row()
    infos = [i for i in row.message_info if i.role == "tool"]
    assert [n for n, info in enumerate(infos) if info.raw_content is not None] == [7, 9]
    assert (infos[7].raw_content, infos[7].synthetic) == ("2", False)
    assert row.metrics["budget_hints"] == 2
    heads = {json.dumps(head) for head in watch.heads}
    assert (len(watch.heads), len(heads)) == (11, 1)  # the summary included
    rl = await rig.play(*steps, tools=TOOLS, policy=PRESETS["rl"], limits=Limits(max_turns=10))
    assert not [text for text in texts(rl) if "[" in text]


async def test_hints_follow_a_budget_that_agents_share(rig: Any) -> None:
    budget = IterationBudget(10)
    for _ in range(5):
        budget.consume()
    steps = [act(n) for n in range(9)]
    ran = await rig.play(*steps, tools=TOOLS, budget=budget, limits=Limits(None))
    assert ["[" in text for text in texts(ran)] == [False, True, False, True, False]


async def test_turns_that_only_ran_code_are_refunded(rig: Any) -> None:
    code = tool("execute_code", refunds_turn=True)
    tools = {**TOOLS, "execute_code": code}
    run = [act(n, "execute_code") for n in range(3)]
    both = {"calls": [*act(7, "execute_code")["calls"], *act(8)["calls"]]}
    steps = [*run, act(1), both, act(2)]
    budget = IterationBudget(20)
    ran = await rig.play(*steps, tools=tools, budget=budget, limits=Limits(max_turns=3))
    assert (ran.result.end_reason, ran.result.turns) == ("max_turns", 6)
    assert ran.result.metrics["refunded_turns"] == 3
    assert budget.used == 3
    endless = [act(n, "execute_code") for n in range(30)]
    ran = await rig.play(*endless, tools=tools, limits=Limits(max_turns=4))
    assert (ran.result.end_reason, ran.result.turns) == ("max_turns", 8)


async def test_a_hint_and_the_users_text_join_one_result(rig: Any) -> None:
    control = Control()
    control.steer("Use the other file.")
    ran = await rig.play(act(1), "done", tools=TOOLS, control=control, limits=Limits(max_turns=1))
    assert texts(ran)[0].startswith("1\n\n[Message from the user")
    assert [i.raw_content for i in ran.row().message_info if i.role == "tool"] == ["1"]
