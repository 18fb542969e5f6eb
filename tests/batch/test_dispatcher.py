"""The dispatcher with scripted workers, through its protocols."""

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
    ISOLATED_SLOTS,
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


def item(number: int = 0, *, isolated: bool = False) -> WorkItem:
    return WorkItem(
        unit_id=f"{number:032}", group_id="g", epoch=1, attempt=0, repeat=0, row_index=0,
        task_id="t", task=None, task_hash="h", seed=0, isolated=isolated,
    )  # fmt: skip


def receipt_of(item: WorkItem) -> Receipt:
    return Receipt(
        unit_id=item.unit_id, epoch=1, attempt=0, writer="1-1", task_id="t", repeat=0, status="ok",
        end_reason="answered", cause=None, reward=1.0, turns=1, usage=UsageTotal(), cost_usd=None,
        unpriced_calls=0, seconds=0.0,
    )  # fmt: skip


@dataclass
class Worker:
    """Finishes attempts at once, or when `hold` is set; a `mortal` one dies instead, and a `slow`
    one never finishes publishing."""

    writer: str
    mortal: bool = False
    blocks_driver_s: float = 0.0
    """Time for which the driver does not run during the first poll."""
    answers: int = 0
    """Polls that a mortal one answers before it dies."""
    late_s: float = 0.0
    """How long after its death the loss is reported."""
    slow: bool = False
    hold: asyncio.Event | None = None
    publishing: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    closed: bool = False
    items: asyncio.Queue[WorkItem] = field(default_factory=asyncio.Queue)

    async def send(self, item: WorkItem) -> None:
        self.items.put_nowait(item)

    async def poll(self) -> Reply:
        got = await self.items.get()
        if self.hold is not None:
            await self.hold.wait()
        time.sleep(self.blocks_driver_s)  # noqa: ASYNC251  it blocks the driver's event loop
        self.blocks_driver_s = 0.0
        self.answers -= 1
        if self.mortal and self.answers < 0:
            await asyncio.sleep(self.late_s)
            raise WorkerLost("it died")
        return Reply(receipts=(receipt_of(got),))

    async def close(self) -> Reply:
        self.publishing.set()
        if self.slow:
            await asyncio.Event().wait()
        self.closed = True
        return Reply()

    async def kill(self) -> None:
        self.killed = True


@dataclass
class Scenario:
    """Worker factory, driver, listener and source in one."""

    workers: dict[int, Worker] = field(default_factory=dict)
    """By number; others are created on demand."""
    refused: dict[int, Exception] = field(default_factory=dict)
    """Starts that fail."""
    unfenced: dict[str, StoreError] = field(default_factory=dict)
    """Recoveries that fail."""
    open_items: list[WorkItem] = field(default_factory=lambda: [item()])
    recovered: list[tuple[str, str]] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    left_open: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, dict[str, WorkItem]] = field(default_factory=dict)
    epoch: int = 1
    started: int = 0
    peak: int = 0
    """The highest number of workers at the same time."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """A start was tried, or a fault was reported."""
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, worker: int, capacity: int) -> Worker:
        self.started += 1
        self.moved.set()
        if worker in self.refused:
            raise self.refused[worker]
        made = self.workers.setdefault(worker, Worker(f"1-{worker}"))
        self.peak = max(self.peak, sum(not w.closed for w in self.workers.values()))
        return made

    def dispatch(self, item: WorkItem, writer: str) -> None:
        self.sent.setdefault(writer, {})[item.unit_id] = item

    async def recover_worker(self, writer: str, cause: str) -> list[Receipt]:
        if writer in self.unfenced:
            raise self.unfenced[writer]
        self.recovered.append((writer, cause))
        self.open_items += [again for again in self.sent.pop(writer, {}).values()]
        self.changed.set()
        return []

    def count_requests(self, requests: int, throttled: int) -> None: ...

    def report_lost_worker(self, writer: str, why: str) -> None:
        self.notes.append(f"{writer}: {why}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def report_fault(self, cause: str, text: str) -> None:
        self.faults.append((cause, text))
        self.moved.set()

    async def next(self) -> WorkItem | None:
        while not self.open_items and (any(self.sent.values()) or self.waiting):
            self.changed.clear()
            await self.changed.wait()
        if not self.open_items:
            return None
        self.waiting += self.open_items[-1].isolated
        return self.open_items.pop()

    waiting: int = 0
    """Attempts that run alone and have not ended."""

    async def stopped(self) -> None:
        await self.halted.wait()

    async def receive(self, receipt: Receipt) -> None:
        self.received.append(receipt.unit_id)
        for units in self.sent.values():
            gone = units.pop(receipt.unit_id, None)
            self.waiting -= gone is not None and gone.isolated
        self.changed.set()

    async def leave_open(self, unit_id: str, reason: str) -> None:
        self.left_open[unit_id] = reason
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
            scenario: Any = self
            fleet = Fleet(workers, concurrency, 1, lease_s)
            await Dispatcher(self.start, scenario, fleet, self).run(scenario)


async def test_workers_cancelled_while_publishing_are_killed_and_recovered() -> None:
    """At a second Ctrl-C during the last step, finished attempts are still published."""
    scenario = Scenario(workers={n: Worker(f"1-{n}", slow=True) for n in (1, 2)})
    run = asyncio.create_task(scenario.run())
    await asyncio.gather(*(worker.publishing.wait() for worker in scenario.workers.values()))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(scenario.received) == 1
    assert all(worker.killed for worker in scenario.workers.values())
    assert sorted(scenario.recovered) == [("1-1", "interrupted"), ("1-2", "interrupted")]


async def test_a_failed_worker_start_is_retried_while_others_work() -> None:
    hold = asyncio.Event()
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True), 2: Worker("1-2", hold=hold)},
        refused={3: UserError("no memory"), 4: UserError("no memory")},
        open_items=[item(n) for n in range(6)],
    )
    run = asyncio.create_task(scenario.run())
    await scenario.until(lambda: scenario.started == 5)
    assert not run.done()
    hold.set()
    await run
    assert Counter(scenario.received) == Counter(item(n).unit_id for n in range(6))
    assert scenario.faults == []
    assert not scenario.workers[2].killed
    assert scenario.notes[1] == (
        "worker 1-3 could not be started (no memory); 1 still running, next try in 0.5 s"
    )
    assert ("1-3", "worker_lost") in scenario.recovered, "its journal is recovered"


async def test_workers_that_end_while_the_driver_is_suspended_count_as_driver_lost() -> None:
    """The driver was suspended for longer than the lease, as by Ctrl-Z. No unit is given up for
    that, however late the loss is seen, and also when an answer was on its way."""
    for answers in (0, 1):
        worker = Worker("1-1", mortal=True, blocks_driver_s=0.5, answers=answers, late_s=0.9)
        scenario = Scenario(workers={1: worker}, open_items=[item(n) for n in range(3)])
        await scenario.run(workers=1, concurrency=1, lease_s=0.4)
        assert scenario.recovered[0] == ("1-1", "driver_lost"), answers
        assert any("this process did not run for" in note for note in scenario.notes)
    died = Scenario(workers={1: Worker("1-1", mortal=True)})
    await died.run(workers=1, concurrency=1)
    assert ("1-1", "worker_lost") in died.recovered


async def test_the_run_stops_when_no_worker_can_be_started() -> None:
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True)},
        refused={n: UserError("no memory") for n in range(2, 100)},
    )
    await scenario.run(workers=1, concurrency=1)
    assert scenario.started == 1 + START_TRIES
    assert scenario.faults == [
        ("worker_lost", "no worker is left, and none can be started (no memory)"),
    ]


async def test_an_error_of_every_first_start_is_raised() -> None:
    scenario = Scenario(refused={n: UserError("no such run") for n in (1, 2)})
    with pytest.raises(UserError, match="no such run"):
        await scenario.run()
    assert scenario.faults == []


async def test_a_slow_worker_start_is_cancelled_at_the_end() -> None:
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True)}, open_items=[item(n) for n in range(3)]
    )
    start, cancelled = scenario.start, []

    async def hang_at_third(worker: int, capacity: int) -> Worker:
        if worker != 3:
            return await start(worker, capacity)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(worker)
            raise
        raise AssertionError

    scenario.start = hang_at_third  # type: ignore[method-assign]
    await scenario.run()
    assert len(scenario.received) == 3
    assert cancelled == [3]
    assert ("1-3", "worker_lost") in scenario.recovered


async def test_a_stopped_run_does_not_wait_for_worker_starts() -> None:
    """The first Ctrl-C while all workers are lost."""
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True)},
        refused={n: UserError("no memory") for n in range(2, 100)},
    )
    run = asyncio.create_task(scenario.run(workers=1, concurrency=1))
    await scenario.until(lambda: scenario.started == 2)
    scenario.halted.set()
    await run
    assert (scenario.started, scenario.faults) == (2, [])


async def test_units_of_an_unfenced_worker_wait_for_the_next_start() -> None:
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True)},
        unfenced={"1-1": NotFenced("writer 1-1 (process 7 on there) still runs; stop it first")},
        open_items=[item(n) for n in range(6)],
    )
    await scenario.run()
    assert len(scenario.left_open) == 1
    assert {*scenario.received, *scenario.left_open} == {item(n).unit_id for n in range(6)}
    assert scenario.faults == []
    assert any("Left for the next start: 1 unit" in note for note in scenario.notes)


async def test_a_damaged_journal_stops_the_run_after_running_rollouts() -> None:
    hold = asyncio.Event()
    scenario = Scenario(
        workers={1: Worker("1-1", mortal=True), 2: Worker("1-2", hold=hold)},
        unfenced={"1-1": StoreError("live-0.jsonl is damaged")},
        open_items=[item(n) for n in range(9)],
    )
    run = asyncio.create_task(scenario.run())
    await scenario.until(lambda: bool(scenario.faults))
    hold.set()
    await run
    assert scenario.faults == [("journal", "live-0.jsonl is damaged")]
    assert len(scenario.received) == 1
    assert scenario.workers[2].closed


async def test_isolated_units_share_two_extra_slots() -> None:
    scenario = Scenario(open_items=[item(n, isolated=True) for n in range(7)])
    await scenario.run()
    assert len(scenario.received) == 7
    assert scenario.started == 2 + 7, "each has a fresh one"
    assert scenario.peak <= 2 + ISOLATED_SLOTS


async def test_an_isolated_unit_without_a_worker_waits_for_the_next_start() -> None:
    scenario = Scenario(
        refused={n: UserError("no memory") for n in range(3, 99)},
        open_items=[item(0), item(1, isolated=True)],
    )
    await scenario.run()
    assert scenario.received == [item(0).unit_id]
    assert scenario.left_open == {
        item(1).unit_id: "no worker of its own could be started for a unit (no memory)"
    }


async def test_an_unfenced_remote_worker_stops_the_run_after_all_other_units(
    tmp_path: Path,
) -> None:
    """The worker is suspended and still holds its journal after its lease. The next start runs its
    unit again."""
    alive = tmp_path / "run" / "journal" / "1-1" / "alive"
    there = ProcessId(pid=7, started=1, host="there", boot="b", lease_s=0.2)
    options = OpenOptions(grace_s=0.2)
    rows = [{"prompt": f"p{n}"} for n in range(5)]

    def make_source(driver: Driver) -> RunSource:
        reader = UnitReader(read_rows(rows), HASH, repeats=1)
        return RunSource(Plan(reader, driver.ledger, epoch=driver.epoch), driver, Sink())

    scenario = Scenario(workers={1: Worker("1-1", mortal=True)})
    async with await open_run(tmp_path / "run", {}, None, options) as driver:
        alive.parent.mkdir()
        with alive.open("wb") as held:
            held.write(msgspec.json.encode(there))
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            source = make_source(driver)
            async with asyncio.timeout(240):
                await Dispatcher(scenario.start, driver, Fleet(2, 2), scenario).run(source)
            assert source.stop is not None
            assert source.stop.cause == "worker_lost"
            assert "writer 1-1 (process 7 on there) still runs" in source.stop.detail
            assert driver.ledger.done == 4
    async with await open_run(tmp_path / "run", {}, None, options) as driver:
        source = make_source(driver)
        again = await source.next()
        assert again is not None
        assert (again.attempt, driver.report.lost[0].unit_id) == (1, again.unit_id)
