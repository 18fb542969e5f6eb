"""Finished rows that no rollout of ours made, written as a run directory through the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.store.commit import Commit
from hermes_rl.store.driver import Driver, open_run
from hermes_rl.store.journal import JournalWriter
from hermes_rl.store.publisher import Publisher
from hermes_rl.store.rows import Finished
from hermes_rl.store.stats import write_stats
from hermes_rl.store.threads import in_thread

TOGETHER = 256
"""Rows that are made durable by one fsync."""


async def write_run(path: Path, identity: Mapping[str, Any], rows: Iterable[Finished]) -> int:
    """Make a run directory of rows; how many there were.

    Args:
        path: must not be a run directory yet.
        identity: stands in the run directory where a configuration's identity would.
        rows: any number; a batch is in memory at a time.

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
        await in_thread(write_stats, driver.run_dir, driver.ledger, {"units": count})
    return count


def _batches(first: list[Finished], rest: Iterator[Finished]) -> Iterator[list[Finished]]:
    batch = first
    while batch:
        yield batch
        batch = list(islice(rest, TOGETHER))


def _book(driver: Driver, commit: Commit) -> None:
    driver.ledger.load([commit])
