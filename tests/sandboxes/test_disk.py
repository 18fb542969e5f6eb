"""The file system that root gives each sandbox, and room on the disk of the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.cli import doctor_command
from hermes_rl.errors import SandboxKilled
from hermes_rl.sandboxes import Bubblewrap, GradingSpec, Sandbox, leased_sandbox, probe

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
WORKER = Path(__file__).with_name("worker.py")


def devices(state: Path) -> list[str]:
    """Loop devices on files below a folder."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(path.read_text())
        except OSError:  # given back just now
            continue
    return [name for name in found if name.startswith(f"{state}/")]


def given_back(state: Path) -> bool:
    deadline = time.monotonic() + 20
    while devices(state) and time.monotonic() < deadline:
        time.sleep(0.02)
    return devices(state) == []


async def test_a_sandbox_has_a_file_system_that_ends_with_the_worker(
    bubblewrap: Bubblewrap, state: Path
) -> None:
    """No other process sees it mounted, and its file has no name."""
    async with leased_sandbox(bubblewrap) as sandbox:
        assert sandbox.info.limits["workspace_held_by"] == "kernel"
        assert len(devices(state)) == 1
        assert str(state) not in Path("/proc/self/mounts").read_text()
        await sandbox.write_file("a/b", b"1")
        assert (await sandbox.run("cat a/b; echo 2 >c; sync c", timeout_s=20)).output == "1"
        assert await sandbox.read_file("c") == b"2\n"
        for _ in range(2):
            graded = await sandbox.grade(GradingSpec("cat $WORKSPACE/c; rm $WORKSPACE/c"))
            assert graded.output == "2\n"
        assert await sandbox.read_left("c") == b"2\n"
        assert len(devices(state)) == 1
    assert len(devices(state)) == 1, "the next sandbox takes it over"
    await bubblewrap.aclose()
    assert given_back(state)


def test_a_killed_worker_leaves_no_device(state: Path) -> None:
    command = [sys.executable, str(WORKER), str(state), "2", "bubblewrap"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert [next(worker.stdout) for _ in range(2)] == ["starting\n", "ready\n"]
    assert len(devices(state)) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert given_back(state)
    deadline = time.monotonic() + 20  # the watchdog cleans up
    while any(state.glob("owners/*")) and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def small_disk(state: Path) -> Iterator[Path]:
    """A state folder on a disk of 160 MB."""
    folder = state / "small"
    folder.mkdir(mode=0o711)
    mount = ["mount", "-t", "tmpfs", "-o", "size=160M,mode=0711", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


Two = tuple[Sandbox, Sandbox]


@pytest.fixture
async def two(small_disk: Path) -> AsyncIterator[Two]:
    """A sandbox that will write too much, and another, which must not notice."""
    backend = Bubblewrap(state_dir=small_disk)
    async with leased_sandbox(backend) as greedy, leased_sandbox(backend) as modest:
        yield greedy, modest
        assert (await modest.run("ls", timeout_s=20)).output == "file\n"
    await backend.aclose()


async def test_one_sandbox_does_not_fill_the_machines_disk(two: Two, small_disk: Path) -> None:
    """It ends while there is room for the files of others, who go on; it is marked on its files."""
    write = "for i in $(seq 20000); do head -c 1M /dev/zero; sleep 0.2; done >big"
    greedy, modest = two
    await modest.run("head -c 20M /dev/zero >file", timeout_s=20)
    await greedy.run("head -c 80M /dev/zero >first", timeout_s=20)
    with pytest.raises(SandboxKilled, match="disk is nearly full"):
        await greedy.run(write, timeout_s=60)
    found = os.statvfs(small_disk)
    assert found.f_bavail * found.f_frsize > 1 << 20
    assert (await greedy.grade(GradingSpec("ls $WORKSPACE"))).output == "big\nfirst\n"


async def test_a_verifier_does_not_fill_the_machines_disk(two: Two) -> None:
    """It may run what the agent left, and ends as an agent would."""
    write = "for i in $(seq 20000); do head -c 1M /dev/zero; sleep 0.01; done >big"
    greedy, modest = two
    await modest.run("head -c 20M /dev/zero >file", timeout_s=20)
    result = await greedy.grade(GradingSpec(f'cd "$WORKSPACE"; {write}', timeout_s=60))
    assert (result.exit_code, result.timed_out) == (137, False), result
    assert "[ended: the machine's disk is nearly full, and the sandbox holds" in result.output
    assert (await greedy.grade(GradingSpec('ls "$WORKSPACE"'))).output == ""


async def test_removed_files_count_for_who_wrote_them(two: Two) -> None:
    """The machine does not get their room back before the sandbox ends: it is the one to end."""
    remove = "head -c 96M /dev/zero >a; sync a; rm a; sleep 30"
    write = "for i in $(seq 58); do head -c 1M /dev/zero; sleep 0.02; done >file"
    greedy, modest = two
    running = asyncio.create_task(greedy.run(remove, timeout_s=60))
    assert (await modest.run(write, timeout_s=20)).exit_code == 0
    with pytest.raises(SandboxKilled, match="disk is nearly full"):
        await running


async def test_doctor_says_who_holds_the_workspace_to_its_size() -> None:
    assert (await asyncio.to_thread(probe.probe_machine)).no_disks == ""
    lines = {found.name: found.text for found in doctor_command.sandboxes()}
    assert lines["workspace"].startswith("limited by the kernel")


def test_without_the_right_to_mount_the_workspace_is_watched() -> None:
    """As in most containers. `doctor` says why, and the rows that it is so."""
    program = """
import asyncio
from hermes_rl.sandboxes import probe
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
async def main():
    backend = Bubblewrap()
    async with await backend.lease(SandboxSpec(lease="watched")) as sandbox:
        print((await sandbox.run("echo 1 >a; cat a", timeout_s=20)).output, end="")
        print(sandbox.info.limits["workspace_held_by"])
    await backend.aclose()
asyncio.run(main())
print(probe.probe_machine().no_disks)
"""
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\nwatching\nunshare: Operation not permitted\n", done


def test_a_mkfs_that_hangs_is_as_none(state: Path) -> None:
    """As on a disk that does not answer for a while."""
    program = f"""
import asyncio
from pathlib import Path
from hermes_rl.sandboxes import disks
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
disks.FORMAT_S = 0.1
async def main():
    backend = Bubblewrap(state_dir=Path({str(state)!r}))
    async with await backend.lease(SandboxSpec(lease="hangs")) as sandbox:
        print(sandbox.info.limits["workspace_held_by"])
    await backend.aclose()
asyncio.run(main())
"""
    hangs = state / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 100\n")
    hangs.chmod(0o755)
    script = 'mount --bind "$1" "$(command -v mkfs.ext4)"; shift; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(hangs), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "watching\n", done
