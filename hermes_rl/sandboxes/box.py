"""One bubblewrap on the host: how it is started, watched and ended, and what a lease holds.

Processes are started from one thread that lives as long as they may: die-with-parent follows the
*thread* that spawned, so a short-lived one would take its sandboxes along. No preexec_fn and no
user=: both cost vfork, several milliseconds in a large process. To drop to a slot's uid the
spawning thread takes that identity for the moment of the start: to the kernel an identity belongs
to a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxStartError, TaskFault, UserError
from hermes_rl.sandboxes import grading, limits, processes, recipe, watchdog
from hermes_rl.sandboxes.base import GradingSpec, SandboxLimits, SandboxSpec
from hermes_rl.sandboxes.disks import Storage
from hermes_rl.sandboxes.files import Beneath, libc
from hermes_rl.sandboxes.forks import Fork
from hermes_rl.sandboxes.grading import Unpackable
from hermes_rl.sandboxes.image_changes import Upper, relied_on, replaced
from hermes_rl.sandboxes.slots import has_slots, is_host_root

HOST_FOLDER_HOME = "/tmp"
"""Home of sessions in a host folder: what programs keep in HOME is no part of your files."""


@dataclass(frozen=True)
class HostFolder:
    """A folder that may be bound into a sandbox."""

    path: Path
    uid: int | None
    """Who the sandbox runs as: the folder's owner where we are root; None is ourselves."""


def host_folder(given: Path, state: Path) -> HostFolder:
    """Look at a folder before it is bound.

    Args:
        given: the folder.
        state: our own state folder, which no sandbox may reach.

    Raises: UserError when there is none, when it holds more than files of yours, or when the
        sandbox would have to run as root.
    """
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"workspace {given}: no such folder. Make it, or name another")
    if state.resolve().is_relative_to(path):
        raise UserError(f"workspace {given}: it holds the folders of all sandboxes. Name a smaller")
    if not has_slots():
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"workspace {given}: not writable for you. Name a folder of your own")
        return HostFolder(path, None)
    uid = path.stat().st_uid
    if uid == 0:
        raise UserError(
            f"workspace {given}: it belongs to root, and no sandbox runs as root. "
            f"Give it to a user (chown -R USER {given}), or start as an ordinary user"
        )
    return HostFolder(path, uid)


END_S = 10.0
"""How long a bubblewrap may take to end after its process 1."""


@lru_cache(maxsize=1)
def filter_path() -> Path:
    """The seccomp filter of this machine's architecture. Raises: SandboxStartError."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    path = Path(__file__).with_name(f"seccomp-{machine}.bpf")
    if not path.exists():
        raise SandboxStartError(f"no seccomp filter for {machine}: make one with make_seccomp")
    return path


@dataclass(frozen=True)
class Lease:
    """What one sandbox holds on the host."""

    spec: SandboxSpec
    box: Path
    storage: Storage
    slot: int | None
    """A user id that no other sandbox on this machine has."""
    layers: recipe.Layers
    cgroup: list[str] = field(default_factory=list)
    """The path of its control group, once there is one."""

    owner: int | None = None
    """Who owns the image, when that is not root: only he can write in it."""
    host: HostFolder | None = None
    """A folder of the host in place of a workspace of its own."""
    images: int = 0
    """Who owns the files of the image, where they are shown as the sandbox's."""
    fork: Fork = field(default_factory=Fork)
    """What it shares with others that start from the same snapshot."""
    small: Path | None = None
    """Its folder in memory, where there is one."""

    @property
    def uid(self) -> int | None:
        """The host user that the sandbox runs as; None is ourselves."""
        if self.host is not None:
            return self.host.uid
        if self.slot is None or self.owner is not None:
            return self.owner
        return self.slot

    @property
    def name(self) -> str:
        """OWNER.N"""
        return self.box.name

    @property
    def tag(self) -> str:
        """How the reaper knows its processes: OWNER.N:LEASE."""
        return f"{self.name}:{self.spec.lease}"

    def supervise(self, most: SandboxLimits | None) -> list[str]:
        """The command line of process 1 (see `recipe.command`)."""
        script = f"{recipe.CONTROL}/{recipe.SUPERVISOR}"
        return recipe.command(script, most, recipe.CONTROL, recipe.STATE, self.tag)

    @property
    def control(self) -> Path:
        """The control directory."""
        return (self.small or self.box) / "ctl"

    @property
    def workspace(self) -> Path:
        """The workspace, as this process finds it."""
        if self.fork.base is not None:
            return self.fork.workspace
        return self.storage.seen(self.bound) if self.host is None else self.host.path

    @property
    def bound(self) -> Path:
        """The workspace, as bubblewrap finds it."""
        return self.storage.folder / "ws" if self.host is None else self.host.path

    @property
    def sources(self) -> list[Path]:
        """The layers of the workspace that the session left, as bubblewrap finds them, the lowest
        first."""
        if self.fork.layer is not None:
            return [self.fork.below, self.fork.layer.up]
        return [self.bound]

    @property
    def intact(self) -> bool:
        """Whether its folders are there: nobody but the host can remove them."""
        return self.workspace.is_dir() and self.box.is_dir() and self.control.is_dir()

    def admit_user(self) -> None:
        """Open the box to the sandbox's user, and to nobody else but us."""
        if self.uid is None:
            return
        for folder in {self.box, self.small or self.box}:
            os.chown(folder, -1, self.uid)
            folder.chmod(0o710)

    def make_readable(self, name: str) -> Path:
        """A folder in the box that the sandbox may read; what is made in it has its group."""
        return self._open_to_read(self.box / name)

    def make_control(self, supervisor: Path) -> None:
        """Make the control directory, with the text of the supervisor. Raises: OSError."""
        self._open_to_read(self.control)
        try:
            os.link(supervisor, self.control / supervisor.name)
        except OSError:  # on another file system
            shutil.copy(supervisor, self.control / supervisor.name)

    def _open_to_read(self, path: Path) -> Path:
        path.mkdir(mode=0o700)
        if self.uid is not None:
            os.chown(path, -1, self.uid)
            path.chmod(0o2750)
        return path

    def make(self, name: str) -> Path:
        """A folder that the sandbox may write, as bubblewrap finds it."""
        return self.storage.make(name, self.uid)


class Inside:
    """What runs in a started sandbox, seen from outside: the tree of its processes (see
    `processes.Tree`)."""

    def __init__(self) -> None:
        self.init = 0
        """The host's id of process 1 of the sandbox; 0 before it is known."""
        self._pidfd = -1
        self._proc: processes.Proc | None = None
        self._supervisor = 0

    @property
    def host_pid(self) -> int:
        """The process with which the sandbox ends: what an operator, or a test, may kill."""
        raise NotImplementedError

    def _found(self, init: int, pidfd: int) -> None:
        self._pidfd = pidfd
        self.init, self._proc = init, processes.find(init)

    def supervisor(self) -> int:
        """Process 1's first child."""
        if not self._supervisor:
            self._supervisor = next(iter(self._children()), 0)
        return self._supervisor

    def orphans(self) -> processes.Snapshot:
        """Children of process 1."""
        return processes.snapshot(self._children(), below=False)

    def _children(self) -> list[int]:
        return processes.children(self.init) if self.stands else []

    def send(self, processes_: Iterable[processes.Proc], number: int) -> None:
        """See `processes.Tree`."""
        processes.signal_all(processes_, number)

    def end_process(self, inside: int) -> None:
        """See `processes.Tree`."""
        processes.end_inside(self.init, inside)

    @property
    def stands(self) -> bool:
        """Whether process 1 runs."""
        return self._proc is not None and self._proc.alive()

    async def ends_within(self, seconds: float) -> bool:
        """Whether process 1 is dead by then, even if its parent has not waited for it."""
        until = time.monotonic() + seconds
        while self.stands:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        return True

    async def end(self) -> int:
        """End all that runs in it. Its code, as `ended` has it."""
        raise NotImplementedError

    async def ended(self) -> int:
        """Wait until all that ran in it is gone. Its code, negative after a signal from outside."""
        raise NotImplementedError

    def _end_init(self) -> bool:
        """SIGKILL process 1. False when it is not there any more."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1


class Outer(Inside):
    """A started bubblewrap."""

    def __init__(self, process: subprocess.Popen[bytes], info: int) -> None:
        super().__init__()
        self.process = process
        self._info = info

    @property
    def host_pid(self) -> int:
        """See `Inside`."""
        return self.process.pid

    def attach(self) -> None:
        """Find the inside, once it stands. Idempotent. Raises: OSError or ValueError."""
        if self.init:
            return
        with open(self._info, "rb") as file:
            self._info = -1
            init = int(json.loads(file.read())["child-pid"])
        self._found(init, os.pidfd_open(init))
        # The kernel ends what the supervisor starts first when the machine is short of memory. A
        # sandbox cannot ask for it itself: its /proc is read-only.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.supervisor()}/oom_score_adj").write_text("1000")

    async def end(self) -> int:
        """End all that runs in it. Its code, as `ended` has it.

        Process 1 is killed, with which all in the sandbox ends; bubblewrap waits for it and ends
        too. Killed itself, it would leave process 1 to the machine's process 1.
        """
        if self.init:
            self._end_init()
        else:
            await asyncio.to_thread(self._end_starting)
        try:
            async with asyncio.timeout(END_S):
                return await self.ended()
        except TimeoutError:  # somebody stopped it
            self.process.kill()
            return await self.ended()

    def _end_starting(self) -> None:
        """The same before process 1 is known, when die-with-parent may not hold yet. Blocks."""
        root = processes.find(self.process.pid)
        if root is None or self.process.poll() is not None:
            return
        processes.stop_tree(root)
        # Also one that has ended: bubblewrap still has to wait for it, and ends then.
        has_child = bool(processes.children(root.pid))
        for proc in processes.descendants(root.pid):
            processes.end_tree(proc)
        root.signal(signal.SIGCONT if has_child else signal.SIGKILL)

    async def ended(self) -> int:
        """See `Inside`: until bubblewrap is gone, too."""
        code = await exited(self.process)
        if self._end_init():
            await gone(self._pidfd)
        return code

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        if self._info >= 0:
            os.close(self._info)
        self._info = -1
        super().close()


def launch(binary: str, box: recipe.Box, uid: int | None, stdio: socket.socket) -> Outer:
    """Start bubblewrap. Call it in the spawner's thread. Raises: SandboxStartError.

    Its options go through a pipe: in the command line they would show the host's paths to the
    sandbox.
    """
    if not uid and is_host_root():
        raise SandboxStartError(
            "root here has no other user ids (see /proc/self/uid_map), and bubblewrap never runs "
            "as root of the machine: start as an ordinary user"
        )
    seccomp = os.open(filter_path(), os.O_RDONLY | os.O_CLOEXEC)
    info, tell = os.pipe()
    options, give = os.pipe()
    try:
        listed = recipe.arguments(box, {"seccomp": seccomp, "info": tell})
        os.write(give, "\0".join(listed).encode() + b"\0")
        os.close(give)
        give = -1
        argv = ["bwrap", "--args", str(options), "--", *box.command]
        process = start(Launch(argv, binary, (seccomp, tell, options), uid=uid), stdio)
    except OSError as error:
        os.close(info)
        raise SandboxStartError(f"cannot start bubblewrap: {error}") from error
    finally:
        for fd in (seccomp, tell, options, give):
            if fd >= 0:
                os.close(fd)
        stdio.close()
    return Outer(process, info)


def make_groups(
    held: list[str], name: str, most: SandboxLimits, groups: limits.Cgroups
) -> list[str]:
    """Make the control groups of a sandbox, unless it has them. Blocks. Returns each once.

    Args:
        held: takes the paths of its groups, to be removed with the sandbox.
        name: OWNER.N, or what begins so.
        most: memory and CPU time of the whole sandbox.
    """
    if groups.base and not held:
        try:
            held.append(groups.make(name, most.memory_bytes))
        except OSError:
            return []  # then the limit is not in force, and `info.limits` does not list it
        if most.cpus is not None:
            with contextlib.suppress(OSError):  # nor this one
                held.append(groups.bound_cpus(name, most.cpus))
    return [*dict.fromkeys(held)]


async def confined(
    held: list[str], name: str, most: SandboxLimits, groups: limits.Cgroups, outer: Outer
) -> None:
    """Find a sandbox's inside, in which nothing of the agent's runs yet, and put it into a control
    group. Raises: OSError or ValueError.

    Beside the loop: the kernel takes milliseconds to move a process. A cancelled caller waits for
    its end, so that the group is known to whoever removes it. The arguments are those of
    `make_groups`.
    """

    def confine() -> None:
        for path in make_groups(held, name, most, groups):
            for pid in (outer.init, outer.supervisor()):
                limits.add(path, pid)

    outer.attach()
    if groups.base:
        await in_thread(confine)


T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What to start."""

    argv: Sequence[str]
    executable: str
    """What runs; argv[0] is only its name, which the sandbox can see."""
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """All of its environment."""
    uid: int | None = None
    """User and group id to drop to; None keeps ours."""


@dataclass(frozen=True)
class _Calls:
    """System call numbers of one architecture: libc's functions would change every thread."""

    setgroups: int
    setresgid: int
    setresuid: int


_CALLS = {"x86_64": _Calls(116, 119, 117), "aarch64": _Calls(159, 149, 147)}
_PR_SET_DUMPABLE = 4


@contextmanager
def identity(uid: int | None) -> Iterator[None]:
    """This thread as user and group `uid`, without any other group; root before and after. None
    changes nothing. Raises: SandboxStartError where the system calls' numbers are not known.

    The saved ids stay 0, which is the way back; a program that is started loses them at its exec.
    """
    if uid is None:
        yield
        return
    calls = _CALLS.get(platform.machine())
    if calls is None:
        machine = platform.machine()
        raise SandboxStartError(f"root cannot start sandboxes on {machine}: use an ordinary user")
    library = libc()
    groups = os.getgroups()

    def call(number: int, *values: object) -> None:
        if library.syscall(number, *values) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot take the identity {uid}: {os.strerror(code)}")

    call(calls.setgroups, 0, None)
    try:
        call(calls.setresgid, uid, uid, 0)
        call(calls.setresuid, uid, uid, 0)
        yield
    finally:
        call(calls.setresuid, 0, 0, 0)
        call(calls.setresgid, 0, 0, 0)
        call(calls.setgroups, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
        library.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of identity clears it


class Spawner:
    """One thread that starts processes; `close` it after all of them have ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawn")

    async def call(self, work: Callable[[], T]) -> T:
        """Run something short in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def run(self, work: Callable[[], T]) -> T:
        """The same, for another thread, which waits for it."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


def start(launch: Launch, stdio: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process with its own session, and all three standard
    descriptors on `stdio`. Call it in a Spawner's thread.
    """
    with identity(launch.uid):
        return subprocess.Popen(
            launch.argv,
            executable=launch.executable,
            stdin=stdio.fileno(),
            stdout=stdio.fileno(),
            stderr=stdio.fileno(),
            env=dict(launch.env),
            cwd="/",
            pass_fds=launch.pass_fds,
            start_new_session=True,
        )


async def exited(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child of ours by pidfd. Returns its code, negative after a signal."""
    code = process.poll()
    if code is not None:
        return code
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # no descriptor left: what it holds must end all the same
        return await asyncio.to_thread(process.wait)
    try:
        await gone(handle)
    finally:
        os.close(handle)
    return process.wait()


async def gone(pidfd: int) -> None:
    """Wait until the process behind a pidfd has ended. Several may wait for the same."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    try:
        handle = os.dup(pidfd)  # the loop takes one reader of a descriptor
    except OSError:  # no descriptor left
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        await asyncio.to_thread(poll.poll)
        return
    loop.add_reader(handle, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def verifier_mounts(lease: Lease, spec: GradingSpec, verify: Path, storage: Storage) -> list[str]:
    """Arguments for the folders that a verifier wants at places of its own.

    Raises: Unpackable when the agent left an image in which no verifier can be trusted to start.
    """
    if spec.image is None and lease.layers.upper is not None:
        image, changes = lease.layers.image, Upper(lease.storage.seen(lease.layers.upper.up))
        search = image.env.get("PATH", recipe.PATH)
        relied = relied_on(image.lower, image.env, search)
        places = (*spec.mounts, grading.HOME, grading.VERIFY)
        if (found := replaced(relied, changes, places)) is not None:
            raise Unpackable(f"the agent replaced {found}, which grading relies on")
    arguments = []
    for number, (place, folder) in enumerate(spec.mounts.items()):
        if not folder:
            arguments += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", place]
            continue
        shown = (verify / folder).resolve()
        if not shown.is_relative_to(verify.resolve()):
            raise TaskFault(f"verify.mounts: {folder!r} is not a folder of the verifier's files")
        shown.mkdir(parents=True, exist_ok=True)
        if lease.uid is not None:  # an overlay takes no writes to other users' files
            for path in (shown, *shown.rglob("*")):
                os.chown(path, lease.uid, lease.uid)
        layer = storage.layer(f"mount{number}", lease.uid)
        arguments += ["--overlay-src", str(shown), *layer.arguments(), place]
    return arguments


_TEMPORARY = (*limits.TEMPORARY, grading.HOME.lstrip("/"))


class GradingSandbox:
    """What one holds on the host.

    Args:
        lease: of the sandbox whose workspace is graded.
        name: of its folder in the lease's folder.
        groups: where its control group is made.
        storage: what is written in it; entered by whoever starts the sandbox.
    """

    def __init__(self, lease: Lease, name: str, groups: limits.Cgroups, storage: Storage) -> None:
        self.lease = lease
        self.name = name
        self.storage = storage
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why its verifier must end, once it must."""
        self._groups = groups
        self._cgroup: list[str] = []
        self._init = 0
        self._bytes = 0

    @property
    def folder(self) -> Path:
        """Everything of it that is on the disk."""
        return self.lease.box / self.name

    async def stand(self, outer: Outer) -> None:
        """Bound its memory and CPU time, now that it stands. Raises: SandboxStartError."""
        name, most = f"{self.lease.name}.{self.name}", self.lease.spec.limits
        try:
            await confined(self._cgroup, name, most, self._groups, outer)
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"the grading sandbox did not start: {error}") from error
        self._init = outer.init

    def due(self) -> bool:
        """Time for a look: its verifier runs."""
        return self._init > 0 and not self.stop.done()

    async def check(self) -> None:
        """Hold it against its limits. Raises: OSError, as without a descriptor to look with."""
        storage = self.storage
        paths = [storage.folder / name for name in ("ws", "layer/up", "root/up")]
        folders = [
            Beneath(path, self.lease.uid) for path in map(storage.seen, paths) if path.is_dir()
        ]
        usage = await asyncio.to_thread(limits.measure, storage, folders, self._init, _TEMPORARY)
        self._bytes = usage.bytes
        if (excess := usage.excess(storage.limits)) is not None:
            self._end(excess)

    def held(self) -> int:
        """Bytes that it has on the disk while something may write more of them."""
        return max(self._bytes, self.storage.held()) if self.due() else 0

    async def relieve(self, why: str) -> None:
        """End its verifier, the one that holds most of the machine's disk, before that is full."""
        self._end(why)

    def _end(self, why: str) -> None:
        if self.due():
            self.stop.set_result(why)

    def remove(self) -> None:
        """Remove all of it. Blocks."""
        for path in self._cgroup:
            watchdog.remove_cgroup(path)
        self.storage.close()
        watchdog.remove_tree(self.folder)
