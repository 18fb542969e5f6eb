"""The dispatcher with workers that are told what to do, through the protocols that it meets."""

import asyncio
import fcntl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_runner import (
    ALONE_SLOTS,
    START_TRIES,
    Dispatcher,
    Fleet,
    Plan,
    Reply,
    RunSource,
    Sink,
    UnitReader,
    WorkerLost,
)
from hermes_rl.errors import StoreError, UserError
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.sources import read_rows
from hermes_rl.store import Driver, NotFenced, OpenOptions, ProcessId, open_run
from hermes_rl.usage import UsageTotal

HASH = "c" * 64


def item(number: int = 0, *, alone: bool = False) -> WorkItem:
    return WorkItem(
        unit_id=f"{number:032}", group_id="g", epoch=1, attempt=0, repeat=0, row_index=0,
        task_id="t", task=None, task_hash="h", seed=0, alone=alone,
    )  # fmt: skip


def receipt(of: WorkItem) -> Receipt:
    return Receipt(
        unit_id=of.unit_id, epoch=1, attempt=0, writer="1-1", task_id="t", repeat=0, status="ok",
        end_reason="answered", cause=None, reward=1.0, turns=1, usage=UsageTotal(), cost_usd=None,
        unpriced_calls=0, seconds=0.0,
    )  # fmt: skip


def block(seconds: float) -> None:
    """Nothing else of this process runs meanwhile."""
    time.sleep(seconds)


@dataclass
class Worker:
    """Finishes what it is given at once, after `hold` where it has one; one that is `mortal` dies
    of it instead, one that is `slow` publishes for ever."""

    writer: str
    mortal: bool = False
    stops_driver_s: float = 0.0
    """For so long nothing else runs before it ends."""
    slow: bool = False
    hold: asyncio.Event | None = None
    publishing: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    closed: bool = False
    given: asyncio.Queue[WorkItem] = field(default_factory=asyncio.Queue)

    async def send(self, item: WorkItem) -> None:
        self.given.put_nowait(item)

    async def poll(self) -> Reply:
        got = await self.given.get()
        if self.hold is not None:
            await self.hold.wait()
        block(self.stops_driver_s)
        if self.mortal:
            raise WorkerLost("it died")
        return Reply(receipts=(receipt(got),))

    async def close(self) -> Reply:
        self.publishing.set()
        if self.slow:
            await asyncio.Event().wait()
        self.closed = True
        return Reply()

    async def kill(self) -> None:
        self.killed = True


@dataclass
class Rig:
    """Factory, driver, listener and source in one."""

    workers: dict[int, Worker] = field(default_factory=dict)
    """By number; another one is made where there is none."""
    refused: dict[int, Exception] = field(default_factory=dict)
    """Starts that fail."""
    unfenced: dict[str, StoreError] = field(default_factory=dict)
    """Recoveries that fail."""
    left: list[WorkItem] = field(default_factory=lambda: [item()])
    recovered: list[tuple[str, str]] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    given_back: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, dict[str, WorkItem]] = field(default_factory=dict)
    epoch: int = 1
    started: int = 0
    most: int = 0
    """Workers at once."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """A start was tried, or a fault was told."""
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, worker: int, capacity: int) -> Worker:
        self.started += 1
        self.moved.set()
        if worker in self.refused:
            raise self.refused[worker]
        made = self.workers.setdefault(worker, Worker(f"1-{worker}"))
        self.most = max(self.most, sum(not w.closed for w in self.workers.values()))
        return made

    def dispatch(self, item: WorkItem, writer: str) -> None:
        self.sent.setdefault(writer, {})[item.unit_id] = item

    async def recover_worker(self, writer: str, cause: str) -> list[Receipt]:
        if writer in self.unfenced:
            raise self.unfenced[writer]
        self.recovered.append((writer, cause))
        self.left += [again for again in self.sent.pop(writer, {}).values()]
        self.changed.set()
        return []

    def heard(self, requests: int, throttled: int) -> None: ...

    def lost(self, writer: str, why: str) -> None:
        self.notes.append(f"{writer}: {why}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fault(self, cause: str, text: str) -> None:
        self.faults.append((cause, text))
        self.moved.set()

    async def next(self) -> WorkItem | None:
        while not self.left and (any(self.sent.values()) or self.waiting):
            self.changed.clear()
            await self.changed.wait()
        if not self.left:
            return None
        self.waiting += self.left[-1].alone
        return self.left.pop()

    waiting: int = 0
    """Attempts that run alone and have not ended."""

    async def stopped(self) -> None:
        await self.halted.wait()

    async def receive(self, receipt: Receipt) -> None:
        self.received.append(receipt.unit_id)
        for units in self.sent.values():
            gone = units.pop(receipt.unit_id, None)
            self.waiting -= gone is not None and gone.alone
        self.changed.set()

    async def leave(self, unit_id: str, reason: str) -> None:
        self.given_back[unit_id] = reason
        for units in self.sent.values():
            units.pop(unit_id, None)
        self.waiting = 0
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.moved.clear()
            await self.moved.wait()

    async def run(self, workers: int = 2, concurrency: int = 2, lease_s: float = 30.0) -> None:
        async with asyncio.timeout(30):
            rig: Any = self
            fleet = Fleet(workers, concurrency, 1, lease_s)
            await Dispatcher(self.start, rig, fleet, self).run(rig)


async def test_a_worker_that_is_cut_while_it_publishes_is_killed_and_recovered() -> None:
    """A second Ctrl-C at the very end: what the worker finished is published all the same."""
    rig = Rig(workers={n: Worker(f"1-{n}", slow=True) for n in (1, 2)})
    run = asyncio.create_task(rig.run())
    await asyncio.gather(*(worker.publishing.wait() for worker in rig.workers.values()))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(rig.received) == 1
    assert all(worker.killed for worker in rig.workers.values())
    assert sorted(rig.recovered) == [("1-1", "interrupted"), ("1-2", "interrupted")]


async def test_a_replacement_that_cannot_start_is_tried_again_while_others_go_on() -> None:
    hold = asyncio.Event()
    rig = Rig(
        workers={1: Worker("1-1", mortal=True), 2: Worker("1-2", hold=hold)},
        refused={3: UserError("no room"), 4: UserError("no room")},
        left=[item(n) for n in range(6)],
    )
    run = asyncio.create_task(rig.run())
    await rig.until(lambda: rig.started == 5)
    assert not run.done()
    hold.set()
    await run
    assert Counter(rig.received) == Counter(item(n).unit_id for n in range(6))
    assert rig.faults == []
    assert not rig.workers[2].killed
    assert rig.notes[1] == (
        "worker 1-3 could not be started (no room); 1 still running, next try in 0.5 s"
    )
    assert ("1-3", "worker_lost") in rig.recovered, "what it left in the journal stays"


async def test_a_worker_that_ended_while_the_driver_did_not_run_died_of_nothing() -> None:
    """The driver was stopped for longer than the lease, as by Ctrl-Z: its units are not to blame,
    and never given up for it."""
    rig = Rig(workers={1: Worker("1-1", mortal=True, stops_driver_s=0.5)})
    await rig.run(workers=1, concurrency=1, lease_s=0.4)
    assert ("1-1", "driver_lost") in rig.recovered
    assert any("this process did not run for" in note for note in rig.notes)
    died = Rig(workers={1: Worker("1-1", mortal=True)})
    await died.run(workers=1, concurrency=1)
    assert ("1-1", "worker_lost") in died.recovered


async def test_the_run_ends_when_no_worker_is_left_and_none_can_be_started() -> None:
    rig = Rig(
        workers={1: Worker("1-1", mortal=True)},
        refused={n: UserError("no room") for n in range(2, 100)},
    )
    await rig.run(workers=1, concurrency=1)
    assert rig.started == 1 + START_TRIES
    assert rig.faults == [
        ("worker_lost", "no worker is left, and none can be started (no room)"),
    ]


async def test_what_no_worker_can_do_is_an_error_at_once() -> None:
    rig = Rig(refused={n: UserError("no such run") for n in (1, 2)})
    with pytest.raises(UserError, match="no such run"):
        await rig.run()
    assert rig.faults == []


async def test_a_start_that_takes_long_does_not_hold_up_the_end() -> None:
    rig = Rig(workers={1: Worker("1-1", mortal=True)}, left=[item(n) for n in range(3)])
    start, cancelled = rig.start, []

    async def endless(worker: int, capacity: int) -> Worker:
        if worker != 3:
            return await start(worker, capacity)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(worker)
            raise
        raise AssertionError

    rig.start = endless  # type: ignore[method-assign]
    await rig.run()
    assert len(rig.received) == 3
    assert cancelled == [3]
    assert ("1-3", "worker_lost") in rig.recovered


async def test_a_run_that_is_stopped_waits_for_no_worker_that_cannot_start() -> None:
    """The first Ctrl-C while all workers are lost."""
    rig = Rig(
        workers={1: Worker("1-1", mortal=True)},
        refused={n: UserError("no room") for n in range(2, 100)},
    )
    run = asyncio.create_task(rig.run(workers=1, concurrency=1))
    await rig.until(lambda: rig.started == 2)
    rig.halted.set()
    await run
    assert (rig.started, rig.faults) == (2, [])


async def test_a_worker_that_cannot_be_fenced_keeps_its_units_and_no_others() -> None:
    rig = Rig(
        workers={1: Worker("1-1", mortal=True)},
        unfenced={"1-1": NotFenced("writer 1-1 (process 7 on there) still runs; stop it first")},
        left=[item(n) for n in range(6)],
    )
    await rig.run()
    assert len(rig.given_back) == 1
    assert {*rig.received, *rig.given_back} == {item(n).unit_id for n in range(6)}
    assert rig.faults == []
    assert any("1 units wait for the next start" in note for note in rig.notes)


async def test_a_damaged_journal_stops_the_run_and_ends_no_other_rollout() -> None:
    hold = asyncio.Event()
    rig = Rig(
        workers={1: Worker("1-1", mortal=True), 2: Worker("1-2", hold=hold)},
        unfenced={"1-1": StoreError("live-0.jsonl is damaged")},
        left=[item(n) for n in range(9)],
    )
    run = asyncio.create_task(rig.run())
    await rig.until(lambda: bool(rig.faults))
    hold.set()
    await run
    assert rig.faults == [("journal", "live-0.jsonl is damaged")]
    assert len(rig.received) == 1
    assert rig.workers[2].closed


async def test_units_that_run_alone_share_two_workers() -> None:
    rig = Rig(left=[item(n, alone=True) for n in range(7)])
    await rig.run()
    assert len(rig.received) == 7
    assert rig.started == 2 + 7, "each has a fresh one"
    assert rig.most <= 2 + ALONE_SLOTS


async def test_a_unit_that_no_worker_can_be_started_for_is_left_to_the_next_start() -> None:
    rig = Rig(
        refused={n: UserError("no room") for n in range(3, 99)},
        left=[item(0), item(1, alone=True)],
    )
    await rig.run()
    assert rig.received == [item(0).unit_id]
    assert rig.given_back == {
        item(1).unit_id: "no worker of its own could be started for a unit (no room)"
    }


async def test_a_run_stops_for_a_worker_that_cannot_be_fenced_once_all_else_is_done(
    tmp_path: Path,
) -> None:
    """The worker is on another machine, stopped, and still holds its journal when its lease is
    over. The next start hands its unit out again."""
    alive = tmp_path / "run" / "journal" / "1-1" / "alive"
    there = ProcessId(pid=7, started=1, host="there", boot="b", lease_s=0.2)
    options = OpenOptions(grace_s=0.2)
    rows = [{"prompt": f"p{n}"} for n in range(5)]

    def make_source(driver: Driver) -> RunSource:
        reader = UnitReader(read_rows(rows), HASH, repeats=1)
        return RunSource(Plan(reader, driver.ledger, epoch=driver.epoch), driver, Sink())

    rig = Rig(workers={1: Worker("1-1", mortal=True)})
    async with await open_run(tmp_path / "run", {}, None, options) as driver:
        alive.parent.mkdir()
        with alive.open("wb") as held:
            held.write(msgspec.json.encode(there))
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            source = make_source(driver)
            async with asyncio.timeout(30):
                await Dispatcher(rig.start, driver, Fleet(2, 2), rig).run(source)
            assert source.stop is not None
            assert source.stop.cause == "worker_lost"
            assert "writer 1-1 (process 7 on there) still runs" in source.stop.detail
            assert driver.ledger.done == 4
    async with await open_run(tmp_path / "run", {}, None, options) as driver:
        source = make_source(driver)
        again = await source.next()
        assert again is not None
        assert (again.attempt, driver.report.lost[0].unit_id) == (1, again.unit_id)
