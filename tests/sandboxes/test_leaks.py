"""Nothing is left: no process, folder, slot or group, whatever is killed; and nothing of others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_rl.sandboxes import (
    Bubblewrap,
    BubblewrapSandbox,
    GradingSpec,
    SandboxSpec,
    Subprocess,
    limits,
    processes,
    watchdog,
)

WORKER = Path(__file__).with_name("worker.py")


def doomed(state: Path, count: int, kind: str = "bubblewrap") -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(state), str(count), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the worker did not say {word}")


def owners(state: Path, pid: int) -> list[str]:
    return [name for name in os.listdir(state / "owners") if name.startswith(f"{pid}-")]


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(0.02)


def groups(owner: str) -> list[str]:
    base = limits.detect().base
    names = os.listdir(base) if base else []
    return [name for name in names if name.startswith(f"hermes-rl-{owner}.")]


async def test_closing_leaves_nothing(bubblewrap: Bubblewrap, state: Path) -> None:
    sandbox = await bubblewrap.lease(SandboxSpec(lease="one"))
    [owner] = owners(state, os.getpid())
    await sandbox.run(
        "mkdir -p a/b; chmod 000 a; (setsid sleep 5000 &); sleep 5000 &", timeout_s=20
    )
    deep = "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')"
    await sandbox.run(f'python3 -c "{deep}"', timeout_s=60)
    host = sandbox.host_pid
    below = processes.descendants(host)
    assert len(below) >= 3
    await sandbox.aclose()
    assert not any(proc.alive() for proc in below)
    assert processes.find(host) is None
    assert [path.name for path in (state / "boxes").iterdir()] == [f"{owner}.1"]  # what is shared
    assert groups(owner) == []


async def test_a_grading_that_is_cancelled_again_and_again_leaves_nothing(
    bubblewrap: Bubblewrap, sandbox: BubblewrapSandbox, state: Path
) -> None:
    """Also while the thread that leaves its mounts starts other sandboxes."""
    [owner] = owners(state, os.getpid())
    opened = len(os.listdir("/proc/self/fd"))

    def present() -> bool:
        folders = any("grade1" in names for _, names, _ in os.walk(state))
        return folders or any("grade" in name for name in groups(owner))

    def left() -> bool:
        # A look at the sandbox may have some descriptors for a moment.
        return present() or len(os.listdir("/proc/self/fd")) > opened

    grading = asyncio.create_task(sandbox.grade(GradingSpec(script="sleep 600", timeout_s=600.0)))
    await asyncio.to_thread(until, present)
    await asyncio.sleep(0.5)  # it has probably begun
    starting = asyncio.create_task(bubblewrap._spawner.call(lambda: time.sleep(0.5)))
    while not grading.done():
        grading.cancel()
        await asyncio.sleep(0.01)
    assert grading.cancelled()
    await starting
    await asyncio.to_thread(until, lambda: not left())


def daemon() -> str:
    """A command that lives on with nothing of its parents but their life line."""
    return f"sleep {970_000 + os.getpid()}"


def living(command: str) -> Iterator[processes.Proc]:
    """Processes of this machine with this command line."""
    for pid in watchdog.tagged(command.split()[1].encode()):
        found = processes.find(pid)
        if found is not None and found.alive():
            yield found


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (":", 0),
        ("mkdir -p a/b/c; touch f a/g a/b/c/h", 0),
        ("ln -s / there; mkfifo p; mkdir -p d; ln -s ../.. d/up; mkdir locked; chmod 0 locked", 0),
        ("(setsid DAEMON &); DAEMON & disown", 2),
    ],
)
async def test_closing_an_idle_shell_leaves_nothing(
    plain: Subprocess, state: Path, tmp_path: Path, command: str, left: int
) -> None:
    """Nothing is searched for where nothing can be; whatever is there goes, and nothing beside."""
    (tmp_path / "kept").write_text("x")
    sandbox = await plain.lease(SandboxSpec(lease="idle"))
    command = command.replace("DAEMON", daemon())
    done = await sandbox.run(f"ln -s {tmp_path} out; {command}", timeout_s=20)
    assert done.exit_code == 0
    [owner] = owners(state, os.getpid())
    until(lambda: len([*living(daemon())]) == left)
    await sandbox.aclose()
    assert [*living(daemon())] == []
    assert (tmp_path / "kept").read_text() == "x"
    assert [path.name for path in (state / "boxes").iterdir()] == [f"{owner}.1"]  # what is shared
    assert [*Path(watchdog.memory_folder(str(state))).iterdir()] == []


async def test_closing_ends_a_background_process_that_holds_nothing(plain: Subprocess) -> None:
    """Without the life line and without the mark it is known only as a child of the shell."""
    closing = "for fd in /proc/self/fd/*; do n=${fd##*/}; ((n > 2 && n < 255)) && exec {n}>&-; done"
    for _ in range(40):
        sandbox = await plain.lease(SandboxSpec(lease="child"))
        process = await sandbox.start_process(f"exec bash -c '{closing}; exec env -i {daemon()}'")
        found = processes.find(process.pid)
        await sandbox.aclose()
        assert found is not None
        assert not found.alive()


async def test_slots_are_used_again(bubblewrap: Bubblewrap) -> None:
    if os.geteuid() != 0:
        return  # only root has slots
    uids = set()
    for _ in range(5):
        sandbox = await bubblewrap.lease(SandboxSpec(lease="slot"))
        uids.add(os.stat(f"/proc/{sandbox.host_pid}").st_uid)
        await sandbox.aclose()
    assert len(uids) == 1


@pytest.fixture
def worker_state(state: Path) -> Iterator[Path]:
    yield state
    until(lambda: not watchdogs(state))  # they end by themselves


def watchdogs(state: Path) -> set[int]:
    every = watchdog.tagged(watchdog.__file__.encode())
    return {*watchdog.tagged(str(state).encode())}.intersection(every)


async def use(kind: type[Bubblewrap] | type[Subprocess], state: Path) -> None:
    """The next start, which cleans up."""
    backend = kind(state_dir=state)
    await (await backend.lease(SandboxSpec(lease="next"))).aclose()
    await backend.aclose()


async def test_a_killed_worker_leaves_nothing(worker_state: Path) -> None:
    """50 sandboxes: no process, and no folder after the next start; a second run goes on."""
    other = Bubblewrap(state_dir=worker_state)
    ours = await other.lease(SandboxSpec(lease="other run"))
    worker = doomed(worker_state, 50)
    wait_for(worker, "ready")
    [owner] = owners(worker_state, worker.pid)
    tag = f"{owner}.".encode()
    assert len(watchdog.tagged(tag)) > 100
    worker.kill()
    worker.wait()
    until(lambda: not watchdog.tagged(tag))
    await use(Bubblewrap, worker_state)
    left = [path for path in (worker_state / "boxes").iterdir() if path.name.startswith(owner)]
    assert left == []
    assert owners(worker_state, worker.pid) == []
    assert groups(owner) == []
    assert (await ours.run("echo still here", timeout_s=20)).output == "still here\n"
    await ours.aclose()
    await other.aclose()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
async def test_a_worker_killed_while_it_starts_sandboxes(
    worker_state: Path, delay_s: float
) -> None:
    worker = doomed(worker_state, 30)
    wait_for(worker, "starting")
    time.sleep(delay_s)  # noqa: ASYNC251  (nothing else runs here)
    worker.kill()
    worker.wait()
    until(lambda: not watchdog.tagged(f"{worker.pid}-".encode()))
    await use(Bubblewrap, worker_state)
    assert [*(worker_state / "boxes").iterdir()] == []


async def test_the_reaper_works_without_a_watchdog(worker_state: Path) -> None:
    """Worker and watchdog killed together: the next start finds folders and processes."""
    worker = doomed(worker_state, 3)
    wait_for(worker, "ready")
    [owner] = owners(worker_state, worker.pid)
    (pid,) = watchdogs(worker_state)
    os.kill(pid, signal.SIGKILL)
    worker.kill()
    worker.wait()
    assert [*(worker_state / "boxes").glob(f"{owner}.*")]
    await use(Bubblewrap, worker_state)
    assert [*(worker_state / "boxes").iterdir()] == []
    assert watchdog.tagged(f"{owner}.".encode()) == []


async def test_a_worker_that_is_killed_with_its_children_leaves_nothing(worker_state: Path) -> None:
    """So Ray does: the watchdog is no child of the worker, and cleans up."""
    worker = doomed(worker_state, 3)
    wait_for(worker, "ready")
    for pid in processes.children(worker.pid):
        os.kill(pid, signal.SIGKILL)
    worker.kill()
    worker.wait()
    until(lambda: not [*worker_state.glob("boxes/*"), *worker_state.glob("owners/*")])


@pytest.mark.slow
async def test_a_hundred_timeouts(sandbox: BubblewrapSandbox) -> None:
    """The number of processes in a sandbox stays flat."""
    await sandbox.run("true", timeout_s=20)
    before = len(processes.descendants(sandbox.host_pid))
    for _ in range(100):
        await sandbox.run("for i in 1 2 3; do (setsid sleep 99 &); done; sleep 99", timeout_s=0.02)
    assert len(processes.descendants(sandbox.host_pid)) <= before


async def test_a_killed_worker_without_sandboxes_leaves_nothing_either(worker_state: Path) -> None:
    """The same promise for `none`: its processes are found by their mark."""
    worker = doomed(worker_state, 3, "none")
    wait_for(worker, "ready")
    [owner] = owners(worker_state, worker.pid)
    mark = f"HERMES_RL_LEASE={worker_state}/boxes/{owner}.".encode()
    assert len(watchdog.tagged(f"{owner}.".encode(), mark)) > 3
    memory = Path(watchdog.memory_folder(str(worker_state)))
    assert len([*memory.glob(f"{owner}.*")]) in (0, 3)  # none where /dev/shm has no space
    worker.kill()
    worker.wait()
    until(lambda: not watchdog.tagged(f"{owner}.".encode(), mark))
    await use(Subprocess, worker_state)
    assert [*(worker_state / "boxes").iterdir(), *memory.glob("*")] == []
