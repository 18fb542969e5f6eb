"""A whole driver without models, to be killed: `play(...)` makes all units of a made-up plan.

Run as a program it is a server that forks one driver per line on its standard input, so that a
kill costs milliseconds and not the start of an interpreter. It has loaded all that a driver loads
late: pyarrow, and pandas, which that imports when rows become Python objects, are most of what a
short life would cost.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_up
import pandas  # noqa: F401  so that forked drivers need not load it; the same for the next lines
import pyarrow.compute
import pyarrow.dataset
import pyarrow.pandas_compat
import pyarrow.parquet  # noqa: F401

from hermes_rl.store import (
    Driver,
    JournalWriter,
    OpenOptions,
    PartWriter,  # noqa: F401
    Publisher,
    SealPolicy,
    open_run,
    write_stats,
)

ROWS_PER_BATCH = 3
AT_ONCE = 3


@dataclass(frozen=True)
class Plan:
    """What is played."""

    path: str
    units: int = 10

    def cause(self, number: int, attempt: int) -> str | None:
        """Every fifth unit fails at first; unit 3 fails always; unit 6 is a bad task."""
        if number == 6:
            return "task"
        if number == 3 or (number % 5 == 4 and attempt == 0):
            return "model_timeout"
        return None


class Books:
    """The log of the outside world: which attempts were asked for, which receipts were given."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, number: int, epoch: int, attempt: int) -> None:
        os.write(self._fd, f"{what} {number} {epoch} {attempt}\n".encode())


async def attempt(
    plan: Plan, driver: Driver, journal: JournalWriter, books: Books, number: int
) -> None:
    unit = made_up.unit(number)
    tried = driver.ledger.next_attempt(unit)
    driver.dispatch(made_up.item(number, tried, driver.epoch), journal.writer)
    books.note("asked", number, driver.epoch, tried)
    cause = plan.cause(number, tried)
    made = made_up.finished(number, tried, driver.epoch, cause=cause)
    recorder = journal.recorder(made.key)
    for event in made_up.story(number, tried, driver.epoch, cause=cause):
        recorder.record(event)
        await asyncio.sleep(0)
    await journal.finish(made)
    books.note("receipt", number, driver.epoch, tried)
    driver.receive(made_up.receipt(made, journal.writer))


async def play(plan: Plan) -> None:
    """Open the run, make what is open, publish, close."""
    path = Path(plan.path)
    books = Books(path.with_name(path.name + ".books"))
    options = OpenOptions(grace_s=0.1)
    async with await open_run(path, made_up.CONFIG, None, options) as driver:
        policy = SealPolicy(rows=ROWS_PER_BATCH)
        async with JournalWriter(driver.run_dir, driver.epoch, 0, policy=policy) as journal:
            publisher = Publisher(journal)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(publisher.run())
                await all_units(plan, driver, journal, books)
                running.cancel()
            await publisher.drain()
    async with await open_run(path, made_up.CONFIG, None, options) as driver:
        write_stats(driver.run_dir, driver.ledger, {"units": plan.units})


async def all_units(plan: Plan, driver: Driver, journal: JournalWriter, books: Books) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def unit(number: int) -> None:
        while driver.ledger.disposition(made_up.unit(number)) == "open":
            async with slots:
                await attempt(plan, driver, journal, books, number)

    async with asyncio.TaskGroup() as group:
        for number in range(plan.units):
            group.create_task(unit(number))


def fork(order: dict[str, Any]) -> int:
    """Play in a forked process; returns its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ["HERMES_RL_CRASH_AT"] = order.pop("crash_at", "")
            asyncio.run(play(Plan(**order)))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve() -> None:
    for line in sys.stdin:
        print(fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    serve()
