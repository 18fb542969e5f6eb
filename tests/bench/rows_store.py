"""What the driver, Ray and the store cost."""

from __future__ import annotations

import json
from pathlib import Path

import meter
from setting import HERE, Bench, Cost, Row

TEXT_BYTES = 50_000
"""Of a prompt: its row holds it twice, as `task_prompt` and in `messages`."""


def per_trajectory(bench: Bench) -> Row:
    """Driver and Ray for a trajectory of 100 KB, and its Parquet."""
    few, many = bench.sizes.stored // 6, bench.sizes.stored
    words = "the quick brown fox jumps over a lazy dog {} ".replace("{}", "and runs") * 1200
    prompt = "Task {}: " + words[:TEXT_BYTES]
    path = bench.dataset(many, prompt)
    first = path.with_name("few.jsonl")
    with path.open() as lines, first.open("w") as out:
        out.writelines(line for _, line in zip(range(few), lines, strict=False))
    found = []
    for rows, dataset in ((few, first), (many, path)):
        cost = bench.ours(*("", rows, 16, "none", "--workers", "2"), sample_s=0.2, dataset=dataset)
        found.append(_apart_from_workers(cost))
    driver_ms = (found[1] - found[0]) / (many - few) * 1e3
    line = meter.python(HERE / "parquet_cost.py", str(many), str(2 * TEXT_BYTES))
    store = json.loads(meter.measure(line, name="parquet").out)
    whole = driver_ms + store["parquet_ms"]
    bench.say(f"driver and Ray {driver_ms:.2f} ms, Parquet {store['parquet_ms']:.2f} ms")
    return Row(
        "driver and Ray per trajectory of 100 KB, Parquet included",
        f"{whole:.1f} ms = {driver_ms:.1f} + {store['parquet_ms']:.1f}",
        "3 ms CPU",
        whole <= 3.0,
        f"journal line {store['journal_ms']:.1f} ms, in the worker",
        data={"driver_and_ray_ms": driver_ms, **store},
    )


def _apart_from_workers(cost: Cost) -> float:
    """CPU of all processes that make no rollouts."""
    return sum(s for (_, name), s in cost.cpu_by_process.items() if not _works(name))


def _works(name: str) -> bool:
    return name.startswith("ray::Worker") or name in ("bash", "bwrap", "true", "sh")


def resume(bench: Bench) -> Row:
    """Resuming a run with very many finished units, from the command to the report."""
    line = meter.python(HERE / "resume.py", str(bench.sizes.resumed))
    found = json.loads(meter.measure(line, name="resume").out)
    seconds = found["resume_s"]
    return Row(
        f"resume of a run with {bench.sizes.resumed:,} finished units",
        f"{seconds:.1f} s, {found['peak_rss_mb']:.0f} MB",
        "10 s, 500 MB",
        seconds <= 10.0 and found["peak_rss_mb"] < 500.0,
        f"{found['cpu_s']:.1f} s CPU; {found['dataset_mb']} MB of dataset read",
        data=found,
    )


def driver_memory(bench: Bench) -> Row:
    """Memory of the driver over many units."""
    line = meter.python(HERE / "driver_memory.py", str(bench.sizes.driven), "20000")
    found = json.loads(meter.measure(line, name="driver").out)
    return Row(
        f"driver memory over {bench.sizes.driven:,} units",
        f"{found['mb_per_1000_units']:.2f} MB per 1,000",
        "1 MB per 1,000",
        found["mb_per_1000_units"] < 1.0,
        f"{found['driver_cpu_ms_per_unit']:.2f} ms CPU per unit",
        data=found,
    )


def programs() -> list[Path]:
    """The programs that rows start."""
    return sorted(HERE.glob("*.py"))
