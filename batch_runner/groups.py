"""Writes the groups of a run whose members are all final: the driver's last work of a start.

What costs nothing is made again after a kill. What `score_group` is paid for is not: each group
that it scored is durable before the next one is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from batch_runner.budgets import within_budgets
from batch_runner.settings import Settings
from hermes_rl.aio import in_thread
from hermes_rl.errors import HermesError
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


async def at_once(
    items: AsyncGenerator[T, None], work: Callable[[T], Awaitable[bool]], most: int
) -> None:
    """Work through items as they come.

    Args:
        work: False begins nothing more; what is under way goes to its end.
        most: under way at once.

    Raises: the first error of `items` or `work`; what was under way is cancelled.
    """
    going, gate = True, asyncio.Semaphore(most)

    async def one(item: T) -> None:
        nonlocal going
        try:
            going = await work(item) and going
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group, aclosing(items):
            async for item in items:
                await gate.acquire()
                if not going:
                    break
                group.create_task(one(item))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@dataclass
class Closed:
    """What became of the groups that were due."""

    due: int = 0
    written: int = 0
    why: str = ""
    """Of the first that could not be scored; or of `stop`."""
    stop: HermesError | None = None
    """What kept the others from being scored too."""
    limits: dict[str, Any] = field(default_factory=dict)
    """See `within_budgets`; empty when nothing was scored."""

    @property
    def unscored(self) -> int:
        """Left for the next start."""
        return self.due - self.written


async def close_groups(
    settings: Settings, driver: Driver, *, size: MembersOf | None, paid: bool
) -> Closed:
    """Write a row for every group that is final and has none of its present state.

    Args:
        size: see `due_groups`; None when no unit of the dataset is open.
        paid: calls may be made; else groups that its environment scores wait for the next start.

    Raises: DiskFull; UserError of an environment that cannot be opened.
    """
    scored = _scores_groups(settings)
    if scored and not paid:
        return Closed()
    due = await in_thread(_due, driver, size)
    closed = Closed(due=len(due))
    if not scored or not due:
        for at in range(0, len(due), PER_BATCH):
            batch = due[at : at + PER_BATCH]
            await driver.publish(Derived(groups=tuple(make_group(g) for g in batch)))
            closed.written += len(batch)
        return closed
    from hermes_rl.rl import open_grader

    config, run_dir, hosts = settings.config, driver.run_dir, settings.hosts
    assert hosts is not None
    every_s = config.run.publish_every_s
    async with (
        within_budgets(config, run_dir, SCORED_AT_ONCE, closed.limits) as share,
        open_grader(
            config, run_dir, driver.run_id, share, opens=hosts.open, keys=settings.keys
        ) as grader,
        open_derived_writer(run_dir, driver.epoch, every_s=every_s) as writer,
    ):
        work = _Scored(grader, writer, closed)
        await at_once(grader.ready(due), work.score, SCORED_AT_ONCE)
    return closed


def _scores_groups(settings: Settings) -> bool:
    """Whether the run's environment scores whole groups."""
    if settings.opened is None:
        return False
    from hermes_rl.rl import scores_groups

    return scores_groups(settings.opened)


@dataclass(frozen=True)
class _Scored:
    """Groups on their way to their rows."""

    grader: Grader
    writer: DerivedWriter
    closed: Closed

    async def score(self, ready: ReadyGroup) -> bool:
        """Score one and write its row. One that could not be scored has a row that says why, and
        stays due; no row when nothing was asked. False when no other could be scored either."""
        cut = make_group(ready.gathered, Scoring(by="score_group", error=INTERRUPTED))
        question = self.writer.begin(Derived(groups=(cut,)))
        scoring = await self.grader.score(ready, question)
        row = make_group(ready.gathered, scoring)
        judged = scoring.stop is None or scoring.calls
        await self.writer.add(Derived(groups=(row,)) if judged else None, question)
        if scoring.error is None:
            self.closed.written += 1
        elif self.closed.stop is None and (scoring.stop is not None or not self.closed.why):
            self.closed.why, self.closed.stop = scoring.error, scoring.stop
        return scoring.stop is None


def _due(driver: Driver, size: MembersOf | None) -> list[Gathered]:
    run = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts)
    due = due_groups(run, driver.ledger, size=size)
    return [gathered for gathered in due if len(gathered.members) > 1]
