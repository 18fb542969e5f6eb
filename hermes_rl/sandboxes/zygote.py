"""The faster way to start plain bubblewrap sandboxes: a small process per worker that holds the
prepared root of all of them and starts each with one clone.

`zygote.c` is that process and documents the protocol. bubblewrap itself is the reference, and what
starts everything else: images, sandboxes with a network, folders of the host, shared snapshots,
and verifiers of these, or with folders at places of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import limits, recipe, watchdog
from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.box import (
    END_S,
    Inside,
    Lease,
    Spawner,
    filter_path,
    gone,
    make_groups,
)
from hermes_rl.sandboxes.disks import open_tree
from hermes_rl.sandboxes.slots import SLOTS, first_slot, identity

_log = logging.getLogger(__name__)

BINARY = Path(__file__).with_name("zygote")
"""Made from `zygote.c` when the package is built or installed from a checkout."""
SWITCH = "HERMES_RL_SANDBOX_LAUNCHER"
"""Variable that names the launcher: `bubblewrap` starts no zygote."""
START_S = 30.0
"""How long the zygote may take to set up, or to answer a request."""
UNANSWERED = 8
"""Requests at a time: the socket holds them, with their descriptors, whatever its buffer is."""
_MESSAGE = 4096
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}
_BASH = "/bin/bash"
DISK, MEMORY = "disk", "memory"
"""Where the zygote shows the folders of sandboxes (see `slots.Home`)."""
_GRADED, _BELOW, _WRITTEN = "graded", "below", "written"
"""Where it shows the root of a grading sandbox, what its workspace is made of, and its writes."""
Operation = tuple[str, ...]
"""A kind and its paths, as `zygote.c` lists them."""


class NoZygote(Exception):
    """Sandboxes are started by bubblewrap: the message says why."""


def reason_against() -> str:
    """Why no zygote can be started here, as far as that is known without trying; else empty."""
    chosen = os.environ.get(SWITCH, "")
    if chosen == "bubblewrap":
        return f"{SWITCH}=bubblewrap"
    if chosen:
        return f"{SWITCH} knows bubblewrap alone, and not {chosen!r}"
    if not os.access(BINARY, os.X_OK):
        return "it was not built: install a C compiler (cc), then install hermes-rl again"
    if not os.path.exists(_BASH):
        return f"there is no {_BASH}"
    return ""


def setup(etc: Path, disk: Path, memory: Path) -> list[Operation]:
    """What makes the root of sandboxes without an image, as `recipe` has bubblewrap make it.

    Args:
        etc: what /etc shows.
        disk: the folders of all sandboxes on the disk.
        memory: those in memory; may be the same.
    """
    shown = {"/etc": os.path.realpath(etc)}
    made = _root("root", lambda path: shown.get(path, path), recipe.solutions(Path("/")))
    for name, folder in ((DISK, disk), (MEMORY, memory)):
        made += [("d", name), ("B", os.path.realpath(folder), name)]
    return [*made, *(("d", name) for name in (_GRADED, _BELOW, _WRITTEN))]


def _root(
    root: str, find: Callable[[str], str], hidden: Sequence[str] = (), more: Sequence[str] = ()
) -> list[Operation]:
    """What makes one.

    Args:
        root: where.
        find: the source of a path.
        hidden: paths that are shown empty.
        more: further folders at its top.
    """
    names = ("usr", "etc", "dev", "proc", "tmp", "run", "workspace", "hx", *more)
    made: list[Operation] = [("d", f"{root}/{name}") for name in names]
    made += [("b", find(path), f"{root}{path}") for path in ("/usr", "/etc")]
    for name, is_link in recipe.machine_links():
        if is_link:
            made.append(("l", f"usr/{name}", f"{root}/{name}"))
        else:
            made += [("d", f"{root}/{name}"), ("b", find(f"/{name}"), f"{root}/{name}")]
    for path in hidden:
        made += [("t", f"{root}{path}", "mode=555,size=4096"), ("r", f"{root}{path}")]
    made.append(("t", f"{root}/dev", "mode=755,size=64k"))
    made += [("d", f"{root}/dev/pts"), ("d", f"{root}/dev/shm")]
    made += [("n", find(f"/dev/{name}"), f"{root}/dev/{name}") for name in _NODES]
    made += [("l", target, f"{root}/dev/{name}") for name, target in _DEVICE_LINKS.items()]
    return [*made, ("r", f"{root}/dev"), ("r", root)]


def session(lease: Lease) -> Request:
    """What starts the session of a lease, but for descriptors that the caller opens: `mounts` is
    its workspace, in a file system of its own."""
    control = f"{DISK}/{lease.name}/ctl" if lease.small is None else f"{MEMORY}/{lease.name}/ctl"
    workspace: Operation = ("m", "root/workspace")
    if not lease.storage.sized:
        workspace = ("B", f"{DISK}/{lease.name}/ws", "root/workspace")
    operations = [*plain("root", lease.spec.limits), workspace, ("b", control, "root/hx")]
    return _request(lease, operations, lease.supervisor)


def grading_session(lease: Lease, name: str, sized: bool) -> Request:
    """What starts a verifier over the workspace of a lease. `mounts` is what the session left, in
    a file system of its own; and what takes the verifier's writes.

    Args:
        name: of its folder in the lease's.
        sized: its writes go to a file system of their own.
    """
    most, folder, root = lease.spec.limits, f"{DISK}/{lease.name}/{name}", _GRADED
    below, written = f"{DISK}/{lease.name}/ws", f"{folder}/layer"
    operations: list[Operation] = []
    if lease.storage.sized:
        operations.append(("m", below := _BELOW))
    if sized:
        operations.append(("m", written := _WRITTEN))
    layers = f"lowerdir={below},upperdir={written}/up,workdir={written}/work,userxattr"
    operations.append(("t", root, "mode=755,size=1m"))
    operations += _root(root, "root{}".format, more=("verify", "grading"))
    operations += [
        *plain(root, most),
        ("o", f"{root}/workspace", layers),
        ("b", f"{folder}/ctl", f"{root}/hx"),
        ("b", f"{folder}/verify", f"{root}/verify"),
        ("t", f"{root}/grading", f"mode=755,size={most.tmp_bytes}"),
    ]
    request = _request(lease, operations, [f"{recipe.CONTROL}/start", lease.tag])
    return replace(request, root=root, cwd="/grading")


def _request(lease: Lease, operations: Sequence[Operation], command: Sequence[str]) -> Request:
    return Request(
        uid=os.geteuid() if lease.uid is None else lease.uid,
        gid=os.getegid() if lease.uid is None else lease.uid,
        limits=lease.spec.limits,
        operations=operations,
        command=command,
    )


def plain(root: str, most: SandboxLimits) -> list[Operation]:
    """The temporary file systems of a sandbox."""
    return [
        ("t", f"{root}/dev/shm", f"mode=1777,size={most.shm_bytes}"),
        ("t", f"{root}/tmp", f"mode=1777,size={most.tmp_bytes}"),
        ("t", f"{root}/run", f"mode=755,size={recipe.RUN_BYTES}"),
        ("d", f"{root}{recipe.STATE}"),
    ]


@dataclass(frozen=True)
class Request:
    """One sandbox to start; no descriptor of it is closed here."""

    uid: int
    gid: int
    limits: SandboxLimits
    operations: Sequence[Operation]
    command: Sequence[str]
    """A script that bash runs, and its arguments."""
    stdio: int = -1
    cgroups: Sequence[int] = ()
    """Open cgroup.procs of its control groups."""
    mounts: Sequence[int] = ()
    """Detached mounts, for the operations `m`."""
    root: str = "root"
    cwd: str = recipe.WORKSPACE

    def message(self) -> bytes:
        """As the zygote reads it."""
        most = self.limits
        operations = [part for operation in self.operations for part in operation]
        variables = [f"LANG={recipe.LANG}", "HOME=/", "SHELL=/bin/bash", f"PWD={self.cwd}"]
        command = [_BASH, "--norc", "--noprofile", "-c", recipe.START_SCRIPT, *self.command]
        lists = [operations, command, variables]
        numbers = [self.uid, self.gid, most.processes, most.memory_bytes >> 10 << 10]
        numbers += [most.file_bytes >> 10 << 10, recipe.OPEN_FILES, len(self.cgroups)]
        strings = [*map(str, numbers), self.root, self.cwd]
        for each in lists:
            strings += [str(len(each)), *each]
        return _join(strings)

    def descriptors(self) -> list[int]:
        """What goes with it."""
        return [self.stdio, *self.cgroups, *self.mounts]


def _join(strings: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in strings)


class Clone(Inside):
    """A sandbox that a zygote started: its process 1 is the zygote's child."""

    in_group = True

    def __init__(self, zygote: Zygote, pid: int, pidfd: int, status: asyncio.Future[int]) -> None:
        super().__init__()
        self._zygote = zygote
        self._status = status
        self._found(pid, pidfd)

    async def end(self) -> int:
        """See `processes.Tree`."""
        self._end_init()
        try:
            async with asyncio.timeout(END_S):
                return await self.ended()
        except TimeoutError:  # somebody stopped the zygote
            self._zygote.kill()
            return await self.ended()

    def abandon(self) -> None:
        """End it without waiting for that."""
        self._end_init()
        self.close()

    async def ended(self) -> int:
        """See `processes.Tree`. A zygote that is gone waits for nobody: its end can be seen before
        those of its sandboxes."""
        status = await asyncio.shield(self._status)
        if self._end_init():
            await gone(self._pidfd)
        return os.waitstatus_to_exitcode(status)


@dataclass
class Zygote:
    """A started one, as the loop uses it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    lost: bool = False
    """It has ended, or was ended: all its sandboxes end too."""
    _loop: asyncio.AbstractEventLoop | None = None
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNANSWERED))
    _requests: deque[asyncio.Future[Clone]] = field(default_factory=deque)
    _running: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    """Process 1 of each sandbox -> its status, as waitpid has it."""

    def listen(self) -> None:
        """Take its answers in the running loop."""
        self.channel.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.channel, self._readable)

    async def start(self, request: Request) -> Clone:
        """Start a sandbox. Raises: SandboxStartError."""
        async with self._turns:
            answer = self._send(request)
            try:
                async with asyncio.timeout(START_S):
                    return await asyncio.shield(answer)
            except TimeoutError:
                self.kill()
                raise SandboxStartError("the launcher of sandboxes did not answer") from None
            except asyncio.CancelledError:
                answer.add_done_callback(self._abandon)
                raise

    def _send(self, request: Request) -> asyncio.Future[Clone]:
        """Raises: SandboxStartError."""
        try:
            if self.lost:
                raise ConnectionError("it was ended")
            socket.send_fds(self.channel, [request.message()], request.descriptors())
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._give_up()
            raise SandboxStartError(
                f"the launcher of sandboxes takes no request: {error}"
            ) from error
        answer: asyncio.Future[Clone] = asyncio.get_running_loop().create_future()
        self._requests.append(answer)
        return answer

    def _abandon(self, answer: asyncio.Future[Clone]) -> None:
        """Whoever asked for a sandbox was cancelled: end it."""
        if not answer.cancelled() and answer.exception() is None:
            answer.result().abandon()

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, _MESSAGE, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._give_up()
            return
        kind, *values = data.split()
        if kind == b"X":
            self._running.pop(int(values[0])).set_result(int(values[1]))
            return
        answer = self._requests.popleft()
        if kind == b"S" and fds:
            pid = int(values[0])
            status = self._running[pid] = asyncio.get_running_loop().create_future()
            answer.set_result(Clone(self, pid, fds[0], status))
            return
        number = int(values[0]) if kind == b"F" else 0
        why = os.strerror(number) if number else "no descriptor left"
        answer.set_exception(SandboxStartError(f"a sandbox cannot be started: {why}"))

    def kill(self) -> None:
        """End it, and with it all its sandboxes, which are lost."""
        self.process.kill()
        self._give_up()

    def _give_up(self) -> None:
        """It is gone. Its sandboxes have the status of processes that were killed."""
        if self.lost:
            return
        self.lost = True
        if self._loop is not None:
            self._loop.remove_reader(self.channel)
        for answer in self._requests:
            answer.set_exception(SandboxStartError("the launcher of sandboxes has ended"))
            answer.exception()  # nobody may be waiting any more
        self._requests.clear()
        for status in self._running.values():
            status.set_result(signal.SIGKILL)
        self._running.clear()

    def close(self) -> None:
        """End it, after its sandboxes. Idempotent. Blocks a moment."""
        if not self.lost:
            self._give_up()
        self.channel.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Zygotes:
    """The zygote of a backend: started with the first sandbox that can use it, and again when it
    is gone.

    Args:
        spawner: the thread that it lives as long as.
        spawn: starts one, in that thread (see `spawn`).
    """

    def __init__(self, spawner: Spawner, spawn: Callable[[], Zygote]) -> None:
        self.reason = ""
        """Why bubblewrap starts all sandboxes; empty where a zygote starts the plain ones."""
        self._spawner = spawner
        self._spawn = spawn
        self._zygote: Zygote | None = None
        self._turn = asyncio.Lock()

    async def ready(self) -> Zygote | None:
        """A zygote that can be used; None where there can be none."""
        if self._zygote is not None and not self._zygote.lost:
            return self._zygote
        async with self._turn:
            if self.reason or (self._zygote is not None and not self._zygote.lost):
                return None if self.reason else self._zygote
            if self._zygote is not None:
                _log.warning("the launcher of sandboxes ended: starting another")
                await asyncio.to_thread(self._zygote.close)
            try:
                self._zygote = await self._spawner.call(self._spawn)
                self._zygote.listen()
            except NoZygote as error:
                self.reason = str(error)
                self._zygote = None
                _log.info("bubblewrap starts all sandboxes: %s", error)
            return self._zygote

    def close(self) -> None:
        """End it, after its sandboxes. Blocks a moment."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


def spawn(
    tag: str,
    uid: int | None,
    operations: Sequence[Operation],
    groups: limits.Cgroups,
) -> Zygote:
    """Start a zygote and have it start a first sandbox, on trial. Call it in the spawner's thread:
    it ends with it. Blocks some milliseconds.

    Args:
        tag: names it to the reaper: OWNER.0:NAME.
        uid: who it runs as, a slot that no sandbox has; None is nearelves.
        operations: see `setup`.
        groups: where control groups of sandboxes are made.

    Raises: NoZygote.
    """
    reason = reason_against()
    if reason:
        raise NoZygote(reason)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = filter_ = -1
    process: subprocess.Popen[bytes] | None = None
    try:
        program = os.open(BINARY, os.O_RDONLY | os.O_CLOEXEC)
        filter_ = os.open(filter_path(), os.O_RDONLY | os.O_CLOEXEC)
        # By its descriptor: others may not be able to enter the folder of the package.
        with far, identity(uid):
            process = subprocess.Popen(
                ["hermes-rl-zygote", str(far.fileno()), str(filter_), tag],
                executable=f"/proc/self/fd/{program}",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=(far.fileno(), filter_, program),
                start_new_session=True,
            )
        near.settimeout(START_S)
        _expect(near, f"U {_digest()}")
        _write_maps(process.pid, uid)
        near.sendall(_join([part for operation in operations for part in operation]))
        _expect(near, "R")
        _try(near, uid, f"{tag.partition(':')[0]}.trial", groups)
    except (OSError, SandboxStartError, NoZygote) as error:
        near.close()
        if process is not None:
            process.kill()
            process.wait()
        raise NoZygote(str(error)) from error
    finally:
        for fd in (program, filter_):
            if fd >= 0:
                os.close(fd)
    return Zygote(process, near)


def _try(channel: socket.socket, uid: int | None, name: str, groups: limits.Cgroups) -> None:
    """Start a sandbox in all the ways that the kernel may refuse. Raises: NoZygote; OSError."""
    held: list[str] = []
    opened: list[int] = []
    most = SandboxLimits()
    near, far = socket.socketpair()
    try:
        for path in make_groups(held, name, most, groups):
            opened.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        count = len(opened)
        if uid is not None:  # as workspaces of limited size come
            opened.append(open_tree(Path("/usr")))
        mounts = [("m", "root/workspace")] if uid is not None else []
        request = Request(
            uid=os.geteuid() if uid is None else uid,
            gid=os.getegid() if uid is None else uid,
            limits=most,
            operations=[*plain("root", most), *mounts],
            command=["/dev/null"],
            stdio=far.fileno(),
            cgroups=opened[:count],
            mounts=opened[count:],
        )
        socket.send_fds(channel, [request.message()], request.descriptors())
        far.close()
        data, fds, _, _ = socket.recv_fds(channel, _MESSAGE, 1)
        opened += fds
        if data.startswith(b"S"):
            data = channel.recv(_MESSAGE)
        if not (data.startswith(b"X") and data.endswith(b" 0")):
            near.settimeout(START_S)
            why = near.recv(_MESSAGE).decode("utf-8", "replace").strip()
            raise NoZygote(why or f"no sandbox can be started: {data.decode()}")
    finally:
        near.close()
        far.close()
        for fd in opened:
            os.close(fd)
        for path in held:
            watchdog.remove_cgroup(path)


def _digest() -> str:
    """Of the source beside the binary: one that was built from another is not used."""
    return hashlib.sha256(BINARY.with_suffix(".c").read_bytes()).hexdigest()[:16]


def _expect(channel: socket.socket, wanted: str) -> None:
    """Raises: NoZygote when it reports something else."""
    found = channel.recv(_MESSAGE).decode("utf-8", "replace")
    if found == wanted:
        return
    if found.startswith("U "):
        raise NoZygote("it was built from another version: install hermes-rl again")
    raise NoZygote(found.removeprefix("E ") or "it ended at once")


def _write_maps(pid: int, uid: int | None) -> None:
    """Tell the kernel which ids a zygote's user namespace knows: those of sandboxes, unchanged."""
    kinds = {"uid": os.geteuid(), "gid": os.getegid()}
    for kind, number in kinds.items():
        if uid is None:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        first, count = (number, 1) if uid is None else (first_slot(), SLOTS)
        Path(f"/proc/{pid}/{kind}_map").write_text(f"{first} {first} {count}")
