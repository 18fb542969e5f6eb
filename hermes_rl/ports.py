"""The protocol and the messages through which higher layers cooperate."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hermes_rl.events import Event
from hermes_rl.tasks import Task
from hermes_rl.usage import UsageTotal


class Recorder(Protocol):
    """Records the events of a rollout, such as the journal or a list in memory."""

    def record(self, event: Event) -> None:
        """Append one event: a plain write, no fsync. Raises: DiskFull."""
        ...


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to run."""

    unit_id: str
    group_id: str
    epoch: int
    attempt: int
    repeat: int
    repeats: int = 1
    """Units of the row."""
    row_index: int
    task_id: str
    task: Task | None
    """None for a bad row; see `bad_row`."""
    task_hash: str
    seed: int
    enqueued_at: float = 0.0
    """Unix time, seconds."""
    bad_row: str | None = None
    """Place and error, such as `my.jsonl:17: 'prompt' is empty`."""
    isolated: bool = False
    """Whether it runs alone in its own worker, since earlier workers died under this unit."""
    fatal_commands: tuple[str, ...] = ()
    """Tool calls during which sandboxes of earlier attempts died."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The message to the driver about a finished attempt; under 4 KB."""

    unit_id: str
    epoch: int
    attempt: int
    writer: str
    """EPOCH-WORKER."""
    task_id: str
    repeat: int
    status: str
    end_reason: str
    cause: str | None
    reward: float | None
    turns: int
    usage: UsageTotal
    cost_usd: float | None
    unpriced_calls: int
    seconds: float
    error: str | None = None
    """At most 400 characters."""
    fatal_command: str | None = None
    """The tool call during which its sandbox died."""
    stem: str | None = None
    """The batch with its rows."""
    offset: int = 0
    """Of its line in the `done` file of that batch, until it is published."""
