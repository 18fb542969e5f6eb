"""Rewards, advantages and group sizes, as RL formats need them.

Where the run has a table `groups`, its rewards (those of `score_group` or of a regrade) and its
advantages count; else the rewards of `trajectories`, and there are no advantages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.export.base import AdvantageKind
from hermes_rl.store.reader import Run


@dataclass(frozen=True)
class Score:
    """Of one rollout."""

    reward: float | None = None
    advantage: float | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of the rollouts of a run, and valid members of its groups."""

    by_trajectory: Mapping[str, Score] = field(default_factory=dict)
    valid: Mapping[str, int] = field(default_factory=dict)
    """Group -> members with a reward."""
    elsewhere: int = 0
    """Members with a reward that have no row in `trajectories`."""

    @classmethod
    def of(
        cls, run: Run, graded: Iterable[tuple[str, float | None]], advantage: AdvantageKind
    ) -> Scores:
        """Read them.

        Args:
            run: with or without a table `groups`.
            graded: group and reward of every rollout in `trajectories`.
            advantage: which one.
        """
        valid = Counter(group for group, reward in graded if reward is not None)
        known: dict[str, Score] = {}
        columns = ["group_id", "trajectory_ids", "rewards", "n_valid", advantage]
        for group in run.arrow("groups", columns).to_pylist():  # of a group's rows the last counts
            valid[group["group_id"]] = group["n_valid"]
            for trajectory, reward, worth in zip(
                group["trajectory_ids"], group["rewards"], group[advantage], strict=True
            ):
                if trajectory is not None:
                    known[trajectory] = Score(reward=reward, advantage=worth)
        rolled = run.arrow("trajectories", ["trajectory_id"])["trajectory_id"] if known else ()
        others = known.keys() - {one.as_py() for one in rolled}
        elsewhere = sum(known[one].reward is not None for one in others)
        return cls(known, valid, elsewhere)

    def of_rollout(self, row: Mapping[str, Any]) -> Score:
        """The score of a row of `trajectories`."""
        return self.by_trajectory.get(row["trajectory_id"], Score(reward=row["reward"]))

    def valid_members(self, group_id: str) -> int:
        """How many members of a group have a reward."""
        return self.valid.get(group_id, 0)
