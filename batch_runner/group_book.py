"""Writes the groups of a run whose members are all final: the driver's last work of a start."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from hermes_rl.rl.groups import Gathered, Scoring, due_groups, make_group
from hermes_rl.store.driver import Driver
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived, Group

PER_BATCH = 1_000
"""Groups that are published together, where making them costs nothing."""
SCORED_PER_BATCH = 16
"""Where they are scored by calls that are paid: a kill loses no more than these."""


class GroupScorer(Protocol):
    """Scores whole groups, where an environment does so (`Environment.score_group`)."""

    async def score(self, gathered: Gathered) -> Scoring | None:
        """The rewards of a group's members; None keeps their own."""
        ...


async def close_groups(
    driver: Driver,
    *,
    size: int | None,
    scorer: AbstractAsyncContextManager[GroupScorer] | None = None,
) -> int:
    """Publish a row for every group that is final and has none of its present state.

    Args:
        size: members of every group, where units of the dataset are still open; None when none is.
        scorer: opened only when there is a group to score.

    Returns: how many groups were written. Raises: DiskFull.
    """
    due = await asyncio.to_thread(_due, driver, size)
    if not due:
        return 0
    if scorer is None:
        for batch in _batches(due, PER_BATCH):
            await driver.publish(Derived(groups=tuple(make_group(g) for g in batch)))
        return len(due)
    async with scorer as scores:
        for batch in _batches(due, SCORED_PER_BATCH):
            groups = await asyncio.gather(*(_scored(scores, gathered) for gathered in batch))
            await driver.publish(Derived(groups=tuple(groups)))
    return len(due)


def _due(driver: Driver, size: int | None) -> list[Gathered]:
    run = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts)
    due = due_groups(run, driver.ledger, size=size)
    return [gathered for gathered in due if len(gathered.members) > 1]


def _batches(due: Sequence[Gathered], size: int) -> Iterator[list[Gathered]]:
    stream = iter(due)
    while batch := list(itertools.islice(stream, size)):
        yield batch


async def _scored(scorer: GroupScorer, gathered: Gathered) -> Group:
    if not any(member.why_invalid is None for member in gathered.members):
        return make_group(gathered)
    return make_group(gathered, await scorer.score(gathered))
