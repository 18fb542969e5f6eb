"""Rows that a driver makes from rows of its run one by one: a kill loses none that was taken.

They go the way of attempts (COMMIT.md, steps 3 to 9): a line of a `done` file, durable at once, and
published with others. `Driver.publish` is for those that are all at hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hermes_rl.store.asked import AskedBook, Question
from hermes_rl.store.driver import Driver
from hermes_rl.store.journal import JournalWriter
from hermes_rl.store.publisher import PUBLISH_EVERY_S, Publisher
from hermes_rl.store.rows import Derived


class DerivedBook:
    """Takes derived rows, and before them what is asked for them; see `derived_book`."""

    def __init__(self, journal: JournalWriter, asked: AskedBook) -> None:
        self._journal, self._asked = journal, asked

    def ask(self, row: Derived) -> Question:
        """Where the events of work for a row go.

        Args:
            row: what is recorded, with the calls that were made, when a kill cuts the work.

        Raises: DiskFull.
        """
        return self._asked.ask(row)

    async def add(self, rows: Derived | None, question: Question | None = None) -> None:
        """Take rows; they are durable on return.

        Args:
            rows: None when nothing came of the question.
            question: that they answer.

        Raises: DiskFull.
        """
        if rows is not None:
            await self._journal.finish(rows)
        if question is not None:
            self._asked.answered(question)


@asynccontextmanager
async def derived_book(
    driver: Driver, *, every_s: float = PUBLISH_EVERY_S
) -> AsyncIterator[DerivedBook]:
    """What takes derived rows; all of them are published when it is left.

    Args:
        every_s: a row is published when it is this old, with those that came since.

    Raises: DiskFull, also when it is left: what was taken is published by the next start.
    """
    name = _free_name(driver)
    async with JournalWriter(driver.run_dir, driver.epoch, name) as journal:
        publisher = Publisher(journal, every_s=every_s)
        asked = AskedBook(driver.run_dir, driver.run_dir.writer_path(journal.writer))
        publishing = asyncio.create_task(publisher.run())
        clean = False
        try:
            yield DerivedBook(journal, asked)
            clean = True
        finally:
            publishing.cancel()
            await asyncio.wait((publishing,))
            if not publishing.cancelled():
                publishing.exception()  # seen: a full disk shows again in the next line
            try:
                await publisher.drain()
            finally:
                asked.close(clean=clean)


def _free_name(driver: Driver) -> str:
    """A writer's name that this driver has not used: stems name their rows for ever."""
    run_dir = driver.run_dir
    for number in itertools.count():
        name = f"derived{number}"
        writer = f"{driver.epoch}-{name}"
        if not run_dir.committed(f"{writer}-0") and not run_dir.writer_path(writer).exists():
            return name
    raise AssertionError  # never: a count has no end
