"""The zygote: what it starts is bound to it, no part of it reaches a sandbox, and none stays."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from hermes_rl.errors import SandboxDied, SandboxStartError
from hermes_rl.sandboxes import (
    Bubblewrap,
    BubblewrapSandbox,
    GradingSpec,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    marks,
    probe,
    processes,
    slots,
    watchdog,
    zygote,
)

SPEC = SandboxSpec(lease="zygote")
INSIDE = (
    "cut -d' ' -f5,6 /proc/self/mountinfo | sort; ls -a / /dev /run; cat /proc/self/limits"
    "; hostname; id; ls -ld /tmp /run /dev/shm /workspace | cut -d' ' -f1,3,4; ip -br addr"
)
"""What a sandbox looks like from inside."""


def zygotes(state: Path) -> list[int]:
    """Those of a state folder, by the owners that have it."""
    tags = [f"{name}.0:".encode() for name in os.listdir(state / "owners")]
    return [pid for tag in tags for pid in watchdog.tagged(tag)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until_ended(pid: int) -> None:
    """Wait for the death of a process whose parent does not collect it."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def mounts(state: Path) -> int:
    """Of this process, at the folders of sandboxes: others of the machine come and go."""
    return Path("/proc/self/mountinfo").read_text().count(str(state))


def folders(state: Path) -> set[str]:
    """Those of sandboxes, and the one that all share."""
    return set(os.listdir(state / "boxes"))


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command, timeout_s=30)).output


@pytest_asyncio.fixture
async def running(bubblewrap: Bubblewrap) -> AsyncIterator[BubblewrapSandbox]:
    sandbox = await bubblewrap.lease(SPEC)
    yield sandbox
    await sandbox.aclose()


async def test_plain_sandboxes_are_children_of_one_unprivileged_process(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox, state: Path
) -> None:
    async with await bubblewrap.lease(SPEC) as other:
        [pid] = zygotes(state)
        assert {parent(running.host_pid), parent(other.host_pid)} == {pid}
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Uid:\t0" not in status
    assert os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
    found = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) - {b""}
    assert found == set()
    if os.geteuid() == 0:  # no id of anybody but sandboxes: not even as root of its namespace
        mapped = [line.split() for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines()]
        assert [int(outside) > 600_100_000 for _, outside, _ in mapped] == [True]


async def test_a_sandbox_has_the_namespaces_and_mounts_that_bubblewrap_gives(
    running: BubblewrapSandbox, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same places with the same kinds and flags, and no namespace that is another's."""
    kinds = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user")
    for kind in kinds:
        mine = os.readlink(f"/proc/self/ns/{kind}")
        [pid] = zygotes(state)
        found = os.readlink(f"/proc/{running.host_pid}/ns/{kind}")
        assert found not in (mine, os.readlink(f"/proc/{pid}/ns/{kind}")), kind
    seen = await sh(running, INSIDE)
    monkeypatch.setenv(zygote.SWITCH, "bubblewrap")
    reference = Bubblewrap(state_dir=state)
    async with await reference.lease(SPEC) as sandbox:
        assert zygotes(state) == [pid], "the reference starts none"
        expected = await sh(sandbox, INSIDE)
    await reference.aclose()
    assert _comparable(seen) == _comparable(expected)


async def test_a_verifier_is_shown_what_bubblewrap_shows_and_leaves_the_workspace_as_it_is(
    running: BubblewrapSandbox, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = "mkdir -p a/b; echo old >a/b/c; ln -s /verify/answer link; chmod 500 a/b"
    script = f"""{INSIDE}; cd /workspace; cat link a/b/c; env | sort; cat /proc/$$/oom_score_adj
find /workspace /verify /grading /hx -printf '%p %M %U %G\\n' | sort
chmod 700 a/b; echo new >a/b/c; rm -r a; (echo x >/usr/x; echo x >/x; echo x >/verify/x) 2>&1
echo; grep -c ulimit /proc/1/cmdline; exit 7"""
    spec = GradingSpec(script=script, files={"answer": b"42\n"})
    monkeypatch.setenv(zygote.SWITCH, "bubblewrap")
    reference = Bubblewrap(state_dir=state)
    async with await reference.lease(SPEC) as sandbox:
        results = []
        for one in (running, sandbox):
            await sh(one, prepare)
            results += [await one.grade(spec), await one.grade(spec)]
    await reference.aclose()
    assert {(r.exit_code, "42\nold\n" in r.output) for r in results} == {(7, True)}
    seen = [result.output.rpartition("\n\n") for result in results]
    assert [by_bubblewrap for _, _, by_bubblewrap in seen] == ["0\n", "0\n", "1\n", "1\n"]
    for output, _, _ in seen[1:]:
        assert _comparable(output) == _comparable(seen[0][0])


def _comparable(seen: str) -> list[str]:
    """Without what is a matter of machines, and options that only make a mount stricter."""
    options = ("noatime", "relatime", "nosuid", "nodev", "noexec")
    lines = [line for line in seen.splitlines() if not line.startswith(("total", "/dev/console"))]
    return [",".join(w for w in line.split(",") if w not in options) for line in lines]


async def test_no_part_of_the_zygote_reaches_a_sandbox(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox, state: Path
) -> None:
    """No descriptor, no process, no memory, no message: there is nobody to send it to."""
    [pid] = zygotes(state)
    for process in (running.host_pid, *processes.children(running.host_pid)):
        links = {
            os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")
        }
        its = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        shared = links & its
        assert shared <= {"/dev/null"}, shared
    program = f"""
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
for attempt in (lambda: os.kill({pid}, 9), lambda: os.listdir("/proc/{pid}"),
                lambda: open("/proc/1/mem", "rb").read(1), lambda: os.open("/proc/1/root/disk", 0),
                lambda: os.listdir("/proc/1/root/memory"), lambda: os.listdir("/old"),
                lambda: os.open("/proc/1/cwd/../disk", 0), lambda: os.open("/proc/1/fd/3", 0)):
    try:
        print("OPEN", attempt())
    except OSError as error:
        pass
print(libc.ptrace(16, {pid}, 0, 0), libc.ptrace(16, 1, 0, 0))
for name in os.listdir("/proc"):
    if name.isdigit():
        print(name, open(f"/proc/{{name}}/comm").read().strip())
"""
    await running.write_file("look.py", program.encode())
    seen = (await sh(running, "python3 look.py")).split("\n")
    assert seen[0] == "-1 -1", seen
    assert {line.split()[1] for line in seen[1:] if line} == {"bash", "python3"}


async def test_a_killed_zygote_is_the_machines_fault_and_the_next_lease_has_another(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox, state: Path
) -> None:
    idle = await bubblewrap.lease(SPEC)
    command = asyncio.create_task(running.run("touch begun; sleep 600", timeout_s=900))
    while "begun" not in await asyncio.to_thread(os.listdir, _inside(running)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    [pid] = zygotes(state)
    below = processes.descendants(pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await command
    with pytest.raises(SandboxDied):
        await idle.run("true", timeout_s=20)
    with pytest.raises(SandboxDied):
        await idle.run("true", timeout_s=20)
    await idle.aclose()
    async with asyncio.timeout(60):
        while any(proc.alive() for proc in below):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with await bubblewrap.lease(SPEC) as sandbox:
        assert await sh(sandbox, "echo again") == "again\n"
        assert zygotes(state) != [pid]


async def test_nothing_of_a_sandbox_runs_any_more_when_it_has_ended_with_the_zygote(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox, state: Path
) -> None:
    """Its files are graded then, or given to the next one."""
    many = "for i in {1..60}; do (setsid python3 -c 'x = bytearray(9 << 20); input()' <>p &); done"
    await running.run(f"mkfifo p; {many}; sleep 2", timeout_s=30)
    [pid] = zygotes(state)
    below = processes.descendants(pid)
    assert len(below) > 60
    os.kill(pid, signal.SIGKILL)
    await running._tree.end()
    assert [proc for proc in below if proc.alive()] == []


def _inside(sandbox: BubblewrapSandbox) -> str:
    return f"/proc/{sandbox.host_pid}/root/workspace"


async def test_grading_survives_a_zygote_that_was_killed(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox, state: Path
) -> None:
    """The work is done and its files are there: a mark can still be given."""
    await running.write_file("answer", b"42")
    [pid] = zygotes(state)
    os.kill(pid, signal.SIGKILL)
    result = await running.grade(GradingSpec("grep -q 42 /workspace/answer"))
    assert result.exit_code == 0, result


async def test_a_stopped_zygote_holds_nobody_up_for_ever(
    bubblewrap: Bubblewrap, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start fails, an end succeeds, both in bounded time; then there is another zygote."""
    monkeypatch.setattr(zygote, "END_S", 0.5)
    sandbox = await bubblewrap.lease(SPEC)
    for step in ("start", "end"):
        [pid] = zygotes(state)
        os.kill(pid, signal.SIGSTOP)
        if step == "start":
            with monkeypatch.context() as patch:
                patch.setattr(zygote, "START_S", 0.5)
                with pytest.raises(SandboxStartError, match="did not answer"):
                    await bubblewrap.lease(SPEC)
        await asyncio.wait_for(sandbox.aclose(), 20)
        sandbox = await bubblewrap.lease(SPEC)
        assert await sh(sandbox, "echo works") == "works\n"
        assert zygotes(state) != [pid]
    await sandbox.aclose()


async def test_a_sandbox_that_ended_under_a_stopped_zygote_is_no_mark_for_the_model(
    bubblewrap: Bubblewrap, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.sandboxes.host.GONE_S", 0.3)
    monkeypatch.setattr(zygote, "END_S", 0.3)
    sandbox = await bubblewrap.lease(SPEC)
    [pid] = zygotes(state)
    os.kill(pid, signal.SIGSTOP)
    os.kill(sandbox.host_pid, signal.SIGKILL)
    until_ended(sandbox.host_pid)
    with pytest.raises(SandboxDied):
        await sandbox.run("true", timeout_s=20)
    await sandbox.aclose()


@pytest.mark.parametrize("trouble", ["umask", "memory"])
async def test_it_works_under_a_strict_umask_and_without_memory_for_files(
    state: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Where /dev/shm is full, or not there, files that every command writes are on the disk."""
    before = os.umask(0o077 if trouble == "umask" else 0o022)
    if trouble == "memory":
        monkeypatch.setattr(slots, "ROOM_BYTES", 1 << 60)
    backend = Bubblewrap(state_dir=state)
    try:
        for _ in range(2):
            async with await backend.lease(SPEC) as sandbox:
                assert await sh(sandbox, "umask; echo works >f; cat f") == "0022\nworks\n"
                assert (
                    await sandbox.grade(GradingSpec("grep -q works /workspace/f"))
                ).exit_code == 0
        assert len(zygotes(state)) == 1
        memory = [path for path in state.parent.glob("../dev/shm/hermes-rl-*/*/ctl")]
        assert trouble == "umask" or not [p for p in memory if p.parent.name in folders(state)]
    finally:
        os.umask(before)
        await backend.aclose()


async def test_memory_for_files_may_become_free_after_the_start(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another program had filled /dev/shm; and it may be full again."""
    backend = Bubblewrap(state_dir=state)
    for full in (True, False, True):
        if full:
            monkeypatch.setattr(slots.Home, "memory_folder", lambda _, box: box)
        else:
            monkeypatch.undo()
        async with await backend.lease(SPEC) as one, await backend.lease(SPEC) as other:
            assert [await sh(each, "echo works") for each in (one, other)] == ["works\n"] * 2
        for lease in backend._recycled.drain():
            await backend._remove(lease)
    await backend.aclose()


async def test_a_thousand_processes_at_once_do_not_keep_a_sandbox_from_starting(
    bubblewrap: Bubblewrap, running: BubblewrapSandbox
) -> None:
    """One fills its own allowance while others start, end, and are counted by themselves."""
    bomb = "b() { b | b & }; b; sleep 1; true"
    attack = asyncio.create_task(running.run(bomb, timeout_s=3))
    for _ in range(5):
        async with await bubblewrap.lease(SPEC) as sandbox:
            assert await sh(sandbox, "echo hi | cat") == "hi\n"
    await attack


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
async def test_starts_and_ends_leave_no_process_mount_or_descriptor(
    bubblewrap: Bubblewrap, state: Path, count: int
) -> None:
    async with await bubblewrap.lease(SPEC):
        pass
    [pid] = zygotes(state)

    def counted() -> tuple[int, int, int, int, int]:
        its = len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
        opened = [len(os.listdir(f"/proc/{p}/fd")) for p in (os.getpid(), pid)]
        return mounts(state), its, len(processes.children(pid)), *opened

    before = counted()

    async def one() -> None:
        async with await bubblewrap.lease(SPEC) as sandbox:
            await sandbox.run("(setsid sleep 500 &)", timeout_s=20)

    for _ in range(count // 4):
        await asyncio.gather(*(one() for _ in range(4)))
    after = counted()
    assert after[:3] == before[:3]
    assert after[4] == before[4]
    assert after[3] - before[3] <= 12, "four at once: user ids and disks stay for the next"


async def test_cancelled_starts_leave_nothing(bubblewrap: Bubblewrap, state: Path) -> None:
    async with await bubblewrap.lease(SPEC):
        pass
    [pid] = zygotes(state)
    for number in range(20):
        start = asyncio.ensure_future(bubblewrap.lease(SPEC))
        await asyncio.sleep(0.0005 * number)
        start.cancel()
        try:
            await (await start).aclose()
        except asyncio.CancelledError:
            pass
    async with asyncio.timeout(60):
        while processes.children(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_backend_whose_first_starts_were_cancelled_is_one_owner(
    bubblewrap: Bubblewrap, state: Path
) -> None:
    for number in range(4):
        start = asyncio.ensure_future(bubblewrap.lease(SPEC))
        await asyncio.sleep(0.01 * number)
        start.cancel()
        await asyncio.wait([start])
    async with await bubblewrap.lease(SPEC) as sandbox:
        assert await sh(sandbox, "echo works") == "works\n"
    assert len(os.listdir(state / "owners")) == 1


def spoil(limits: SandboxLimits) -> dict[str, str]:
    """What an agent may do to its workspace, by what it leaves in it."""
    return {
        "files": "mkdir -p a/b; echo secret >a/b/c; ln a/b/c d; ln -s / e; mkfifo f",
        "names": "touch $'\\n' .hidden",
        "xattr": "python3 -c \"import os; os.setxattr('.', 'user.left', b'secret')\"",
        "acl": "python3 -c \"import os; os.setxattr('.', 'system.posix_acl_default', "
        "b'\\x02\\x00\\x00\\x00\\x01\\x00\\x07\\x00\\xff\\xff\\xff\\xff\\x04\\x00\\x05\\x00\\xff\\xff\\xff\\xff"
        "\\x20\\x00\\x05\\x00\\xff\\xff\\xff\\xff')\"",
        "mode": "chmod 1777 .",
        "flags": "python3 -c \"import fcntl, os; fd = os.open('.', 0); "
        "fcntl.ioctl(fd, 0x40086602, (0x80080).to_bytes(8, 'little'))\"",
        "size": "for i in {1..400}; do : >a-long-name-that-fills-the-folder-$i; done; rm a-*",
        "times": "touch -d 2001-01-01 .",
        "nothing": ":",
    }


LOOK = (
    "ls -A /workspace /tmp /dev/shm /run/hx | grep -v ^[ab]$; find / -xdev -newermt 2000-01-01 "
    "! -newermt 2002-01-01 -path '/workspace*'; python3 -c \"import os; "
    "print(os.listxattr('/workspace'), oct(os.stat('/workspace').st_mode))\"; "
    "lsattr -d /workspace 2>/dev/null | tr -d ' '; env | sort; pwd; umask; jobs; alias"
)


@pytest.mark.parametrize("action", spoil(SandboxLimits()))
async def test_a_recycled_workspace_shows_nothing_of_the_lease_before(
    bubblewrap: Bubblewrap, state: Path, action: str
) -> None:
    async with await bubblewrap.lease(SPEC) as first:
        fresh = await sh(first, LOOK)
        before = folders(state)
    async with await bubblewrap.lease(SPEC) as spoiled:
        assert await sh(spoiled, LOOK) == fresh
        done = await spoiled.run(spoil(SandboxLimits())[action], timeout_s=30)
        assert done.exit_code == 0 or action in ("flags", "acl", "xattr"), done
        await spoiled.run("export LEFT=secret; alias left=x; cd /tmp; umask 077", timeout_s=30)
        assert await sh(spoiled, LOOK) != fresh
    async with await bubblewrap.lease(SPEC) as after:
        assert folders(state) == before, "the same folder, or it proves nothing"
        assert await sh(after, LOOK) == fresh
    other = SandboxSpec(lease="other", limits=SandboxLimits(workspace_files=5_000))
    async with await bubblewrap.lease(other) as sandbox:
        assert len(folders(state)) == 3, "folders are for the limits they had"
        assert await sh(sandbox, "echo works") == "works\n"


def test_an_attribute_that_a_workspace_was_made_with_may_not_change(state: Path) -> None:
    """As access lists do that it inherits from the state folder: they decide about new files."""
    os.setxattr(state, "user.note", b"one")
    made = marks(state)
    assert marks(state) == made
    os.setxattr(state, "user.note", b"two")
    assert marks(state) != made


@pytest.mark.parametrize(
    "last",
    ["mkdir -p 1/2/3/4/5", "sync big; rm big", "rm big; printf '%s\\n' {1..3000} | xargs touch"],
)
async def test_a_workspace_that_took_much_of_the_disk_is_not_recycled(
    bubblewrap: Bubblewrap, state: Path, last: str
) -> None:
    """Also one that is empty again: its file system still takes the machine's disk. Nor is one with
    thousands of files, which take longer to remove than a new file system to make."""
    async with await bubblewrap.lease(SPEC) as sandbox:
        sized = sandbox.info.limits["workspace_held_by"] == "kernel"
        await sandbox.run(f"head -c 20M /dev/urandom >big; {last}", timeout_s=30)
    assert len(folders(state)) == 1 or not sized, "what all share"


async def test_small_machines_fall_back_and_say_why(
    bubblewrap: Bubblewrap, state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler at installation, an old binary, a kernel that refuses: bubblewrap serves."""
    old = tmp_path / "zygote"
    old.write_bytes(zygote.BINARY.read_bytes())
    old.chmod(0o755)
    old.with_suffix(".c").write_text("newer")
    refusing = tmp_path / "refusing"
    refusing.write_text("#!/bin/bash\nprintf 'E user namespace: refused' >&$1\n")
    refusing.chmod(0o755)
    refusing.with_suffix(".c").write_text("")
    for binary, why in ((tmp_path / "absent", "not built"), (old, "another version"),
                        (refusing, "user namespace: refused")):  # fmt: skip
        monkeypatch.setattr(zygote, "BINARY", binary)
        assert why in probe.probe_machine().no_zygote
        backend = Bubblewrap(state_dir=state)
        async with await backend.lease(SPEC) as sandbox:
            assert await sh(sandbox, "echo works") == "works\n"
        await backend.aclose()
    monkeypatch.undo()
    assert probe.probe_machine().no_zygote == ""


def test_the_program_refuses_root_and_malformed_requests(tmp_path: Path) -> None:
    """It is started by hand here, as whoever we are."""
    found = subprocess.run([zygote.BINARY], capture_output=True, check=False)
    assert found.returncode == 2
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far, open(tmp_path / "filter", "w+b") as empty:
        line = [zygote.BINARY, str(far.fileno()), str(empty.fileno()), "tag"]
        subprocess.run(line, pass_fds=(far.fileno(), empty.fileno()), check=False)
        assert near.recv(100) == (b"E not as root: " if os.geteuid() == 0 else b"E filter: ") + (
            b"Operation not permitted" if os.geteuid() == 0 else b"Invalid argument"
        )
