"""`AIAgent` through its doors: scripts, running loops, other threads."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.agent import Limits, preset
from hermes_rl.errors import AuthError, UserError
from hermes_rl.events import CallStarted, MessageAdded
from hermes_rl.tools import function_tool

from .conftest import Make, say


def test_chat_keeps_conversation_and_files(make: Make) -> None:
    script = say({"run": "echo kept > f"}, "Written.", {"run": "cat f"}, "It says kept.")
    with make() as agent:
        assert agent.chat(script) == "Written."
        assert agent.chat("And now read it.") == "It says kept."
        result = agent.run_conversation("Anything else?")
    assert result["final_response"] == "done"
    assert [m["role"] for m in result["messages"]] == [
        "system",
        *("user", "assistant", "tool", "assistant"),
        *("user", "assistant", "tool", "assistant"),
        *("user", "assistant"),
    ]
    assert json.loads(result["messages"][7]["content"])["output"] == "kept\n"


def test_the_result_has_the_keys_of_the_contract(make: Make) -> None:
    with make() as agent:
        result = agent.run_conversation(say({"run": "true"}, "ok"), "Be terse.", task_id="t1")
    assert list(result) == [
        "final_response",
        "messages",
        "completed",
        "end_reason",
        "error",
        "usage",
        "calls",
        "cost_usd",
        "model",
        "session_id",
        "task_id",
    ]
    assert result["messages"][0] == {"role": "system", "content": "Be terse."}
    assert (result["completed"], result["end_reason"]) == (True, "answered")
    assert len(result["calls"]) == 2
    total = sum(c["input_tokens"] + c["output_tokens"] for c in result["calls"])
    assert result["usage"]["total_tokens"] == total > 0
    assert (result["model"], result["task_id"]) == ("m", "t1")
    json.dumps(result)


def test_history_from_outside(make: Make) -> None:
    history = [
        {"role": "system", "content": "Old rules."},
        {"role": "user", "content": say("one", "two")},
        {"role": "assistant", "content": "one"},
    ]
    with make(toolsets=()) as agent:
        result = agent.run_conversation("Go on.", conversation_history=history)
        assert result["final_response"] == "two"
        assert result["messages"][0]["content"] == "Old rules."
        again = agent.run_conversation("x", conversation_history=result["messages"])
        assert [m["role"][0] for m in again["messages"]] == list("suauaua")
        anew = agent.run_conversation(say("fresh"), conversation_history=[])
        assert anew["final_response"] == "fresh"
        assert len(anew["messages"]) == 3


@pytest.mark.parametrize(
    "given", [{"user_message": None}, {"user_message": "x", "system_message": ["x"]}]
)
def test_what_is_said_must_be_text(make: Make, given: dict[str, Any]) -> None:
    with make(toolsets=()) as agent, pytest.raises(UserError, match="must be text"):
        agent.run_conversation(**given)


def test_half_characters_in_a_history_do_not_lose_a_paid_answer(make: Make) -> None:
    history = [
        {"role": "system", "content": "Rules \ud800."},
        {"role": "user", "content": say("one", "two") + "\ud800"},
        {"role": "assistant", "content": "one", "reasoning_content": "\ud800"},
        {"role": "user", "content": [{"type": "text", "text": "\ud800"}]},
        {"role": "assistant", "content": "two"},
    ]
    with make(toolsets=()) as agent:
        result = agent.run_conversation("Go on.", conversation_history=history)
        json.dumps(result, ensure_ascii=False).encode()
        said = agent.run_conversation("x", system_message="Now \ud800")
        assert said["messages"][0]["content"] == "Now \ufffd"


async def test_the_doors_work_where_a_loop_is_running(make: Make) -> None:
    async with make() as agent:
        assert agent.chat(say({"run": "pwd"}, "here")) == "here"  # as in a notebook cell
        result = await agent.run("again")
        assert result["completed"]


async def test_one_agent_over_several_loops(make: Make) -> None:
    agent = make()
    script = say({"run": "echo a > f"}, "1", {"run": "cat f"}, "2")

    def elsewhere() -> dict[str, Any]:
        return asyncio.run(agent.run(script))

    first = await asyncio.to_thread(elsewhere)
    assert first["final_response"] == "1"
    second = await agent.run("now here")
    assert json.loads(second["messages"][-2]["content"])["output"] == "a\n"
    await agent.aclose()


def test_interrupt_with_a_message_goes_on_with_that(make: Make) -> None:
    started = threading.Event()

    def on_event(event: Any) -> None:
        if isinstance(event, MessageAdded) and event.turn == 1:
            started.set()

    steps = [{"run": "touch f; sleep 30"}, "Changed my mind, as you said.", "third"]
    with make(on_event=on_event) as agent:

        def interrupt() -> None:
            started.wait(60)
            time.sleep(0.2)
            agent.interrupt("Do something else.")

        thread = threading.Thread(target=interrupt)
        thread.start()
        start = time.monotonic()
        result = agent.run_conversation(say(*steps))
        thread.join()
        assert time.monotonic() - start < 25
        assert result["final_response"] == "Changed my mind, as you said."
        assert [m["role"][0] for m in result["messages"]] == list("suatua")
        assert result["messages"][4]["content"] == "Do something else."
        assert len(result["calls"]) == 2
        assert agent.chat("more") == "third"


def test_interrupt_without_a_message_ends_the_run(make: Make) -> None:
    started = threading.Event()

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted):
            started.set()

    with make(on_event=on_event) as agent:

        def interrupt() -> None:
            started.wait(60)
            time.sleep(0.2)
            agent.interrupt()

        threading.Thread(target=interrupt).start()
        start = time.monotonic()
        result = agent.run_conversation(say([{"text": "late", "latency_s": 30}, "late"], "second"))
        assert time.monotonic() - start < 25
        assert (result["completed"], result["end_reason"]) == (False, "interrupted")
        assert result["final_response"] is None
        assert [c["outcome"] for c in result["calls"]] == ["cancelled"]
        assert result["usage"]["unknown_calls"] == 1
        # The next message joins the one that got no answer: roles go on alternating.
        result = agent.run_conversation("SCRIPT is off")
        assert [m["role"][0] for m in result["messages"]] == list("sua")


def test_a_cut_answer_can_be_gone_on_from(make: Make) -> None:
    cut = {"run": "touch f", "text": "Let me", "finish": "length"}
    with make(preset="rl") as agent:
        result = agent.run_conversation(say(cut, "second"))
        assert (result["end_reason"], result["completed"]) == ("output_truncated", False)
        assert result["messages"][-1]["tool_calls"]
        result = agent.run_conversation("Go on.")
        assert result["final_response"] == "second"
        assert result["messages"][2] == {"role": "assistant", "content": "Let me"}


def test_the_answer_is_the_whole_of_a_cut_one(make: Make) -> None:
    cut = {"text": "One, ", "finish": "length"}
    with make(toolsets=()) as agent:
        result = agent.run_conversation(say([{"text": ""}, cut], "two.", "three"))
        assert (result["final_response"], result["end_reason"]) == ("One, two.", "answered")
        assert [c["error"] for c in result["calls"]] == ["discarded: empty answer", None, None]
        assert [m["content"] for m in result["messages"]][2:] == ["One, two."]
        assert agent.chat(say("three"), "t") == "two."  # the server counts the answers in a history


def test_a_policy_of_ones_own(make: Make) -> None:
    policy = preset("interactive").switched({"continue_output": False})
    with make(toolsets=(), preset=policy) as agent:
        result = agent.run_conversation(say({"text": "One, ", "finish": "length"}, "two."))
    assert (result["final_response"], result["end_reason"]) == ("One, ", "output_truncated")


def test_interrupt_while_idle_does_nothing(make: Make) -> None:
    with make() as agent:
        agent.interrupt("x")
        assert agent.chat(say("fine")) == "fine"


def test_a_failed_call_leaves_the_conversation_as_it_was(make: Make) -> None:
    with make() as agent:
        assert agent.chat(say("one", {"fault": "auth"})) == "one"
        with pytest.raises(AuthError):
            agent.chat("two")
        with pytest.raises(AuthError):
            agent.chat("two")


def test_one_run_at_a_time(make: Make) -> None:
    errors: list[BaseException] = []

    def chat_too() -> str:
        """Runs in a thread of its own, as each plain function does."""
        try:
            agents[0].chat("me too")
        except UserError as error:
            errors.append(error)
        return ""

    with make(toolsets=(), tools=[function_tool(chat_too)]) as agent:
        agents = [agent]
        agent.chat(say({"calls": [{"name": "chat_too"}]}, "done"))
    assert "already running" in str(errors[0])


def test_calling_a_door_from_a_callback_is_refused(make: Make) -> None:
    agents: list[AIAgent] = []
    errors: list[str] = []

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted):
            try:
                agents[0].chat("inner")
            except UserError as error:
                errors.append(str(error))

    with make(on_event=on_event) as agent:
        agents.append(agent)
        assert agent.chat(say("outer")) == "outer"
    assert "callback" in errors[0]


def test_streamed_pieces(make: Make) -> None:
    pieces: list[str] = []
    with make(toolsets=(), on_delta=pieces.append) as agent:
        assert agent.chat(say("piece by piece")) == "".join(pieces) == "piece by piece"


def test_lone_surrogates_are_replaced(make: Make) -> None:
    with make(toolsets=()) as agent:
        result = agent.run_conversation("\ud800" + say("ok"))
    assert result["messages"][1]["content"].startswith("\ufffdDo it.")


def test_limits_and_bad_names(make: Make) -> None:
    with make(limits=Limits(max_turns=1), preset="rl") as agent:
        result = agent.run_conversation(say({"run": "true"}, "never"))
        assert result["end_reason"] == "max_turns"
    with pytest.raises(UserError, match=r"unknown toolset 'smell' \(known: terminal, file"):
        make(toolsets=["smell"])
    with pytest.raises(UserError, match="the toolset 'image_gen' has no tools"):
        make(toolsets=["image_gen"])
    with pytest.raises(UserError, match=r"unknown preset 'fast' \(known: interactive"):
        make(preset="fast")


def test_the_oracle_is_for_tasks() -> None:
    with AIAgent("oracle", toolsets=()) as agent, pytest.raises(UserError, match="hermes-rl run"):
        agent.chat("x")


def test_a_provider_is_refused_rather_than_ignored() -> None:
    model = ModelConfig(name="m", provider="somebody")
    with AIAgent(model, toolsets=()) as agent, pytest.raises(UserError, match="unknown provider"):
        agent.chat("x")
