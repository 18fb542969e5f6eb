"""Writes the groups of a run whose members are all final: the last step of each start.

Groups that cost no call are made again after a kill. Groups that `score_group` scored with calls
are not: each is durable before the next one is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from batch_runner.budgets import open_budget_share
from batch_runner.settings import Settings
from hermes_rl.aio import in_thread
from hermes_rl.errors import HermesError, Interrupted
from hermes_rl.rl import (
    INTERRUPTED,
    SCORED_AT_ONCE,
    Gathered,
    MembersOf,
    Scoring,
    due_groups,
    make_group,
)
from hermes_rl.store import Derived, DerivedWriter, Driver, Run, open_derived_writer

if TYPE_CHECKING:
    from hermes_rl.rl import Grader, ReadyGroup

PER_BATCH = 1_000
"""Groups that are published together, where making them costs nothing."""

T = TypeVar("T")


async def run_concurrently(
    items: AsyncGenerator[T, None], work: Callable[[T], Awaitable[bool]], limit: int
) -> None:
    """Process items as they arrive, up to `limit` at a time.

    Args:
        work: returns False to start no further item; running ones finish.

    Raises: the first error of `items` or `work`; running work is cancelled.
    """
    open_, slots = True, asyncio.Semaphore(limit)

    async def one(item: T) -> None:
        nonlocal open_
        try:
            open_ = await work(item) and open_
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as group, aclosing(items):
            async for item in items:
                await slots.acquire()
                if not open_:
                    break
                group.create_task(one(item))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@dataclass
class GroupResults:
    """Results for the groups that had to be written."""

    due: int = 0
    written: int = 0
    why: str = ""
    """The error of `stop`, or of the first group that could not be scored."""
    stop: HermesError | None = None
    """The error after which no further group was scored."""
    limits: dict[str, Any] = field(default_factory=dict)
    """See `open_budget_share`; empty when no group was scored."""

    @property
    def unscored(self) -> int:
        """Left for the next start."""
        return self.due - self.written


async def write_groups(
    settings: Settings,
    driver: Driver,
    catch: Callable[[Callable[[], None], Callable[[], object]], AbstractContextManager[object]],
    note: Callable[[str], None],
    *,
    size: MembersOf | None,
    paid: bool,
) -> GroupResults:
    """Write a row for every final group without a row of its current state.

    Args:
        catch: see `catch_signals`. After the first Ctrl-C no further group is scored, and the
            second one cancels those that are; the next start scores them.
        note: prints a line.
        size: see `due_groups`; None when no unit of the dataset is open.
        paid: calls may be made; otherwise groups that need calls wait for the next start.

    Raises: DiskFull; UserError of an environment that cannot be opened.
    """
    scored = _scores_groups(settings)
    due = await in_thread(_due, driver, size)
    results = GroupResults(due=len(due))
    if scored and not paid:
        results.why = "the run was stopped"
        return results
    if not scored or not due:
        for at in range(0, len(due), PER_BATCH):
            batch = due[at : at + PER_BATCH]
            await driver.publish(Derived(groups=tuple(make_group(g) for g in batch)))
            results.written += len(batch)
        return results
    from hermes_rl.rl import open_grader

    config, run_dir, hosts = settings.config, driver.run_dir, settings.hosts
    assert hosts is not None
    joint = None if settings.joint is None else settings.joint.limits
    every_s = config.run.publish_every_s
    async with (
        open_budget_share(config, run_dir, SCORED_AT_ONCE, results.limits, joint) as share,
        open_grader(
            config, run_dir, driver.run_id, share, opens=hosts.open, keys=settings.keys
        ) as grader,
        open_derived_writer(run_dir, driver.epoch, every_s=every_s) as writer,
    ):
        work = _GroupScorer(grader, writer, results, note)
        scoring = asyncio.create_task(
            run_concurrently(grader.ready(due), work.score, SCORED_AT_ONCE)
        )
        with catch(work.end, scoring.cancel):
            try:
                await scoring
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if results.stop is None or (task is not None and task.cancelling()):
                    raise
    return results


def _scores_groups(settings: Settings) -> bool:
    """Whether the run's environment scores whole groups."""
    if settings.opened is None:
        return False
    from hermes_rl.rl import scores_groups

    return scores_groups(settings.opened)


@dataclass(frozen=True)
class _GroupScorer:
    """Scores groups and writes their rows."""

    grader: Grader
    writer: DerivedWriter
    results: GroupResults
    note: Callable[[str], None]

    async def score(self, ready: ReadyGroup) -> bool:
        """Score a group and write its row. A group that could not be scored gets a row with the
        error and is scored again at the next start; it gets none when no call was made. Returns
        False when no other group could be scored either."""
        cut = make_group(ready.gathered, Scoring(by="score_group", error=INTERRUPTED))
        pending = self.writer.begin(Derived(groups=(cut,)))
        scoring = await self.grader.score(ready, pending)
        row = make_group(ready.gathered, scoring)
        kept = scoring.stop is None or scoring.calls
        await self.writer.add(Derived(groups=(row,)) if kept else None, pending)
        if scoring.error is None:
            self.results.written += 1
        elif self.results.stop is None and (scoring.stop is not None or not self.results.why):
            self.results.why, self.results.stop = scoring.error, scoring.stop
        return self.results.stop is None

    def end(self) -> None:
        """Score no further group."""
        self.results.stop, self.results.why = Interrupted("interrupted"), "interrupted"
        self.note("stopping: groups that are being scored end first (Ctrl-C again stops at once)")


def _due(driver: Driver, size: MembersOf | None) -> list[Gathered]:
    run = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts)
    due = due_groups(run, driver.ledger, size=size)
    return [gathered for gathered in due if len(gathered.members) > 1]
