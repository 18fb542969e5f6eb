"""Scores of runs and their comparison, with the task as the sampling unit (formulas: `stats`).

Infrastructure failures are in no score; they are counted, and bounded apart.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hermes_rl.errors import UserError
from hermes_rl.evals import stats
from hermes_rl.evals.stats import Interval, VarianceSplit
from hermes_rl.text import many

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run

SOLVED = 1.0
"""The reward from which a task counts as solved."""
ALPHA, POWER = 0.05, 0.8
"""Error rate of a verdict, and the share of real differences that one finds."""
ROUNDING = 1e-12
"""Differences below it come from sums of fractions."""

Score = Literal["solved", "reward"]
"""What is compared: solved shares, or mean rewards, which count partial rewards too."""

_KEYS = ["task_id", "task_hash"]
_UNITS = [*_KEYS, "unit_id", "reward", "turns", "truncated", "attempt"]
_FAILURES = [*_KEYS, "unit_id", "owner", "cause", "error"]


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
    partial: bool
    """Whether there are rewards other than 0 and 1, about which solved shares say little."""
    variance: VarianceSplit
    """Of the solved share: how much tasks and repeats contribute."""
    all_failed: float
    """Share of the tasks with repeats whose rewards are all 0: no gradient comes from them."""
    all_solved: float
    """Share of the tasks with repeats whose rewards are all 1."""
    truncated: float
    """Share of graded units that a limit cut."""
    retried: float
    """Share of graded units that needed more than one attempt."""
    failed_attempts: int
    """Attempts without a verdict, because of infrastructure, task or operator."""
    never_graded: int
    """Units with attempts but without a reward, which are missing from the score."""
    bounds: Bounds
    """The solved share if all ungraded units were failed, and if they were solved."""
    unfinished: str | None
    """What is missing from a run that is not complete (`Run.unfinished`); None for chosen tasks."""
    per_task: pd.DataFrame
    """task_id, units, solved (share), reward (mean), turns (mean)."""
    failures: pd.DataFrame
    """task_id, owner, cause, error: one row per failed attempt."""

    @property
    def shares(self) -> str:
        """The shares of truncated and retried units, and of tasks without a contrast."""
        text = f"{self.name}: {self.truncated:.0%} of units truncated, {self.retried:.0%} retried"
        if math.isfinite(self.all_failed):
            text += (
                f"; of tasks with repeats {self.all_failed:.0%} always failed, "
                f"{self.all_solved:.0%} always solved"
            )
        return text

    def __str__(self) -> str:
        left_out = f"{many(self.failed_attempts, 'attempt')} left out"
        if not self.tasks:
            return "; ".join(
                filter(None, [f"{self.name}: nothing was graded", left_out, self.unfinished])
            )
        solved = f"solved {self.solved.mean:.0%}"
        if self.tasks > 1:
            solved += f" (95 % interval {self.solved.low:.0%} to {self.solved.high:.0%})"
        there = f"{many(self.tasks, 'task')}, {many(self.units, 'unit')}"
        if self.partial:
            solved += f", mean reward {self.reward.mean:.3g}"
        if self.partial and self.tasks > 1:
            solved += f" ({self.reward.low:.3g} to {self.reward.high:.3g})"
        text = f"{self.name}: {solved} over {there}; {left_out}"
        if self.never_graded:
            low, high = self.bounds
            lost = many(self.never_graded, "unit")
            text += f"; {lost} ungraded: {low:.0%} to {high:.0%} with them"
        return "; ".join(filter(None, [text, self.unfinished]))


def _frame(run: Run, table: str, columns: list[str], tasks: Collection[str] | None) -> pd.DataFrame:
    frame = run.frame(table, columns)
    return frame if tasks is None else frame[frame["task_hash"].isin(tasks)]


def summary(run: Run, *, by: str | None = None, tasks: Collection[str] | None = None) -> Summary:
    """Compute the scores of a run that `hermes_rl.load_run` returned.

    Args:
        by: a column of `metadata` that tasks have in common, such as their repository; errors are
            clustered by it.
        tasks: only these, by `task_hash`.
    """
    trajectories = _frame(run, "trajectories", _UNITS, tasks)
    failed = _frame(run, "failures", _FAILURES, tasks)
    per_task = task_scores(trajectories)
    missing = _never_graded(trajectories, failed)
    graded = trajectories[trajectories["reward"].notna()]
    units, clusters = len(graded), _clusters(run, per_task, by)
    repeated = per_task[per_task["units"] > 1]
    return Summary(
        name=run.path.name,
        tasks=len(per_task),
        units=units,
        solved=stats.share_interval(per_task["solved"].to_numpy(), clusters, units=units),
        reward=stats.mean_interval(per_task["reward"].to_numpy(), clusters),
        partial=not graded["reward"].isin([0, 1]).all(),
        variance=stats.variance_split(
            (graded["reward"] >= SOLVED).to_numpy(), graded.groupby(_KEYS).ngroup().to_numpy()
        ),
        all_failed=_share(repeated["most"] <= 0),
        all_solved=_share(repeated["least"] >= SOLVED),
        truncated=_share(graded["truncated"]),
        retried=_share(graded["attempt"] > 0),
        failed_attempts=len(failed),
        never_graded=len(missing),
        bounds=_bounds(per_task, missing),
        unfinished=run.unfinished if tasks is None else None,
        per_task=per_task.drop(columns=["least", "most"]),
        failures=failed[["task_id", "owner", "cause", "error"]].reset_index(drop=True),
    )


def grouped(run: Run, column: str, *, tasks: Collection[str] | None = None) -> pd.DataFrame:
    """Score the tasks of each value of a column of `metadata`, such as `category`.

    Returns: one row per value, sorted: tasks, units, solved with its interval (`solved_low`,
        `solved_high`) and its standard error over tasks (`solved_stderr`), reward with its own.

    Raises: UserError for tasks without that column.
    """
    import pandas as pd

    per_task = task_scores(_frame(run, "trajectories", _UNITS, tasks))
    values = np.asarray(_clusters(run, per_task, column))
    rows = []
    for value in np.unique(values):
        found = per_task[values == value]
        units, solved = int(found["units"].sum()), found["solved"].to_numpy()
        share, reward = stats.share_interval(solved, units=units), found["reward"].to_numpy()
        rows.append(
            {
                column: str(value),
                "tasks": len(found),
                "units": units,
                "solved": share.mean,
                "solved_low": share.low,
                "solved_high": share.high,
                "solved_stderr": stats.standard_error(solved),
                "reward": float(reward.mean()),
                "reward_stderr": stats.standard_error(reward),
            }
        )
    return pd.DataFrame(rows)


def _share(flags: pd.Series[Any]) -> float:
    return float(flags.astype(float).mean()) if len(flags) else math.nan


def _clusters(run: Run, per_task: pd.DataFrame, by: str | None) -> list[str] | None:
    """The cluster of each task. Raises: UserError for tasks without that column."""
    if by is None:
        return None
    frame = run.frame("trajectories", ["task_hash", "metadata"])
    pairs: Iterable[tuple[str, Any]] = zip(frame["task_hash"], frame["metadata"], strict=True)
    found = {task: str(data[by]) for task, data in pairs if isinstance(data, dict) and by in data}
    absent = sorted(set(per_task["task_hash"]) - found.keys())
    if absent:
        raise UserError(
            f"{run.path.name}: {many(len(absent), 'task')} without '{by}' in the metadata"
        )
    return [found[task] for task in per_task["task_hash"]]


def task_scores(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Compute one row per task: graded units, solved share, reward (mean, least, most), turns."""
    graded = trajectories[trajectories["reward"].notna()]
    graded = graded.assign(solved=(graded["reward"] >= SOLVED).astype(float))
    groups = graded.groupby(_KEYS, sort=True)
    scores = groups.agg(
        units=("reward", "size"),
        solved=("solved", "mean"),
        reward=("reward", "mean"),
        least=("reward", "min"),
        most=("reward", "max"),
        turns=("turns", "mean"),
    )
    return scores.reset_index()


def _never_graded(trajectories: pd.DataFrame, failures: pd.DataFrame) -> pd.DataFrame:
    """Return one row per unit without a reward: task_id, task_hash, unit_id."""
    import pandas as pd

    columns = [*_KEYS, "unit_id"]
    graded = trajectories["reward"].notna()
    tried = pd.concat([trajectories.loc[~graded, columns], failures[columns]])
    return tried[~tried["unit_id"].isin(trajectories.loc[graded, "unit_id"])].drop_duplicates(
        "unit_id"
    )


def _bounds(per_task: pd.DataFrame, missing: pd.DataFrame) -> Bounds:
    lost = missing.groupby(_KEYS).size().rename("lost").reset_index()
    tasks = per_task.merge(lost, on=_KEYS, how="outer").fillna({"units": 0, "solved": 0, "lost": 0})
    if tasks.empty:
        return Bounds(math.nan, math.nan)
    solved, all_units = tasks["solved"] * tasks["units"], tasks["units"] + tasks["lost"]
    low, high = solved / all_units, (solved + tasks["lost"]) / all_units
    return Bounds(float(low.mean()), float(high.mean()))


def pass_at(run: Run, k: int, *, every: bool = False) -> Interval:
    """Estimate how often at least one of k repeats solves a task (pass@k), with its interval.

    Tasks with fewer than k graded units are left out, with a warning that counts them.

    Args:
        every: all of k repeats (pass^k) instead of one.

    Raises: UserError when no task has k graded units.
    """
    graded = task_scores(run.frame("trajectories", _UNITS))
    tasks = int((graded["units"] >= k).sum())
    if not tasks or k < 1:
        raise UserError(f"{run.path.name}: no task has {many(k, 'graded unit')}. Use a smaller k")
    if left_out := len(graded) - tasks:
        warnings.warn(
            f"{run.path.name}: pass at {k} leaves out {left_out} of {len(graded)} tasks, which "
            f"have fewer than {k} graded units",
            stacklevel=2,
        )
    return pass_interval(graded, k, every=every)


def pass_interval(graded: pd.DataFrame, k: int, *, every: bool) -> Interval:
    """Estimate pass@k, or pass^k, from the scores of tasks that have k graded units."""
    scores = graded[graded["units"] >= k]
    estimate = stats.pass_hat_k if every else stats.pass_at_k
    solved = (scores["solved"] * scores["units"]).round().astype(int)
    pairs = zip(scores["units"], solved, strict=True)
    values = [estimate(int(units), int(right), k) for units, right in pairs]
    return stats.share_interval(values, units=int(scores["units"].sum()))


@dataclass(frozen=True)
class Comparison:
    """The paired difference of two runs over the tasks that are graded in both."""

    a: str
    b: str
    tasks: int
    difference: Interval
    """Solved share (or mean reward) of b minus that of a, averaged over tasks."""
    p_value: float
    """Of no difference; adjusted for the number of comparisons by `compare_all`."""
    test: Literal["exact McNemar", "sign flips"]
    """McNemar for one unit per task; else a permutation test of the differences of tasks."""
    detectable: float
    """The smallest difference that as many tasks find in 80 % of cases."""
    correlation: float
    """Of the scores of both runs: what pairing gains. NaN if one of them is constant."""
    verdict: Literal["a", "b", "undecided"]
    """The better run, if p_value is below 0.05 and the difference is at least `detectable`."""
    per_task: pd.DataFrame
    """task_id, solved_a, solved_b (or reward_a, reward_b), difference."""
    only_a: list[str]
    """Tasks that are graded only in a, and left out."""
    only_b: list[str]
    unfinished: Sequence[str] = ()
    """What is missing from runs that are not complete (`Run.unfinished`)."""
    clusters: int | None = None
    """Clusters of the tasks; None for tasks on their own."""
    score: Score = "solved"

    def shown(self, value: float) -> str:
        """A difference as text, with its sign."""
        return f"{value:+.0%}" if self.score == "solved" else f"{round(value, 12) + 0.0:+.3g}"

    @property
    def tasks_needed(self) -> int | None:
        """Tasks with which a difference as large as the observed one would be detectable, in
        clusters like these. None where that many are here: the exact test, or the correction for
        many comparisons, is stricter than the approximation behind the number."""
        if abs(self.difference.mean) < ROUNDING or not self.detectable > 0:
            return None
        clusters = self.clusters or self.tasks
        deviation = self.detectable / stats.detectable_effect(1, clusters, alpha=ALPHA, power=POWER)
        more = stats.tasks_needed(deviation, self.difference.mean, alpha=ALPHA, power=POWER)
        needed = math.ceil(more * self.tasks / clusters)
        return needed if needed > self.tasks else None

    def __str__(self) -> str:
        d = self.difference
        better = {"a": f"{self.a} is better", "b": f"{self.b} is better"}
        bounds = f" (95 % interval {self.shown(d.low)} to {self.shown(d.high)})"
        what = "mean reward " if self.score == "reward" else ""
        alone = ((self.only_a, self.a), (self.only_b, self.b))
        left_out = [f"{many(len(tasks), 'task')} only in {run}" for tasks, run in alone if tasks]
        return (
            f"{self.b} less {self.a}: {what}{self.shown(d.mean)}{bounds if self.tasks > 1 else ''} "
            f"over {many(self.tasks, 'common task')}: "
            f"{better.get(self.verdict) or self._why_undecided()}"
            + (f"; left out: {', '.join(left_out)}" if left_out else "")
            + "".join(f"; {line}" for line in self.unfinished)
        )

    def _repr_html_(self) -> str:
        rows = self.per_task.to_html(index=False, max_rows=20, float_format="{:.2f}".format)
        return f"<p>{escape(str(self))}</p>{rows}"

    def _why_undecided(self) -> str:
        if abs(self.difference.mean) < ROUNDING or self.tasks < 2:
            return "no difference shown"
        if self.p_value < ALPHA:
            least = self.detectable
            shown = f"{least:.1%}" if self.score == "solved" else f"{least:.2g}"
            why = f"below the {shown} that {self.tasks} tasks can show"
        else:
            why = f"no difference shown (p = {self.p_value:.2g}, {self.test})"
        needed = self.tasks_needed
        return why if needed is None else f"{why}; {needed:,} tasks would show one of this size"


def _verdict(p_value: float, difference: float, least: float) -> Literal["a", "b", "undecided"]:
    if not p_value < ALPHA or not abs(difference) >= least:
        return "undecided"
    return "b" if difference > 0 else "a"


def compare(
    a: Run,
    b: Run,
    *,
    by: str | None = None,
    tasks: Collection[str] | None = None,
    score: Score = "solved",
) -> Comparison:
    """Compare two runs over their common tasks.

    Tasks are matched by content, so an edited task is another task. Infrastructure failures are in
    neither score.

    Args:
        by: a column of `metadata`; interval, p-value and verdict are clustered by it (see
            `summary`).
        tasks: only these, by `task_hash`.
        score: `reward` for mean rewards instead of solved shares.

    Raises: UserError when no task is graded in both.
    """
    left, right = (task_scores(_frame(run, "trajectories", _UNITS, tasks)) for run in (a, b))
    both = _common(a, b, left, right)
    of_a, of_b = both[f"{score}_a"], both[f"{score}_b"]
    both["difference"] = (of_b - of_a).round(12)  # sums of fractions differ by their order
    values = both["difference"].to_numpy()
    clusters = _clusters(a, both, by)
    single = bool(((both["units_a"] == 1) & (both["units_b"] == 1)).all())
    if exact := single and score == "solved" and clusters is None:
        p_value = stats.mcnemar(int((values < 0).sum()), int((values > 0).sum()))
    else:  # all tasks of a cluster change sides together
        p_value = stats.sign_flips(values if clusters is None else _sums(values, clusters))
    is_share = of_a.between(0, 1).all() and of_b.between(0, 1).all()
    interval = (stats.difference_interval if is_share else stats.mean_interval)(values, clusters)
    number = len(both if clusters is None else set(clusters))
    deviation = stats.standard_error(values, clusters) * math.sqrt(number)
    least = stats.detectable_effect(deviation, number, alpha=ALPHA, power=POWER)
    varied = of_a.nunique() > 1 and of_b.nunique() > 1
    common = set(both["task_hash"])
    return Comparison(
        a=a.path.name,
        b=b.path.name,
        tasks=len(both),
        difference=interval,
        p_value=p_value,
        test="exact McNemar" if exact else "sign flips",
        detectable=least,
        correlation=float(of_a.corr(of_b)) if varied else math.nan,
        verdict=_verdict(p_value, interval.mean, least),
        per_task=both[["task_id", f"{score}_a", f"{score}_b", "difference"]],
        only_a=sorted(left.loc[~left["task_hash"].isin(common), "task_id"]),
        only_b=sorted(right.loc[~right["task_hash"].isin(common), "task_id"]),
        unfinished=[
            f"{run.path.name}: {run.unfinished}"
            for run in (a, b)
            if tasks is None and run.unfinished is not None
        ],
        clusters=None if clusters is None else number,
        score=score,
    )


def _common(a: Run, b: Run, left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """The scores of the tasks that both runs have graded. Raises: UserError for none."""
    for run, scores in ((a, left), (b, right)):
        if scores.empty:
            raise UserError(f"{run.path.name}: nothing was graded, so there is nothing to compare")
    both = left.merge(right, on=_KEYS, suffixes=("_a", "_b"))
    if both.empty:
        raise UserError(
            f"{a.path.name} and {b.path.name} have no graded task in common. "
            "Compare runs of one dataset"
        )
    return both


def _sums(values: npt.NDArray[Any], clusters: Sequence[str]) -> npt.NDArray[Any]:
    """The sum of each cluster."""
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index, weights=values)


class NotCompared(UserWarning):
    """Two runs have no graded task in common."""


def compare_all(
    runs: Sequence[Run],
    *,
    correction: Literal["holm", "benjamini-hochberg"] = "holm",
    by: str | None = None,
    tasks: Collection[str] | None = None,
    score: Score = "solved",
) -> list[Comparison]:
    """Compare every pair of runs, with p-values adjusted for the number of pairs.

    Args:
        correction: `holm` for claims, `benjamini-hochberg` for exploring.
        by, tasks, score: as in `compare`.

    Pairs without a graded task in common are left out, with a `NotCompared` warning for each.
    """
    pairs: list[Comparison] = []
    for a, b in combinations(runs, 2):
        try:
            pairs.append(compare(a, b, by=by, tasks=tasks, score=score))
        except UserError as error:
            warnings.warn(NotCompared(f"not compared: {error}"), stacklevel=2)
    adjust = stats.holm if correction == "holm" else stats.benjamini_hochberg
    adjusted = adjust([pair.p_value for pair in pairs])
    return [
        replace(pair, p_value=p, verdict=_verdict(p, pair.difference.mean, pair.detectable))
        for pair, p in zip(pairs, adjusted, strict=True)
    ]
