"""The content of `done` files: rows of a finished attempt, with its receipt, or derived rows."""

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
from hermes_rl.usage import UsageTotal


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one attempt: they become durable together."""

    key: AttemptKey
    row: Trajectory
    subagents: tuple[Trajectory, ...] = ()
    segments: tuple[Segment, ...] = ()
    fatal_command: str | None = None
    """Names the tool call under which the attempt's sandbox died. No column of the row: the commit
    keeps it, so that the next attempt is told, also after a restart."""


TEXT_CHARS = 400
"""Of the two texts in a receipt: at four bytes a character they still leave it under 4 KB."""


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
"""The columns of `trajectories` and `failures` that a receipt is made of."""


def receipt_of(finished: Finished, writer: str) -> Receipt:
    """The receipt of a finished attempt, under 4 KB whatever the row holds."""
    row = {name: getattr(finished.row, name) for name in RECEIPT_COLUMNS}
    return make_receipt(finished.key, msgspec.to_builtins(row), writer, finished.fatal_command)


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
    """The repeats of one task, compared with each other: the columns of table `groups`, in order.

    Lists have one entry per member, in the order of `members`. Of several rows of one group the
    newest counts: a member that was tried again or graded again makes a new row.
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
    """The components that `score_group` gave; empty where it gave none, whose rewards' components
    stand in the rows of the members or in their grades."""
    reward_metrics: list[list[Metric]] = []
    """Numbers that `score_group` gave beside them."""
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
    """compute_reward, score_group or regrade: where the rewards come from."""
    grade_id: str | None
    """Of the grades that the rewards come from."""
    calls: list[Call]
    """Model calls of `score_group` itself."""
    usage: UsageTotal
    cost_usd: float | None
    metrics: dict[str, float] = {}
    """Upper bounds on what those of the calls used whose usage nobody knows."""
    error: str | None = None
    """Why `score_group` gave no rewards; the next start asks it again."""
    created_at: Timestamp


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """A stored rollout, graded again: the columns of table `grades`, in order."""

    trajectory_id: str
    unit_id: str
    group_id: str
    run_id: str
    task_id: str
    env_name: str | None
    grade_id: str
    """Names the grader: environment, its configuration and source, and the verifier."""
    reward: float | None
    """None when it could not be judged; `error` says why."""
    rewards: list[RewardPart]
    metrics: dict[str, float]
    error: str | None
    calls: list[Call]
    """Model calls of the grader: a judge's."""
    usage: UsageTotal
    cost_usd: float | None
    seconds: float
    graded_at: Timestamp


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a driver made from rows of the run: no attempt, so no unit changes by them."""

    groups: tuple[Group, ...] = ()
    grades: tuple[Grade, ...] = ()


def without_secrets(rows: Finished | Derived) -> Finished | Derived:
    """The same rows without secrets of this process; a rollout that had one loses its
    segments, whose ids would contain it."""
    if isinstance(rows, Derived):
        return SECRETS.scrub_record(rows)
    texts = (rows.row, rows.subagents)
    row, subagents = scrubbed = SECRETS.scrub_record(texts)
    if scrubbed is texts and REDACTED not in row.metrics:
        return rows
    row = msgspec.structs.replace(row, metrics={**row.metrics, REDACTED: 1.0})
    return msgspec.structs.replace(rows, row=row, subagents=subagents, segments=())
