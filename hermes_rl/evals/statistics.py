"""Scores of runs and their comparison, with the task as the sampling unit.

Repeats of one task are not independent, so every interval resamples tasks, never rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from hermes_rl.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run

RESAMPLES = 10_000


class Interval(NamedTuple):
    """An estimate with its bounds."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Interval:
    """Return the mean of per-task values with a percentile bootstrap interval over tasks.

    Args:
        values: one value per task; their order does not matter.
        level: coverage of the interval.
        seed: of the resampling.

    Returns: NaN bounds for fewer than two tasks, NaN everywhere for none.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    data = np.sort(np.asarray(values, dtype=float))
    if data.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, float("nan"), float("nan"))
    random = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    rows = max(1, 4_000_000 // data.size)  # bounds the memory of one draw to 32 MB
    for start in range(0, RESAMPLES, rows):
        stop = min(start + rows, RESAMPLES)
        picks = random.integers(0, data.size, size=(stop - start, data.size))
        means[start:stop] = data[picks].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high))


def wilson(solved: int, tried: int) -> Interval:
    """Return the solved share of the repeats of a task with its 95 % Wilson score interval.

    Returns: NaN everywhere when nothing was tried.

    Source: Wilson, Probable Inference, JASA 22 (1927), 209-212.
    """
    if tried == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    z = 1.959963984540054  # the standard normal's 97.5 % quantile
    share = solved / tried
    scale = 1 + z * z / tried
    centre = (share + z * z / (2 * tried)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


SOLVED = 1.0
"""The reward from which a task counts as solved."""


class Bounds(NamedTuple):
    """Lower and upper bound of a value."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Scores of a run. Infrastructure failures are in no score and are counted separately."""

    name: str
    tasks: int
    """Tasks with at least one graded unit."""
    units: int
    """Graded units."""
    solved: Interval
    """Share of units solved, averaged per task, then over tasks."""
    reward: Interval
    """Mean reward, averaged per task, then over tasks."""
    failed_attempts: int
    """Attempts without a verdict, because of infrastructure, task or operator."""
    never_graded: int
    """Units with attempts but without a reward, which are missing from the score."""
    bounds: Bounds
    """The solved share if all ungraded units were failed, and if they were solved."""
    per_task: pd.DataFrame
    """task_id, units, solved (share), reward (mean), turns (mean)."""
    failures: pd.DataFrame
    """task_id, owner, cause, error: one row per failed attempt."""

    def __str__(self) -> str:
        left_out = f"{self.failed_attempts} attempts left out"
        if not self.tasks:
            return f"{self.name}: nothing was graded; {left_out}"
        solved = f"solved {self.solved.mean:.0%}"
        if self.tasks > 1:
            solved += f" (95 % interval {self.solved.low:.0%} to {self.solved.high:.0%})"
        return f"{self.name}: {solved} over {self.tasks} tasks, {self.units} units; {left_out}"


def summary(run: Run) -> Summary:
    """Compute the scores of a run that `hermes_rl.load_run` returned."""
    per_task = task_scores(run.trajectories)
    failed = run.failures
    missing = _never_graded(run.trajectories, failed)
    return Summary(
        name=run.path.name,
        tasks=len(per_task),
        units=int(per_task["units"].sum()) if len(per_task) else 0,
        solved=bootstrap(per_task["solved"].tolist()),
        reward=bootstrap(per_task["reward"].tolist()),
        failed_attempts=len(failed),
        never_graded=len(missing),
        bounds=_bounds(per_task, missing),
        per_task=per_task,
        failures=failed[["task_id", "owner", "cause", "error"]].reset_index(drop=True),
    )


def task_scores(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Compute one row per task: graded units, solved share, mean reward and mean turns."""
    graded = trajectories[trajectories["reward"].notna()]
    graded = graded.assign(solved=(graded["reward"] >= SOLVED).astype(float))
    groups = graded.groupby(["task_id", "task_hash"], sort=True)
    scores = groups.agg(
        units=("reward", "size"),
        solved=("solved", "mean"),
        reward=("reward", "mean"),
        turns=("turns", "mean"),
    )
    return scores.reset_index()


def _never_graded(trajectories: pd.DataFrame, failures: pd.DataFrame) -> pd.DataFrame:
    """Return one row per unit without a reward: task_id, task_hash, unit_id."""
    import pandas as pd

    columns = ["task_id", "task_hash", "unit_id"]
    graded = trajectories["reward"].notna()
    tried = pd.concat([trajectories.loc[~graded, columns], failures[columns]])
    return tried[~tried["unit_id"].isin(trajectories.loc[graded, "unit_id"])].drop_duplicates(
        "unit_id"
    )


def _bounds(per_task: pd.DataFrame, missing: pd.DataFrame) -> Bounds:
    keys = ["task_id", "task_hash"]
    lost = missing.groupby(keys).size().rename("lost").reset_index()
    tasks = per_task.merge(lost, on=keys, how="outer").fillna({"units": 0, "solved": 0, "lost": 0})
    if tasks.empty:
        return Bounds(float("nan"), float("nan"))
    solved, all_units = tasks["solved"] * tasks["units"], tasks["units"] + tasks["lost"]
    low, high = solved / all_units, (solved + tasks["lost"]) / all_units
    return Bounds(float(low.mean()), float(high.mean()))


DECIDING_TASKS = 6
"""Tasks that must differ for a verdict: with fewer, no sign test rejects equality at 5 %, since
2 * 0.5**5 > 0.05, even if the bootstrap interval excludes zero."""


@dataclass(frozen=True)
class Comparison:
    """The paired difference of two runs over the tasks that are graded in both."""

    a: str
    b: str
    tasks: int
    difference: Interval
    """Solved share of b minus that of a, averaged over tasks; bootstrap over tasks."""
    verdict: Literal["a", "b", "undecided"]
    """The better run if the interval excludes zero and enough tasks differ (`DECIDING_TASKS`)."""
    per_task: pd.DataFrame
    """task_id, solved_a, solved_b, difference."""
    only_a: list[str]
    """Tasks that are graded only in a, and left out."""
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

    def _repr_html_(self) -> str:
        rows = self.per_task.to_html(index=False, max_rows=20, float_format="{:.2f}".format)
        return f"<p>{escape(str(self))}</p>{rows}"


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
