"""Locks on files (flock) that the kernel frees when their holder ends, however it ends; and the
exchange of two folders in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_EXCHANGE = 2
_HERE = -100  # AT_FDCWD


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting, and return whether that succeeded.

    Args:
        shared: several holders may share the lock; it excludes exclusive ones.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(fd: int, seconds: float) -> bool:
    """Lock an open file exclusively, waiting at most so many seconds; return whether it succeeded.

    Blocking: for threads, not for an event loop.
    """
    deadline = time.monotonic() + seconds
    while not try_lock(fd):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Take the exclusive lock on `path` if it is free, and yield whether it was.

    The file is created if it is missing and is never removed.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders at once: renameat2(2), RENAME_EXCHANGE.

    Raises: OSError where the file system or the system cannot.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, "this system has no renameat2")
    if call(_HERE, bytes(one), _HERE, bytes(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
