"""Grades stored rollouts again, without a new call of the policy's.

The run must have kept its workspaces (`run.keep_workspaces`). What is graded by one grader (the
environment's code and configuration, or a task's verifier) is graded once: each grade is durable
before the next one is begun, and the same command goes on where it stopped and tries again what
could not be judged. The grades stand in a table of their own; the rows of the run never change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from batch_runner.at_once import at_once
from batch_runner.budgets import refuse_unpriced
from batch_runner.manifest import read_manifest
from batch_runner.regraded import Regraded, Regrouped, StoredRows, due_again, graded_metrics
from batch_runner.within import within_budgets
from hermes_rl.config import RunConfig, load_config, parse_config, set_key
from hermes_rl.errors import UserError, cause_of
from hermes_rl.rl.groups import INTERRUPTED, SCORED_AT_ONCE, Gathered, Scoring, make_group
from hermes_rl.rl.loading import settle_env
from hermes_rl.rl.scoring import (
    Grader,
    ReadyGroup,
    StoredRollout,
    open_grader,
    without_policy,
)
from hermes_rl.store.derived import DerivedWriter, PendingRow, open_derived_writer
from hermes_rl.store.driver import Driver, OpenOptions, open_run
from hermes_rl.store.rows import Derived
from hermes_rl.store.rundir import RunDir
from hermes_rl.workspaces import WORKSPACES

CONCURRENCY = 16

_SETTABLE = ("env", "endpoint", "run.budget", "run.model_", "run.unit_budget", "run.allow_unpriced")
"""Beginnings of the keys that a regrade takes: what judges, where that is, what it may spend."""


async def regrade(
    path: Path, changes: Sequence[tuple[str, Any]] = (), *, concurrency: int = CONCURRENCY
) -> Regraded:
    """Grade all stored rollouts of a run with the grader as it is now, within its budgets.

    Args:
        path: the run directory; nobody else may drive it.
        changes: dotted keys with new values: `("env.config.strict", True)`, and those of budgets
            and endpoints.
        concurrency: grading at once.

    Raises: UserError; StoreError when the run is in use; DiskFull.
    """
    config = await asyncio.to_thread(_settled, path, changes)
    refuse_unpriced(without_policy(config))
    done = Regraded()
    governed: dict[str, Any] = {}
    async with await _open(RunDir(path)) as driver:
        async with (
            within_budgets(config, driver.run_dir, concurrency, governed) as share,
            open_grader(
                config, driver.run_dir, driver.run_id, share, concurrency=concurrency
            ) as grader,
            open_derived_writer(driver.run_dir, driver.epoch) as book,
        ):
            rows = await asyncio.to_thread(StoredRows, driver.run_dir, grader, done)
            work = _Work(grader, book, done)
            await at_once(rows.stream(), work.grade, concurrency)
            if done.stopped is None:
                groups = await asyncio.to_thread(due_again, driver.run_dir, rows.judged_by)
                await work.regroup(groups)
        await asyncio.to_thread(_note_budgets, driver.run_dir, governed)
    return done


async def _open(run_dir: RunDir) -> Driver:
    """A start of the run that changes nothing of what it says of itself."""
    epochs = run_dir.epochs()
    if not epochs:
        raise UserError(f"{run_dir.path} is no run directory (no epochs/). Give the path of a run")
    first, last = run_dir.epoch(epochs[0]), run_dir.epoch(epochs[-1])
    meta = {"regrade": True, "config_hash": last.meta.get("config_hash", "")}
    options = OpenOptions(max_attempts=last.max_attempts)
    return await open_run(run_dir.path, first.identity, meta, options)


def _settled(path: Path, changes: Sequence[tuple[str, Any]]) -> RunConfig:
    """The run's configuration with the changes."""
    if not (path / "run.yaml").exists():
        raise UserError(f"{path} is no run directory (no run.yaml). Give the path of a run")
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
            f"{path} kept no workspaces, so nothing of it can be graded again. Make the run in "
            "another --out with --set run.keep_workspaces=true"
        )
    return settle_env(config)[0]


@dataclass(frozen=True)
class _Work:
    """What is done to one rollout or group after the other."""

    grader: Grader
    book: DerivedWriter
    done: Regraded

    async def grade(self, stored: StoredRollout) -> bool:
        """Grade one; its row is durable on return. False when no other could be graded either."""
        question = self.book.begin(Derived(grades=(self.grader.pending(stored),)))
        judged = await self.grader.grade(stored, question)
        grade, done = judged.grade, self.done
        told = judged.stop is None or grade.calls
        await self.book.add(Derived(grades=(grade,)) if told else None, question)
        if judged.stop is not None:
            done.stop(cause_of(judged.stop), grade.error or "")
            return False
        done.graded += grade.reward is not None
        done.failed += grade.reward is None
        done.changed += grade.reward not in (None, stored.row["reward"])
        return True

    async def regroup(self, groups: Sequence[Regrouped]) -> None:
        """New rows for groups; an environment that compares members does so again."""
        grader = self.grader
        if not grader.scores_groups:
            for one in groups:
                await self.book.add(Derived(groups=(make_group(one.gathered, one.scoring),)))
            self.done.groups += len(groups)
            return
        graded = {one.gathered.facts["group_id"]: one.scoring for one in groups}
        metrics = await asyncio.to_thread(graded_metrics, grader.run_dir)

        async def score(ready: ReadyGroup) -> bool:
            by_members = graded[ready.gathered.facts["group_id"]]
            # What compute_reward noted this time, and not what it noted in the run.
            keys = [(row["trajectory_id"], by_members.grade_id or "") for row in ready.rows]
            rows = tuple(
                {**row, "metrics": {**row["metrics"], **metrics.get(key, {})}}
                for row, key in zip(ready.rows, keys, strict=True)
            )
            ready = replace(ready, rows=rows)
            cut = make_group(
                ready.gathered, replace(by_members, by="score_group", error=INTERRUPTED)
            )
            question = self.book.begin(Derived(groups=(cut,)))
            scored = await grader.score(ready, question)
            return await self._take(ready.gathered, by_members, scored, question)

        await at_once(grader.ready([one.gathered for one in groups]), score, SCORED_AT_ONCE)

    async def _take(
        self, gathered: Gathered, graded: Scoring, scored: Scoring, question: PendingRow
    ) -> bool:
        """The row of a group that was scored again. False when no other could be."""
        if scored.error is None and scored.rewards is None:
            scored = replace(scored, by=graded.by, rewards=graded.rewards)
        row = make_group(gathered, replace(scored, grade_id=graded.grade_id))
        told = scored.error is None or scored.calls
        await self.book.add(Derived(groups=(row,)) if told else None, question)
        if scored.stop is not None:
            self.done.stop(cause_of(scored.stop), scored.error or "")
        self.done.groups += scored.error is None
        self.done.unscored += scored.error is not None
        return scored.stop is None


def _note_budgets(run_dir: RunDir, governed: dict[str, Any]) -> None:
    """What all starts have spent, in manifest.json."""
    content = read_manifest(run_dir)
    if content and governed["budgets"]:
        data = msgspec.json.encode({**content, "budgets": governed["budgets"]})
        run_dir.storage.put("manifest.json", msgspec.json.format(data, indent=2) + b"\n")
