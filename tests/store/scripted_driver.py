"""A driver without models, for kills: `play(...)` runs all units of a scripted plan.

As a program it is a server that forks one driver per line on its standard input, so that a kill
costs milliseconds. `play(do="compact", ...)` merges instead, `play(do="stall", ...)` leaves a
suspended writer, and `play(do="wake", pid=...)` lets it continue. The server has imported
everything that a driver imports late, such as pyarrow and pandas."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas  # noqa: F401  so that forked drivers need not load it; the same for the next lines
import pyarrow.compute
import pyarrow.dataset
import pyarrow.pandas_compat
import pyarrow.parquet  # noqa: F401
import scripted_rows

from hermes_rl.store import (
    CrashHook,
    Driver,
    JournalWriter,
    OpenOptions,
    PartWriter,  # noqa: F401
    Prepared,
    Publisher,
    RunDir,
    SealPolicy,
    compact_run,
    open_run,
    write_stats,
)

ROWS_PER_BATCH = 3
AT_ONCE = 3


@dataclass(frozen=True)
class Plan:
    """A scripted run."""

    path: str
    units: int = 10
    many_files: int = 50
    """See `OpenOptions`."""

    def cause(self, number: int, attempt: int) -> str | None:
        """Every fifth unit fails once; unit 3 always fails; unit 6 is a bad task."""
        if number == 6:
            return "task"
        if number == 3 or (number % 5 == 4 and attempt == 0):
            return "model_timeout"
        return None


class AttemptLog:
    """A log outside the run directory: attempts that started, and receipts."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, number: int, epoch: int, attempt: int) -> None:
        os.write(self._fd, f"{what} {number} {epoch} {attempt}\n".encode())


async def run_attempt(
    plan: Plan, driver: Driver, journal: JournalWriter, log: AttemptLog, number: int
) -> None:
    unit = scripted_rows.unit_id(number)
    tried = driver.ledger.next_attempt(unit)
    driver.dispatch(scripted_rows.make_item(number, tried, driver.epoch), journal.writer)
    log.note("started", number, driver.epoch, tried)
    cause = plan.cause(number, tried)
    made = scripted_rows.make_finished(number, tried, driver.epoch, cause=cause)
    recorder = journal.recorder(made.key)
    for event in scripted_rows.make_events(number, tried, driver.epoch, cause=cause):
        recorder.record(event)
        await asyncio.sleep(0)
    await journal.finish(made)
    log.note("receipt", number, driver.epoch, tried)
    driver.receive(scripted_rows.make_receipt(made, journal.writer))


async def play(plan: Plan) -> None:
    """Run all open units, publish and close."""
    path = Path(plan.path)
    log = AttemptLog(path.with_name(path.name + ".log"))
    options = OpenOptions(grace_s=0.1, many_files=plan.many_files, many_units=1)
    async with await open_run(path, scripted_rows.CONFIG, None, options) as driver:
        policy = SealPolicy(rows=ROWS_PER_BATCH)
        async with JournalWriter(driver.run_dir, driver.epoch, 0, policy=policy) as journal:
            publisher = Publisher(journal, commit=driver.commit)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(publisher.run())
                tending = [group.create_task(job(driver)) for job in (merge, save)]
                await run_units(plan, driver, journal, publisher, log)
                running.cancel()
                for task in tending:
                    task.cancel()
            await publisher.drain()
            await driver.write_checkpoint()
            await driver.merge_files(grace_s=0)
    async with await open_run(path, scripted_rows.CONFIG, None, options) as driver:
        write_stats(driver.run_dir, driver.ledger, {"units": plan.units})


async def merge(driver: Driver) -> None:
    """Merge small files whenever there are many, while the writer continues."""
    while True:
        await driver.many_files.wait()
        await driver.merge_files(grace_s=0)


async def save(driver: Driver) -> None:
    """Write a checkpoint after each batch."""
    while True:
        await driver.write_checkpoint()
        await asyncio.sleep(0.002)


async def run_units(
    plan: Plan, driver: Driver, journal: JournalWriter, publisher: Publisher, log: AttemptLog
) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def unit(number: int) -> None:
        while driver.ledger.disposition(scripted_rows.unit_id(number)) == "open":
            async with slots:
                await run_attempt(plan, driver, journal, log, number)
                if journal.full.is_set():
                    await publisher.drain()

    async with asyncio.TaskGroup() as group:
        for number in range(plan.units):
            group.create_task(unit(number))


class NoDriver(Exception):
    """What a worker hands over after the death of its driver reaches nobody."""


async def reach_nobody(prepared: Prepared) -> None:
    raise NoDriver


async def stall(plan: Plan, crash_at: str) -> None:
    """A driver that dies after its dispatches, and its worker, which outlives it and is suspended
    at a crash point."""
    path = Path(plan.path)
    log = AttemptLog(path.with_name(path.name + ".log"))
    driver = await open_run(path, scripted_rows.CONFIG, None, OpenOptions(grace_s=0.1))
    tried = {n: driver.ledger.next_attempt(scripted_rows.unit_id(n)) for n in range(plan.units)}
    todo = [n for n in tried if driver.ledger.disposition(scripted_rows.unit_id(n)) == "open"]
    policy = SealPolicy(rows=ROWS_PER_BATCH)
    for number in todo:
        item = scripted_rows.make_item(number, tried[number], driver.epoch)
        driver.dispatch(item, f"{driver.epoch}-1")
        log.note("started", number, driver.epoch, tried[number])
    driver.release()
    os.environ["HERMES_RL_CRASH_AT"] = crash_at  # of the worker only: its driver holds LOCK
    async with JournalWriter(RunDir(path), driver.epoch, 1, policy=policy) as journal:
        publisher = Publisher(journal, commit=reach_nobody)
        for number in todo:
            cause = plan.cause(number, tried[number])
            made = scripted_rows.make_finished(number, tried[number], driver.epoch, cause=cause)
            recorder = journal.recorder(made.key)
            for event in scripted_rows.make_events(
                number, tried[number], driver.epoch, cause=cause
            ):
                recorder.record(event)
            await journal.finish(made)
            if journal.full.is_set():
                await publisher.drain()
        await publisher.drain()


def work(do: str, order: dict[str, Any]) -> None:
    """What a forked process does."""
    if do == "compact":
        compact_run(grace_s=0.0, **order)
    elif do == "stall":
        with patch.object(CrashHook, "die", lambda hook: os.kill(os.getpid(), signal.SIGSTOP)):
            crash_at = os.environ.pop("HERMES_RL_CRASH_AT")
            with suppress(NoDriver):
                asyncio.run(stall(Plan(**order), crash_at))
    else:
        asyncio.run(play(Plan(**order)))


def fork(order: dict[str, Any]) -> int:
    """Play in a forked process; returns its exit status, negative for a signal. Of a process that
    is suspended, returns the id."""
    do = order.pop("do", "play")
    pid = int(order.pop("pid", 0)) or os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ["HERMES_RL_CRASH_AT"] = order.pop("crash_at", "")
            work(do, order)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if do == "wake":
        os.kill(pid, signal.SIGCONT)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    return pid if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def serve() -> None:
    for line in sys.stdin:
        print(fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    serve()
