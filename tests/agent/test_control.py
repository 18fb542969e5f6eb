"""Interrupt and steer, from the loop and from other threads."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent import Control
from hermes_rl.errors import Interrupted
from hermes_rl.events import AnswerDiscarded, CallStarted, MessageAdded
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage


def started(pipe: Path, action: Callable[[], None]) -> None:
    """In a thread of its own: do that once a command has written to a named pipe."""
    os.mkfifo(pipe)

    def wait() -> None:
        assert pipe.read_text() == "started\n"
        action()

    threading.Thread(target=wait, daemon=True).start()


async def test_interrupt_ends_a_model_call_at_once(rig: Any) -> None:
    control = Control()

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted):
            threading.Timer(0.2, control.interrupt, ["stop"]).start()

    rig.listener = on_event
    start = time.monotonic()
    with pytest.raises(Interrupted):
        await rig.play({"text": "late", "latency_s": 30}, control=control)
    assert time.monotonic() - start < 20
    assert control.message == "stop"
    assert [e.outcome for e in rig.log.events if hasattr(e, "outcome")] == ["cancelled"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_interrupt_ends_a_tool_at_once_and_leaves_a_whole_conversation(
    rig: Any, tmp_path: Path
) -> None:
    control = Control()
    pipe = tmp_path / "pipe"
    begin = f"touch started; echo started > {pipe}; sleep 30; touch late"
    commands = ["echo before", begin, "touch never"]
    started(pipe, control.interrupt)
    start = time.monotonic()
    with pytest.raises(Interrupted):
        await rig.play(
            {"calls": [{"arguments": {"command": c}} for c in commands]}, control=control
        )
    assert time.monotonic() - start < 20
    results = [e for e in rig.log.events if isinstance(e, MessageAdded) and e.tool_ok is not None]
    assert [e.synthetic for e in results] == [False, True, True]
    assert [e.tool_ok for e in results] == [True, False, False]
    assert "interrupted" in results[1].message.content
    # The command is gone and the session still serves.
    listed = await rig.sandbox.run("sleep 0.2; ls", timeout_s=30)
    assert listed.output == "started\n"


LATE = {"text": "late", "latency_s": 30}
CUT = {"text": "One, ", "finish": "length"}


@pytest.mark.parametrize(
    ("steps", "calls", "discarded"),
    [
        (([{"text": ""}, LATE],), 2, 1),  # asked again
        (({"run": "true"}, {"text": ""}, LATE), 3, 1),  # nudged
        ((CUT, CUT, LATE), 3, 0),  # gone on from
        (([{"run": "x", "finish": "length"}, LATE],), 2, 1),  # a cut call
    ],
)
async def test_interrupt_where_an_answer_is_asked_for_again(
    rig: Any, steps: Any, calls: int, discarded: int
) -> None:
    control = Control()
    begun: list[CallStarted] = []

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted):
            begun.append(event)
            if len(begun) == calls:
                asyncio.get_running_loop().call_later(0.05, control.interrupt)

    rig.listener = on_event
    start = time.monotonic()
    with pytest.raises(Interrupted):
        await rig.play(*steps, control=control)
    assert time.monotonic() - start < 20
    outcomes = [e.outcome for e in rig.log.events if hasattr(e, "outcome")]
    assert outcomes == ["ok"] * (calls - 1) + ["cancelled"]
    assert sum(isinstance(e, AnswerDiscarded) for e in rig.log.events) == discarded


async def test_outer_cancellation_stays_cancellation(rig: Any) -> None:
    task = asyncio.create_task(rig.play({"text": "late", "latency_s": 30}))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_at_once_is_cancellation(rig: Any) -> None:
    control = Control()
    task = asyncio.create_task(rig.play({"text": "late", "latency_s": 30}, control=control))
    await asyncio.sleep(0.2)
    control.interrupt()
    task.cancel()
    with pytest.raises((asyncio.CancelledError, Interrupted)):
        await task


async def test_an_interrupt_after_the_end_harms_nothing(rig: Any) -> None:
    control = Control()
    ran = await rig.play("done", control=control)
    control.interrupt()
    await asyncio.sleep(0.05)
    assert ran.result.end_reason == "answered"


async def test_steer_while_a_tool_runs_stands_behind_its_result(rig: Any, tmp_path: Path) -> None:
    control = Control()
    pipe, steered = tmp_path / "pipe", tmp_path / "steered"

    def steer() -> None:
        control.steer("use python")
        steered.touch()

    started(pipe, steer)
    slow = f"echo started > {pipe}; until [ -e {steered} ]; do sleep 0.01; done; echo 2"
    calls = [{"arguments": {"command": c}} for c in ("echo 1", slow)]
    ran = await rig.play({"calls": calls}, "done", control=control)
    first, last = (e.message.content for e in ran.results())
    assert "python" not in first
    assert last.endswith("\n\n[Message from the user while you were working: use python]")
    assert [type(m) for m in ran.result.messages[2:]] == [
        AssistantMessage,
        ToolMessage,
        ToolMessage,
        AssistantMessage,
    ]
    assert not any(e.synthetic for e in ran.added())


async def test_steer_while_the_model_answers_becomes_the_next_user_message(rig: Any) -> None:
    control = Control()

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted) and event.turn == 1:
            control.steer("and then?")

    rig.listener = on_event
    ran = await rig.play("first", "second", control=control)
    assert [m.content for m in ran.result.messages[2:]] == ["first", "and then?", "second"]
    assert isinstance(ran.result.messages[3], UserMessage)
    assert ran.result.turns == 2


async def test_steers_from_many_threads_all_arrive_once() -> None:
    control = Control()
    threads = [threading.Thread(target=control.steer, args=(str(n),)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(control.take_steers(), key=int) == [str(n) for n in range(50)]
    assert control.take_steers() == []
