"""Runs for the tests of exports, made from events and written by the real store."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import scripted_rows

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

IDENTITY = {"model": {"name": "m"}}

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
    return hashlib.sha256(b"unit %d" % number).hexdigest()[:32]


def call(id: str, arguments: str, name: str = "terminal") -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


def message(content: Message, turn: int, **more: Any) -> ev.MessageAdded:
    return ev.MessageAdded(message=content, turn=turn, **more)


def model_call(turn: int) -> list[ev.Event]:
    started = ev.CallStarted(
        call_id=f"c{turn}", turn=turn, purpose="agent", model="m", started_at=1.0 + turn
    )
    ended = ev.CallEnded(
        call_id=f"c{turn}",
        outcome="ok",
        latency_s=0.5,
        finish_reason="stop",
        usage=Usage(input_tokens=10, cache_read_tokens=3, output_tokens=turn),
        cost_usd=0.25,
        served_model="m-1",
    )
    return [started, ended]


def tool_calls_and_answer(last: str = "{never closed") -> list[ev.Event]:
    """Reasoning, two calls of one turn, a call with the arguments `last`, and an answer."""
    calls = (call("a", '{"command": "ls <b>"}'), call("b", '{"path":"x"}', "read_file"))
    return [
        message(SystemMessage(content="Be brief."), 0),
        message(UserMessage(content="List grüße."), 0),
        *model_call(1),
        message(
            AssistantMessage(
                content="Looking.", reasoning_content="I need a list.", tool_calls=calls
            ),
            1,
        ),
        message(ToolMessage(tool_call_id="a", name="terminal", content='{"output": "x y"}'), 1),
        message(
            ToolMessage(tool_call_id="b", name="read_file", content="<i>text</tool_response>"), 1
        ),
        *model_call(2),
        message(AssistantMessage(tool_calls=(call("c", last),)), 2),
        message(ToolMessage(tool_call_id="c", name="terminal", content="not JSON"), 2),
        *model_call(3),
        message(AssistantMessage(content="Two: x and y."), 3),
    ]


def with_synthetic_messages() -> list[ev.Event]:
    """A synthetic assistant message between two real ones; the last message is a tool result."""
    return [
        message(UserMessage(content="Go."), 0),
        *model_call(1),
        message(AssistantMessage(content="First answer."), 1),
        message(AssistantMessage(content="(empty)"), 2, synthetic=True),
        message(UserMessage(content="Continue."), 2, synthetic=True),
        *model_call(2),
        message(AssistantMessage(tool_calls=(call("d", '{"command":"ls"}'),)), 2),
        message(ToolMessage(tool_call_id="d", name="terminal", content="tail"), 2),
    ]


def with_two_contexts() -> list[ev.Event]:
    """Two contexts: the second keeps the prompt and one exchange, and has a summary."""
    return [
        message(UserMessage(content="Long work."), 0),
        *model_call(1),
        message(AssistantMessage(tool_calls=(call("e", '{"command":"one"}'),)), 1),
        message(ToolMessage(tool_call_id="e", name="terminal", content="result one"), 1),
        *model_call(2),
        message(AssistantMessage(tool_calls=(call("f", '{"command":"two"}'),)), 2),
        message(ToolMessage(tool_call_id="f", name="terminal", content="result two"), 2),
        ev.ContextStarted(start=0, reason=""),
        ev.ContextStarted(start=5, kept=[0, 3, 4], summary_index=5, reason="compacted"),
        message(UserMessage(content="Summary: one was done."), 3, context=1, synthetic=True),
        *model_call(3),
        message(AssistantMessage(content="Done after all."), 3, context=1),
    ]


def with_quoted_answer() -> list[ev.Event]:
    """The task's prompt quotes an assistant."""
    return [
        message(UserMessage(content="What is 2+2?"), 0),
        message(AssistantMessage(content="Five."), 0),
        message(UserMessage(content="Are you sure?"), 0),
        *model_call(1),
        message(AssistantMessage(content="Four."), 1),
    ]


EVENT_STREAMS = [
    tool_calls_and_answer(),
    with_synthetic_messages(),
    with_two_contexts(),
    with_quoted_answer(),
]


def finished(
    number: int,
    events: Sequence[ev.Event],
    *,
    reward: float | None = 1.0,
    end_reason: str = "answered",
    cause: str | None = None,
    segments: Sequence[Segment] = (),
    size: int = 2,
) -> Finished:
    """One attempt of unit `number`; `size` units make a group."""
    begun = scripted_rows.make_begun(
        number,
        key=ev.AttemptKey(unit_id=unit(number), epoch=1, attempt=0),
        started_at=1000.0 + number,
        run_id="run",
        group_id=unit(10**6 + number // size),
        member=number % size,
        repeat=number % size,
        row_index=number // size,
        task_id=f"task-{number // size}",
        prompt="Go.",
        model="m",
        toolsets=("terminal",),
    )
    graded = [] if reward is None else [ev.Graded(reward=reward)]
    ended = ev.Ended(finished_at=2000.0 + number, end_reason=end_reason, cause=cause)
    return Finished(
        key=begun.key,
        row=fold([begun, ev.ToolsOffered(tools=TOOLS), *events, *graded, ended]),
        segments=tuple(segments),
    )


def segment(number: int, ids: Sequence[int], trained: Sequence[int], **more: Any) -> Segment:
    """A segment of unit `number`; `trained` are the positions of sampled tokens."""
    columns: dict[str, Any] = {
        "trajectory_id": trajectory_id(unit(number), 1, 0),
        "unit_id": unit(number),
        "run_id": "run",
        "task_id": f"task-{number // 2}",
        "group_id": unit(10**6 + number // 2),
        "member": number % 2,
        "reward": 1.0,
        "tokenizer_hash": "t",
        "template_hash": "t",
        "model": "m",
    }
    return scripted_rows.make_segment(number, ids, trained, **{**columns, **more})


def write(path: Path, rows: Sequence[Finished]) -> Path:
    asyncio.run(write_run(path, IDENTITY, rows))
    return path


def leave_unpublished(path: Path, made: Finished) -> None:
    """Add a finished attempt to a run like a worker that was killed before it published."""

    async def add() -> None:
        async with (
            await open_run(path, IDENTITY) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
        ):
            await journal.finish(made)

    asyncio.run(add())


def read(path: str) -> list[dict[str, Any]]:
    """Read the rows of an export with readers that refuse invalid UTF-8 and invalid JSON."""
    if path.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]
