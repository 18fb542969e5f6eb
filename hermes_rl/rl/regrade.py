"""Grades stored rollouts again, without a new call of the policy's.

The run must have kept its workspaces (`run.keep_workspaces`). What is graded by one grader (the
environment's code and configuration, or a task's verifier) is graded once: the same command goes on
where it stopped, and tries again what could not be judged. The grades stand in a table of their
own; the rows of the run never change.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.config import RunConfig, load_config, parse_config, set_key
from hermes_rl.errors import UserError
from hermes_rl.rl.grader import Grader, Stored, open_grader, without_policy
from hermes_rl.rl.groups import Gathered, Scoring, gather, make_group
from hermes_rl.rl.opening import Opened, settle_env
from hermes_rl.store.driver import Driver, open_run
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived, Grade
from hermes_rl.store.rundir import RunDir
from hermes_rl.tasks import Task
from hermes_rl.workspaces import Workspaces

CONCURRENCY = 16
_PER_BATCH = 64
"""Grades that are published together: a kill loses no more than these."""


@dataclass
class Regraded:
    """What a regrade did."""

    graded: int = 0
    failed: int = 0
    """Could not be judged: their grades say why."""
    known: int = 0
    """Graded by the same grader before."""
    not_kept: int = 0
    """Without a stored workspace, or with a state that is no JSON."""
    other_task: int = 0
    """Whose task is another one now, or gone: other seed, configuration or dataset."""
    changed: int = 0
    """Rewards that differ from those of the rollouts."""
    groups: int = 0
    """Groups that have new rows."""


async def regrade(
    path: Path, changes: Sequence[tuple[str, Any]] = (), *, concurrency: int = CONCURRENCY
) -> Regraded:
    """Grade all stored rollouts of a run with the grader as it is now.

    Args:
        path: the run directory; nobody else may drive it.
        changes: dotted keys below `env` with new values: `("env.config.strict", True)`.
        concurrency: grading at once.

    Raises: UserError; StoreError when the run is in use; errors of a judge that stop everything.
    """
    config, opened = await asyncio.to_thread(_settled, path, changes)
    run_dir = RunDir(path)
    identity = run_dir.epoch(run_dir.epochs()[0]).identity
    async with await open_run(path, identity, {"regrade": True}) as driver:
        async with open_grader(config, opened, driver.run_id, concurrency) as grader:
            done = Regraded()
            rows = await asyncio.to_thread(_Rows, driver, grader, done)
            while batch := await asyncio.to_thread(rows.take, _PER_BATCH):
                gate = asyncio.Semaphore(concurrency)
                grades = await asyncio.gather(*(_within(gate, grader.grade(r)) for r in batch))
                await driver.publish(Derived(grades=tuple(grades)))
                done.graded += sum(g.reward is not None for g in grades)
                done.failed += sum(g.reward is None for g in grades)
                pairs = zip(batch, grades, strict=True)
                done.changed += sum(g.reward not in (None, r.row["reward"]) for r, g in pairs)
        done.groups = await _regroup(driver, rows.judged_by)
        return done


async def _within(gate: asyncio.Semaphore, work: Any) -> Grade:
    async with gate:
        grade: Grade = await work
        return grade


def _settled(path: Path, changes: Sequence[tuple[str, Any]]) -> tuple[RunConfig, Opened | None]:
    """The run's configuration with the changes, and a policy that is never asked."""
    if not (path / "run.yaml").exists():
        raise UserError(f"{path} is no run directory (no run.yaml). Give the path of a run")
    data = load_config(path / "run.yaml")
    for dotted, value in changes:
        if not dotted.startswith("env."):
            raise UserError(f"--set {dotted}: a regrade changes keys below 'env' alone")
        set_key(data, dotted, value)
    config = without_policy(parse_config(data, str(path / "run.yaml")))
    return settle_env(config)


class _Rows:
    """The stored rollouts that this grader has not graded, in the order of the run's parts.

    Blocking: for threads. Memory: the tasks that were passed, and what is taken.
    """

    def __init__(self, driver: Driver, grader: Grader, done: Regraded) -> None:
        self._grader, self._done = grader, done
        self._kept = Workspaces(driver.run_dir.path / "workspaces")
        self._tasks: list[Task | None] = []
        self._stream = grader.tasks()
        self._known = _known(driver)
        self._rows = _trajectories(driver.run_dir)
        self.judged_by: dict[str, str] = {}
        """Trajectory -> the grader of its task as it is now."""

    def take(self, most: int) -> list[Stored]:
        """The next ones; empty at the end."""
        return list(itertools.islice(self._wanted(), most))

    def _wanted(self) -> Iterator[Stored]:
        for row in self._rows:
            kept = self._kept.find(row["trajectory_id"], sandboxed=self._grader.sandboxed)
            task = self._task(row["row_index"])
            if kept is None:
                self._done.not_kept += 1
                continue
            if task is None or task.id != row["task_id"]:
                self._done.other_task += 1
                continue
            grade_id = self._grader.grade_id(task)
            self.judged_by[row["trajectory_id"]] = grade_id
            if (row["trajectory_id"], grade_id) in self._known:
                self._done.known += 1
                continue
            yield Stored(row, task, kept.archive, kept.state, grade_id)

    def _task(self, index: int) -> Task | None:
        while len(self._tasks) <= index:
            try:
                self._tasks.append(next(self._stream))
            except StopIteration:
                return None
        return self._tasks[index]


def _known(driver: Driver) -> set[tuple[str, str]]:
    """(trajectory, grader) with a reward: what could not be judged is tried again."""
    return {pair for pair, reward in _rewards(Run(driver.run_dir)).items() if reward is not None}


def _rewards(run: Run) -> dict[tuple[str, str], float | None]:
    """(trajectory, grader) -> the reward of the newest grade."""
    grades = run.arrow("grades", ["trajectory_id", "grade_id", "reward", "graded_at"]).to_pylist()
    grades.sort(key=lambda grade: grade["graded_at"])
    return {(g["trajectory_id"], g["grade_id"]): g["reward"] for g in grades}


def _trajectories(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    for part in run_dir.parts("trajectories"):
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    yield {**row, "metrics": {m["name"]: m["value"] for m in row["metrics"]}}


async def _regroup(driver: Driver, judged_by: Mapping[str, str]) -> int:
    """New rows for the groups whose members have grades of the grader as it is now."""
    groups = await asyncio.to_thread(_regrouped, driver, judged_by)
    for batch in (groups[i : i + 1000] for i in range(0, len(groups), 1000)):
        made = tuple(make_group(gathered, scoring) for gathered, scoring in batch)
        await driver.publish(Derived(groups=made))
    return len(groups)


def _regrouped(driver: Driver, judged_by: Mapping[str, str]) -> list[tuple[Gathered, Scoring]]:
    """Groups with grades of their present grader, whose newest row does not show these.

    Args:
        judged_by: trajectory -> its present grader; absent for one that cannot be graded again.
    """
    run = Run(driver.run_dir)
    rewards = _rewards(run)
    shown = {
        row["group_id"]: (row["grade_id"], list(row["trajectory_ids"]), _listed(row["rewards"]))
        for row in run.groups.to_dict("records")
    }
    found = []
    for gathered in gather(run):
        ids = [m.trajectory_id for m in gathered.members]
        graders = {judged_by[one] for one in ids if one is not None and one in judged_by}
        if len(ids) < 2 or len(graders) != 1:
            continue
        (grade_id,) = graders
        own = [rewards.get((one or "", grade_id)) for one in ids]
        if shown.get(gathered.facts["group_id"]) != (grade_id, ids, own):
            found.append((gathered, Scoring(by="regrade", grade_id=grade_id, rewards=own)))
    return found


def _listed(rewards: Iterable[float | None]) -> list[float | None]:
    """A column's rewards, in which pandas shows None as NaN."""
    return [None if r is None or math.isnan(r) else float(r) for r in rewards]
