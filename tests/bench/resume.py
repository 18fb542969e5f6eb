"""How long a run with many finished units takes to resume, and how much memory that needs.

`python tests/bench/resume.py [UNITS]` prints one line of JSON. The commits are made in a temporary
folder by another process, so that the memory measured is that of opening the run alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from hermes_rl.store.commit import Commit, Keys, write_commit
from hermes_rl.store.driver import open_run
from hermes_rl.store.rundir import RunDir
from hermes_rl.store.summary import Summary

ROWS = 1000
"""Finished attempts of one batch, as the seal policy has it."""


def unit(number: int) -> str:
    return hashlib.sha256(number.to_bytes(8, "big")).hexdigest()[:32]


def make(path: str, units: int) -> None:
    """A run directory as it stands after so many units; one in ten took a second attempt."""
    asyncio.run(_begin(path))
    run_dir = RunDir(path)
    for batch, first in enumerate(range(0, units, ROWS)):
        numbers = range(first, min(first + ROWS, units))
        tries = [(n, a) for n in numbers for a in range(2 if n % 10 == 0 else 1)]
        last = [a == (1 if n % 10 == 0 else 0) for n, a in tries]
        keys = Keys(
            unit_id=[unit(n) for n, _ in tries],
            epoch=[1] * len(tries),
            attempt=[a for _, a in tries],
            table="".join("t" if done else "f" for done in last),
            end=[0 if done else 1 for done in last],
            cause=[-1 if done else 2 for done in last],
            names=["answered", "error", "model_timeout"],
        )
        summary = Summary(
            counts={"trajectories": len(numbers), "turns": 5 * len(numbers)},
            sums={"total_s": 1.5 * len(numbers)},
            histograms={"turns": {b: 1 for b in range(8)}},
        )
        commit = Commit(
            stem=f"1-0-{batch}",
            schema_version=1,
            committed_at=time.time(),
            keys=keys,
            parts=[],
            summary=summary,
        )
        (Path(path) / "commits" / f"1-0-{batch}.json").write_bytes(msgspec.json.encode(commit))
    write_commit(run_dir, commit)


async def _begin(path: str) -> None:
    async with await open_run(path, {}):
        pass


def measure(path: str, units: int) -> dict[str, float]:
    """Open it and ask for every unit once, as the plan does."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def run() -> tuple[float, float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        async with await open_run(path, {}) as driver:
            opened = time.perf_counter() - start
            opened_cpu = time.process_time() - cpu
            start = time.perf_counter()
            for number in range(units):
                assert driver.ledger.disposition(unit(number)) == "done"
            return opened, opened_cpu, time.perf_counter() - start

    opened, cpu, asked = asyncio.run(run())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "units": units,
        "open_s": round(opened, 2),
        "open_cpu_s": round(cpu, 2),
        "ask_all_s": round(asked, 2),
        "peak_rss_mb": round(peak / 1024, 1),
        "of_which_open_mb": round((peak - before) / 1024, 1),
    }


def resume(units: int = 1_000_000) -> dict[str, float]:
    """The whole measurement."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        path = f"{folder}/run"
        maker = spawn.Process(target=make, args=(path, units))
        maker.start()
        maker.join()
        return measure(path, units)


def main() -> None:
    """Print the measurement as JSON."""
    print(json.dumps(resume(*map(int, sys.argv[1:2]))))


if __name__ == "__main__":
    main()
