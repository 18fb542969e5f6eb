"""Who holds a lock: a process named by host, boot, pid and start time, so that none is mistaken."""

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
    """One process, unmistakably."""

    pid: int
    started: int
    """Clock ticks after boot (field 22 of /proc/PID/stat)."""
    host: str
    boot: str
    """The kernel's boot id; another one means that the process is gone."""
    lease_s: float | None = None
    """Of a worker: it stops when it does not hear its driver for so many seconds."""

    @property
    def local(self) -> bool:
        """It ran under this very kernel."""
        return self.host == socket.gethostname() and self.boot == _boot_id()

    @property
    def alive(self) -> bool:
        """A local process that still runs; a pid that was given anew does not count."""
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


class Held:
    """A lock file that this process holds until `release`. A forked child does not hold it."""

    def __init__(self, fd: int, lease_s: float | None = None) -> None:
        self._fd = fd
        self._users = 1
        self._guard = threading.Lock()
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(this_process(lease_s)), 0)
        _held.add(self)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep the lock until this is left, whoever releases it meanwhile.

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
        """Unlock the file for everybody who shares its descriptor, and close it."""
        with self._guard:
            self._users -= 1
            if not self._users:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)

    def drop(self) -> None:
        """Close the descriptor without unlocking the file: the parent process holds it."""
        if self._users > 0:
            os.close(self._fd)
        self._users = 0


_held: weakref.WeakSet[Held] = weakref.WeakSet()


def _drop_inherited() -> None:
    for held in list(_held):
        held.drop()
    _held.clear()


os.register_at_fork(after_in_child=_drop_inherited)


def read_holder(fd: int) -> ProcessId | None:
    """Who holds a lock file; None when it does not say."""
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
