"""The viewer on large runs: how soon one opens, how long a page takes, and the server's memory.

    python tests/bench/viewer.py [--rows 200000] [--gigabytes 20] [--keep FOLDER]

The first run has so many distinct rows of about 8 KB. The second one has parts of 100 MB under as
many names as its size needs: they are links to one file, so that it needs no such disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "viewer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))

from made_runs import finished_attempt
from served import Served, serving

from hermes_rl.store import open_run, schema_of, to_arrow

PART_ROWS = 1_000
GROUP_ROWS = 400
"""About the 64 MB of the store, for the rows of the second run."""
CALLS = {
    "call_id": "c", "turn": 1, "purpose": "agent", "agent": "main", "model": "toy", "retries": 0,
    "input_tokens": 900, "output_tokens": 80, "latency_s": 1.5, "outcome": "ok", "started_at": 1,
}  # fmt: skip
ENDS = ("answered", "answered", "answered", "max_turns", "error")


def make_row(number: int, text: str) -> dict[str, Any]:
    """A row with two calls, tool output and a text."""
    chance = random.Random(number)
    row: dict[str, Any] = msgspec.to_builtins(finished_attempt(number, text).row)
    end = chance.choice(ENDS)
    return {
        **row,
        "task_id": f"task-{number // 8:06}",
        "repeat": number % 8,
        "reward": None if end == "error" else float(chance.random() < 0.4),
        "end_reason": end,
        "turns": chance.randrange(1, 30),
        "calls": [CALLS, {**CALLS, "turn": 2}],
        "tool_stats": [
            {"tool": "terminal", "calls": 2, "ok": 1, "errors": chance.randrange(2), "seconds": 1.0}
        ],
        "usage": {**row["usage"], "input_tokens": 1800, "output_tokens": chance.randrange(999)},
    }


def write_part(path: Path, rows: list[dict[str, Any]]) -> None:
    table = to_arrow(rows, schema_of("trajectories"))
    pq.write_table(table, path, compression="zstd", row_group_size=GROUP_ROWS)


def make_rows(folder: Path, rows: int) -> None:
    """A run with this many distinct attempts."""
    vocabulary = [f"term{n}" for n in range(2_000)]
    for part in range(rows // PART_ROWS):
        chance = random.Random(part)
        made = [
            make_row(part * PART_ROWS + n, " ".join(chance.choices(vocabulary, k=900)))
            for n in range(PART_ROWS)
        ]
        write_part(folder / "trajectories" / f"part-1-0-{part}.parquet", made)


def make_gigabytes(folder: Path, gigabytes: float) -> None:
    """A run whose parts are links to one file of 100 MB that does not compress."""
    first = folder / "trajectories" / "part-1-0-0.parquet"
    texts = (os.urandom(75_000).hex() for _ in range(1_000))
    write_part(first, [make_row(n, text) for n, text in enumerate(texts)])
    size = first.stat().st_size
    for number in range(1, round(gigabytes * 1e9 / size)):
        first.with_name(f"part-1-0-{number}.parquet").hardlink_to(first)


async def empty_run(path: Path) -> None:
    async with await open_run(path, {"model": {"name": "toy"}}):
        pass


def measure(served: Served, run: str) -> dict[str, Any]:
    """Seconds of the first page, and of others."""
    start = time.monotonic()
    served.get("run", run=run)
    first = served.get("units", run=run)
    found: dict[str, Any] = {"rows": first["total"], "open_s": time.monotonic() - start}
    middle = first["total"] // 2
    queries: dict[str, dict[str, Any]] = {
        "plain": {}, "middle": {"offset": middle // 100 * 100}, "by reward": {"sort": "-reward"},
        "by time": {"sort": "-total_s"}, "by task": {"sort": "task_id"},
        "by tokens, late": {"sort": "-total_tokens", "offset": middle},
        "task": {"task": "task-000123"}, "failed": {"reward": "failed", "errors": 1},
        "ending": {"end": "max_turns", "sort": "-turns"},
        "text": {"q": "term1234 term7"}, "rare text": {"q": "nowhere in it"},
    }  # fmt: skip
    middle_row = served.get("units", run=run, offset=middle // 100 * 100)["rows"][0]
    for path in ("unit", "messages"):
        start = time.monotonic()
        served.get(path, run=run, id=middle_row["trajectory_id"])
        found[path] = time.monotonic() - start
    for name, query in queries.items():
        start = time.monotonic()
        page = served.get("units", run=run, **query)
        found[name] = time.monotonic() - start
        if "text" in name:
            found[f"{name}, unsearched"] = page["unsearched"]
    start = time.monotonic()
    served.get("runs")
    found["list of runs"] = time.monotonic() - start
    return found


def memory_mb(served: Served) -> dict[str, float]:
    status = Path(f"/proc/{served.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--keep", type=Path, help="folder of the runs; made once")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hermes-rl-viewer-") as temporary:
        folder = arguments.keep or Path(temporary)
        for name, make, size in (
            ("rows", make_rows, arguments.rows),
            ("gigabytes", make_gigabytes, arguments.gigabytes),
        ):
            if not (folder / name).exists():
                asyncio.run(empty_run(folder / name))
                make(folder / name, size)
            with serving(folder / name) as served:
                found = measure(served, name)
                print(json.dumps({"run": name, **found, **memory_mb(served)}, indent=1))


if __name__ == "__main__":
    main()
