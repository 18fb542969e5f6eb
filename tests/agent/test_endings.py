"""Endings that need more than a case of `test_unusable_answers`, and errors of no ending."""

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent import PRESETS, Control, Limits
from hermes_rl.errors import (
    ENDINGS,
    AuthError,
    Interrupted,
    Outage,
    Overloaded,
    Stalled,
    ToolError,
    UserError,
)
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from hermes_rl.tools import Tool, ToolContext, ToolResult

LS = {"run": "ls"}
RL = PRESETS["rl"]
HERE, TABLE = Path(__file__).parent, "test_unusable_answers.py"


def roles(messages: list[Any]) -> str:
    letters = {SystemMessage: "s", UserMessage: "u", AssistantMessage: "a", ToolMessage: "t"}
    return "".join(letters[type(m)] for m in messages)


async def test_answered(rig: Any) -> None:
    ran = await rig.play({"run": "echo one > f; cat f"}, "I wrote one.")
    assert ran.result.end_reason == "answered"
    assert ran.result.final_response == "I wrote one."
    assert ran.result.turns == 2
    assert roles(ran.result.messages) == "suata"
    assert ran.results()[0].message.content == '{"output":"one\\n","exit_code":0}'
    assert [e.turn for e in ran.added()] == [0, 0, 1, 1, 2]
    assert 0 < ran.results()[0].seconds <= ran.result.active_seconds < ran.result.seconds


async def test_rl_samples_from_the_whole_distribution(rig: Any) -> None:
    assert rig.parts().policy.complete(rig.parts().sampling).as_dict() == {}
    sampling = PRESETS["rl"].complete(rig.parts().sampling)
    assert sampling.as_dict() == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


async def test_token_limit_ends_after_a_whole_turn(rig: Any) -> None:
    ran = await rig.play(*[LS] * 9, limits=Limits(max_turns=None, max_tokens=100))
    assert ran.result.end_reason == "token_limit"
    assert roles(ran.result.messages)[-1] == "t"
    used = [end.usage.total_tokens for _, end in ran.calls()]
    assert sum(used) >= 100 > sum(used[:-1])


async def test_time_limit_counts_tools_and_cuts_them(rig: Any) -> None:
    slow = {"run": "sleep 20", "latency_s": 0.3}
    ran = await rig.play(slow, "done", limits=Limits(max_seconds=0.2))
    assert ran.result.end_reason == "time_limit"
    assert 0.2 <= ran.result.active_seconds < 15
    assert '"exit_code":124' in ran.results()[0].message.content


async def test_no_call_is_begun_without_time(rig: Any) -> None:
    calls = [{"arguments": {"command": c}} for c in ("sleep 20", "touch late", "touch later")]
    ran = await rig.play({"calls": calls}, "done", limits=Limits(max_seconds=0.2))
    assert ran.result.end_reason == "time_limit"
    assert [e.synthetic for e in ran.results()] == [False, True, True]
    assert (await rig.sandbox.run("ls", timeout_s=30)).output == ""


async def test_time_limit_leaves_model_seconds_out(rig: Any) -> None:
    ran = await rig.play({"text": "slow", "latency_s": 0.3}, limits=Limits(max_seconds=0.1))
    assert ran.result.end_reason == "answered"


async def test_wall_limit_is_infrastructure(rig: Any) -> None:
    with pytest.raises(Stalled, match=r"0\.2 s"):
        await rig.play({"text": "x", "latency_s": 30}, limits=Limits(wall_seconds=0.2))
    assert [e.outcome for e in rig.log.events if hasattr(e, "outcome")] == ["cancelled"]


async def test_a_call_whose_result_changes_is_no_loop(rig: Any) -> None:
    ran = await rig.play(*[{"run": "echo x >> f; wc -l < f"}] * 8, "done")
    assert ran.result.end_reason == "answered"


async def test_sandbox_killed_by_the_agent(rig: Any) -> None:
    calls = [{"arguments": {"command": "kill -9 $$"}}, {"arguments": {"command": "ls"}}]
    ran = await rig.play({"calls": calls}, "never")
    assert ran.result.end_reason == "sandbox_killed"
    assert roles(ran.result.messages) == "suatt"
    assert [e.synthetic for e in ran.results()] == [True, True]


def test_every_ending_has_a_test_here() -> None:
    """Here, or as a case of the table."""
    sources = "".join((HERE / name).read_text() for name in ("test_endings.py", TABLE))
    assert [e for e in ENDINGS if f'"{e}"' not in sources] == []


async def test_infrastructure_errors_come_out_typed(rig: Any) -> None:
    with pytest.raises(AuthError):
        await rig.play(LS, {"fault": "auth"})
    with pytest.raises(Outage) as caught:
        await rig.play({"fault": "overloaded"})
    assert isinstance(caught.value.__cause__, Overloaded)
    outcomes = [e.outcome for e in rig.log.events if hasattr(e, "outcome")]
    assert len(outcomes) > 1  # every request of the failed step is in the record
    assert set(outcomes) == {"refused"}


async def test_a_bug_in_a_tool_is_ours(rig: Any) -> None:
    async def broken(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        raise ZeroDivisionError("bug")

    tool = Tool("terminal", "", {"type": "object"}, broken, "x", parallel=True)
    with pytest.raises(ZeroDivisionError):
        await rig.play({"calls": [{}, {}]}, tools={"terminal": tool})


async def test_a_tool_error_goes_to_the_model(rig: Any) -> None:
    async def failing(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        raise ToolError("no such thing: \ud800")

    tool = Tool("terminal", "", {"type": "object"}, failing, "x")
    ran = await rig.play({"calls": [{}]}, "done", tools={"terminal": tool})
    assert ran.result.end_reason == "answered"
    assert ran.results()[0].message.content == '{"error":"no such thing: \ufffd"}'
    assert ran.results()[0].tool_ok is False


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "the prompt is empty; it must have a user message"),
        ([AssistantMessage(content="hi")], "the prompt must end with a user message"),
        ([UserMessage(content=" ")], "the prompt is empty; it must have a user message"),
        ([UserMessage(content="a"), AssistantMessage(content="b")], "not one of role assistant"),
        (
            [UserMessage(content="a"), SystemMessage(content="b"), UserMessage(content="c")],
            "message 2 is a system message behind one of role user; put it first",
        ),
        (
            [UserMessage(content="a"), ToolMessage(tool_call_id="1", name="x", content="")],
            "the prompt must end with a user message, not one of role tool",
        ),
    ],
)
async def test_prompts_that_no_repair_completes(rig: Any, prompt: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        await rig.run(prompt)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo </tool_call>"}}',
        "<function=terminal><parameter=command>ls</parameter></function>",
        '[TOOL_CALLS] [{"name": "terminal"}]',
        "<|tool_call_begin|>terminal",
        '```json\n{"name": "terminal", "arguments": {"command": "ls"}}\n```',
        '{"type": "function", "name": "terminal", "parameters": {"command": "ls"}}',
    ],
)
async def test_calls_that_no_server_parsed_are_counted(rig: Any, text: str) -> None:
    ran = await rig.play(text)
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", text)
    assert ran.result.metrics == {"suspected_unparsed_calls": 1.0}
    assert [e.suspected_unparsed for e in ran.added() if e.turn] == [True]
    fine = await rig.play('The tool_call of {"name": "nobody", "arguments": {}} was fine.')
    assert fine.result.metrics == {}
    assert not any(e.suspected_unparsed for e in fine.added())


async def test_a_call_that_stayed_in_the_reasoning_is_counted_too(rig: Any) -> None:
    call = '<tool_call>{"name": "terminal", "arguments": {}}</tool_call>'
    lost = await rig.play({"text": "", "reasoning": f"I do {call}"}, policy=RL)
    assert lost.result.metrics["suspected_unparsed_calls"] == 1.0
    thought = await rig.play({"text": "Done.", "reasoning": f"I could {call}"})
    assert thought.result.metrics == {}


async def test_a_system_message_in_the_prompt_takes_the_place_of_the_preset(rig: Any) -> None:
    ran = await rig.run([SystemMessage(content="Own."), UserMessage(content="x")], model="noop")
    assert [m.content for m in ran.result.messages if isinstance(m, SystemMessage)] == ["Own."]


async def test_tools_without_a_sandbox_are_refused(rig: Any) -> None:
    with pytest.raises(UserError, match=r"terminal.* need a sandbox"):
        await rig.run("x", sandbox=None)
    ran = await rig.run("x", sandbox=None, tools={}, model="noop")
    assert ran.result.end_reason == "answered"


async def test_interrupted_before_the_start(rig: Any) -> None:
    control = Control()
    control.interrupt()
    with pytest.raises(Interrupted):
        await rig.play("x", control=control)
    assert rig.server.requests == 0
