"""Scripted rows, units and events for the tests of the store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from hermes_rl.events import (
    AttemptKey,
    Begun,
    CallEnded,
    CallStarted,
    Ended,
    Event,
    Graded,
    MessageAdded,
    ToolsOffered,
)
from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.record import Segment, Trajectory
from hermes_rl.store import Driver, Finished, Group, JournalWriter, receipt_of
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage, UsageTotal

Play = Callable[..., int]
"""The type of the fixture `play`."""

CONFIG = {"model": {"name": "scripted", "temperature": 0.7}}
TOOLS = [{"type": "function", "function": {"name": "terminal", "parameters": {"type": "object"}}}]


def unit_id(number: int) -> str:
    """The id of a unit."""
    return hashlib.sha256(b"unit %d" % number).hexdigest()[:32]


def attempt_key(number: int, attempt: int = 0, epoch: int = 1) -> AttemptKey:
    return AttemptKey(unit_id=unit_id(number), epoch=epoch, attempt=attempt)


def make_item(number: int, attempt: int = 0, epoch: int = 1) -> WorkItem:
    """The work item of one attempt."""
    return WorkItem(
        unit_id=unit_id(number),
        group_id=unit_id(number // 4),
        epoch=epoch,
        attempt=attempt,
        repeat=number % 4,
        row_index=number // 4,
        task_id=f"task-{number // 4}",
        task=None,
        task_hash="h" * 64,
        seed=number,
    )


def make_begun(number: int, attempt: int = 0, epoch: int = 1, **more: Any) -> Begun:
    columns: dict[str, Any] = {
        "key": attempt_key(number, attempt, epoch),
        "started_at": time.time(),
        "run_id": "run",
        "group_id": unit_id(number // 4),
        "member": number % 4,
        "repeat": number % 4,
        "row_index": number // 4,
        "task_id": f"task-{number // 4}",
        "task_hash": "h" * 64,
        "config_hash": "c" * 64,
        "seed": number,
        "prompt": f"Do thing {number}",
        "model": "scripted",
        "api_mode": "chat_completions",
        "endpoint": "127.0.0.1:1",
    }
    return Begun(**{**columns, **more})


def make_events(
    number: int,
    attempt: int = 0,
    epoch: int = 1,
    *,
    cause: str | None = None,
    arguments: str = '{"command":"ls"}',
    content: str = "",
    **more: Any,
) -> list[Event]:
    """All events of one attempt."""
    answer = AssistantMessage(
        content=content,
        tool_calls=(ToolCall(id="call_1", name="terminal", arguments=arguments),),
    )
    call = f"{unit_id(number)}-{epoch}-{attempt}"
    return [
        make_begun(number, attempt, epoch, **more),
        ToolsOffered(tools=TOOLS),
        MessageAdded(message=UserMessage(content=f"Do thing {number}"), turn=0),
        CallStarted(call_id=call, turn=1, purpose="agent", model="scripted", started_at=1.0),
        CallEnded(
            call_id=call,
            outcome="ok",
            latency_s=0.1,
            finish_reason="tool_calls",
            usage=Usage(input_tokens=10, output_tokens=number),
        ),
        MessageAdded(message=answer, turn=1),
        Graded(reward=float(number % 2), metrics={"score": number / 3}),
        Ended(
            finished_at=time.time(),
            end_reason="answered" if cause is None else "error",
            cause=cause,
            error=None if cause is None else f"Failure: {cause}",
        ),
    ]


def make_row(number: int, attempt: int = 0, epoch: int = 1, **more: Any) -> Trajectory:
    return fold(make_events(number, attempt, epoch, **more))


def make_finished(number: int, attempt: int = 0, epoch: int = 1, **more: Any) -> Finished:
    """All rows of one attempt."""
    return Finished(
        key=attempt_key(number, attempt, epoch),
        row=make_row(number, attempt, epoch, **more),
        subagents=(make_row(number, attempt, epoch),) if number % 3 == 0 else (),
        segments=(make_segment(number),) if number % 5 == 0 else (),
    )


def make_segment(
    number: int, ids: Sequence[int] | None = None, trained: Sequence[int] = (1, 2), **more: Any
) -> Segment:
    """A segment of unit `number`; `trained` are the positions that were sampled."""
    ids = [1, 2, number] if ids is None else list(ids)
    mask = [place in set(trained) for place in range(len(ids))]
    starts = [i for i, sampled in enumerate(mask) if sampled and not (i and mask[i - 1])]
    columns: dict[str, Any] = {
        "trajectory_id": "t" * 32,
        "unit_id": unit_id(number),
        "run_id": "run",
        "task_id": "task",
        "group_id": unit_id(number // 4),
        "member": 0,
        "agent_name": "main",
        "branch_index": 0,
        "n_branches": 1,
        "branch_kind": "main",
        "input_ids": ids,
        "loss_mask": mask,
        "sampled_mask": mask,
        "logprobs": [-0.5 if sampled else None for sampled in mask],
        "logprobs_kind": "sampling",
        "turn_ids": [int(sampled) for sampled in mask],
        "version_ids": [0] * len(ids),
        "prompt_len": mask.index(True) if any(mask) else len(ids),
        "n_sampled": sum(mask),
        "temperature": 1.0,
        "top_p": 1.0,
        "finish_reasons": ["stop"] * len(starts),
        "truncated": False,
        "token_source": "engine",
        "model": "scripted",
        "trainable": True,
        "call_ids": [f"c{i + 1}" for i in range(len(starts))],
        "call_starts": starts,
    }
    return Segment(**{**dict.fromkeys(Segment.__struct_fields__), **columns, **more})


def make_group(number: int, at: int = 1, **more: Any) -> Group:
    """A row of table groups."""
    columns: dict[str, Any] = {
        "group_id": unit_id(number),
        "run_id": "run",
        "task_id": f"task-{number}",
        "task_hash": "h" * 64,
        "size": 2,
        "n_valid": 1,
        "members": [0, 1],
        "unit_ids": [unit_id(0), unit_id(1)],
        "trajectory_ids": ["t0", None],
        "rewards": [1.0, None],
        "reward_parts": [],
        "reward_metrics": [],
        "valid": [True, False],
        "why_invalid": [None, "sandbox_died"],
        "mean": 1.0,
        **dict.fromkeys(("equal_scores", "sendable"), False),
        **{name: [None, None] for name in ("grpo", "rloo", "dr_grpo")},
        "scored_by": "compute_reward",
        "calls": [],
        "usage": UsageTotal(),
        "metrics": {},
        "created_at": at,
    }
    return Group(**{**dict.fromkeys(Group.__struct_fields__), **columns, **more})


def make_receipt(made: Finished, writer: str) -> Receipt:
    """The receipt for the driver."""
    return receipt_of(made, writer)


async def run_attempt(driver: Driver, journal: JournalWriter, number: int, **more: object) -> None:
    """Run one whole attempt."""
    tried = driver.ledger.next_attempt(unit_id(number))
    work = make_item(number, tried, driver.epoch)
    driver.dispatch(work, journal.writer)
    made = make_finished(number, tried, driver.epoch, **more)
    recorder = journal.recorder(made.key)
    for event in make_events(number, tried, driver.epoch, **more):
        recorder.record(event)
    await journal.finish(made)
    driver.receive(make_receipt(made, journal.writer))
