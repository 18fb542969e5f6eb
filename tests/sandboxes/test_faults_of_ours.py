"""What is no deed of the agent's is not laid at its door, and what it does cannot hold us up."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import SandboxStartError, TaskFault
from hermes_rl.sandboxes import (
    Beneath,
    Bubblewrap,
    GradingSpec,
    Look,
    Packing,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    Storage,
    Subprocess,
    Unpackable,
    leased_sandbox,
    measure,
    pack_in_thread,
    reading,
    remove_tree,
    watchdog,
)

Kind = type[Bubblewrap] | type[Subprocess]
each_kind = pytest.mark.parametrize("kind", [Bubblewrap, Subprocess])


async def test_pipes_and_sparse_files_do_not_hold_us_up(each_sandbox: Sandbox) -> None:
    await each_sandbox.run("mkfifo notes.txt; truncate -s 900M big", timeout_s=20)
    async with asyncio.timeout(60):
        with pytest.raises(OSError, match="regular file"):
            await each_sandbox.write_file("notes.txt", b"x")
        with pytest.raises(OSError, match="download it"):
            await each_sandbox.read_file("big")
    assert (await each_sandbox.run("echo still", timeout_s=20)).output == "still\n"


async def test_files_without_a_size_are_read_to_a_bound(
    each_sandbox: Sandbox, tmp_path: Path
) -> None:
    """Those of /proc: this one reports the size 0 and has 256 GB to give."""
    await each_sandbox.run("ln -s /proc/self/pagemap link", timeout_s=20)
    with pytest.raises(OSError, match="link: "):
        await each_sandbox.read_file("link")
    with pytest.raises(OSError, match="link: "):
        await each_sandbox.download("link", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_killed_watchdog_is_no_error_of_the_end(each_sandbox: Sandbox, state: Path) -> None:
    theirs = {*watchdog.tagged(str(state).encode())}
    (pid,) = theirs.intersection(watchdog.tagged(watchdog.__file__.encode()))
    os.kill(pid, signal.SIGKILL)
    assert (await each_sandbox.run("echo hi", timeout_s=20)).output == "hi\n"


async def test_a_plain_sandbox_is_ended_by_several_threads_at_once(plain: Subprocess) -> None:
    """As when a cancelled grading ends its processes and so does `aclose`. One thread alone closes
    the descriptor: a second time it would be somebody else's."""
    for _ in range(20):
        async with await plain.lease(SandboxSpec(lease="test")) as sandbox:
            jobs = "for n in {1..5}; do setsid sleep 600 >/dev/null 2>&1 & done"
            await sandbox.run(jobs, timeout_s=60.0)
            end = sandbox._tree.end_now
            await asyncio.gather(*(asyncio.to_thread(end) for _ in range(4)))


@each_kind
async def test_a_relative_state_folder(
    state: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(state.parent)
    backend: SandboxBackend = kind(state_dir=Path(state.name))
    async with leased_sandbox(backend) as sandbox:
        assert (await sandbox.run("echo here", timeout_s=20)).output == "here\n"
    await backend.aclose()


@each_kind
async def test_a_folder_that_all_may_write_is_refused_and_left_as_it_is(
    state: Path, kind: Kind
) -> None:
    shared = state / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(SandboxStartError, match="can be written by others"):
        await kind(state_dir=shared).lease(SandboxSpec(lease="s"))
    assert shared.stat().st_mode & 0o7777 == 0o1777
    shared.rmdir()


async def test_two_files_of_a_verifier_in_one_place(sandbox: Sandbox) -> None:
    with pytest.raises(TaskFault, match="both a file and a folder"):
        await sandbox.grade(GradingSpec(script="true", files={"a": b"1", "a/b": b"2"}))


@contextlib.contextmanager
def few_descriptors(most: int) -> Iterator[list[int]]:
    """Within, this process can open no more files. Yields descriptors that may be closed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


def test_no_descriptor_is_no_word_about_a_workspace(tmp_path: Path) -> None:
    """Ours are used up: the look says so, and not that the workspace is full."""
    (tmp_path / "file").write_text("x")
    with few_descriptors(256), pytest.raises(OSError, match="Too many open files"):
        Beneath(tmp_path).listing("", Look())


@pytest.mark.parametrize("way", [Packing.pack, Packing.copy])
def test_paths_as_long_as_the_machine_takes_are_the_agents_doing(
    tmp_path: Path, way: Callable[[Packing, Path], None]
) -> None:
    """The copy's paths are longer than those that were found."""
    source, back = tmp_path / "ws", os.getcwd()
    source.mkdir()
    os.chdir(source)
    try:
        for _ in range(2_000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(back)
    target = tmp_path / ("longer" * 20)
    try:
        with reading(source) as packing, pytest.raises(Unpackable, match="paths of more than"):
            way(packing, target)
    finally:  # pytest cannot remove trees as deep as these
        remove_tree(source)
        remove_tree(target)


async def test_a_cancelled_copy_ends_soon_and_is_not_reported(
    tmp_path: Path, loop_reports: list[dict[str, Any]]
) -> None:
    """Its walk ends with an error of its own, which nobody has to read."""
    source = tmp_path / "ws"
    source.mkdir()
    for number in range(200):
        (source / str(number)).write_text("x")
    begun = threading.Event()

    def walk(packing: Packing) -> None:
        begun.set()
        while True:
            packing.copy(tmp_path / "copy")
            remove_tree(tmp_path / "copy")

    work = asyncio.ensure_future(pack_in_thread(source, walk))
    await asyncio.to_thread(begun.wait)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 60)
    del work
    gc.collect()
    assert loop_reports == []


def test_a_locked_folder_is_copied(tmp_path: Path) -> None:
    """An ordinary user's agent that locks a folder does not escape its verifier."""
    source = tmp_path / "ws"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("x")
    (source / "d" / "f").chmod(0)
    (source / "d").chmod(0)
    try:
        with reading(source) as packing:
            packing.copy(tmp_path / "copy")
        assert (tmp_path / "copy" / "d").stat().st_mode & 0o777 == 0
        (tmp_path / "copy" / "d").chmod(0o700)
        assert (tmp_path / "copy" / "d" / "f").stat().st_mode & 0o777 == 0
    finally:
        for folder in (source / "d", tmp_path / "copy" / "d"):
            if folder.exists():
                folder.chmod(0o700)


def test_all_folders_of_a_sandbox_are_measured(tmp_path: Path) -> None:
    workspace, layer = tmp_path / "ws", tmp_path / "layer"
    workspace.mkdir()
    layer.mkdir()
    (layer / "big").write_bytes(b"x" * 100_000)
    spec = SandboxSpec(lease="m")
    storage = Storage(tmp_path, None, spec.limits)
    usage = measure(storage, [Beneath(workspace), Beneath(layer)], os.getpid())
    assert usage.bytes >= 100_000


async def test_a_machine_without_descriptors_starts_nothing_and_loses_nothing(
    bubblewrap: Bubblewrap,
) -> None:
    """It is the machine's fault, which a later attempt may not meet; no slot and no folder stays
    taken."""
    spec = SandboxSpec(lease="first")
    async with await bubblewrap.lease(spec) as sandbox:
        async with await bubblewrap.lease(spec) as second:
            uid = os.stat(f"/proc/{second.host_pid}").st_uid
        with few_descriptors(max(map(int, os.listdir("/proc/self/fd"))) + 20) as taken:
            with pytest.raises(SandboxStartError):
                await sandbox.grade(GradingSpec("true"))
            with pytest.raises(SandboxStartError):
                await bubblewrap.lease(spec)
            for _ in range(8):  # how far it gets differs
                os.close(taken.pop())
                with contextlib.suppress(SandboxStartError):
                    await (await bubblewrap.lease(spec)).aclose()
        assert (await sandbox.grade(GradingSpec("true"))).exit_code == 0
        async with await bubblewrap.lease(spec) as later:
            assert os.stat(f"/proc/{later.host_pid}").st_uid == uid
