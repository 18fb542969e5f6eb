"""One bubblewrap on the host: how it is started, watched and ended, and what a lease holds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxStartError, UserError
from hermes_rl.sandboxes import limits, processes, recipe
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.disk import Storage
from hermes_rl.sandboxes.slots import Slot, has_slots, is_host_root
from hermes_rl.sandboxes.spawn import Launch, exited, gone, start

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
    slot: Slot | None
    layers: recipe.Layers
    cgroup: list[str] = field(default_factory=list)
    """The path of its control group, once there is one."""

    owner: int | None = None
    """Who owns the image, when that is not root: only he can write in it."""
    host: HostFolder | None = None
    """A folder of the host in place of a workspace of its own."""

    @property
    def uid(self) -> int | None:
        """The host user that the sandbox runs as; None is ourselves."""
        if self.host is not None:
            return self.host.uid
        if self.slot is None or self.owner is not None:
            return self.owner
        return self.slot.uid

    @property
    def tag(self) -> str:
        """How the reaper knows its processes: OWNER.N:LEASE."""
        return f"{self.box.name}:{self.spec.lease}"

    @property
    def workspace(self) -> Path:
        """The workspace, as this process finds it."""
        return self.storage.seen(self.bound) if self.host is None else self.host.path

    @property
    def bound(self) -> Path:
        """The workspace, as bubblewrap finds it."""
        return self.storage.folder / "ws" if self.host is None else self.host.path

    @property
    def intact(self) -> bool:
        """Whether its folders are there: nobody but the host can remove them."""
        return self.workspace.is_dir() and self.box.is_dir()

    def admit_user(self) -> None:
        """Open the box to the sandbox's user, and to nobody else but us."""
        if self.uid is not None:
            os.chown(self.box, -1, self.uid)
            self.box.chmod(0o710)

    def make_readable(self, name: str) -> Path:
        """A folder in the box that the sandbox may read; what is made in it has its group."""
        path = self.box / name
        path.mkdir(mode=0o700)
        if self.uid is not None:
            os.chown(path, -1, self.uid)
            path.chmod(0o2750)
        return path

    def make(self, name: str) -> Path:
        """A folder that the sandbox may write, as bubblewrap finds it."""
        return self.storage.make(name, self.uid)


class Inner:
    """Process 1 of a sandbox, and the supervisor, as the host sees them."""

    def __init__(self, init: int) -> None:
        self.init = init
        self.pidfd = os.pidfd_open(init)
        self._proc = processes.find(init)
        self._supervisor = 0

    @property
    def supervisor(self) -> int:
        """The supervisor's id on the host: process 1's first child."""
        if not self._supervisor:
            self._supervisor = next(iter(self.children()), 0)
        return self._supervisor

    def children(self) -> list[int]:
        """Those of process 1: the supervisor, and what lost its parent. Empty once it is gone."""
        alive = self._proc is not None and self._proc.alive()
        return processes.children(self.init) if alive else []

    def expend(self) -> None:
        """Have the kernel end what the supervisor starts first when the machine is short of memory.
        A sandbox cannot ask for it itself: its /proc is read-only."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.supervisor}/oom_score_adj").write_text("1000")

    def end_process(self, inside: int) -> None:
        """End a background process by its id in the sandbox. Blocks."""
        for proc in processes.descendants(self.init):
            if processes.inside_pid(proc.pid) == inside:
                processes.stop_tree(proc)
                processes.end_tree(proc)


class Outer:
    """A started bubblewrap."""

    def __init__(self, process: subprocess.Popen[bytes], info: int) -> None:
        self.process = process
        self._info = info
        self._inner: Inner | None = None

    def inner(self) -> Inner:
        """Its inside, once it stands. Raises: OSError or ValueError when it does not."""
        if self._inner is None:
            with open(self._info, "rb") as file:
                self._info = -1
                self._inner = Inner(int(json.loads(file.read())["child-pid"]))
            self._inner.expend()
        return self._inner

    async def end(self) -> int:
        """End all that runs in it. Its code, as `ended` has it.

        Process 1 is killed, with which all in the sandbox ends; bubblewrap waits for it and ends
        too. Killed itself, it would leave process 1 to the machine's process 1.
        """
        if self._inner is None:
            await asyncio.to_thread(self._end_starting)
        else:
            self._end_inner()
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
        below = processes.descendants(root.pid)
        for proc in below:
            processes.end_tree(proc)
        root.signal(signal.SIGCONT if below else signal.SIGKILL)

    def _end_inner(self) -> bool:
        """SIGKILL process 1. False when it is not there any more."""
        if self._inner is None or self._inner.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._inner.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    async def ended(self) -> int:
        """Wait until it and all that ran in it are gone. Its code, negative after a signal."""
        code = await exited(self.process)
        if self._inner is not None and self._end_inner():
            await gone(self._inner.pidfd)
        return code

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        if self._info >= 0:
            os.close(self._info)
            self._info = -1
        if self._inner is not None and self._inner.pidfd >= 0:
            os.close(self._inner.pidfd)
            self._inner.pidfd = -1


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


async def abandon(outer: Outer) -> None:
    """End a bubblewrap that did not come up."""
    await outer.end()
    outer.close()


async def confined(
    held: list[str], name: str, memory_bytes: int, groups: limits.Cgroups, inner: Inner
) -> None:
    """Put a sandbox, in which nothing of the agent's runs yet, into a control group.

    Beside the loop: the kernel takes milliseconds to move a process. A cancelled caller waits for
    its end, so that the group is known to whoever removes it.

    Args:
        held: takes the path of the group, to be removed with the sandbox.
        name: OWNER.N, or what begins so.
        memory_bytes: of the whole sandbox.
    """

    def confine() -> None:
        try:
            path = groups.make(name, memory_bytes)
        except OSError:
            return  # then the limit is not in force, and `info.limits` does not list it
        held.append(path)
        for pid in (inner.init, inner.supervisor):
            limits.add(path, pid)

    if groups.works:
        await in_thread(confine)
