"""A full disk raises DiskFull, corrupts nothing, and the run continues once there is space."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import invariants as checks
import pytest
import scripted_rows
from scripted_driver import Plan

from hermes_rl.errors import DiskFull, StoreError
from hermes_rl.store import (
    AppendFile,
    CrashHook,
    JournalWriter,
    OpenOptions,
    Publisher,
    load_run,
    open_run,
    read_payloads,
)

HERE = Path(__file__).parent

LIMITED = """
import resource, signal, sys
from pathlib import Path
from hermes_rl.errors import DiskFull
from hermes_rl.store.crash import CrashHook
from hermes_rl.store.files import AppendFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = AppendFile(Path(sys.argv[1]), CrashHook(), "attempt-3-done")
file.append(b"a" * 400)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
try:
    file.append(b"b" * 400)
except DiskFull:
    print("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append(b"c" * 400)
"""


def test_a_partial_write_is_truncated(tmp_path: Path) -> None:
    """A file size limit cuts the write in the middle of a line, like a full disk."""
    path = tmp_path / "done-0.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "full\n"
    assert list(read_payloads(path)) == [b"a" * 400, b"c" * 400]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, which only root can mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, b"size=1m")
    if mounted:
        pytest.skip(
            "mounting a small file system needs root; see test_a_partial_write_is_truncated"
        )
    yield tmp_path
    libc.umount2(bytes(tmp_path), 2)


def fill(path: Path, leave: int) -> None:
    """Fill the file system but for some bytes."""
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    (path / "ballast").write_bytes(b"x" * max(0, free - leave))


@pytest.mark.parametrize("leave", [4096, 20_000, 60_000, 120_000])
async def test_a_full_disk(small_disk: Path, leave: int) -> None:
    """Filled at different moments: in live lines, in rows, in parts, in commits."""
    path = small_disk / "run"
    plan = Plan(str(path), units=40)
    finished: list[int] = []
    async with (
        await open_run(path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        publisher = Publisher(journal)

        async def attempts() -> None:
            for number in range(plan.units):
                if number == 5:
                    fill(small_disk, leave)
                driver.dispatch(scripted_rows.make_item(number, 0, 1), journal.writer)
                made = scripted_rows.make_finished(number)
                recorder = journal.recorder(made.key)
                for event in scripted_rows.make_events(number):
                    recorder.record(event)
                await journal.finish(made)
                finished.append(number)
                driver.receive(scripted_rows.make_receipt(made, journal.writer))
                if number % 5 == 4:
                    await publisher.drain()

        with pytest.raises(DiskFull, match=r"the disk is full: .*Free some space and run again"):
            await attempts()
        for line in (path / "journal" / "1-0").glob("*.jsonl"):
            list(read_payloads(line))  # raises for a line that was not undone
    assert len(finished) >= 5
    checks.check_invariants(path)

    (small_disk / "ballast").unlink()
    async with await open_run(path, scripted_rows.CONFIG, None, OpenOptions(grace_s=0.1)) as again:
        states = {n: again.ledger.disposition(scripted_rows.unit_id(n)) for n in finished}
    assert set(states.values()) == {"done"}
    assert set(load_run(path).trajectories["unit_id"]) == {
        scripted_rows.unit_id(n) for n in finished
    }
    checks.check_invariants(path)


def test_lines_have_length_and_checksum(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a", CrashHook(), "attempt-3-done")
    file.append(b'{"a":1}')
    file.close()
    assert (tmp_path / "a").read_bytes() == b'7 561bacaf {"a":1}\n'
    with pytest.raises(FileExistsError):
        AppendFile(tmp_path / "a", CrashHook(), "attempt-3-done")


@pytest.mark.parametrize("left", ["", "tmp"])
async def test_a_run_directory_that_is_moved_while_it_is_driven_is_reported(
    run_path: Path, left: str
) -> None:
    """In one line, and nothing is lost when it is back."""
    place, moved = run_path / left, run_path.parent / "moved"

    async def drive() -> None:
        async with (
            await open_run(run_path, scripted_rows.CONFIG) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
        ):
            await scripted_rows.run_attempt(driver, journal, 1)
            place.rename(moved)
            await Publisher(journal, commit=driver.commit).drain()

    with pytest.raises(StoreError, match="were moved or removed during the run") as raised:
        await drive()
    assert "\n" not in str(raised.value)
    assert not run_path.exists() or left
    moved.rename(place)
    async with await open_run(run_path, scripted_rows.CONFIG, None, OpenOptions(grace_s=0.1)):
        assert list(load_run(run_path).trajectories["unit_id"]) == [scripted_rows.unit_id(1)]
