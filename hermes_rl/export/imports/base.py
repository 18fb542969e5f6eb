"""Rollouts of foreign files: as events, as rows, and as a run directory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.aio import in_thread
from hermes_rl.errors import UserError
from hermes_rl.identity import digest, group_id, trajectory_id, unit_id
from hermes_rl.messages import AssistantMessage, Message, UserMessage, text_of
from hermes_rl.record import Segment
from hermes_rl.rl.groups import gather, make_group
from hermes_rl.store.commit import read_commits
from hermes_rl.store.driver import Driver, open_run
from hermes_rl.store.journal import JournalWriter, Publisher
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived, Finished, Group
from hermes_rl.store.stats import write_stats
from hermes_rl.trajectory import fold

EPOCH = 1
ORIGIN = "import"
"""The endpoint in imported rows."""


@dataclass(frozen=True)
class ForeignRollout:
    """One rollout of a foreign file."""

    messages: Sequence[Message]
    model: str
    end_reason: str = "answered"
    reward: float | None = None
    tools: Sequence[dict[str, Any]] = ()
    toolsets: tuple[str, ...] = ()
    at: float = 0.0
    """Unix time in seconds; 0 when the file has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the file."""
    task: Any = None
    """Equal for equal tasks; by default the opening messages."""
    calls: int = 0
    """Model calls, if there are more than assistant messages."""


class RolloutNamer:
    """Gives imported rollouts their ids: rollouts of one task are members of one group.

    Args:
        config_hash: identifies the file.
    """

    def __init__(self, config_hash: str) -> None:
        self.config_hash = config_hash
        self._seen: Counter[str] = Counter()
        self._tasks: dict[str, int] = {}

    def begun(self, rollout: ForeignRollout) -> ev.Begun:
        """Return the first event of the next rollout."""
        opening = _opening(rollout.messages)
        task_hash = digest([rollout.task] if rollout.task is not None else ["prompt", *opening])
        repeat = self._seen[task_hash]
        self._seen[task_hash] += 1
        index = self._tasks.setdefault(task_hash, len(self._tasks))
        unit = unit_id(self.config_hash, task_hash, 0, repeat)
        return ev.Begun(
            key=ev.AttemptKey(unit_id=unit, epoch=EPOCH, attempt=0),
            started_at=rollout.at,
            run_id=self.config_hash[:32],
            group_id=group_id(self.config_hash, task_hash, 0),
            member=repeat,
            repeat=repeat,
            row_index=index,
            task_id=task_hash[:12],
            task_hash=task_hash,
            config_hash=self.config_hash,
            seed=0,
            prompt=opening[-1] if opening else "",
            model=rollout.model,
            api_mode="chat_completions",
            endpoint=ORIGIN,
            toolsets=rollout.toolsets,
            metadata=dict(rollout.metadata),
        )


def _opening(messages: Sequence[Message]) -> list[str]:
    """Return the user's texts before the first answer."""
    texts = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            break
        if isinstance(message, UserMessage):
            texts.append(text_of(message))
    return texts


def finished(
    rollout: ForeignRollout, begun: ev.Begun, segments: Sequence[Segment] = ()
) -> Finished:
    """Return the row of a rollout, from the same fold as rows of runs."""
    stream: list[ev.Event] = [begun, ev.ToolsOffered(tools=list(rollout.tools))]
    turn = 0
    for message in rollout.messages:
        if isinstance(message, AssistantMessage):
            turn += 1
            stream += _call(turn, rollout)
        stream.append(ev.MessageAdded(message=message, turn=turn))
    for further in range(turn + 1, rollout.calls + 1):
        stream += _call(further, rollout)
    if rollout.reward is not None:
        stream.append(ev.Graded(reward=rollout.reward))
    stream.append(ev.Ended(finished_at=rollout.at, end_reason=rollout.end_reason))
    row = fold(stream)
    if segments:  # one branch each: every call but the first continues the one before
        calls = sum(len(segment.call_ids) for segment in segments)
        counted = {"captured_calls": calls, "followed_calls": calls - len(segments)}
        metrics = {name: float(max(0, count)) for name, count in counted.items()}
        row = msgspec.structs.replace(row, metrics={**row.metrics, **metrics, "forked_calls": 0.0})
    return Finished(key=begun.key, row=row, segments=tuple(segments))


def call_id(turn: int) -> str:
    """Return the id of the model call of a turn."""
    return f"{ORIGIN}-{turn}"


def _call(turn: int, rollout: ForeignRollout) -> list[ev.Event]:
    """Return the events of a call of which nothing else is known."""
    return [
        ev.CallStarted(
            call_id=call_id(turn),
            turn=turn,
            purpose="agent",
            model=rollout.model,
            started_at=rollout.at,
        ),
        ev.CallEnded(call_id=call_id(turn), outcome="ok", latency_s=0.0),
    ]


def trajectory_id_of(begun: ev.Begun) -> str:
    """Return the id of the rollout's trajectory."""
    return trajectory_id(begun.key.unit_id, EPOCH, begun.key.attempt)


ROWS_PER_SYNC = 256
"""Rows that one fsync makes durable."""


async def write_run(
    path: Path, identity: Mapping[str, Any], rows: Iterable[Finished], *, grouped: bool = False
) -> int:
    """Write rows as a run directory; return how many there were.

    Args:
        path: must not be a run directory yet.
        identity: takes the place of a configuration's identity.
        rows: any number; one batch is in memory at a time.
        grouped: also write the groups whose members have rewards.

    Raises: UserError when there is a run already; StoreError, DiskFull.
    """
    if (path / "epochs").is_dir():
        raise UserError(f"{path} is a run already. Choose another --out")
    count = 0
    remaining = iter(rows)
    first = list(islice(remaining, ROWS_PER_SYNC))  # a bad first line leaves no run directory
    async with await open_run(path, identity) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, "import") as journal:
            publisher = Publisher(journal)
            for batch in _batches(first, remaining):
                await asyncio.gather(*(journal.finish(made) for made in batch))
                count += len(batch)
                if journal.full.is_set():
                    await publisher.drain()
            await publisher.drain()
        await in_thread(driver.ledger.load, read_commits(driver.run_dir))
        if grouped and (groups := await in_thread(_groups, driver)):
            await driver.publish(Derived(groups=groups))
        await in_thread(write_stats, driver.run_dir, driver.ledger, {"units": count})
    return count


def _groups(driver: Driver) -> tuple[Group, ...]:
    """Return the groups with rewards to compare."""
    groups = map(make_group, gather(Run(driver.run_dir)))
    return tuple(group for group in groups if group.size > 1 and group.n_valid)


def _batches(first: list[Finished], rest: Iterator[Finished]) -> Iterator[list[Finished]]:
    batch = first
    while batch:
        yield batch
        batch = list(islice(rest, ROWS_PER_SYNC))
