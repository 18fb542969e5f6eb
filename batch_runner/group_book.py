"""Writes the groups of a run whose members are all final: the driver's last work of a start."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from batch_runner.governing import LocalGovernor, Prices, charter_of, pots_of
from batch_runner.settings import Settings
from batch_runner.spent import spent_before
from hermes_rl.config import RunConfig
from hermes_rl.errors import HermesError
from hermes_rl.models.limits.share import Share
from hermes_rl.rl.groups import Gathered, Scoring, due_groups, make_group
from hermes_rl.store.driver import Driver
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived

PER_BATCH = 1_000
"""Groups that are published together, where making them costs nothing."""
SCORED_PER_BATCH = 16
"""Where they are scored by calls that are paid: a kill loses no more than these."""


class GroupScorer(Protocol):
    """Scores whole groups, where an environment does so (`Environment.score_group`)."""

    async def score(self, batch: Sequence[Gathered]) -> list[Scoring | HermesError | None]:
        """The rewards of each group's members; None keeps their own, an error says why there are
        none now."""
        ...


def scorer_of(
    settings: Settings, driver: Driver
) -> AbstractAsyncContextManager[GroupScorer] | None:
    """What scores whole groups, where the run's environment does."""
    if settings.opened is None:
        return None
    from hermes_rl.rl.scoring import scores_groups

    return _scoring(settings.config, driver) if scores_groups(settings.opened) else None


@asynccontextmanager
async def _scoring(config: RunConfig, driver: Driver) -> AsyncIterator[GroupScorer]:
    """The scorer within what is left of the run's budgets: its workers have ended."""
    from hermes_rl.rl.scoring import CONCURRENCY, open_scorer

    pots, prices = pots_of(config), Prices(config)
    known = (pots, prices.worst, prices.models, prices.output_max)
    spent = await asyncio.to_thread(spent_before, driver.run_dir, *known)
    governor = LocalGovernor(charter_of(config, CONCURRENCY, spent))
    async with (
        Share("groups", governor.line(), tuple(pots)) as share,
        open_scorer(config, driver.run_dir, driver.run_id, share) as scorer,
    ):
        yield scorer


@dataclass
class Closed:
    """What became of the groups that were due."""

    written: int = 0
    unscored: int = 0
    """Left for the next start."""
    why: str = ""
    """Of the first that could not be scored."""


async def close_groups(
    driver: Driver,
    *,
    size: int | None,
    scorer: AbstractAsyncContextManager[GroupScorer] | None = None,
) -> Closed:
    """Publish a row for every group that is final and has none of its present state.

    Args:
        size: members of every group, where units of the dataset are still open; None when none is.
        scorer: opened only when there is a group to score.

    Raises: DiskFull; UserError of a scorer that cannot be opened.
    """
    due = await asyncio.to_thread(_due, driver, size)
    closed = Closed()
    if scorer is None or not due:
        for batch in _batches(due, PER_BATCH):
            await driver.publish(Derived(groups=tuple(make_group(g) for g in batch)))
            closed.written += len(batch)
        return closed
    async with scorer as scores:
        for batch in _batches(due, SCORED_PER_BATCH):
            await _publish_scored(driver, closed, batch, await scores.score(batch))
    return closed


async def _publish_scored(
    driver: Driver,
    closed: Closed,
    batch: Sequence[Gathered],
    scorings: Sequence[Scoring | HermesError | None],
) -> None:
    groups = []
    for gathered, scoring in zip(batch, scorings, strict=True):
        if isinstance(scoring, HermesError):
            closed.unscored += 1
            closed.why = closed.why or f"{type(scoring).__name__}: {scoring}"
        else:
            groups.append(make_group(gathered, scoring))
    if groups:
        await driver.publish(Derived(groups=tuple(groups)))
        closed.written += len(groups)


def _due(driver: Driver, size: int | None) -> list[Gathered]:
    run = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts)
    due = due_groups(run, driver.ledger, size=size)
    return [gathered for gathered in due if len(gathered.members) > 1]


def _batches(due: Sequence[Gathered], size: int) -> Iterator[list[Gathered]]:
    stream = iter(due)
    while batch := list(itertools.islice(stream, size)):
        yield batch
