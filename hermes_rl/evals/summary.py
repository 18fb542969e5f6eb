"""What one run says about its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hermes_rl.evals.statistics import Interval, bootstrap

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run

SOLVED = 1.0
"""The reward from which a task counts as solved."""


class Bounds(NamedTuple):
    """Between what a figure must lie."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """The figures of one run. Infrastructure failures are counted apart and in no score."""

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
    """Attempts that ended without a verdict: infrastructure, task or operator."""
    never_graded: int
    """Units that have attempts and no reward: missing from the score."""
    bounds: Bounds
    """The solved share had all units that were never graded failed, and had they been solved."""
    per_task: pd.DataFrame
    """task_id, units, solved (share), reward (mean), turns (mean)."""
    failures: pd.DataFrame
    """task_id, owner, cause, error: one row per such attempt."""

    def __str__(self) -> str:
        left_out = f"{self.failed_attempts} attempts left out"
        if not self.tasks:
            return f"{self.name}: nothing was graded; {left_out}"
        solved = f"solved {self.solved.mean:.0%}"
        if self.tasks > 1:
            solved += f" (95 % interval {self.solved.low:.0%} to {self.solved.high:.0%})"
        return f"{self.name}: {solved} over {self.tasks} tasks, {self.units} units; {left_out}"


def summary(run: Run) -> Summary:
    """The figures of a run, with the task as the sampling unit.

    Args:
        run: as `hermes_rl.load_run` gives it.
    """
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
    """One row per task: its graded units, the share of them solved, mean reward and mean turns."""
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
    """One row per unit without a reward: task_id, task_hash, unit_id."""
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
