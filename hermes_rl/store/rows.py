"""The content of `done` files: rows of a finished attempt, or derived rows; and receipts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hermes_rl.events import AttemptKey, RewardPart
from hermes_rl.ports import Receipt
from hermes_rl.record import Call, Segment, Timestamp, Trajectory
from hermes_rl.store.summary import known_cost
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import REDACTED
from hermes_rl.usage import Int64, UsageTotal


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one attempt, which become durable together."""

    key: AttemptKey
    row: Trajectory
    subagents: tuple[Trajectory, ...] = ()
    segments: tuple[Segment, ...] = ()
    fatal_command: str | None = None
    """The tool call during which its sandbox died. It is not a column: the commit stores it for the
    next attempt."""


class RelayedLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of a worker's journal on its way to the driver, which writes it; see `relay`."""

    content: bytes
    """JSON, packed if it is long: an event of an attempt, its rows, or a connection of its
    sandbox."""
    attempt: int = 0
    """Number of the attempt in its writer; 0 for a connection."""
    key: AttemptKey | None = None
    """Of the attempt, in the line of its first event."""
    receipt: Receipt | None = None
    """Of the attempt, in the line with its rows: it counts when they are durable."""


TEXT_CHARS = 400
"""Maximum length of the two texts in a receipt, which keeps it under 4 KB."""


_UNCHANGED = (
    "repeat",
    "status",
    "end_reason",
    "cause",
    "reward",
    "turns",
    "unpriced_calls",
)
RECEIPT_COLUMNS = (*_UNCHANGED, "task_id", "usage", "cost_usd", "calls", "timing", "error")
"""The columns of `trajectories` and `failures` that a receipt needs."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows of an attempt are: in a batch, and until that is published at an offset of its
    `done` file."""

    stem: str
    offset: int


def receipt_of(finished: Finished, writer: str, place: Place | None = None) -> Receipt:
    """The receipt of a finished attempt, always under 4 KB."""
    row = {name: getattr(finished.row, name) for name in RECEIPT_COLUMNS}
    receipt = make_receipt(finished.key, msgspec.to_builtins(row), writer, finished.fatal_command)
    if place is None:
        return receipt
    return msgspec.structs.replace(receipt, stem=place.stem, offset=place.offset)


def make_receipt(
    key: AttemptKey, row: Mapping[str, Any], writer: str, fatal_command: str | None
) -> Receipt:
    """The receipt of an attempt. Args: row: its `RECEIPT_COLUMNS`, as plain values."""
    return Receipt(
        unit_id=key.unit_id,
        epoch=key.epoch,
        attempt=key.attempt,
        writer=writer,
        task_id=row["task_id"][:TEXT_CHARS],
        usage=msgspec.convert(row["usage"] or {}, UsageTotal),
        cost_usd=known_cost(row),
        seconds=row["timing"]["total_s"],
        error=row["error"] and row["error"][:TEXT_CHARS],
        fatal_command=fatal_command,
        **{name: row[name] for name in _UNCHANGED},
    )


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A number by name."""

    name: str
    value: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The repeats of one task: the columns of table `groups`, in order.

    Lists have one entry per member, in the order of `members`. The newest row of a group counts: a
    member that ran or was graded again causes a new row.
    """

    group_id: str
    run_id: str
    task_id: str
    task_hash: str
    env_name: str | None
    split: str | None
    size: int
    n_valid: int
    """Members with a reward: only these are compared."""
    members: list[int]
    unit_ids: list[str]
    trajectory_ids: list[str | None]
    """None for a member that was given up."""
    rewards: list[float | None]
    """None for a member that is not valid."""
    reward_parts: list[list[RewardPart]] = []
    """The components from `score_group`; empty without them, when the components are in the rows of
    the members or in their grades."""
    reward_metrics: list[list[Metric]] = []
    """Further numbers from `score_group`."""
    valid: list[bool]
    why_invalid: list[str | None]
    """The last cause of a member that was given up; `not graded`."""
    mean: float | None
    std: float | None
    """Sample standard deviation; None below two valid members."""
    equal_scores: bool
    sendable: bool
    """At least two valid members: a trainer can compare them."""
    grpo: list[float | None]
    rloo: list[float | None]
    dr_grpo: list[float | None]
    scored_by: str
    """The source of the rewards: compute_reward, score_group or regrade."""
    grade_id: str | None
    """The grader of the grades with these rewards."""
    calls: list[Call]
    """Model calls of `score_group`."""
    usage: UsageTotal
    cost_usd: float | None
    metrics: dict[str, float] = {}
    """Upper bounds for calls of unknown usage."""
    error: str | None = None
    """Why `score_group` returned no rewards; the next start calls it again."""
    created_at: Timestamp


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """A regraded rollout: the columns of table `grades`, in order."""

    trajectory_id: str
    unit_id: str
    group_id: str
    run_id: str
    task_id: str
    env_name: str | None
    grade_id: str
    """Names the grader: environment, its configuration and source, and the verifier."""
    reward: float | None
    """None when grading failed; see `error`."""
    rewards: list[RewardPart]
    metrics: dict[str, float]
    error: str | None
    calls: list[Call]
    """Model calls of a judge."""
    usage: UsageTotal
    cost_usd: float | None
    seconds: float
    graded_at: Timestamp


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a group of a live run: the columns of table `deliveries`, in order.

    The newest row of a group counts. A complete group without a row waits for its trainer.
    """

    group_id: str
    run_id: str
    task_id: str
    row_index: Int64
    """Position of its task in the stream."""
    event: str
    """acknowledged, rejected, skipped (before any rollout), or reopened (after a rollback)."""
    reason: str | None
    """Why it was rejected or skipped."""
    step: int | None
    """The trainer's step that was given with the acknowledgement; with `reopened`, the step to
    which the trainer went back."""
    level: str | None
    """The difficulty key of its task, if the run has a curriculum."""
    solve_rate: float | None
    """Mean reward of its valid members, scaled to 0 to 1 by the environment's range."""
    created_at: Timestamp


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a driver made from rows of the run. They belong to no attempt and change no
    unit."""

    groups: tuple[Group, ...] = ()
    grades: tuple[Grade, ...] = ()
    deliveries: tuple[Delivery, ...] = ()


def without_secrets(rows: Finished | Derived) -> Finished | Derived:
    """Remove secrets of this process from rows. A rollout with one loses its segments, whose ids
    would contain it."""
    if isinstance(rows, Derived):
        return SECRETS.scrub_record(rows)
    texts = (rows.row, rows.subagents)
    row, subagents = scrubbed = SECRETS.scrub_record(texts)
    if scrubbed is texts and REDACTED not in row.metrics:
        return rows
    row = msgspec.structs.replace(row, metrics={**row.metrics, REDACTED: 1.0})
    return msgspec.structs.replace(rows, row=row, subagents=subagents, segments=())
