"""Readers see whole files and no row twice during a run; statistics follow from commits."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import invariants as checks
import pyarrow.parquet as pq
import pytest
import scripted_rows
from scripted_rows import Play, run_attempt

from hermes_rl.errors import StoreError
from hermes_rl.store import (
    Batch,
    JournalWriter,
    Publisher,
    SealPolicy,
    compact_run,
    load_run,
    open_run,
)


async def test_reading_during_a_run(run_path: Path) -> None:
    """Each look finds every attempt that had its receipt before, once."""
    looks = 0
    over = asyncio.Event()
    receipts: set[str] = set()

    def look(before: set[str]) -> None:
        table = load_run(run_path).arrow("trajectories")
        seen = Counter(table["unit_id"].to_pylist())
        assert set(seen.values()) <= {1}
        assert before <= set(seen), "a finished row has vanished"
        for part in (run_path / "trajectories").glob("*.parquet"):
            pq.read_table(part)

    async def watch() -> None:
        nonlocal looks
        while not over.is_set():
            await asyncio.to_thread(look, set(receipts))
            looks += 1

    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, 1, 0, policy=SealPolicy(rows=7)) as journal,
        asyncio.TaskGroup() as group,
    ):
        publisher = Publisher(journal, every_s=0.05)
        group.create_task(watch())
        publishing = group.create_task(publisher.run())
        while len(receipts) < 150 or looks <= 3:
            number = len(receipts)
            await run_attempt(driver, journal, number)
            receipts.add(scripted_rows.unit_id(number))
            await asyncio.sleep(0.002)
        publishing.cancel()
        await publisher.drain()
        over.set()
    assert len(load_run(run_path).trajectories) == len(receipts)


def comparable(stats: dict[str, Any]) -> dict[str, Any]:
    """Without times, and without what lost attempts add."""
    kept = {k: v for k, v in stats.items() if k in ("plan", "units", "ends", "reward")}
    kept["ends"] = {k: v for k, v in kept["ends"].items() if k != "error"}
    kept["histograms"] = {k: stats["histograms"][k] for k in ("reward", "turns", "total_tokens")}
    return kept


def test_statistics_of_killed_and_undisturbed_runs_are_equal(play: Play, run_path: Path) -> None:
    whole = run_path.with_name("whole")
    assert play(path=whole) == 0
    for crash_at in ("attempt-4-synced:4", "publish-7-renamed:2", "recover-4-published:1"):
        play(path=run_path, crash_at=crash_at)
    assert play(path=run_path) == 0
    one, other = (json.loads((p / "stats.json").read_bytes()) for p in (whole, run_path))
    assert comparable(one) == comparable(other)
    assert one["attempts"]["finished"] == other["attempts"]["finished"] == 8
    assert load_run(whole).stats == one
    assert load_run(run_path).stats == other
    checks.check_invariants(whole)


class RecordingWriter(JournalWriter):
    """Notes the batches that are committed."""

    stems: asyncio.Queue[str]

    async def committed(self, batch: Batch) -> None:
        await super().committed(batch)
        self.stems.put_nowait(batch.stem)


async def test_a_batch_is_published_by_age(run_path: Path) -> None:
    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        RecordingWriter(driver.run_dir, 1, 0) as journal,
        asyncio.TaskGroup() as group,
    ):
        journal.stems = asyncio.Queue()
        publishing = group.create_task(Publisher(journal, every_s=0.2).run())
        begun = time.monotonic()
        await run_attempt(driver, journal, 0)
        assert await asyncio.wait_for(journal.stems.get(), 60) == "1-0-0"
        assert time.monotonic() - begun >= 0.2
        publishing.cancel()


async def test_digests_are_verified_on_demand(run_path: Path) -> None:
    """A changed value in a file that is still readable, and a missing file."""
    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, 1, 0) as journal,
    ):
        for number in range(7):
            await run_attempt(driver, journal, number)
        await Publisher(journal).drain()
    assert len(load_run(run_path, verify=True).trajectories) == 7
    compact_run(run_path, grace_s=0)
    part = run_path / "trajectories" / "part-1-0-0.parquet"
    pq.write_table(pq.read_table(part).slice(1), part)
    assert len(load_run(run_path).trajectories) == 6
    message = f"{part} has {part.stat().st_size} bytes, but .* were committed"
    with pytest.raises(StoreError, match=message + f". See hermes-rl check {run_path}"):
        load_run(run_path, verify=True)
    part.unlink()
    with pytest.raises(StoreError, match=f"{part} is missing, but its batch is committed"):
        load_run(run_path, verify=True)
