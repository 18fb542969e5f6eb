"""Rows that a driver makes from rows of its run one by one: a kill loses none that was taken.

They go the way of attempts (COMMIT.md, steps 3 to 9): a line of a `done` file, durable at once, and
published with others. `Driver.publish` is for those that are all at hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from hermes_rl.store.driver import Driver
from hermes_rl.store.journal import JournalWriter
from hermes_rl.store.publisher import PUBLISH_EVERY_S, Publisher
from hermes_rl.store.rows import Derived

Add = Callable[[Derived], Awaitable[None]]
"""Takes rows; they are durable when it returns. Raises: DiskFull."""


@asynccontextmanager
async def derived_book(driver: Driver, *, every_s: float = PUBLISH_EVERY_S) -> AsyncIterator[Add]:
    """What takes derived rows; all of them are published when it is left.

    Args:
        every_s: a row is published when it is this old, with those that came since.

    Raises: DiskFull, also when it is left: what was taken is published by the next start.
    """
    async with JournalWriter(driver.run_dir, driver.epoch, _free_name(driver)) as journal:
        publisher = Publisher(journal, every_s=every_s)
        publishing = asyncio.create_task(publisher.run())
        try:
            yield journal.finish
        finally:
            publishing.cancel()
            await asyncio.wait((publishing,))
            if not publishing.cancelled():
                publishing.exception()  # seen: a full disk shows again in the next line
            await publisher.drain()


def _free_name(driver: Driver) -> str:
    """A writer's name that this driver has not used: stems name their rows for ever."""
    run_dir = driver.run_dir
    for number in itertools.count():
        name = f"derived{number}"
        writer = f"{driver.epoch}-{name}"
        if not run_dir.committed(f"{writer}-0") and not run_dir.writer_path(writer).exists():
            return name
    raise AssertionError  # never: a count has no end
