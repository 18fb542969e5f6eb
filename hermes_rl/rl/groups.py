"""Groups: the repeats of one task, with their rewards, statistics and advantages.

A group's row is made from rows of the run alone, once none of its members is open any more; the
row of an earlier state is followed by a newer one, never changed. `due_groups` finds what is
missing, so that a kill costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import HermesError
from hermes_rl.record import Call
from hermes_rl.rl import advantages
from hermes_rl.rl.rewards import Rewards
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Group, Metric
from hermes_rl.usage import UsageTotal

if TYPE_CHECKING:
    import pyarrow as pa

SENDABLE = 2
"""So many valid members make a group that a trainer can compare."""
SCORED_AT_ONCE = 16
"""Groups that an environment scores at once: a kill loses no more than these."""

_SHARED = ("group_id", "run_id", "task_id", "task_hash", "env_name", "split")
_OWN = ("member", "unit_id", "trajectory_id", "attempt", "reward", "cause")
_NOTHING = UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)


@dataclass(frozen=True)
class Member:
    """One member as the run's tables have it."""

    index: int
    """0-based: the repeat."""
    unit_id: str
    trajectory_id: str | None
    """None when it was given up."""
    reward: float | None
    why_invalid: str | None
    """None for a member with a reward."""
    unjudged: str | None = None
    """The rollout of one that was given up since nobody could judge it: a regrade may."""


@dataclass(frozen=True)
class Gathered:
    """A group's members, before anything is computed."""

    facts: dict[str, Any]
    """The columns that its members share."""
    members: tuple[Member, ...]
    """By index."""
    row_index: int = 0
    """Position of its task in the dataset or stream."""


@dataclass(frozen=True)
class Scoring:
    """Where a group's rewards come from."""

    by: str = "compute_reward"
    grade_id: str | None = None
    rewards: Sequence[float | None] | None = None
    """In the order of the members, in place of their own; one without a trajectory has none."""
    given: Sequence[Rewards | None] | None = None
    """What `score_group` said of each member: the rewards with their components."""
    calls: list[Call] = field(default_factory=list)
    usage: UsageTotal = _NOTHING
    cost_usd: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Bounds on calls of unknown usage."""
    error: str | None = None
    """Why there are no rewards now: no member is valid, and the group is due again."""
    stop: HermesError | None = None
    """What keeps every other group from being scored too."""


def make_group(gathered: Gathered, scoring: Scoring | None = None) -> Group:
    """The row of a group; statistics and advantages are over valid members only."""
    scoring = scoring or Scoring()
    members = gathered.members
    scores = [m.reward for m in members] if scoring.rewards is None else list(scoring.rewards)
    if scoring.error is not None:
        scores = [None] * len(members)
    rewards = [
        s if m.trajectory_id is not None else None for m, s in zip(members, scores, strict=True)
    ]
    valid = [r for r in rewards if r is not None]
    given = [None] * len(members) if scoring.given is None else scoring.given
    without = "not graded" if scoring.error is None else "not scored"
    return Group(
        **gathered.facts,
        size=len(members),
        n_valid=len(valid),
        members=[m.index for m in members],
        unit_ids=[m.unit_id for m in members],
        trajectory_ids=[m.trajectory_id for m in members],
        rewards=rewards,
        reward_parts=[list(one.parts) if one else [] for one in given],
        reward_metrics=[_metrics(one) for one in given],
        valid=[r is not None for r in rewards],
        why_invalid=[
            None if r is not None else m.why_invalid or without
            for m, r in zip(members, rewards, strict=True)
        ],
        mean=advantages.mean(rewards),
        std=advantages.std(rewards),
        equal_scores=len(valid) >= SENDABLE and min(valid) == max(valid),
        sendable=len(valid) >= SENDABLE,
        grpo=advantages.grpo(rewards),
        rloo=advantages.rloo(rewards),
        dr_grpo=advantages.dr_grpo(rewards),
        scored_by=scoring.by,
        grade_id=scoring.grade_id,
        calls=scoring.calls,
        usage=scoring.usage,
        cost_usd=scoring.cost_usd,
        metrics=scoring.metrics,
        error=scoring.error,
        created_at=time.time_ns() // 1000,
    )


def _metrics(given: Rewards | None) -> list[Metric]:
    return [Metric(name=n, value=float(v)) for n, v in given.metrics.items()] if given else []


MembersOf = Callable[[int], int | None]
"""Row of the dataset -> members of its group; None where nobody knows yet."""


def due_groups(run: Run, ledger: Ledger, *, size: MembersOf | None) -> Iterator[Gathered]:
    """The groups that are final and have no row of their present state.

    Args:
        run: read anew: finished rows that are not published yet count too.
        ledger: says which units are still open.
        size: of each group, where units may be open that the tables do not name; None when there
            are none, and what the tables hold is all.
    """
    changed = _changed(run)
    rows = _known_rows(run, changed)
    for gathered in gather(run, only=changed):
        units = [m.unit_id for m in gathered.members]
        if any(ledger.disposition(unit) == "open" for unit in units):
            continue
        if size is not None:
            members = size(gathered.row_index)
            if members is None or len(units) < members:
                continue
        if rows.get(gathered.facts["group_id"]) != _state(gathered.members):
            yield gathered


def _changed(run: Run) -> pa.Array:
    """The ids of all groups that may differ from their newest row, found without looking at each: a
    resume of a million units finds none in seconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ["group_id", "unit_ids", "trajectory_ids", "error"]
    groups = run.arrow("groups", columns)
    groups = groups.filter(pc.is_null(groups["error"])).combine_chunks()
    done = run.arrow("trajectories", ["group_id", "trajectory_id"])
    failed = run.arrow("failures", ["group_id", "unit_id", "trajectory_id", "cause"])
    unjudged = failed.filter(pc.equal(failed["cause"], "verifier"))["trajectory_id"]
    known = pa.chunked_array([*done["trajectory_id"].chunks, *unjudged.chunks], pa.string())
    units, shown = (pc.list_flatten(groups[name]) for name in columns[1:3])
    owners = groups["group_id"].take(pc.list_parent_indices(groups["trajectory_ids"]))
    gone = pc.and_(pc.is_valid(shown), pc.invert(pc.is_in(shown, known)))
    found = [
        done["group_id"].filter(pc.invert(pc.is_in(done["trajectory_id"], shown))),
        failed["group_id"].filter(pc.invert(pc.is_in(failed["unit_id"], units))),
        owners.filter(gone),
    ]
    return pc.unique(pa.chunked_array([c for ids in found for c in ids.chunks], pa.string()))


def gather(run: Run, *, only: pa.Array | None = None) -> list[Gathered]:
    """The groups of a run with the members that were tried, in the order of the dataset.

    Memory: some hundred bytes for each unit.

    Args:
        only: ids of groups; None takes all.
    """
    found: dict[str, dict[int, tuple[int, Member]]] = {}
    facts: dict[str, tuple[int, dict[str, Any]]] = {}
    for table in ("failures", "trajectories"):  # what is finished stands above what failed
        for row in _rows(run, table, only):
            group_id, attempt = row["group_id"], int(row["attempt"])
            if group_id not in facts:
                facts[group_id] = (row["row_index"], {name: row[name] for name in _SHARED})
                found[group_id] = {}
            member, members = _member(row, table), found[group_id]
            known = members.get(member.index)
            if known is None or table == "trajectories" or known[0] <= attempt:
                members[member.index] = (attempt, member)
    ordered = sorted(facts, key=lambda group_id: (facts[group_id][0], group_id))
    return [
        Gathered(
            facts=facts[group_id][1],
            members=tuple(member for _, (_, member) in sorted(found[group_id].items())),
            row_index=facts[group_id][0],
        )
        for group_id in ordered
    ]


def _rows(run: Run, table: str, only: pa.Array | None) -> Iterator[dict[str, Any]]:
    rows = _of_groups(run.arrow(table, [*_SHARED, *_OWN, "row_index"]), only)
    for batch in rows.to_batches(max_chunksize=1_000):
        yield from batch.to_pylist()


def _member(row: dict[str, Any], table: str) -> Member:
    done = table == "trajectories"
    graded = done and row["reward"] is not None
    return Member(
        index=row["member"],
        unit_id=row["unit_id"],
        trajectory_id=row["trajectory_id"] if done else None,
        reward=row["reward"] if done else None,
        why_invalid=None if graded else ("not graded" if done else str(row["cause"])),
        unjudged=row["trajectory_id"] if not done and row["cause"] == "verifier" else None,
    )


State = list[tuple[str, str | None]]


def _state(members: Sequence[Member]) -> State:
    return [(m.unit_id, m.trajectory_id) for m in members]


def _of_groups(rows: pa.Table, only: pa.Array | None) -> pa.Table:
    import pyarrow.compute as pc

    return rows if only is None else rows.filter(pc.is_in(rows["group_id"], only))


def _known_rows(run: Run, only: pa.Array) -> dict[str, State]:
    names = ["group_id", "unit_ids", "trajectory_ids", "error"]
    rows = _of_groups(run.arrow("groups", names), only).to_pylist()
    return {
        row["group_id"]: list(zip(row["unit_ids"], row["trajectory_ids"], strict=True))
        for row in rows
        if row["error"] is None
    }
