"""Where a run of 10,000 workers and 100 million units would break: a simulation from constants that
are measured on this machine.

`python tests/bench/scale.py [--ray]` prints them and a table; `docs/scale.md` explains it. The
driver is one process, hence one queue: receipts, polls and rate reports arrive at random, and each
takes its measured CPU time. What the machine cannot measure is assumed, and named as such.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from driver_memory import over_a_run

from hermes_rl.models.rate import (
    RUN_USD,
    Coordinator,
    Events,
    Grant,
    LaneReport,
    LeaseReport,
    Report,
    UnitSpending,
)
from hermes_rl.store import (
    BatchSummary,
    Keys,
    Ledger,
    RunDir,
    begin_epoch,
    open_checkpoint,
    write_checkpoint,
    write_commit,
)

UNITS = 100_000_000
PUBLISH_EVERY_S = 300.0
BATCH_ROWS = 1000
POLL_S = 5.0
"""An idle worker answers a poll after a sixth of the lease of 30 s."""
REPORT_S = 0.25
"""Between two rate reports of a worker of a few."""
OBJECTS = 3
"""Per batch: trajectories, failures or segments, and the commit."""
PUTS_PER_S = 3500.0
"""Assumed: of one partitioned prefix of Amazon S3, by its documentation."""
RAY_CALL_MS = 0.5
"""Assumed unless --ray measures it: CPU of the driver for one call of an actor."""


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds of CPU for one of some calls."""
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


async def delays_ms(work: Callable[[], object]) -> list[float]:
    """By how many ms an event loop wakes up late while a thread works, in order of size. Without
    the time in which the whole process waited for a core."""
    found, working = list[float](), asyncio.create_task(asyncio.to_thread(work))
    while not working.done():
        begun, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.005)
        late = time.perf_counter() - begun - 0.005
        found.append(1000 * min(late, time.process_time() - used))
    return sorted(found)


@functools.cache
def rate_reports(workers: int) -> tuple[float, float]:
    """Of this many workers on one lane with a budget: CPU of one report at the driver in ms (median
    of five rounds), and the reports of all per second."""
    budget = {RUN_USD: 10**18}
    coordinator = Coordinator(100_000, budget, {}, clock=time.monotonic, unix=time.time)
    units = tuple(UnitSpending(place, 5, 10**6) for place in range(64))
    lease = LeaseReport(budget=RUN_USD, spent=5, held=64 * 10**6, units=units)

    def report(number: int) -> Grant:
        lane = LaneReport(lane="host|account|model", demand=64, events=Events(running=60))
        report = Report(worker=f"1-{number}", lanes=(lane,), leases=(lease,))
        return coordinator.handle(report)

    for number in range(workers):
        interval = report(number).interval
    rounds = [timed(lambda: report(random.randrange(workers)), 200) for _ in range(5)]
    return 1000 * statistics.median(rounds), workers / REPORT_S / interval


def commit_constants(folder: Path) -> dict[str, float]:
    """A commit of 1,000 units: its size, the time to load it, and the memory of the ledger."""
    ids = [hashlib.sha256(b"%d" % n).hexdigest()[:32] for n in range(100 * BATCH_ROWS)]
    one = {"end": [0], "cause": [-1], "names": ["answered"]}
    commits = []
    for n in range(100):
        units = ids[n * BATCH_ROWS : (n + 1) * BATCH_ROWS]
        columns: dict[str, Any] = {name: value * len(units) for name, value in one.items()}
        keys = Keys(
            **(columns | {"names": one["names"]}),
            unit_id=units,
            epoch=[1] * len(units),
            attempt=[0] * len(units),
            table="t" * len(units),
        )
        commits.append(msgspec.structs.replace(BatchSummary().commit(f"1-{n}-0"), keys=keys))
    run_dir = RunDir(folder)
    run_dir.create()
    start = time.perf_counter()
    for commit in commits[:20]:
        write_commit(run_dir, commit)
    written = (time.perf_counter() - start) / 20
    size = (folder / "commits" / "1-0-0.json").stat().st_size
    for n in range(5000):
        (folder / "commits" / f"2-{n}-0.json").touch()
    listing = timed(run_dir.commit_stems, 3) / 5020
    tracemalloc.start()
    ledger = Ledger()
    load = timed(lambda: ledger.load(commits), 1) / len(ids)
    memory = tracemalloc.get_traced_memory()[0] / len(ids)
    tracemalloc.stop()
    for path in (folder / "commits").glob("2-*.json"):
        path.unlink()
    epoch = begin_epoch(run_dir, {}, {}).epoch
    for commit in commits:
        write_commit(run_dir, commit)
    saved = timed(lambda: write_checkpoint(run_dir, epoch, None), 1) / len(ids)
    late = asyncio.run(delays_ms(lambda: write_checkpoint(run_dir, epoch, None)))
    base = open_checkpoint(run_dir)
    assert base is not None
    some = bytes.fromhex("".join(ids))
    return {
        "commit_write_ms": 1000 * written,
        "commit_bytes_per_unit": size / BATCH_ROWS,
        "commit_list_us_per_file": 1e6 * listing,
        "ledger_load_us_per_unit": 1e6 * load,
        "ledger_bytes_per_unit": memory,
        "checkpoint_write_us_per_unit": 1e6 * saved,
        "checkpoint_loop_delay_p99_ms": late[99 * len(late) // 100],
        "checkpoint_loop_delay_worst_ms": late[-1],
        "checkpoint_open_us_per_unit": 1e6 * timed(lambda: open_checkpoint(run_dir), 5) / len(ids),
        "checkpoint_find_us_per_unit": 1e6 * timed(lambda: [*base.open_among(some)], 5) / len(ids),
        "checkpoint_bytes_per_unit": (folder / "ledger.checkpoint").stat().st_size / len(ids),
    }


def unit_ms(workers: int) -> float:
    """CPU of the driver for one unit of a run with this many workers."""
    return asyncio.run(over_a_run(20_000, workers))["driver_cpu_ms_per_unit"]


def ray_call_ms(calls: int = 2000) -> float:
    """CPU of the driver for one call of an actor that answers at once."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(_Answers).remote()

    async def call() -> None:
        for _ in range(calls // 20):
            await asyncio.gather(*(actor.poll.remote() for _ in range(20)))

    asyncio.run(call())
    start = time.process_time()
    asyncio.run(call())
    spent = time.process_time() - start
    ray.shutdown()
    return 1000 * spent / calls


class _Answers:
    async def poll(self) -> bytes:
        return b"x" * 500


def simulate(
    workers: int, at_once: int, seconds: float, constants: dict[str, float], arrivals: int = 200_000
) -> dict[str, Any]:
    """One combination.

    Args:
        workers: processes on other machines.
        at_once: rollouts in flight in each.
        seconds: of one rollout.
    """
    units = workers * at_once / seconds
    report_ms, reports = rate_reports(workers)
    kinds = [
        (units, constants["driver_ms_per_unit"] + constants["ray_call_ms"]),
        (max(workers / POLL_S, min(units, 20 * workers)), constants["ray_call_ms"]),
        (reports, constants["ray_call_ms"] + report_ms),
    ]
    total = sum(rate for rate, _ in kinds)
    load = sum(rate * ms for rate, ms in kinds) / 1000
    chance, wait, waits = random.Random(0), 0.0, list[float]()
    for _ in range(arrivals):
        ((_, ms),) = chance.choices(kinds, [rate for rate, _ in kinds])
        wait = max(0.0, wait + ms / 1000 - chance.expovariate(total))
        waits.append(wait)
    rows = min(BATCH_ROWS, max(1.0, at_once * PUBLISH_EVERY_S / seconds))
    batches = units / rows
    return {
        "workers": workers,
        "in flight": workers * at_once,
        "rollout s": seconds,
        "units/s": round(units),
        "days": round(UNITS / units / 86400, 1),
        "driver load": round(load, 2),
        "p99 wait s": round(sorted(waits)[int(0.99 * arrivals)], 3) if load < 1 else "unbounded",
        "rows/batch": round(rows),
        "PUT/s": round(batches * OBJECTS),
        "of S3 prefix": f"{batches * OBJECTS / PUTS_PER_S:.0%}",
        "commits": round(UNITS / rows),
    }


def main() -> None:
    """Print constants and table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ray", action="store_true", help="measure the calls of an actor, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        constants = commit_constants(Path(folder) / "run")
    constants |= {
        f"report_us_{workers}_workers": 1000 * rate_reports(workers)[0]
        for workers in (10, 100, 1000, 10_000)
    } | {
        "driver_ms_per_unit_2_workers": unit_ms(2),
        "driver_ms_per_unit": unit_ms(1000),
        "ray_call_ms": ray_call_ms() if options.ray else RAY_CALL_MS,
    }
    print(json.dumps({name: round(value, 5) for name, value in constants.items()}, indent=2))
    rows = [
        simulate(workers, at_once, seconds, constants)
        for workers in (8, 100, 300, 1000, 3000, 10_000)
        for at_once, seconds in ((64, 60.0), (64, 600.0))
    ]
    for row in [dict.fromkeys(rows[0]) | {n: n for n in rows[0]}, *rows]:
        print(" | ".join(str(value).rjust(len(name)) for name, value in row.items()))
    load_s = UNITS * constants["ledger_load_us_per_unit"] / 1e6
    print(f"a start with {UNITS:,} finished units: {load_s / 60:.0f} min of CPU,")
    print(f"{UNITS * constants['ledger_bytes_per_unit'] / 2**30:.1f} GB for the ledger,")
    print(f"{UNITS * constants['commit_bytes_per_unit'] / 2**30:.1f} GB of commits")


if __name__ == "__main__":
    sys.exit(main())
