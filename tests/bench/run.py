"""The numbers of docs/performance.md: one row per promise, with bare loops beside them.

    python tests/bench/run.py [--quick | --tiny] [--only NAME ...] [--scratch DIR] [--json]

CPU is user plus system time of the whole process tree with its sandboxes, the model server's left
out. What is compared is measured in turn, in the same minutes; figures are medians, with the range
over the repetitions in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import meter
from rows import ROWS
from setting import FULL, QUICK, TINY, Bench, Row


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 when a row could not be measured."""
    arguments = _parser().parse_args(argv)
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    chosen = arguments.only or list(ROWS)
    meter.become_reaper()
    start = time.monotonic()
    found: dict[str, Row] = {}
    if arguments.scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = str(arguments.scratch)
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        bench = Bench(sizes, Path(folder), _say)
        for name in chosen:
            try:
                found[name] = ROWS[name](bench)
            except Exception:  # the other rows are worth having all the same
                _say(f"{name}: not measured\n{traceback.format_exc()}")
    conditions = _conditions(time.monotonic() - start)
    if arguments.json:
        rows = {name: row.__dict__ for name, row in found.items()}
        print(json.dumps({"conditions": conditions, "rows": rows}))
    else:
        print(f"\n{conditions}\n\n{table(list(found.values()))}")
    return 0 if len(found) == len(chosen) else 1


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, notes below."""
    lines = ["| what | measured | bar | met | for scale |", "|---|---|---|---|---|"]
    for row in rows:
        met = "yes" if row.met else "**no**"
        lines.append(f"| {row.what} | {row.measured} | {row.bar} | {met} | {row.scale} |")
    notes = [f"- {row.what}: {note}" for row in rows for note in row.notes]
    return "\n".join(lines + (["", *notes] if notes else []))


def _conditions(seconds: float) -> str:
    cores = len(os.sched_getaffinity(0))
    load = "/".join(f"{x:.1f}" for x in os.getloadavg())
    with meter.Account("probe") as account:
        how = "control group" if account.path else "children that were waited for"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {platform.python_version()}, "
        f"{cores} cores, load {load} at the end, {seconds:.0f} s, CPU by {how}, "
        f"scratch on {_filesystem(tempfile.gettempdir())}"
    )


def _filesystem(folder: str) -> str:
    """The kind of file system that holds a folder."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if Path(folder).is_relative_to(place) and len(place) > len(best[0]):
            best = (place, kind)
    return best[1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller numbers, once each: minutes")
    size.add_argument("--tiny", action="store_true", help="only to see that the bench works")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="these rows")
    parser.add_argument("--scratch", type=Path, help="folder for sandboxes and run directories")
    parser.add_argument("--json", action="store_true", help="all figures for programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
