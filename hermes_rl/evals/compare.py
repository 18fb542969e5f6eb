"""Two runs of the same tasks, compared pairwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hermes_rl.errors import UserError
from hermes_rl.evals.statistics import Interval, bootstrap
from hermes_rl.evals.summary import task_scores

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run


DECIDING_TASKS = 6
"""Tasks that must differ for a verdict: fewer can never reject equality at 5 % in a sign test,
since 2 * 0.5**5 > 0.05, however clear a bootstrap of a handful looks."""


@dataclass(frozen=True)
class Comparison:
    """The paired difference of two runs over the tasks that both graded."""

    a: str
    b: str
    tasks: int
    difference: Interval
    """Solved share of b less that of a, per task, then averaged; bootstrap over tasks."""
    verdict: Literal["a", "b", "undecided"]
    """Who is better where the interval excludes zero and enough tasks differ (`DECIDING_TASKS`);
    otherwise undecided."""
    per_task: pd.DataFrame
    """task_id, solved_a, solved_b, difference."""
    only_a: list[str]
    """Tasks that only a graded: left out of the comparison."""
    only_b: list[str]

    def __str__(self) -> str:
        d = self.difference
        better = {"a": f"{self.a} is better", "b": f"{self.b} is better"}
        differing = int((self.per_task["difference"] != 0).sum())
        few = f"{differing} tasks differ, too few for a verdict"
        nothing = few if 0 < differing < DECIDING_TASKS else "no difference shown"
        verdict = better.get(self.verdict, nothing)
        interval = f" (95 % interval {d.low:+.0%} to {d.high:+.0%})" if self.tasks > 1 else ""
        return (
            f"{self.b} less {self.a}: {d.mean:+.0%}{interval} over {self.tasks} common tasks: "
            f"{verdict}"
        )


def _verdict(interval: Interval, differing: int) -> Literal["a", "b", "undecided"]:
    if differing < DECIDING_TASKS:
        return "undecided"
    return "b" if interval.low > 0 else "a" if interval.high < 0 else "undecided"


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs over their common tasks.

    Tasks are matched by content, so an edited task is another task. Infrastructure failures are in
    neither score.

    Raises: UserError when no task is graded in both.
    """
    left, right = task_scores(a.trajectories), task_scores(b.trajectories)
    both = left.merge(right, on=["task_id", "task_hash"], suffixes=("_a", "_b"))
    if both.empty:
        raise UserError(
            f"{a.path.name} and {b.path.name} have no graded task in common. "
            "Compare runs of one dataset"
        )
    both["difference"] = both["solved_b"] - both["solved_a"]
    interval = bootstrap(both["difference"].tolist())
    common = set(both["task_hash"])
    return Comparison(
        a=a.path.name,
        b=b.path.name,
        tasks=len(both),
        difference=interval,
        verdict=_verdict(interval, int((both["difference"] != 0).sum())),
        per_task=both[["task_id", "solved_a", "solved_b", "difference"]],
        only_a=sorted(left.loc[~left["task_hash"].isin(common), "task_id"]),
        only_b=sorted(right.loc[~right["task_hash"].isin(common), "task_id"]),
    )
