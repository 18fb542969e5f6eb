"""Writes the groups of a run whose members are all final: the driver's last work of a start.

What costs nothing is made again after a kill. What `score_group` is paid for is not: each group
that it scored is durable before the next one is begun.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batch_runner.at_once import at_once
from batch_runner.settings import Settings
from batch_runner.within import within_budgets
from hermes_rl.aio import in_thread
from hermes_rl.errors import HermesError
from hermes_rl.rl.groups import (
    INTERRUPTED,
    SCORED_AT_ONCE,
    Gathered,
    MembersOf,
    Scoring,
    due_groups,
    make_group,
)
from hermes_rl.store.derived import DerivedWriter, open_derived_writer
from hermes_rl.store.driver import Driver
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived

if TYPE_CHECKING:
    from hermes_rl.rl.scoring import Grader, ReadyGroup

PER_BATCH = 1_000
"""Groups that are published together, where making them costs nothing."""


@asynccontextmanager
async def _scoring(
    settings: Settings, driver: Driver, governed: dict[str, Any]
) -> AsyncIterator[Grader]:
    """The scorer within what is left of the run's budgets: its workers have ended.

    Args:
        governed: see `within_budgets`.
    """
    from hermes_rl.rl.scoring import open_grader

    config, run_dir, keys = settings.config, driver.run_dir, settings.keys
    async with (
        within_budgets(config, run_dir, SCORED_AT_ONCE, governed) as share,
        open_grader(
            config, run_dir, driver.run_id, share, opens=settings.hosts.open, keys=keys
        ) as scorer,
    ):
        yield scorer


@dataclass
class Closed:
    """What became of the groups that were due."""

    due: int = 0
    written: int = 0
    why: str = ""
    """Of the first that could not be scored; or of `stop`."""
    stop: HermesError | None = None
    """What kept the others from being scored too."""
    governed: dict[str, Any] = field(default_factory=dict)
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
    scored = scored_by_env(settings)
    if scored and not paid:
        return Closed()
    due = await in_thread(_due, driver, size)
    closed = Closed(due=len(due))
    if not scored or not due:
        for batch in _batches(due, PER_BATCH):
            await driver.publish(Derived(groups=tuple(make_group(g) for g in batch)))
            closed.written += len(batch)
        return closed
    async with (
        _scoring(settings, driver, closed.governed) as scores,
        open_derived_writer(
            driver.run_dir, driver.epoch, every_s=settings.config.run.publish_every_s
        ) as book,
    ):
        work = _Scored(scores, book, closed)
        await at_once(scores.ready(due), work.score, SCORED_AT_ONCE)
    return closed


def scored_by_env(settings: Settings) -> bool:
    """Whether the run's environment scores whole groups."""
    if settings.opened is None:
        return False
    from hermes_rl.rl.scoring import scores_groups

    return scores_groups(settings.opened)


@dataclass(frozen=True)
class _Scored:
    """Groups on their way to their rows."""

    scores: Grader
    book: DerivedWriter
    closed: Closed

    async def score(self, ready: ReadyGroup) -> bool:
        """Score one and write its row. One that could not be scored has a row that says why, and
        stays due; no row when nothing was asked. False when no other could be scored either."""
        cut = make_group(ready.gathered, Scoring(by="score_group", error=INTERRUPTED))
        question = self.book.begin(Derived(groups=(cut,)))
        scoring = await self.scores.score(ready, question)
        row = make_group(ready.gathered, scoring)
        asked = scoring.stop is None or scoring.calls
        await self.book.add(Derived(groups=(row,)) if asked else None, question)
        if scoring.error is None:
            self.closed.written += 1
        elif self.closed.stop is None and (scoring.stop is not None or not self.closed.why):
            self.closed.why, self.closed.stop = scoring.error, scoring.stop
        return scoring.stop is None


def _due(driver: Driver, size: MembersOf | None) -> list[Gathered]:
    run = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts)
    due = due_groups(run, driver.ledger, size=size)
    return [gathered for gathered in due if len(gathered.members) > 1]


def _batches(due: Sequence[Gathered], size: int) -> Iterator[list[Gathered]]:
    stream = iter(due)
    while batch := list(itertools.islice(stream, size)):
        yield batch
