"""Finished rows that no rollout of ours made, written as a run directory through the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rl.groups import gather, make_group
from hermes_rl.store.commit import Commit
from hermes_rl.store.driver import Driver, open_run
from hermes_rl.store.journal import JournalWriter
from hermes_rl.store.publisher import Publisher
from hermes_rl.store.reader import Run
from hermes_rl.store.rows import Derived, Finished, Group
from hermes_rl.store.stats import write_stats
from hermes_rl.threads import in_thread

TOGETHER = 256
"""Rows that are made durable by one fsync."""


async def write_run(
    path: Path, identity: Mapping[str, Any], rows: Iterable[Finished], *, grouped: bool = False
) -> int:
    """Make a run directory of rows; how many there were.

    Args:
        path: must not be a run directory yet.
        identity: stands in the run directory where a configuration's identity would.
        rows: any number; a batch is in memory at a time.
        grouped: also write the groups whose members have rewards.

    Raises: UserError when there is a run already; StoreError, DiskFull.
    """
    if (path / "epochs").is_dir():
        raise UserError(f"{path} is a run already. Choose another --out")
    count = 0
    remaining = iter(rows)
    first = list(islice(remaining, TOGETHER))  # a bad first line leaves no run directory
    async with await open_run(path, identity) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, "import") as journal:
            publisher = Publisher(journal, on_commit=lambda commit: _book(driver, commit))
            for batch in _batches(first, remaining):
                await asyncio.gather(*(journal.finish(made) for made in batch))
                count += len(batch)
                if journal.full.is_set():
                    await publisher.drain()
            await publisher.drain()
        if grouped and (groups := await in_thread(_groups, driver)):
            await driver.publish(Derived(groups=groups))
        await in_thread(write_stats, driver.run_dir, driver.ledger, {"units": count})
    return count


def _groups(driver: Driver) -> tuple[Group, ...]:
    """The groups in which there is something to compare."""
    made = map(make_group, gather(Run(driver.run_dir)))
    return tuple(group for group in made if group.size > 1 and group.n_valid)


def _batches(first: list[Finished], rest: Iterator[Finished]) -> Iterator[list[Finished]]:
    batch = first
    while batch:
        yield batch
        batch = list(islice(rest, TOGETHER))


def _book(driver: Driver, commit: Commit) -> None:
    driver.ledger.load([commit])
