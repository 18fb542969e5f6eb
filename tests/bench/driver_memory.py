"""What the driver itself costs: memory over many units, time per unit, and the plan's memory.

`python tests/bench/driver_memory.py [UNITS [PLANNED]]` prints one line of JSON. Workers are
stand-ins that answer each attempt at once, so that all that is measured is the driver's own: plan,
journal of dispatches, ledger, retries, sink.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch_runner import Dispatcher, Fleet, Plan, Progress, Reply, RunSource, Sink, UnitReader
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.sources import read_rows
from hermes_rl.store import Disposition, Driver, Ledger, open_run
from hermes_rl.usage import UsageTotal

CAPACITY = 32
"""Rollouts in flight in one worker."""
POINTS = 10
"""Memory is read so often; the first reading comes after the warm-up."""

CONFIG_HASH = "0" * 64


def rss_mb() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def dataset(units: int) -> Iterator[dict[str, Any]]:
    """Rows that differ, of about 300 bytes."""
    for number in range(units):
        yield {"id": f"task-{number}", "prompt": f"Do {number}. " + "x" * 200, "verify": "true"}


@dataclass
class StandIn:
    """A worker that finishes each attempt at once."""

    writer: str
    outbox: list[Receipt] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, item: WorkItem) -> None:
        usage = UsageTotal(input_tokens=100, output_tokens=10, total_tokens=110)
        self.outbox.append(
            Receipt(
                unit_id=item.unit_id,
                epoch=item.epoch,
                attempt=item.attempt,
                writer=self.writer,
                task_id=item.task_id,
                repeat=item.repeat,
                status="ok",
                end_reason="answered",
                cause=None,
                reward=1.0,
                turns=1,
                usage=usage,
                cost_usd=None,
                unpriced_calls=1,
                seconds=0.1,
            )
        )
        self.news.set()

    async def poll(self) -> Reply:
        await self.news.wait()
        self.news.clear()
        receipts, self.outbox = tuple(self.outbox), []
        return Reply(receipts=receipts, requests=len(receipts))

    async def close(self) -> Reply:
        return Reply()

    async def kill(self) -> None: ...


async def start(worker: int, capacity: int) -> StandIn:
    """Start one."""
    return StandIn(f"1-{worker}")


class Deaf:
    """Hears nothing; fails loudly."""

    def count_requests(self, requests: int, throttled: int) -> None: ...

    def report_lost_worker(self, writer: str, why: str) -> None:
        raise AssertionError(why)

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def report_fault(self, cause: str, text: str) -> None:
        raise AssertionError(text)


class Readings(Progress):
    """Memory at even distances over the run."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.units = 0
        self.points: list[tuple[int, float]] = []

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        self.units += 1
        if self.units % self.every == 0:
            self.points.append((self.units, rss_mb()))

    def slope(self) -> float:
        """MB per 1,000 units, least squares over the later half and more: warm-up left out."""
        points = self.points[2:]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        above = sum((x - mean_x) * (y - mean_y) for x, y in points)
        return 1000 * above / sum((x - mean_x) ** 2 for x, _ in points)


async def drive(driver: Driver, units: int, readings: Readings, workers: int) -> None:
    """A whole run with stand-ins."""
    reader = UnitReader(read_rows(dataset(units)), CONFIG_HASH, repeats=1)
    plan = Plan(reader, driver.ledger, epoch=driver.epoch)
    source = RunSource(plan, driver, Sink(readings))
    await Dispatcher(start, driver, Fleet(workers, workers * CAPACITY), Deaf()).run(source)


async def over_a_run(units: int, workers: int = 2) -> dict[str, float]:
    """Memory slope and CPU of the driver."""
    readings = Readings(units // POINTS)
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        async with await open_run(f"{folder}/run", {}) as driver:
            cpu = time.process_time()
            await drive(driver, units, readings, workers)
            cpu = time.process_time() - cpu
    return {
        "units": units,
        "mb_per_1000_units": round(readings.slope(), 4),
        "rss_mb": round(readings.points[-1][1], 1),
        "driver_cpu_ms_per_unit": round(1000 * cpu / units, 4),
    }


async def over_a_plan(rows: int) -> dict[str, float]:
    """Memory and CPU of planning rows that are all done, the ledger of them included."""
    before = rss_mb()
    ledger = Ledger()
    reader = UnitReader(read_rows(dataset(rows)), CONFIG_HASH, repeats=1)
    done = UnitReader(read_rows(dataset(rows)), CONFIG_HASH, repeats=1)
    while not done.ended:
        for unit in done.take(1000):
            ledger.apply(unit.unit_id, 0, done=True, cause=None)
    del done, unit
    cpu = time.process_time()
    plan = Plan(reader, ledger)
    while not plan.counts.complete:
        assert await plan.take() == []
    assert plan.counts.done == rows
    return {
        "planned_rows": rows,
        "plan_and_ledger_mb": round(rss_mb() - before, 1),
        "plan_cpu_us_per_row": round(1e6 * (time.process_time() - cpu) / rows, 2),
    }


def main() -> None:
    """Print the measurements as JSON."""
    units, rows = (list(map(int, sys.argv[1:3])) + [50_000, 200_000][len(sys.argv[1:3]) :])[:2]
    print(json.dumps({**asyncio.run(over_a_run(units)), **asyncio.run(over_a_plan(rows))}))


if __name__ == "__main__":
    main()
