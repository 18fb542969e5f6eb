"""Lock files and their holders, identified by host, boot, pid and start time."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.sandboxes import find


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one process."""

    pid: int
    started: int
    """Clock ticks after boot (field 22 of /proc/PID/stat)."""
    host: str
    boot: str
    """The boot id of the kernel; with another one the process has ended."""
    lease_s: float | None = None
    """Seconds without a message from its driver after which a worker stops."""

    @property
    def local(self) -> bool:
        """Whether it ran under this kernel."""
        return self.host == socket.gethostname() and self.boot == _boot_id()

    @property
    def alive(self) -> bool:
        """Whether it is a local process that still runs; reused pids do not count."""
        return self.local and _started(self.pid) == self.started

    def kill(self) -> None:
        """kill -9, if it is alive."""
        if self.alive:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def this_process(lease_s: float | None = None) -> ProcessId:
    """The identity of the calling process."""
    pid = os.getpid()
    return ProcessId(
        pid=pid,
        started=_started(pid) or 0,
        host=socket.gethostname(),
        boot=_boot_id(),
        lease_s=lease_s,
    )


class HeldLock:
    """A lock file that this process holds until `release`. Forked children do not hold it."""

    def __init__(self, fd: int, lease_s: float | None = None) -> None:
        self._fd = fd
        self._users = 1
        self._guard = threading.Lock()
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(this_process(lease_s)), 0)
        _held.add(self)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock during this context, even if it is released meanwhile.

        Raises: StoreError when it was released before.
        """
        with self._guard:
            if not self._users:
                raise StoreError("the lock was released")
            self._users += 1
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Release one hold; the last one unlocks and closes the file."""
        with self._guard:
            self._users -= 1
            if not self._users:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)

    def drop(self) -> None:
        """Close the descriptor in a forked child; the parent keeps the lock."""
        if self._users > 0:
            os.close(self._fd)
        self._users = 0


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    for held in list(_held):
        held.drop()
    _held.clear()


os.register_at_fork(after_in_child=_drop_inherited)


def read_holder(fd: int) -> ProcessId | None:
    """The holder of a lock file; None when the file does not name it."""
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=ProcessId)
    except msgspec.DecodeError:
        return None


def _started(pid: int) -> int | None:
    process = find(pid)
    return process.start if process is not None and process.alive() else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
