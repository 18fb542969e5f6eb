"""The small protocols that higher floors meet through."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hermes_rl.events import Event
from hermes_rl.tasks import Task
from hermes_rl.usage import UsageTotal


class Recorder(Protocol):
    """Takes a rollout's events as they happen. The journal is one, a list in memory another."""

    def record(self, event: Event) -> None:
        """Append one event: a plain write, no fsync. Raises: DiskFull."""
        ...


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be made."""

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
    """None for a bad row; `bad_row` then says what is wrong with it."""
    task_hash: str
    seed: int
    enqueued_at: float = 0.0
    """Unix time, seconds."""
    bad_row: str | None = None
    """Place and fault: `my.jsonl:17: 'prompt' is empty`."""
    isolated: bool = False
    """Runs in a worker of its own: earlier workers died under this unit."""
    fatal_commands: tuple[str, ...] = ()
    """Names of the tool calls under which sandboxes of earlier attempts died."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver learns of a finished attempt; under 4 KB."""

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
    """Names the tool call under which its sandbox died."""
