"""The event loop stays free: fsync and Parquet happen beside it."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest
import scripted_rows

from hermes_rl.store import JournalWriter, OpenOptions, Publisher, RunDir, SealPolicy, open_run

ATTEMPTS = 64
ROUNDS = 6


async def lags(stop: asyncio.Event) -> list[float]:
    """How late the loop wakes, sampled every millisecond."""
    found = []
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        found.append(time.perf_counter() - before - 0.001)
    return found


async def measure(path: Path, fsync_delay_s: float) -> tuple[float, float]:
    """(median lag of the loop, seconds) of many attempts at once."""
    async with await open_run(path, scripted_rows.CONFIG) as driver:
        run_dir = RunDir(path, fsync_delay_s=fsync_delay_s)
        policy = SealPolicy(rows=50)
        async with JournalWriter(run_dir, driver.epoch, 0, policy=policy) as journal:
            publisher = Publisher(journal)
            stop = asyncio.Event()
            watch = asyncio.create_task(lags(stop))
            publishing = asyncio.create_task(publisher.run())
            start = time.perf_counter()

            async def attempts(slot: int) -> None:
                for number in range(ROUNDS):
                    await asyncio.sleep(0.02)
                    await journal.finish(rows[slot * ROUNDS + number])

            rows = [scripted_rows.make_finished(n) for n in range(ATTEMPTS * ROUNDS)]
            async with asyncio.TaskGroup() as group:
                for slot in range(ATTEMPTS):
                    group.create_task(attempts(slot))
            seconds = time.perf_counter() - start
            stop.set()
            found = await watch
            publishing.cancel()
            await publisher.drain()
    return statistics.median(found), seconds


async def test_a_slow_fsync_does_not_block_the_loop(tmp_path: Path) -> None:
    median, seconds = await measure(tmp_path / "slow", 0.02)
    assert median < 0.015, "the loop is late as long as an fsync takes"
    # One after another the fsyncs alone would take 64 x 6 x 20 ms = 7.7 s; grouped they share.
    assert seconds < ATTEMPTS * ROUNDS * 0.02


async def test_finish_returns_only_once_it_is_durable(tmp_path: Path) -> None:
    async with await open_run(tmp_path, scripted_rows.CONFIG) as driver:
        run_dir = RunDir(tmp_path, fsync_delay_s=0.2)
        async with JournalWriter(run_dir, driver.epoch, 0) as journal:
            start = time.perf_counter()
            await asyncio.gather(
                *(journal.finish(scripted_rows.make_finished(n)) for n in range(20))
            )
            took = time.perf_counter() - start
    assert 0.2 <= took < 3.5, "at least one fsync, and far fewer than twenty"


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
async def test_a_cancelled_publisher_finishes_its_batch(tmp_path: Path, after_s: float) -> None:
    async with await open_run(tmp_path, scripted_rows.CONFIG) as driver:
        run_dir = RunDir(tmp_path, fsync_delay_s=0.02)
        async with JournalWriter(run_dir, driver.epoch, 0) as journal:
            publisher = Publisher(journal)
            for number in range(5):
                journal.recorder(scripted_rows.attempt_key(number)).record(
                    scripted_rows.make_begun(number)
                )
            await asyncio.gather(
                *(journal.finish(scripted_rows.make_finished(n)) for n in range(5))
            )
            drain = asyncio.create_task(publisher.drain())
            await asyncio.sleep(after_s)
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            assert list((tmp_path / "tmp").iterdir()) == []
            await publisher.drain()
    assert [p.name for p in (tmp_path / "commits").iterdir()] == ["1-0-0.json"]
    assert list((tmp_path / "journal").iterdir()) == []


async def test_a_cancelled_open_releases_the_lock(tmp_path: Path) -> None:
    options = OpenOptions(fsync_delay_s=0.5)
    opening = asyncio.create_task(open_run(tmp_path, scripted_rows.CONFIG, None, options))
    await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with await open_run(tmp_path, scripted_rows.CONFIG) as driver:
        assert driver.epoch == 2
