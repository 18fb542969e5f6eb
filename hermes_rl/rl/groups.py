"""Groups: the repeats of one task, with their rewards, statistics and advantages.

A group's row is computed from rows of the run alone, once none of its members is open. A newer row
replaces an earlier one; rows never change. `due_groups` finds the missing rows, so a kill loses
nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import HermesError
from hermes_rl.record import Call
from hermes_rl.rl import advantages
from hermes_rl.rl.rewards import Rewards
from hermes_rl.store import Group, Ledger, Metric, Run
from hermes_rl.text import many
from hermes_rl.usage import UsageTotal

if TYPE_CHECKING:
    import pyarrow as pa

SENDABLE = 2
"""Valid members from which a group can be compared by a trainer."""
SCORED_AT_ONCE = 16
"""Groups that an environment scores concurrently: a kill loses no more than these."""
INTERRUPTED = "driver_lost: killed"
"""The error of a grade or a group that a kill interrupted."""

_SHARED = ("group_id", "run_id", "task_id", "task_hash", "env_name", "split")
_MEMBER = ("member", "unit_id", "trajectory_id", "attempt", "reward", "cause")
_NOTHING = UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)


@dataclass(frozen=True)
class Member:
    """One member, from the run's tables."""

    index: int
    """0-based: the repeat."""
    unit_id: str
    trajectory_id: str | None
    """None when it was given up."""
    reward: float | None
    why_invalid: str | None
    """None for a member with a reward."""
    unjudged: str | None = None
    """The rollout of a member whose verifier failed, which a regrade may grade."""


@dataclass(frozen=True)
class Gathered:
    """The members of a group, before anything is computed."""

    facts: dict[str, Any]
    """The columns that its members share."""
    members: tuple[Member, ...]
    """Ordered by index."""
    row_index: int = 0
    """Position of its task in the dataset or stream."""


@dataclass(frozen=True)
class Scoring:
    """The source of a group's rewards."""

    by: str = "compute_reward"
    grade_id: str | None = None
    rewards: Sequence[Rewards | float | None] | None = None
    """Replacements of the members' rewards, in their order; those of `score_group` have components.
    One without a trajectory has none."""
    calls: list[Call] = field(default_factory=list)
    usage: UsageTotal = _NOTHING
    cost_usd: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Bounds on calls of unknown usage."""
    error: str | None = None
    """Why there are no rewards now: no member is valid, and the group is due again."""
    stop: HermesError | None = None
    """An error that prevents scoring of all other groups."""


def make_group(gathered: Gathered, scoring: Scoring | None = None) -> Group:
    """Make the row of a group; statistics and advantages are over valid members only."""
    scoring = scoring or Scoring()
    members = gathered.members
    values = [m.reward for m in members] if scoring.rewards is None else scoring.rewards
    rewards = [
        (r.total if isinstance(r, Rewards) else r)
        if m.trajectory_id is not None and scoring.error is None
        else None
        for m, r in zip(members, values, strict=True)
    ]
    valid = [r for r in rewards if r is not None]
    missing = "not graded" if scoring.error is None else "not scored"
    return Group(
        **gathered.facts,
        size=len(members),
        n_valid=len(valid),
        members=[m.index for m in members],
        unit_ids=[m.unit_id for m in members],
        trajectory_ids=[m.trajectory_id for m in members],
        rewards=rewards,
        reward_parts=[list(r.parts) if isinstance(r, Rewards) else [] for r in values],
        reward_metrics=[
            [Metric(name=n, value=float(v)) for n, v in r.metrics.items()]
            if isinstance(r, Rewards)
            else []
            for r in values
        ],
        valid=[r is not None for r in rewards],
        why_invalid=[
            None if r is not None else m.why_invalid or missing
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


MembersOf = Callable[[int], int | None]
"""Row index of the dataset -> members of its group; None where that is not known yet."""


def due_groups(run: Run, ledger: Ledger, *, size: MembersOf | None) -> Iterator[Gathered]:
    """Find the groups that are final and have no row of their present state.

    Args:
        run: freshly read; finished rows that are not published yet count too.
        ledger: says which units are still open.
        size: of each group, when units may be open that the tables do not name; None when every
            unit is in the tables.
    """
    changed = _changed(run)
    names = ["group_id", "unit_ids", "trajectory_ids", "error"]
    rows = {
        row["group_id"]: (row["unit_ids"], row["trajectory_ids"])
        for row in _of_groups(run.arrow("groups", names), changed).to_pylist()
        if row["error"] is None
    }
    for gathered in gather(run, only=changed):
        units = [m.unit_id for m in gathered.members]
        if any(ledger.disposition(unit) == "open" for unit in units):
            continue
        members = 0 if size is None else size(gathered.row_index)
        if members is None or len(units) < members:
            continue
        state = (units, [m.trajectory_id for m in gathered.members])
        if rows.get(gathered.facts["group_id"]) != state:
            yield gathered


def _changed(run: Run) -> pa.Array:
    """Return the ids of all groups that may differ from their newest row.

    Computed on columns, not row by row: in a run of a million units this takes seconds.
    """
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
    """Return the groups of a run with the members that were tried, in the order of the dataset.

    Memory: some hundred bytes for each unit.

    Args:
        only: ids of groups; None takes all.
    """
    found: dict[str, dict[int, tuple[int, Member]]] = {}
    facts: dict[str, tuple[int, dict[str, Any]]] = {}
    for table in ("failures", "trajectories"):  # finished rows take precedence
        rows = _of_groups(run.arrow(table, [*_SHARED, *_MEMBER, "row_index"]), only)
        for row in (r for b in rows.to_batches(max_chunksize=1_000) for r in b.to_pylist()):
            group_id, attempt = row["group_id"], int(row["attempt"])
            facts.setdefault(group_id, (row["row_index"], {name: row[name] for name in _SHARED}))
            member, members = _member(row, table), found.setdefault(group_id, {})
            known = members.get(member.index)
            if known is None or table == "trajectories" or known[0] <= attempt:
                members[member.index] = (attempt, member)
    return [
        Gathered(shared, tuple(found[group_id][n][1] for n in sorted(found[group_id])), row_index)
        for group_id, (row_index, shared) in sorted(facts.items(), key=lambda f: (f[1][0], f[0]))
    ]


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


def _of_groups(rows: pa.Table, only: pa.Array | None) -> pa.Table:
    import pyarrow.compute as pc

    return rows if only is None else rows.filter(pc.is_in(rows["group_id"], only))


# The report of `env process`


@dataclass(frozen=True)
class RolloutStats:
    """Statistics of some rollouts."""

    count: int
    mean_turns: float | None
    mean_tokens: float | None
    """Input and output tokens, over rollouts of known usage."""
    endings: dict[str, int]
    """End reason, or the cause of a failure -> rollouts."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> RolloutStats:
        """Compute them from rows of `trajectories` and `failures`."""
        tokens = [row["usage"]["total_tokens"] for row in rows]
        known = [count for count in tokens if count is not None]
        return cls(
            count=len(rows),
            mean_turns=fmean(row["turns"] for row in rows) if rows else None,
            mean_tokens=fmean(known) if known else None,
            endings=dict(Counter(str(r["cause"] or r["end_reason"]) for r in rows).most_common()),
        )

    def __str__(self) -> str:
        if not self.count:
            return "0 rollouts"
        turns = "?" if self.mean_turns is None else f"{self.mean_turns:.1f}"
        tokens = "?" if self.mean_tokens is None else f"{self.mean_tokens:,.0f}"
        endings = ", ".join(f"{name} {count}" for name, count in self.endings.items())
        count = many(self.count, "rollout")
        return f"{count}, {turns} turns and {tokens} tokens on average ({endings})"


@dataclass(frozen=True)
class GroupReport:
    """The rollouts of a run that a trainer gets, and those that it does not get.

    Dropping rollouts changes the data: if long ones fail more often, the kept ones are shorter than
    the policy's. So both sides are described with the same statistics.
    """

    groups: int
    sendable: int
    """Groups with at least two valid members."""
    equal_scores: int
    n_valid: dict[int, int]
    """Valid members -> groups."""
    kept: RolloutStats
    """Valid members of sendable groups."""
    dropped: RolloutStats
    """All other attempts: failures, and members of groups that cannot be sent."""
    unjudged: int = 0
    """Of the dropped, those whose verifier, judge or grading sandbox failed. This counts as an
    infrastructure failure, but the policy may have caused it."""
    unscored: int = 0
    """Groups that `score_group` could not score; the next start tries them again."""

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        sizes = ", ".join(f"{n} valid: {count}" for n, count in sorted(self.n_valid.items()))
        lines = [
            f"groups: {self.groups} ({self.sendable} sendable, {self.equal_scores} with equal "
            f"scores; {sizes})",
            f"kept:    {self.kept}",
            f"dropped: {self.dropped}",
        ]
        if self.unjudged:
            share = self.unjudged / (self.kept.count + self.dropped.count)
            lines.append(
                f"unjudged: {self.unjudged:,} of the dropped ({share:.1%} of all) could not be "
                "judged. A policy may learn to cause that: look at them with show RUN --failed. "
                "Where workspaces are kept, env regrade can judge them later"
            )
        if self.unscored:
            lines.append(
                f"unscored: {many(self.unscored, 'group')}; the next start tries them again"
            )
        return lines


def group_report(run: Run) -> GroupReport:
    """Describe the groups of a run that have rows."""
    names = ["group_id", "trajectory_ids", "valid", "sendable", "equal_scores", "n_valid", "error"]
    groups = run.groups[names].to_dict("records")
    sendable = [group for group in groups if group["sendable"]]
    kept_ids = {
        trajectory
        for group in sendable
        for trajectory, valid in zip(group["trajectory_ids"], group["valid"], strict=True)
        if valid
    }
    columns = ["trajectory_id", "group_id", "turns", "usage", "end_reason", "cause"]
    rows = [row for t in ("trajectories", "failures") for row in run.arrow(t, columns).to_pylist()]
    grouped = {group["group_id"] for group in groups}
    kept, dropped = [], []
    for row in rows:
        if row["trajectory_id"] in kept_ids:
            kept.append(row)
        elif row["group_id"] in grouped:
            dropped.append(row)
    return GroupReport(
        groups=len(groups),
        sendable=len(sendable),
        equal_scores=sum(bool(group["equal_scores"]) for group in groups),
        n_valid=dict(Counter(int(group["n_valid"]) for group in groups)),
        kept=RolloutStats.of(kept),
        dropped=RolloutStats.of(dropped),
        unjudged=sum(row["cause"] == "verifier" for row in dropped),
        unscored=sum(isinstance(group["error"], str) for group in groups),
    )
