"""Which groups a trainer gets: gates on complete groups, early ends, and a curriculum of tasks.

Groups that a trainer does not get are stored with the reason (table `deliveries`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.input_errors import check_fields
from hermes_rl.store import Group
from hermes_rl.tasks import Task

MARGIN = 0.1
"""Weight of a new group in the running solve rate of its level."""


def solve_rate(rewards: Sequence[float | None], reward_range: tuple[float, float]) -> float | None:
    """Return the mean of the valid rewards, scaled to 0 to 1; None without any."""
    valid = [reward for reward in rewards if reward is not None]
    if not valid:
        return None
    low, high = reward_range
    return (sum(valid) / len(valid) - low) / (high - low)


@dataclass(frozen=True)
class Curriculum:
    """Prefer tasks of a level that the policy solves about half of the time.

    The next task is chosen among the next `window` tasks of the stream: the one whose level has the
    solve rate closest to `target`. Levels without a result come first. A task that was passed over
    `window` times is skipped, and stored with the reason.
    """

    key: str = "level"
    """Column of the task with its level; `id` is the task itself, for streams that repeat tasks."""
    target: float = 0.5
    window: int = 64

    def __post_init__(self) -> None:
        check_fields(self, "curriculum")
        if self.window < 1:
            raise UserError(f"curriculum: window must be at least 1 task, not {self.window}")
        if not 0 <= self.target <= 1:
            raise UserError(f"curriculum: target is a solve rate from 0 to 1, not {self.target:g}")

    def level_of(self, task: Task | None) -> str | None:
        """Return the level of a task; None if it has none."""
        if task is None:
            return None
        value = task.id if self.key == "id" else task.metadata.get(self.key)
        return None if value is None else str(value)


@dataclass(frozen=True)
class Selection:
    """Gates on groups. Refused groups are replaced by the next tasks of the stream."""

    min_valid: int = 2
    """Valid members that a group needs: with fewer than two there are no advantages."""
    refill: int = 0
    """Further members that a group may have in place of members that infrastructure failed."""
    drop_equal: bool = False
    """Refuse groups whose valid rewards are all equal: their advantages are all 0."""
    solve_rate: tuple[float, float] | None = None
    """Refuse groups whose mean reward, scaled to 0 to 1, is outside these bounds."""
    early_stop: int | None = None
    """Roll out so many members first. If their rewards are all equal, the group ends there and is
    refused; otherwise the other members follow."""
    gate: Callable[[Group], str | None] | None = None
    """Your own gate: returns why a group is refused, or None."""
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        check_fields(self, "selection")
        for name in ("min_valid", "refill"):
            if (count := getattr(self, name)) < 0:
                raise UserError(
                    f"selection: {name} must be a number of members from 0, not {count}"
                )
        if self.early_stop is not None and self.early_stop < 2:
            raise UserError("early_stop needs at least 2 members, whose rewards are compared")
        if self.solve_rate is not None and not 0 <= self.solve_rate[0] <= self.solve_rate[1] <= 1:
            raise UserError("solve_rate takes two numbers from 0 to 1, the smaller one first")

    def refuse(self, group: Group, reward_range: tuple[float, float]) -> str | None:
        """Return why a complete group is refused; None if it is delivered."""
        if group.n_valid < self.min_valid:
            return (
                f"too_few_valid: {group.n_valid} of {group.size} members, {self.min_valid} needed"
            )
        rate = solve_rate(group.rewards, reward_range)
        if self.solve_rate is not None and rate is not None:
            low, high = self.solve_rate
            if rate < low:
                return f"too_hard: solve rate {rate:.3g}, at least {low:g} wanted"
            if rate > high:
                return f"too_easy: solve rate {rate:.3g}, at most {high:g} wanted"
        if self.drop_equal and group.equal_scores:
            return f"equal_scores: all rewards are {group.mean:g}"
        return self._gated(group) if self.gate is not None else None

    def _gated(self, group: Group) -> str | None:
        assert self.gate is not None
        try:
            why = self.gate(group)
        except Exception as error:  # of the trainer's code
            raise UserError(f"selection.gate raised {type(error).__name__}: {error}") from error
        if why is not None and not isinstance(why, str):
            raise UserError(f"selection.gate returned {why!r}; return the reason as text, or None")
        return why

    def ends_early(self, rewards: Sequence[float | None], size: int) -> str | None:
        """Return why a group ends after its first members; None if the others follow.

        Args:
            rewards: of the first members.
            size: of the whole group.
        """
        valid = {reward for reward in rewards if reward is not None}
        if len(valid) != 1 or len(rewards) >= size or None in rewards:
            return None
        return f"equal_scores: the first {len(rewards)} of {size} rewards are {valid.pop():g}"


@dataclass
class Difficulty:
    """Running solve rates by level. Memory: one number per level."""

    curriculum: Curriculum
    rates: dict[str, float] = field(default_factory=dict)

    def record(self, level: str | None, rate: float | None) -> None:
        """Update the rate of a level with a group."""
        if level is not None and rate is not None:
            before = self.rates.get(level, rate)
            self.rates[level] = before + MARGIN * (rate - before)

    def choose(self, levels: Mapping[Hashable, str | None]) -> Any:
        """Return the key of the best task: the first one of the best level."""
        target = self.curriculum.target

        def distance(level: str | None) -> float:
            rate = None if level is None else self.rates.get(level)
            return -1.0 if rate is None else abs(rate - target)

        return min(levels, key=lambda key: distance(levels[key]))
