"""What a trainer gets of a run's groups, and what it does not: kept against dropped rollouts.

Who drops rollouts changes the data: if long ones fail more often, what is kept is shorter than what
the policy does. So both sides are described alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.store.reader import Run


@dataclass(frozen=True)
class Rollouts:
    """Some rollouts, in numbers."""

    count: int
    mean_turns: float | None
    mean_tokens: float | None
    """Input and output; over those whose usage is known."""
    endings: dict[str, int]
    """End reasons; for what failed its cause."""


@dataclass(frozen=True)
class GroupReport:
    """The groups of a run."""

    groups: int
    sendable: int
    """With at least two valid members."""
    equal_scores: int
    n_valid: dict[int, int]
    """Valid members -> groups."""
    kept: Rollouts
    """Valid members of sendable groups."""
    dropped: Rollouts
    """All other attempts: failures, and members of groups that cannot be sent."""
    unjudged: int = 0
    """Of these so many whose verifier, judge or grading box could not judge. Infrastructure's by
    rule, but what is judged may have had a hand in it."""
    unscored: int = 0
    """Groups that `score_group` could not score; the next start tries them again."""

    def lines(self) -> list[str]:
        """For people."""
        sizes = ", ".join(f"{n} valid: {count}" for n, count in sorted(self.n_valid.items()))
        lines = [
            f"groups: {self.groups} ({self.sendable} sendable, {self.equal_scores} with equal "
            f"scores; {sizes})",
            f"kept:    {_said(self.kept)}",
            f"dropped: {_said(self.dropped)}",
        ]
        if self.unjudged:
            share = self.unjudged / (self.kept.count + self.dropped.count)
            lines.append(
                f"unjudged: {self.unjudged:,} of the dropped ({share:.1%} of all) could not be "
                "judged. A policy may learn to cause that: look at them with show RUN --failed. "
                "Where workspaces are kept, env regrade can judge them later"
            )
        if self.unscored:
            lines.append(f"unscored: {self.unscored:,} groups; the next start tries them again")
        return lines


def group_report(run: Run) -> GroupReport:
    """Describe the groups of a run that are written."""
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
    kept = [row for row in rows if row["trajectory_id"] in kept_ids]
    dropped = [
        row for row in rows if row["trajectory_id"] not in kept_ids and row["group_id"] in grouped
    ]
    return GroupReport(
        groups=len(groups),
        sendable=len(sendable),
        equal_scores=sum(bool(group["equal_scores"]) for group in groups),
        n_valid=dict(Counter(int(group["n_valid"]) for group in groups)),
        kept=_rollouts(kept),
        dropped=_rollouts(dropped),
        unjudged=sum(row["cause"] == "verifier" for row in dropped),
        unscored=sum(isinstance(group["error"], str) for group in groups),
    )


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> Rollouts:
    tokens = [row["usage"]["total_tokens"] for row in rows]
    endings = Counter(str(row["cause"] or row["end_reason"]) for row in rows)
    return Rollouts(
        count=len(rows),
        mean_turns=_mean([row["turns"] for row in rows]),
        mean_tokens=_mean([count for count in tokens if count is not None]),
        endings=dict(endings.most_common()),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _said(some: Rollouts) -> str:
    if not some.count:
        return "0 rollouts"
    turns = "?" if some.mean_turns is None else f"{some.mean_turns:.1f}"
    tokens = "?" if some.mean_tokens is None else f"{some.mean_tokens:,.0f}"
    endings = ", ".join(f"{name} {count}" for name, count in some.endings.items())
    return f"{some.count:,} rollouts, {turns} turns and {tokens} tokens on average ({endings})"
