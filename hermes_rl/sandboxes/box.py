"""One sandbox of bubblewrap on the host: how it is started, watched and ended, what a lease holds,
and what the next one takes over from it.

Processes are started from one thread that lives as long as they may: die-with-parent follows the
*thread* that spawned, so a short-lived one would take its sandboxes along.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import grading, limits, processes, recipe, watchdog
from hermes_rl.sandboxes.base import GradingSpec, SandboxLimits, SandboxSpec
from hermes_rl.sandboxes.disks import Storage
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.forks import Fork
from hermes_rl.sandboxes.image_changes import Upper, relied_on
from hermes_rl.sandboxes.slots import Launch, is_host_root, start

END_S = 10.0
"""How long a bubblewrap may take to end after its process 1."""
DYING_S = 1.0
"""How long process 1 may take after a signal."""


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
    host: recipe.HostFolder | None = None
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

    @property
    def supervisor(self) -> list[str]:
        """The script of its session, and the arguments."""
        script = f"{recipe.CONTROL}/{recipe.SUPERVISOR}"
        return [script, recipe.CONTROL, recipe.STATE, self.tag]

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

    in_group = False
    """Process 1 is in a control group: the kernel may end it for its memory."""

    def __init__(self) -> None:
        self.init = 0
        """The host's id of process 1 of the sandbox; 0 before it is known."""
        self._pidfd = -1
        self._supervisor = 0

    @property
    def host_pid(self) -> int:
        """The process with which the sandbox ends: what an operator, or a test, may kill."""
        return self.init

    def _found(self, init: int, pidfd: int) -> None:
        self.init, self._pidfd = init, pidfd

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
        return self._pidfd >= 0 and not _has_ended(self._pidfd)

    async def held_from_outside(self) -> str | None:
        """Why one whose shell does not answer is not to be blamed for it; None for nothing."""
        until = time.monotonic() + DYING_S
        while self.stands:
            if time.monotonic() > until:
                return None
            await asyncio.sleep(0.05)
        return "the launcher of the sandbox does not report its end"  # somebody stopped it

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
        pids = (outer.init, outer.supervisor())
        for path in make_groups(held, name, most, groups):
            for pid in pids:
                limits.add(path, pid)
        if not held:  # then nobody may raise it: see `recipe.command`
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_AS, (most.memory_bytes, most.memory_bytes))

    outer.attach()
    if groups.base:
        await in_thread(confine)


T = TypeVar("T")


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


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def verifier_mounts(lease: Lease, spec: GradingSpec, verify: Path, storage: Storage) -> list[str]:
    """Arguments for the folders that a verifier wants at places of its own.

    Raises: Unpackable when the agent left an image in which no verifier can be trusted to start.
    """
    if spec.image is None and lease.layers.upper is not None:
        image, changes = lease.layers.image, Upper(lease.storage.seen(lease.layers.upper.up))
        relied = relied_on(image.lower, image.env, image.env.get("PATH", recipe.PATH))
        grading.check_image(relied, changes, spec.mounts)
    arguments = []
    for number, (place, folder) in enumerate(spec.mounts.items()):
        if not folder:
            arguments += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", place]
            continue
        shown = grading.shown_folder(verify, folder)
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
        self.cgroup: list[str] = []
        """See `make_groups`."""
        self.mounts: list[int] = []
        """What a zygote shall mount: descriptors, closed here unless somebody takes them."""
        self._groups = groups
        self._init = 0
        self._bytes = 0

    @property
    def folder(self) -> Path:
        """Everything of it that is on the disk."""
        return self.lease.box / self.name

    def make(self) -> None:
        """Make its folder, in the lease's, which is closed to others."""
        self.folder.mkdir()
        self.folder.chmod(0o711)

    def stage(self, spec: GradingSpec) -> Path:
        """Make what a zygote shows to a verifier (see `zygote.grading_session`); in the spawner's
        thread. Returns the control directory. Raises: OSError; TaskFault."""
        self.make()
        control, verify = (self.lease.make_readable(f"{self.name}/{n}") for n in ("ctl", "verify"))
        grading.write_stage(control, verify, spec)
        self.storage.enter()
        self.storage.layer("layer", self.lease.uid)
        for storage, name in ((self.lease.storage, "ws"), (self.storage, "layer")):
            if storage.sized:
                self.mounts.append(storage.mount_attached(name))
        return control

    async def stand(self, inside: Inside) -> None:
        """Bound its memory and CPU time, now that it stands. Raises: SandboxStartError."""
        if isinstance(inside, Outer):
            name, most = f"{self.lease.name}.{self.name}", self.lease.spec.limits
            try:
                await confined(self.cgroup, name, most, self._groups, inside)
            except (OSError, ValueError) as error:
                raise SandboxStartError(f"the grading sandbox did not start: {error}") from error
        self._init = inside.init

    def due(self) -> bool:
        """Time for a look: its verifier runs."""
        return self._init > 0 and not self.stop.done()

    async def look(self) -> None:
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

    def leave(self) -> None:
        """What needed its mounts has found them; in the spawner's thread."""
        while self.mounts:
            os.close(self.mounts.pop())
        self.storage.leave()

    def remove(self) -> None:
        """Remove all of it. Blocks."""
        for path in self.cgroup:
            watchdog.remove_cgroup(path)
        self.storage.close()
        watchdog.remove_tree(self.folder)


IDLE = 64
"""How many are kept."""
HELD_BYTES = 4 << 20
"""A disk that takes more of the machine's is not kept: what was removed from it still counts."""
MOST_FILES = 2_000
"""With more files in it a new file system is made sooner than this one is emptied."""
_GET_FLAGS, _GET_ATTRIBUTES = 0x80086601, 0x801C581F
"""ioctls: FS_IOC_GETFLAGS, and FS_IOC_FSGETXATTR, which holds the project."""
_ATTRIBUTES = struct.Struct("=5I8x")

Marks = tuple[object, ...]


def marks(folder: Path) -> Marks:
    """What a folder is, beside its times and its content: mode, owners, extended attributes with
    its access lists, flags and project. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        return (
            (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid),
            (found.st_size, tuple((name, os.getxattr(fd, name)) for name in os.listxattr(fd))),
            _ask(fd, _GET_FLAGS, 8),
            _ask(fd, _GET_ATTRIBUTES, _ATTRIBUTES.size),
            tuple(os.listdir(fd)),
        )
    finally:
        os.close(fd)


def _ask(fd: int, request: int, size: int) -> bytes:
    try:
        return fcntl.ioctl(fd, request, bytes(size))
    except OSError:  # not known to this file system, so it cannot have changed
        return b""


@dataclass
class Recycled:
    """What one backend keeps.

    Making it is the larger part of a sandbox's start. The next lease must find no trace of an
    earlier one: its processes and temporary file systems are gone with its namespaces, the control
    directory is the host's, and a workspace is either proved to be as it was made, or made again
    in a file system that is proved to hold as many free blocks and inodes as before the lease.
    """

    idle: list[Lease] = field(default_factory=list)
    _made: dict[str, tuple[Marks, tuple[int, int]]] = field(default_factory=dict)
    """Name of a lease -> its workspace as it was made, and what was free then."""

    def note(self, lease: Lease) -> None:
        """A workspace was just made. Raises: OSError."""
        if _plain(lease):
            free = lease.storage.counts() if lease.storage.sized else (0, 0)
            self._made[lease.name] = marks(lease.workspace), free

    def take(self, spec: SandboxSpec, layers: recipe.Layers) -> Lease | None:
        """One for a sandbox with an empty workspace and these limits."""
        for number in range(len(self.idle) - 1, -1, -1):
            if self.idle[number].spec.limits == spec.limits:
                return replace(self.idle.pop(number), spec=spec, layers=layers)
        return None

    async def keep(self, lease: Lease) -> bool:
        """Keep what an ended sandbox held; False when it has to be removed instead."""
        made = self._made.get(lease.name)
        if made is None or len(self.idle) >= IDLE:
            return False
        try:
            for entry in os.scandir(lease.control):
                if entry.name != recipe.SUPERVISOR:
                    os.unlink(entry)
            if marks(lease.workspace) == made[0]:
                os.utime(lease.workspace)
            elif not await asyncio.to_thread(self._make_again, lease, made[1]):
                return False
            if lease.storage.held() > HELD_BYTES:
                return False
        except OSError:
            return False
        self.idle.append(lease)
        return True

    def _make_again(self, lease: Lease, free: tuple[int, int]) -> bool:
        if lease.storage.sized and free[1] - lease.storage.counts()[1] > MOST_FILES:
            return False
        if not watchdog.remove_shallow(lease.workspace):
            return False
        lease.make("ws")
        self.note(lease)
        return self._made[lease.name][1] == free

    def forget(self, lease: Lease) -> None:
        """It is removed."""
        self._made.pop(lease.name, None)

    def drain(self) -> list[Lease]:
        """All that are kept, to be removed."""
        idle, self.idle = self.idle, []
        return idle


def _plain(lease: Lease) -> bool:
    """Whether all that it holds is an empty workspace on a disk, or in a folder, of its own."""
    image = lease.layers.image
    return not (image.lower or lease.host or lease.spec.snapshot or lease.owner)
