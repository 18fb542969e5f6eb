"""How long a run with many finished units takes to resume, and how much memory that needs.

`python tests/bench/resume.py [UNITS]` prints one line of JSON. The dataset and the commits are made
in a temporary folder by another process; then the run is resumed as `hermes-rl run` does it: the
run directory is opened, the dataset read, every unit found done, the manifest and the statistics
written. As after a kill, the last quarter of the commits is in no checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

ROWS = 1000
"""Finished attempts of one batch, as the seal policy has it."""

ROW = {
    "prompt": "Count the files in docs whose name ends in .txt and that hold the word {} at least "
    "once, and write the number, alone on one line, to the file count.txt in the workspace.",
    "setup": "mkdir docs; echo {} > docs/a.txt; echo no > docs/b.txt",
    "verify": 'test "$(cat count.txt)" = 1',
    "level": 2,
}


def config(folder: str) -> dict[str, object]:
    """The run."""
    return {
        "dataset": {"path": f"{folder}/rows.jsonl"},
        "model": {"name": "noop"},
        "sandbox": {"backend": "none"},
        "run": {"out": f"{folder}/run", "workers": 0, "allow_unsandboxed": True},
    }


def make(folder: str, units: int) -> None:
    """A dataset and its run directory, all done; one unit in ten took a second attempt."""
    from batch_runner import open_indexed, open_reader, resolve_settings
    from hermes_rl.config import parse_config
    from hermes_rl.store import Ledger, RunDir, write_checkpoint

    with open(f"{folder}/rows.jsonl", "w") as out:
        for n in range(units):
            row = {k: v.format(n) if isinstance(v, str) else v for k, v in ROW.items()}
            out.write(json.dumps({"id": f"count-{n}", **row}) + "\n")
    settings = resolve_settings(parse_config(config(folder), "resume.py"))
    asyncio.run(_begin(f"{folder}/run", settings.identity))
    # A run writes the index of a large dataset as it reads it.
    reader = open_indexed(settings, RunDir(f"{folder}/run"), Ledger()) or open_reader(settings)
    batches = -(-units // ROWS)
    for batch in range(batches):
        _commit(f"{folder}/run", batch, [u.unit_id for u in reader.take(ROWS, 60.0)])
        if batch == batches * 3 // 4:
            write_checkpoint(RunDir(f"{folder}/run"), 1, None)


def _commit(path: str, batch: int, units: list[str]) -> None:
    from hermes_rl.store import Commit, Keys, RunDir, Summary, write_commit

    tries = [(n, a) for n in range(len(units)) for a in range(2 if n % 10 == 0 else 1)]
    last = [a == (1 if n % 10 == 0 else 0) for n, a in tries]
    keys = Keys(
        unit_id=[units[n] for n, _ in tries],
        epoch=[1] * len(tries),
        attempt=[a for _, a in tries],
        table="".join("t" if done else "f" for done in last),
        end=[0 if done else 1 for done in last],
        cause=[-1 if done else 2 for done in last],
        names=["answered", "error", "model_timeout"],
    )
    summary = Summary(
        counts={"trajectories": len(units), "turns": 5 * len(units)},
        sums={"total_s": 1.5 * len(units)},
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
    write_commit(RunDir(path), commit)


async def _begin(path: str, identity: dict[str, object]) -> None:
    from hermes_rl.store import open_run

    async with await open_run(path, identity):
        pass


def measure(folder: str, units: int) -> dict[str, float]:
    """Resume it: nothing is left to do. Imports are part of it."""
    start = time.perf_counter()
    from batch_runner import Silent, run_batch
    from hermes_rl.config import parse_config

    report = run_batch(parse_config(config(folder), "resume.py"), progress=Silent())
    seconds = time.perf_counter() - start
    assert (report.units, report.done, report.left) == (units, units, 0), report
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "units": units,
        "dataset_mb": round(Path(f"{folder}/rows.jsonl").stat().st_size / 1e6),
        "resume_s": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_mb": round(used.ru_maxrss / 1024, 1),
    }


def resume(units: int = 1_000_000) -> dict[str, float]:
    """The whole measurement."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        maker = spawn.Process(target=make, args=(folder, units))
        maker.start()
        maker.join()
        return measure(folder, units)


def main() -> None:
    """Print the measurement as JSON."""
    print(json.dumps(resume(*map(int, sys.argv[1:2]))))


if __name__ == "__main__":
    main()
