"""However a run of `AIAgent` ends: no message and no token of usage is lost, and the next message
finds a conversation, a model and a sandbox that work."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hermes_rl import Limits, load_run
from hermes_rl.cli import main
from hermes_rl.errors import BillingError, HermesError, UserError
from hermes_rl.events import AnswerDiscarded, CallStarted, MessageAdded
from hermes_rl.testing import FakeServer
from hermes_rl.tools import Tool, ToolContext, ToolResult

from .conftest import Make, say, served_ids

RUN = {"run": "echo hi", "text": "I run it."}
CUT = {"text": "One, ", "finish": "length"}

ENDED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "answered": ([RUN, CUT, "two."], {}),
    "refused": ([RUN, {"text": "No.", "finish": "refusal"}], {"api_mode": "anthropic_messages"}),
    "max_turns": ([RUN, RUN, "The summary."], {"limits": Limits(max_turns=2)}),
    "token_limit": ([RUN] * 9, {"limits": Limits(max_tokens=100)}),
    "time_limit": ([{"run": "sleep 20"}, "never"], {"limits": Limits(max_seconds=0.2)}),
    "output_truncated": ([RUN, *[CUT] * 4], {}),
    "context_overflow": ([RUN, {"fault": "context_overflow"}], {}),
    "empty_response": ([RUN, *[{"text": ""}] * 9], {}),
    "invalid_tool_calls": ([{"calls": [{"name": "nope"}]}] * 3, {}),
    "tool_loop": ([RUN] * 9, {}),
    "sandbox_killed": ([RUN, {"run": "kill -9 $$"}, "never"], {}),
    "billing": ([RUN, RUN, RUN, {"fault": "billing"}], {}),
    "content_filter": ([RUN, {"fault": "content_filter"}], {}),
    "model_protocol": ([RUN, {"fault": "bad_request"}], {}),
}


def served(server: FakeServer) -> int:
    """Tokens of the answers that were sent whole."""
    whole = [e for e in server.entries if e.outcome == "served" and e.fault is None]
    return sum(e.prompt_tokens + e.completion_tokens for e in whole)


def in_row(row: pd.Series) -> list[dict[str, Any]]:
    """The messages of a row that the harness did not write."""
    pairs = zip(row["messages"], row["message_info"], strict=True)
    return [message for message, info in pairs if not info["synthetic"]]


@pytest.mark.parametrize("ending", ENDED)
def test_every_ending_keeps_messages_usage_and_row(
    make: Make, server: FakeServer, tmp_path: Path, ending: str
) -> None:
    steps, arguments = ENDED[ending]
    with make(**arguments) as agent:
        result = agent.run_conversation(say(*steps))
        agent.save_trajectory(tmp_path / "run")
        agent.save_trajectory(tmp_path / "run")  # it has the row already
        failed = result["end_reason"] == "error"
        assert ending == (result["error"]["cause"] if failed else result["end_reason"])
        assert result["completed"] is (ending == "answered")
        assert sorted(c["call_id"] for c in result["calls"]) == served_ids(server)
        assert result["usage"]["total_tokens"] == served(server)
        row = the_row(tmp_path / "run", failed=failed)
        assert (row["end_reason"], row["final_response"]) == (
            result["end_reason"],
            result["final_response"],
        )
        assert row["usage"]["total_tokens"] == served(server)
        kept = [text for m in in_row(row) if (text := m["content"])]
        texts = "".join(m["content"] for m in result["messages"])
        assert all(text in texts for text in kept)
        assert main(["check", str(tmp_path / "run")]) == 0
        # What the harness wrote is not in the conversation, and the next message is taken.
        from_user = [m["content"] for m in result["messages"] if m["role"] == "user"]
        assert from_user == [say(*steps)]
        again = agent.run_conversation(say("Fine."), conversation_history=[])
        assert again["final_response"] == "Fine."
        again = agent.run_conversation("SCRIPT: off", conversation_history=result["messages"])
        assert again["messages"][: len(result["messages"])] == result["messages"]


def the_row(path: Path, *, failed: bool) -> pd.Series:
    run = load_run(path)
    frames = {"trajectories": run.trajectories, "failures": run.failures}
    assert {n: len(f) for n, f in frames.items()} == {
        "trajectories": int(not failed),
        "failures": int(failed),
    }
    return frames["failures" if failed else "trajectories"].iloc[0]


@pytest.mark.slow
async def test_a_server_that_fails_for_good_after_a_paid_turn(
    make: Make, server: FakeServer
) -> None:
    faults = {"server_error": "model_server", "reset": "model_server", "cut": "model_protocol"}
    agents = {fault: make() for fault in faults}
    script = {fault: say(RUN, {"fault": fault}) for fault in faults}
    results = dict(
        zip(
            faults,
            await asyncio.gather(*(agents[fault].run(script[fault]) for fault in faults)),
            strict=True,
        )
    )
    for fault, result in results.items():
        await agents[fault].aclose()
        assert (result["completed"], result["end_reason"]) == (False, "error")
        assert result["error"]["cause"] in (faults[fault], "outage")
        assert [m["role"][0] for m in result["messages"]] == list("suat")
        assert result["usage"]["total_tokens"] > 0
    calls = sorted(c["call_id"] for r in results.values() for c in r["calls"])
    assert calls == served_ids(server)


@pytest.mark.parametrize("fault", ["server_error", "reset", "cut", "garbage", "overloaded"])
def test_a_fault_that_passes_costs_no_turn(make: Make, fault: str) -> None:
    with make() as agent:
        result = agent.run_conversation(say(RUN, [{"fault": fault}, "Fine."]))
    assert (result["final_response"], result["error"]) == ("Fine.", None)
    assert len(result["calls"]) == 3
    assert [m["role"][0] for m in result["messages"]] == list("suata")


def test_raise_on_error_raises_what_would_be_returned(make: Make) -> None:
    with make() as agent, pytest.raises(BillingError) as caught:
        agent.run_conversation(say(RUN, {"fault": "billing"}), raise_on_error=True)
    result = caught.value.result
    assert result is not None
    assert result["error"]["reason"] == "billing"
    assert [m["role"][0] for m in result["messages"]] == list("suat")


LATE = {"text": "late", "latency_s": 30}


def starts_call(turn: int) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, CallStarted) and event.turn == turn


INTERRUPTED: dict[str, tuple[list[Any], Callable[[Any], bool], str]] = {
    "model call": ([RUN, LATE], starts_call(2), "suat"),
    "tool": (
        [{"run": "sleep 30", "text": "I wait."}],
        lambda event: isinstance(event, MessageAdded) and event.turn == 1,
        "suat",
    ),
    "pause before a retry": (
        [RUN, [{"fault": "rate_limit_after"}, LATE]],
        starts_call(2),
        "suat",
    ),
    "second request": (
        [RUN, {"text": "", "reasoning": ""}, LATE],
        lambda event: isinstance(event, AnswerDiscarded),
        "suat",
    ),
    "summary": (
        [RUN, LATE],
        lambda event: isinstance(event, CallStarted) and event.purpose == "summary",
        "suat",
    ),
}


@pytest.mark.parametrize("phase", INTERRUPTED)
def test_an_interrupt_in_each_phase(make: Make, tmp_path: Path, phase: str) -> None:
    steps, is_phase, roles = INTERRUPTED[phase]
    there, began = threading.Event(), list[float]()

    def on_event(event: Any) -> None:
        if is_phase(event):
            there.set()

    limits = Limits(max_turns=1) if phase == "summary" else None
    with make(on_event=on_event, limits=limits) as agent:

        def interrupt() -> None:
            assert there.wait(60)
            began.append(time.monotonic())
            agent.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = agent.run_conversation(say(*steps))
        took = time.monotonic() - began[0]
        thread.join()
        agent.save_trajectory(tmp_path / "run")
        assert (result["completed"], result["end_reason"]) == (False, "interrupted")
        assert [m["role"][0] for m in result["messages"]] == list(roles)
        assert result["usage"]["total_tokens"] > 0
        row = the_row(tmp_path / "run", failed=True)
        assert (row["status"], row["cause"]) == ("cancelled", "interrupted")
        assert row["metrics"].get("discarded_answers", 0) == (phase == "second request")
        assert row["usage"]["total_tokens"] == result["usage"]["total_tokens"]
        assert len(row["calls"]) == len(result["calls"])
        assert agent.run_conversation(say("Fine."), conversation_history=[])["completed"]
        assert took < 20, "what it interrupts takes half a minute"


def test_an_interrupt_with_a_message_makes_two_rows(make: Make, tmp_path: Path) -> None:
    there = threading.Event()

    def on_event(event: Any) -> None:
        if starts_call(2)(event):
            there.set()

    with make(on_event=on_event) as agent:
        thread = threading.Thread(target=lambda: there.wait(60) and agent.interrupt("Instead."))
        thread.start()
        result = agent.run_conversation(say(RUN, [LATE, "As requested."]))
        thread.join()
        agent.save_trajectory(tmp_path / "run")
    assert result["final_response"] == "As requested."
    run = load_run(tmp_path / "run")
    assert (len(run.trajectories), len(run.failures)) == (1, 1)
    calls = [c["call_id"] for c in result["calls"]]
    assert sorted(run.calls["call_id"]) == sorted(calls)


async def test_a_cancelled_run_leaves_a_row(make: Make, tmp_path: Path) -> None:
    there = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_event(event: Any) -> None:
        if starts_call(2)(event):
            loop.call_soon_threadsafe(there.set)

    async with make(on_event=on_event, save_trajectories=tmp_path / "run") as agent:
        running = asyncio.create_task(agent.run(say(RUN, LATE)))
        await there.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    row = the_row(tmp_path / "run", failed=True)
    assert [c["outcome"] for c in row["calls"]] == ["ok", "cancelled"]
    assert row["usage"]["total_tokens"] > 0


def test_a_bug_in_a_tool_is_an_ending_too(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        raise ZeroDivisionError("a bug")

    tool = Tool("broken", "", {"type": "object"}, broken, "x", needs_sandbox=False)
    with make(tools=[tool], toolsets=()) as agent:
        result = agent.run_conversation(say({"calls": [{"name": "broken"}]}))
        assert result["error"]["cause"] == "harness"
        assert result["error"]["message"] == "ZeroDivisionError: a bug"
        assert result["usage"]["total_tokens"] > 0
        assert "ZeroDivisionError" in caplog.text
        with pytest.raises(HermesError) as caught:
            agent.chat("Again.")
        assert caught.value.result is not None
        assert caught.value.result["usage"]["total_tokens"] > 0


def test_a_lost_sandbox_is_replaced_for_the_next_message(make: Make) -> None:
    with make() as agent:
        result = agent.run_conversation(say({"run": "kill -9 $$"}, {"run": "pwd"}, "Fine."))
        assert result["end_reason"] == "sandbox_killed"
        result = agent.run_conversation("Continue.")
    assert result["final_response"] == "Fine."
    assert json.loads(result["messages"][-2]["content"])["exit_code"] == 0


def test_a_place_for_rows_that_cannot_be_written_costs_no_answer(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("not a folder")
    with make(save_trajectories=place) as agent:
        assert agent.chat(say("Fine.")) == "Fine."
        with pytest.raises(UserError):
            agent.save_trajectory(place)
    assert "could not be recorded" in caplog.text
    with make() as agent, pytest.raises(UserError, match="no run to save yet"):
        agent.save_trajectory(tmp_path / "run")
    assert os.listdir(tmp_path) == ["file"]
