"""Grades stored rollouts again, without a new call of the policy.

The run must have kept its workspaces (`run.keep_workspaces`). Each grader (code and configuration
of the environment, or the verifier of a task) grades a rollout once: each grade is durable before
the next one is started. The same command continues where it stopped and repeats failed gradings.
Grades are in their own table; the rows of the run never change.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from batch_runner.budgets import open_budget_share, refuse_unpriced
from batch_runner.groups import run_concurrently
from batch_runner.manifest import read_manifest
from hermes_rl.config import RunConfig, load_config, parse_config, set_key
from hermes_rl.errors import UserError, cause_of
from hermes_rl.messages import UNPARSED
from hermes_rl.rl import (
    INTERRUPTED,
    SCORED_AT_ONCE,
    Gathered,
    Grader,
    Member,
    ReadyGroup,
    Scoring,
    StoredRollout,
    gather,
    make_group,
    open_grader,
    settle_env,
    without_policy,
)
from hermes_rl.sandboxes import SandboxSnapshot
from hermes_rl.store import (
    Derived,
    DerivedWriter,
    Driver,
    OpenOptions,
    PendingRow,
    Run,
    RunDir,
    decode_metrics,
    open_derived_writer,
    open_run,
)
from hermes_rl.task_folders import IMAGE_PREFIX
from hermes_rl.tasks import LazyRow, Task
from hermes_rl.text import many
from hermes_rl.workspaces import WORKSPACES, Workspaces

_ROWS_AT_ONCE = 64
"""Rollouts that are read at a time."""

_SELECTION_COLUMNS = (
    "trajectory_id",
    "row_index",
    "task_id",
    "task_hash",
    "task_prompt",
    "metadata",
)
"""Columns that decide whether a rollout is graded."""

CONCURRENCY = 16

_SETTABLE = ("env", "endpoint", "run.budget", "run.model_", "run.unit_budget", "run.allow_unpriced")
"""Prefixes of the keys that a regrade accepts: graders, endpoints and budgets."""


@dataclass
class RegradeResult:
    """The result of a regrade."""

    graded: int = 0
    failed: int = 0
    """Could not be graded; their grades have the error."""
    known: int = 0
    """Graded by the same grader already."""
    not_kept: int = 0
    """Without a stored workspace, or with a state that is not JSON."""
    other_task: int = 0
    """Their task has changed or was removed: other seed, configuration or dataset."""
    edited_task: int = 0
    """Graded although parts of their task changed that the model does not see: the verifier, files
    or setup."""
    changed: int = 0
    """Rewards that differ from those of the rollouts."""
    groups: int = 0
    """Groups that have new rows."""
    unscored: int = 0
    """Groups that `score_group` could not score."""
    stopped: str | None = None
    """The cause for which the regrade stopped: one that opens the breaker (`errors.CAUSES`)."""
    why: str = ""

    def stop(self, cause: str, why: str) -> None:
        """Record why no further grading is started. The first reason is kept."""
        if self.stopped is None:
            self.stopped, self.why = cause, why.rstrip(".")

    @property
    def nothing(self) -> bool:
        """No rollout could be graded, now or earlier."""
        return not (self.graded or self.failed or self.known or self.stopped)

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.graded} graded ({self.changed} with another reward), {self.failed} could not "
            f"be judged, {self.known} were graded before, {self.groups} groups have new rows"
        ]
        if self.unscored:
            lines.append(
                f"{many(self.unscored, 'group')} could not be scored; the same command tries again"
            )
        if self.not_kept:
            lines.append(
                f"{self.not_kept} have no stored workspace (or a ctx.state that is not JSON, or an "
                "image whose changes are not stored). Make the run with "
                "--set run.keep_workspaces=true, task folders with --sandbox bubblewrap"
            )
        if self.other_task:
            lines.append(
                f"{self.other_task} belong to a task that has changed. Regrade with the "
                "configuration and data that made the tasks"
            )
        if self.edited_task:
            lines.append(
                f"{self.edited_task} belong to a task whose verifier, files or setup have changed; "
                "its prompt is the same"
            )
        return lines


async def regrade_run(
    path: Path, changes: Sequence[tuple[str, Any]] = (), *, concurrency: int = CONCURRENCY
) -> RegradeResult:
    """Grade all stored rollouts of a run with the current grader, within its budgets.

    Args:
        path: the run directory; no driver may be running.
        changes: dotted keys with new values: `("env.config.strict", True)`, and those of budgets
            and endpoints.
        concurrency: grading at once.

    Raises: UserError; StoreError when the run is in use; DiskFull.
    """
    config = await asyncio.to_thread(_load_run_config, path, changes)
    refuse_unpriced(without_policy(config))
    result = RegradeResult()
    limits: dict[str, Any] = {}
    async with await _open(RunDir(path)) as driver:
        async with (
            open_budget_share(config, driver.run_dir, concurrency, limits) as share,
            open_grader(
                config, driver.run_dir, driver.run_id, share, concurrency=concurrency
            ) as grader,
            open_derived_writer(driver.run_dir, driver.epoch) as writer,
        ):
            rows = await asyncio.to_thread(StoredRows, driver.run_dir, grader, result)
            work = _Regrader(grader, writer, result)
            await run_concurrently(rows.stream(), work.grade, concurrency)
            if result.stopped is None:
                groups = await asyncio.to_thread(
                    find_changed_groups, driver.run_dir, rows.judged_by
                )
                await work.regroup(groups)
        await asyncio.to_thread(_note_budgets, driver.run_dir, limits)
    return result


async def _open(run_dir: RunDir) -> Driver:
    """Open the run with its own identity and limits."""
    epochs = run_dir.epochs()
    if not epochs:
        raise UserError(
            f"{run_dir.path} is not a run directory (no epochs/). Give the path of a run"
        )
    first, last = run_dir.epoch(epochs[0]), run_dir.epoch(epochs[-1])
    meta = {"regrade": True, "config_hash": last.meta.get("config_hash", "")}
    options = OpenOptions(max_attempts=last.max_attempts)
    return await open_run(run_dir.path, first.identity, meta, options)


def _load_run_config(path: Path, changes: Sequence[tuple[str, Any]]) -> RunConfig:
    """The run's configuration with the changes."""
    if not (path / "run.yaml").exists():
        raise UserError(f"{path} is not a run directory (no run.yaml). Give the path of a run")
    data = load_config(path / "run.yaml")
    for dotted, value in changes:
        if not dotted.startswith(_SETTABLE):
            raise UserError(
                f"--set {dotted}: a regrade changes keys below 'env' and 'endpoint', and budgets"
            )
        set_key(data, dotted, value)
    config = parse_config(data, str(path / "run.yaml"))
    if not (config.run.keep_workspaces or (path / WORKSPACES).is_dir()):
        raise UserError(
            f"{path} kept no workspaces, so none of its rollouts can be graded again. Make the "
            "run in another --out with --set run.keep_workspaces=true"
        )
    return settle_env(config)[0]


@dataclass(frozen=True)
class _Regrader:
    """Grades rollouts and scores groups, one after the other."""

    grader: Grader
    writer: DerivedWriter
    result: RegradeResult

    async def grade(self, stored: StoredRollout) -> bool:
        """Grade a rollout; its row is durable on return. Returns False when no other could be
        graded."""
        pending = self.writer.begin(Derived(grades=(self.grader.pending(stored),)))
        judged = await self.grader.grade(stored, pending)
        grade, result = judged.grade, self.result
        kept = judged.stop is None or grade.calls
        await self.writer.add(Derived(grades=(grade,)) if kept else None, pending)
        if judged.stop is not None:
            result.stop(cause_of(judged.stop), grade.error or "")
            return False
        result.graded += grade.reward is not None
        result.failed += grade.reward is None
        result.changed += grade.reward not in (None, stored.row["reward"])
        return True

    async def regroup(self, groups: Sequence[Regrouped]) -> None:
        """Write new rows for groups; an environment with `score_group` scores them again."""
        grader = self.grader
        if not grader.scores_groups:
            for one in groups:
                await self.writer.add(Derived(groups=(make_group(one.gathered, one.scoring),)))
            self.result.groups += len(groups)
            return
        graded = {one.gathered.facts["group_id"]: one.scoring for one in groups}
        metrics = await asyncio.to_thread(_newest_grades, Run(grader.run_dir), "metrics")

        async def score(ready: ReadyGroup) -> bool:
            by_members = graded[ready.gathered.facts["group_id"]]
            # The metrics of this grading, not those of the run.
            keys = [(row["trajectory_id"], by_members.grade_id or "") for row in ready.rows]
            rows = tuple(
                {**row, "metrics": {**row["metrics"], **decode_metrics(metrics.get(key) or ())}}
                for row, key in zip(ready.rows, keys, strict=True)
            )
            ready = replace(ready, rows=rows)
            cut = make_group(
                ready.gathered, replace(by_members, by="score_group", error=INTERRUPTED)
            )
            pending = self.writer.begin(Derived(groups=(cut,)))
            scored = await grader.score(ready, pending)
            return await self._take(ready.gathered, by_members, scored, pending)

        await run_concurrently(
            grader.ready([one.gathered for one in groups]), score, SCORED_AT_ONCE
        )

    async def _take(
        self, gathered: Gathered, graded: Scoring, scored: Scoring, pending: PendingRow
    ) -> bool:
        """Write the row of a group that was scored again. Returns False when no other could be."""
        if scored.error is None and scored.rewards is None:
            scored = replace(scored, by=graded.by, rewards=graded.rewards)
        row = make_group(gathered, replace(scored, grade_id=graded.grade_id))
        kept = scored.error is None or scored.calls
        await self.writer.add(Derived(groups=(row,)) if kept else None, pending)
        if scored.stop is not None:
            self.result.stop(cause_of(scored.stop), scored.error or "")
        self.result.groups += scored.error is None
        self.result.unscored += scored.error is not None
        return scored.stop is None


def _note_budgets(run_dir: RunDir, limits: dict[str, Any]) -> None:
    """Write the spending of all starts to manifest.json."""
    content = read_manifest(run_dir)
    if content and limits["budgets"]:
        data = msgspec.json.encode({**content, "budgets": limits["budgets"]})
        run_dir.storage.put("manifest.json", msgspec.json.format(data, indent=2) + b"\n")


class StoredRows:
    """The stored rollouts that the grader has not graded, in the order of the parts. Blocking.

    Memory: the tasks of one part, the rows that are read at a time, and an entry for each rollout.
    """

    def __init__(self, run_dir: RunDir, grader: Grader, result: RegradeResult) -> None:
        self._run_dir, self._grader, self._result = run_dir, grader, result
        self._kept = Workspaces(run_dir.path / WORKSPACES)
        rewards = _newest_grades(Run(run_dir), "reward")
        self._known = {pair for pair, reward in rewards.items() if reward is not None}
        self.judged_by: dict[str, str] = {}
        """Trajectory -> the current grader of its task."""

    async def stream(self) -> AsyncGenerator[StoredRollout, None]:
        """Yield each of them once."""
        rows = self._all()
        while taken := await asyncio.to_thread(lambda: list(itertools.islice(rows, _ROWS_AT_ONCE))):
            for stored in taken:
                yield stored

    def _all(self) -> Iterator[StoredRollout]:
        for part in self._run_dir.parts("trajectories"):
            yield from self._read_part(part)
        unjudged = _unjudged(Run(self._run_dir))
        for part in self._run_dir.parts("failures") if unjudged else ():
            yield from self._read_part(part, unjudged)

    def _read_part(self, part: Path, only: Container[str] | None = None) -> Iterator[StoredRollout]:
        """Args: only: ids of trajectories; None takes all."""
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        with pq.ParquetFile(part) as file:
            light = file.read(columns=list(_SELECTION_COLUMNS)).to_pylist()
            light = [row for row in light if only is None or row["trajectory_id"] in only]
            tasks = self._grader.tasks.find({row["row_index"] for row in light})
            wanted = {
                row["trajectory_id"]: t for row in light if (t := self._task_to_grade(row, tasks))
            }
            ids = pa.array(wanted, pa.string())
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE) if wanted else ():
                for row in batch.filter(pc.is_in(batch["trajectory_id"], ids)).to_pylist():
                    yield self._stored(row, wanted[row["trajectory_id"]])

    def _task_to_grade(self, row: Mapping[str, Any], tasks: Mapping[int, LazyRow]) -> Task | None:
        """The task of a rollout that is to be graded; None for others, which are counted."""
        result, row_id = self._result, row["trajectory_id"]
        kept = self._kept.find(row_id, sandboxed=self._grader.sandboxed)
        task, edited = _task_of(row, tasks.get(row["row_index"]))
        # The agents of task folders work in their image, not in the workspace.
        inside = task is not None and (task.image or "").startswith(IMAGE_PREFIX)
        if kept is None or (inside and kept.changes is None):
            result.not_kept += 1
            return None
        if task is None:
            result.other_task += 1
            return None
        result.edited_task += edited
        grade_id = self.judged_by[row_id] = self._grader.grade_id(task)
        if (row_id, grade_id) in self._known:
            result.known += 1
            return None
        return task

    def _stored(self, row: dict[str, Any], task: Task) -> StoredRollout:
        row_id = row["trajectory_id"]
        kept = self._kept.find(row_id, sandboxed=self._grader.sandboxed)
        assert kept is not None
        rolled = self._kept.as_rolled({**row, "metrics": decode_metrics(row["metrics"])})
        changes = SandboxSnapshot(kept.changes) if kept.changes is not None else None
        by = self.judged_by[row_id]
        return StoredRollout(rolled, task, kept.archive, changes, kept.state, by)


def _unjudged(run: Run) -> set[str]:
    """The rollouts whose verifier failed and whose units were therefore given up."""
    done = set(run.arrow("trajectories", ["unit_id"])["unit_id"].to_pylist())
    columns = ["unit_id", "attempt", "trajectory_id", "cause"]
    last: dict[str, dict[str, Any]] = {}
    for row in run.arrow("failures", columns).to_pylist():
        if row["unit_id"] not in done:
            known = last.setdefault(row["unit_id"], row)
            last[row["unit_id"]] = max(known, row, key=lambda one: int(one["attempt"]))
    return {row["trajectory_id"] for row in last.values() if row["cause"] == "verifier"}


def _task_of(row: Mapping[str, Any], lazy: LazyRow | None) -> tuple[Task | None, bool]:
    """The current task of a rollout, and whether it was edited; None for a different task.

    Tasks with equal hashes are equal. A verifier may have been corrected, however: with another
    hash it is still the same task if everything that the row contains of it is equal.
    """
    task = lazy.parse().task if lazy is not None else None
    if lazy is None or task is None:
        return None, False
    if lazy.task_hash == row["task_hash"]:
        return task, False
    shown = (task.id, task.prompt_text) == (row["task_id"], row["task_prompt"])
    return (task, True) if shown and _same_metadata(row, task) else (None, False)


def _same_metadata(row: Mapping[str, Any], task: Task) -> bool:
    text = msgspec.json.encode(task.metadata).decode()
    stored = msgspec.json.decode(row["metadata"])
    return bool(stored == msgspec.json.decode(text) or stored == {UNPARSED: text})


def _newest_grades(run: Run, column: str) -> dict[tuple[str, str], Any]:
    """(trajectory, grader) -> a column of the newest grade. Blocking."""
    grades = run.arrow("grades", ["trajectory_id", "grade_id", column]).to_pylist()
    return {(g["trajectory_id"], g["grade_id"]): g[column] for g in grades}


@dataclass(frozen=True)
class Regrouped:
    """A group whose members have grades."""

    gathered: Gathered
    scoring: Scoring


def find_changed_groups(run_dir: RunDir, judged_by: Mapping[str, str]) -> list[Regrouped]:
    """Find groups whose newest row lacks the grades of the current grader. Blocking.

    Args:
        judged_by: trajectory -> its current grader; absent when it cannot be graded again.
    """
    run = Run(run_dir)
    rewards = _newest_grades(run, "reward")
    shown = {row["group_id"]: _GroupState.of(row) for row in run.groups.to_dict("records")}
    found = []
    for gathered in gather(run):
        ids = [m.trajectory_id or m.unjudged for m in gathered.members]
        graders = {judged_by[one] for one in ids if one is not None and one in judged_by}
        if len(ids) < 2 or len(graders) != 1:
            continue
        (grade_id,) = graders
        rewards_now = [rewards.get((one or "", grade_id)) for one in ids]
        members = tuple(map(_apply_grade, gathered.members, rewards_now))
        ids = [m.trajectory_id for m in members]
        before = shown.get(gathered.facts["group_id"])
        if before is None or not before.shows(grade_id, ids, rewards_now):
            scoring = Scoring(by="regrade", grade_id=grade_id, rewards=rewards_now)
            found.append(Regrouped(replace(gathered, members=members), scoring))
    return found


def _apply_grade(member: Member, reward: float | None) -> Member:
    """A member after a regrade: valid when it has a grade."""
    if reward is None:
        return replace(member, reward=None, why_invalid=member.why_invalid or "not graded")
    row_id = member.trajectory_id or member.unjudged
    return replace(member, trajectory_id=row_id, reward=reward, why_invalid=None)


@dataclass(frozen=True)
class _GroupState:
    """The content of the newest row of a group."""

    grade_id: str | None
    ids: list[str | None]
    rewards: list[float | None]
    scored: bool
    """By `score_group`: the rewards differ from the grades."""

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> _GroupState:
        ids, rewards = list(row["trajectory_ids"]), _rewards_of(row["rewards"])
        # A group that could not be scored has no rewards yet.
        grade_id = None if isinstance(row["error"], str) else row["grade_id"]
        return cls(grade_id, ids, rewards, row["scored_by"] == "score_group")

    def shows(self, grade_id: str, ids: list[str | None], rewards: list[float | None]) -> bool:
        if (self.grade_id, self.ids) != (grade_id, ids):
            return False
        if self.scored:
            return [r is None for r in self.rewards] == [r is None for r in rewards]
        return self.rewards == rewards


def _rewards_of(rewards: Iterable[float | None]) -> list[float | None]:
    """Rewards of a column, with None for pandas' NaN."""
    return [None if r is None or math.isnan(r) else float(r) for r in rewards]
