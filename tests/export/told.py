"""Runs for the exporters' tests: told as events, folded and written by the real store."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import made_up

from hermes_rl import events as ev
from hermes_rl.export import write_run
from hermes_rl.identity import trajectory_id
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.record import Segment
from hermes_rl.store import Finished, JournalWriter, open_run
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage

IDENTITY = {"model": {"name": "told"}}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
]


def unit(number: int) -> str:
    return hashlib.sha256(b"told %d" % number).hexdigest()[:32]


def call(id: str, arguments: str, name: str = "terminal") -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


def said(message: Message, turn: int, **more: Any) -> ev.MessageAdded:
    return ev.MessageAdded(message=message, turn=turn, **more)


def model_call(turn: int) -> list[ev.Event]:
    started = ev.CallStarted(
        call_id=f"c{turn}", turn=turn, purpose="agent", model="told", started_at=1.0 + turn
    )
    ended = ev.CallEnded(
        call_id=f"c{turn}",
        outcome="ok",
        latency_s=0.5,
        finish_reason="stop",
        usage=Usage(input_tokens=10, cache_read_tokens=3, output_tokens=turn),
        cost_usd=0.25,
        served_model="told-1",
    )
    return [started, ended]


def simple(last: str = "{never closed") -> list[ev.Event]:
    """Reasoning, two calls at once, a call that is no JSON unless told otherwise, an answer."""
    calls = (call("a", '{"command": "ls <b>"}'), call("b", '{"path":"x"}', "read_file"))
    return [
        said(SystemMessage(content="Be brief."), 0),
        said(UserMessage(content="List grüße."), 0),
        *model_call(1),
        said(
            AssistantMessage(
                content="Looking.", reasoning_content="I need a list.", tool_calls=calls
            ),
            1,
        ),
        said(ToolMessage(tool_call_id="a", name="terminal", content='{"output": "x y"}'), 1),
        said(ToolMessage(tool_call_id="b", name="read_file", content="<i>text</tool_response>"), 1),
        *model_call(2),
        said(AssistantMessage(tool_calls=(call("c", last),)), 2),
        said(ToolMessage(tool_call_id="c", name="terminal", content="not JSON"), 2),
        *model_call(3),
        said(AssistantMessage(content="Two: x and y."), 3),
    ]


def nudged() -> list[ev.Event]:
    """A synthetic assistant message between two real ones, and a tail of a tool result."""
    return [
        said(UserMessage(content="Go."), 0),
        *model_call(1),
        said(AssistantMessage(content="First own words."), 1),
        said(AssistantMessage(content="(empty)"), 2, synthetic=True),
        said(UserMessage(content="Go on."), 2, synthetic=True),
        *model_call(2),
        said(AssistantMessage(tool_calls=(call("d", '{"command":"ls"}'),)), 2),
        said(ToolMessage(tool_call_id="d", name="terminal", content="tail"), 2),
    ]


def compacted() -> list[ev.Event]:
    """Two contexts: the second keeps the prompt and one exchange, and has a summary."""
    return [
        said(UserMessage(content="Long work."), 0),
        *model_call(1),
        said(AssistantMessage(tool_calls=(call("e", '{"command":"one"}'),)), 1),
        said(ToolMessage(tool_call_id="e", name="terminal", content="result one"), 1),
        *model_call(2),
        said(AssistantMessage(tool_calls=(call("f", '{"command":"two"}'),)), 2),
        said(ToolMessage(tool_call_id="f", name="terminal", content="result two"), 2),
        ev.ContextStarted(start=0, reason=""),
        ev.ContextStarted(start=5, kept=[0, 3, 4], summary_index=5, reason="compacted"),
        said(UserMessage(content="Summary: one was done."), 3, context=1, synthetic=True),
        *model_call(3),
        said(AssistantMessage(content="Done after all."), 3, context=1),
    ]


def quoted() -> list[ev.Event]:
    """The task's prompt quotes an assistant."""
    return [
        said(UserMessage(content="What is 2+2?"), 0),
        said(AssistantMessage(content="Five."), 0),
        said(UserMessage(content="Are you sure?"), 0),
        *model_call(1),
        said(AssistantMessage(content="Four."), 1),
    ]


STORIES = [simple(), nudged(), compacted(), quoted()]


def finished(
    number: int,
    story: Sequence[ev.Event],
    *,
    reward: float | None = 1.0,
    end_reason: str = "answered",
    cause: str | None = None,
    segments: Sequence[Segment] = (),
    size: int = 2,
) -> Finished:
    """One attempt of unit `number`; `size` units make a group."""
    begun = made_up.begun(
        number,
        key=ev.AttemptKey(unit_id=unit(number), epoch=1, attempt=0),
        started_at=1000.0 + number,
        run_id="told",
        group_id=unit(10**6 + number // size),
        member=number % size,
        repeat=number % size,
        row_index=number // size,
        task_id=f"task-{number // size}",
        prompt="told",
        model="told",
        toolsets=("terminal",),
    )
    graded = [] if reward is None else [ev.Graded(reward=reward)]
    ended = ev.Ended(finished_at=2000.0 + number, end_reason=end_reason, cause=cause)
    return Finished(
        key=begun.key,
        row=fold([begun, ev.ToolsOffered(tools=TOOLS), *story, *graded, ended]),
        segments=tuple(segments),
    )


def segment(number: int, ids: Sequence[int], trained: Sequence[int], **more: Any) -> Segment:
    """A segment of unit `number`; `trained` are the positions that were sampled."""
    columns: dict[str, Any] = {
        "trajectory_id": trajectory_id(unit(number), 1, 0),
        "unit_id": unit(number),
        "run_id": "told",
        "task_id": f"task-{number // 2}",
        "group_id": unit(10**6 + number // 2),
        "member": number % 2,
        "reward": 1.0,
        "tokenizer_hash": "t",
        "template_hash": "t",
        "model": "told",
    }
    return made_up.segment(number, ids, trained, **{**columns, **more})


def write(path: Path, rows: Sequence[Finished]) -> Path:
    asyncio.run(write_run(path, IDENTITY, rows))
    return path


def leave_unpublished(path: Path, made: Finished) -> None:
    """Add a finished attempt to a run as a worker does that was killed before it published."""

    async def add() -> None:
        async with (
            await open_run(path, IDENTITY) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
        ):
            await journal.finish(made)

    asyncio.run(add())
