"""The event loop stays free: fsync and Parquet happen beside it."""

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import scripted_rows

from hermes_rl.store import JournalWriter, Publisher, open_run

ATTEMPTS = 64


class SlowDisk:
    """One fsync takes until the test releases it. On the event loop it would block the test.

    Args:
        slow: which one, from 1.
    """

    def __init__(self, patch: pytest.MonkeyPatch, slow: int = 1) -> None:
        self.slow = slow
        self.syncs = 0
        self._begun, self._released = threading.Event(), threading.Event()
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, partial(self._sync, getattr(os, name)))

    def _sync(self, sync: Callable[[int], None], fd: int) -> None:
        self.syncs += 1
        if self.syncs == self.slow:
            self._begun.set()
            assert self._released.wait(60), "the event loop was blocked"
        sync(fd)

    async def begun(self) -> None:
        """Wait until the slow fsync has begun."""
        assert await asyncio.to_thread(self._begun.wait, 60)

    def release(self) -> None:
        self._released.set()


async def test_attempts_wait_for_the_disk_together_and_the_loop_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that finish during an fsync share the next one, and return when it is done."""
    async with (
        await open_run(tmp_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        disk = SlowDisk(monkeypatch)
        rows = [scripted_rows.make_finished(number) for number in range(ATTEMPTS)]
        ends = [asyncio.create_task(journal.finish(row)) for row in rows]
        await disk.begun()
        assert not any(end.done() for end in ends), "it is not durable yet"
        disk.release()
        await asyncio.gather(*ends)
        assert disk.syncs < 10, "one for each attempt would be 64"


@pytest.mark.parametrize("slow", [0, 1, 2, 3, 4])
async def test_a_cancelled_publisher_finishes_its_batch(
    tmp_path: Path, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled before it begins, and during each fsync."""
    async with (
        await open_run(tmp_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        publisher = Publisher(journal)
        for number in range(5):
            journal.recorder(scripted_rows.attempt_key(number)).record(
                scripted_rows.make_begun(number)
            )
        await asyncio.gather(*(journal.finish(scripted_rows.make_finished(n)) for n in range(5)))
        disk = SlowDisk(monkeypatch, slow)
        drain = asyncio.create_task(publisher.drain())
        if slow:
            await disk.begun()
        drain.cancel()
        await asyncio.wait((drain,), timeout=0.01)
        assert not (slow and drain.done()), "its thread still writes"
        disk.release()
        await asyncio.gather(drain, return_exceptions=True)
        assert list((tmp_path / "tmp").iterdir()) == []
        await publisher.drain()
    assert [p.name for p in (tmp_path / "commits").iterdir()] == ["1-0-0.json"]
    assert list((tmp_path / "journal").iterdir()) == []


async def test_a_cancelled_open_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk = SlowDisk(patch)
        opening = asyncio.create_task(open_run(tmp_path, scripted_rows.CONFIG))
        await disk.begun()
        opening.cancel()
        disk.release()
        with pytest.raises(asyncio.CancelledError):
            await opening
    async with await open_run(tmp_path, scripted_rows.CONFIG) as driver:
        assert driver.epoch == 2
