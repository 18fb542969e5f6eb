"""A worker without a run directory, whose lines the driver writes."""

import asyncio
import base64
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted_rows

from hermes_rl.errors import StoreError
from hermes_rl.store import (
    Driver,
    JournalWriter,
    Publisher,
    RelayedLine,
    RelayedWriter,
    RelayJournal,
    load_run,
    open_run,
)

PATIENT_S = 3600.0
_wire = msgspec.msgpack.Decoder(tuple[RelayedLine, ...]).decode


def make_writer(driver: Driver) -> RelayedWriter:
    return RelayedWriter(
        JournalWriter(driver.run_dir, driver.epoch, 1),
        partial(Publisher, every_s=PATIENT_S, commit=driver.commit),
    )


def take(journal: RelayJournal) -> tuple[RelayedLine, ...]:
    """The lines as the driver gets them."""
    return _wire(msgspec.msgpack.encode(journal.take()))


def begin(driver: Driver, journal: RelayJournal, number: int, events: int) -> None:
    """An attempt that made its first events."""
    work = scripted_rows.make_item(number, 0, driver.epoch)
    driver.dispatch(work, journal.writer)
    recorder = journal.recorder(scripted_rows.attempt_key(number))
    for event in scripted_rows.make_events(number)[:events]:
        recorder.record(event)


async def test_finished_attempts_count_and_running_ones_are_recovered(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        journal = RelayJournal("1-1")
        writer = make_writer(driver)
        await writer.open()
        for number in range(6):
            begin(driver, journal, number, 7)
        for number in range(4):
            await journal.finish(scripted_rows.make_finished(number))
        journal.append_connection(b'{"host": "example.org"}')
        receipts = await writer.take(take(journal))
        assert [receipt.unit_id for receipt in receipts] == [
            scripted_rows.unit_id(number) for number in range(4)
        ]
        assert {(receipt.writer, receipt.stem) for receipt in receipts} == {("1-1", "1-1-0")}
        for receipt in receipts:
            driver.receive(receipt)
        await journal.finish(scripted_rows.make_finished(4))  # is never polled
        await writer.aclose()
        lost = await driver.recover_worker("1-1")
        assert sorted(r.unit_id for r in lost) == sorted(map(scripted_rows.unit_id, (4, 5)))
        assert {receipt.cause for receipt in lost} == {"worker_lost"}
        assert not driver.in_flight
        assert [*(run_path / "journal").glob("1-1")] == []
        log = (run_path / "network" / "1-1.jsonl").read_bytes()
        assert json.loads(log) == {"host": "example.org"}
    run = load_run(run_path)
    assert len(run.trajectories) == 4
    lost_rows: list[dict[str, Any]] = run.failures.to_dict("records")
    assert [len(row["messages"]) for row in lost_rows] == [2, 2], "their events arrived"


async def test_a_call_that_outlives_its_attempt_ends_no_run(run_path: Path) -> None:
    """A judge that the environment did not wait for answers after the rows were sent."""
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        journal = RelayJournal("1-1")
        writer = make_writer(driver)
        await writer.open()
        driver.dispatch(scripted_rows.make_item(0, 0, driver.epoch), journal.writer)
        recorder = journal.recorder(scripted_rows.attempt_key(0))
        events = scripted_rows.make_events(0)
        recorder.record(events[0])
        await journal.finish(scripted_rows.make_finished(0))
        recorder.record(events[1])
        for receipt in await writer.take(take(journal)):
            driver.receive(receipt)
        recorder.record(events[2])
        assert await writer.take((*take(journal), RelayedLine(b"{}", 1))) == ()
        await writer.drain()
        await writer.aclose()
    assert len(load_run(run_path).trajectories) == 1


async def test_rows_come_in_replies_of_a_bounded_size_and_in_order(run_path: Path) -> None:
    notified = asyncio.Event()
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        journal = RelayJournal("1-1")
        journal.notify = notified.set
        writer = make_writer(driver)
        await writer.open()
        for number in range(6):
            text = base64.b64encode(random.randbytes(1_000_000)).decode()  # does not compress
            begin(driver, journal, number, 1)
            await journal.finish(scripted_rows.make_finished(number, content=text))
        replies = list[tuple[RelayedLine, ...]]()
        while notified.is_set():
            notified.clear()
            replies.append(take(journal))
        assert [sum(line.receipt is not None for line in lines) for lines in replies] == [1] * 6
        for lines in replies:
            for receipt in await writer.take(lines):
                driver.receive(receipt)
        assert driver.ledger.done == 6
        await writer.drain()
        await writer.aclose()
    assert len(load_run(run_path).trajectories) == 6


async def test_a_journal_that_cannot_be_created_is_one_line(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        (run_path / "journal").rename(run_path / "moved")
        with pytest.raises(StoreError, match=f"{run_path} cannot be used: "):
            await make_writer(driver).open()
        (run_path / "moved").rename(run_path / "journal")


async def test_events_of_running_attempts_travel_after_a_second(run_path: Path) -> None:
    notified = asyncio.Event()
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        journal = RelayJournal("1-1")
        journal.notify = notified.set
        begin(driver, journal, 0, 5)
        assert not notified.is_set()
        async with asyncio.timeout(60):
            await notified.wait()
        assert len(take(journal)) == 5
        await driver.recover_worker("1-1")
