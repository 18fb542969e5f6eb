"""A disk that stalls: nobody takes over what a thread of this process still writes."""

import asyncio
import os
from pathlib import Path
from typing import BinaryIO

import invariants as checks
import pyarrow.parquet as pq
import pytest
import scripted_rows

from hermes_rl.errors import StoreError
from hermes_rl.store import JournalWriter, OpenOptions, Publisher, load_run, open_run, publish_batch

OPTIONS = OpenOptions(grace_s=0.05)
UNITS = 4


class Stall:
    """A `done` file that gives its lines when the test says so: a FIFO in its place."""

    def __init__(self, done: Path) -> None:
        self.done, self.aside = done, done.with_name("aside")

    def __enter__(self) -> "Stall":
        os.rename(self.done, self.aside)
        os.mkfifo(self.done)
        return self

    async def reached(self) -> BinaryIO:
        """The FIFO's other end, once the publisher reads; its first rows are given to it."""
        end = await asyncio.to_thread(self.done.open, "wb", 0)
        self.lines = self.aside.read_bytes().splitlines(keepends=True)
        end.write(b"".join(self.lines[:2]))
        os.replace(self.aside, self.done)
        return end

    def __exit__(self, *_: object) -> None:
        pass


async def test_recovery_leaves_a_batch_whose_publisher_is_stalled(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        journal = await JournalWriter(driver.run_dir, driver.epoch, 0).__aenter__()
        publisher = Publisher(journal)
        for number in range(UNITS):
            await scripted_rows.run_attempt(driver, journal, number)
        done = run_path / "journal" / "1-0" / "done-0.jsonl"
        with Stall(done) as stall:
            publishing = asyncio.create_task(publisher.drain())
            end = await stall.reached()
            await journal.aclose()  # as the end of a worker's patience does
            with pytest.raises(StoreError, match="1-0 of this process still waits for its disk"):
                await driver.recover_worker("1-0")
            assert done.exists()
            assert os.listdir(run_path / "commits") == []
            end.write(b"".join(stall.lines[2:]))
            end.close()
            await publishing
        assert not done.exists()
        await driver.recover_worker("1-0")
    assert len(load_run(run_path).trajectories) == UNITS
    checks.check_invariants(run_path)
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        assert driver.ledger.done == UNITS


async def test_two_concurrent_publishers_of_a_batch_write_the_same(run_path: Path) -> None:
    """No lock can keep a host with a broken clock or network from it: then both write the same."""
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, 0) as journal:
            for number in range(UNITS):
                await scripted_rows.run_attempt(driver, journal, number)
        done = run_path / "journal" / "1-0" / "done-0.jsonl"
        with Stall(done) as stall:
            slow = asyncio.create_task(
                asyncio.to_thread(publish_batch, driver.run_dir, done, "1-0-0")
            )
            end = await stall.reached()
            await asyncio.to_thread(publish_batch, driver.run_dir, done, "1-0-0")
            end.write(b"".join(stall.lines[2:]))
            end.close()
            await slow
    assert len(load_run(run_path).trajectories) == UNITS
    checks.check_invariants(run_path)


async def test_done_is_kept_until_its_parts_are_intact(run_path: Path) -> None:
    """Killed between commit and unlink, and then the parts went: they are written again."""
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, 0) as journal:
            for number in range(UNITS):
                await scripted_rows.run_attempt(driver, journal, number)
        done = run_path / "journal" / "1-0" / "done-0.jsonl"
        lines = done.read_bytes()
        publish_batch(driver.run_dir, done, "1-0-0")
        part = run_path / "trajectories" / "part-1-0-0.parquet"
        whole = part.read_bytes()
        for damage in (None, b"", whole[:-9], bytes([whole[0] ^ 1]) + whole[1:]):
            part.unlink() if damage is None else part.write_bytes(damage)
            done.write_bytes(lines)
            publish_batch(driver.run_dir, done, "1-0-0")
            assert pq.read_table(part).num_rows == UNITS
            assert not done.exists()
    checks.check_invariants(run_path)
