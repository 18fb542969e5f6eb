"""Opening files in a folder that a sandbox writes, from the host.

A sandbox can put a symlink, a device or a pipe anywhere in its workspace at any moment. So the host
opens only by openat2: beneath the folder, through no symlink and no magic link, without blocking,
and regular files only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_OPENAT2 = 437
_RESOLVE = 0x08 | 0x04 | 0x02  # beneath, no symlinks, no magic links
_SAFE = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
LOCKED_MAX = 256
"""Folders that their owner locked and one look opens, at most: each costs us a descriptor."""
READ_MAX = 256 << 20
"""Bytes of a file that is read into memory, at most: a sparse one costs its maker nothing."""
DOWNLOAD_MAX = 1 << 30
"""Bytes of a file that is copied out, at most: what a sandbox may write into one."""
UNSIZED_MAX = 16 << 20
"""Bytes of a file without a size, at most: some of /proc have no end."""
UNSAFE = (errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ENOSYS, errno.EAGAIN)
"""Errors that mean: not a plain path. Such a file is read inside the sandbox instead."""


class _How(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


@lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """The C library, for system calls that Python does not have."""
    return ctypes.CDLL(None, use_errno=True)


def _openat2(folder: int, path: str, flags: int, mode: int = 0) -> int:
    how = _How(flags | (os.O_CLOEXEC if flags & os.O_PATH else _SAFE), mode, _RESOLVE)
    name = os.fsencode(path)
    fd = libc().syscall(_OPENAT2, folder, name, ctypes.byref(how), ctypes.sizeof(how))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(fd)


class Look(contextlib.ExitStack):
    """One look through folders; on leaving it, what was opened for it is locked again."""

    locked: int = 0


@dataclass(frozen=True)
class Beneath:
    """A folder of the host that a sandbox writes.

    Attributes:
        folder: the folder; its own path is made and owned by the host.
        uid: who owns what we make in it; None is ourselves.
    """

    folder: Path
    uid: int | None = None

    def open_read(self, path: str) -> int:
        """Open a regular file. Raises: OSError; IsADirectoryError for a folder."""
        return self._checked(self._open(path, os.O_RDONLY), path)

    def open_write(self, path: str) -> int:
        """Open a regular file to write it anew, making its parents. Raises: OSError."""
        flags = os.O_WRONLY | os.O_CREAT
        try:
            fd = self._open(path, flags, 0o644)
        except FileNotFoundError:
            self.make_folder(os.path.dirname(path))
            fd = self._open(path, flags, 0o644)
        self._checked(fd, path)
        os.ftruncate(fd, 0)
        if self.uid is not None:
            os.fchown(fd, self.uid, self.uid)
        return fd

    def listing(self, path: str, after: Look) -> list[tuple[str, bool, int]]:
        """What is in a folder: paths from here, whether they are folders, bytes on the disk.

        A folder that its owner locked is opened for the look, and locked again by `after`. One that
        vanished is empty; one that its owner made so that it cannot be looked into counts as full.

        Raises: OSError when this process, or the machine, has no descriptor left.
        """
        try:
            fd = self._open_folder(path, after)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            full = error.errno in (errno.ENAMETOOLONG, errno.EACCES)
            return [(path, False, 1 << 62)] if full else []
        found = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat(follow_symlinks=False).st_blocks * 512
                        is_folder = entry.is_dir(follow_symlinks=False)
                        found.append((os.path.join(path, entry.name), is_folder, size))
        finally:
            os.close(fd)
        return found

    def _open_folder(self, path: str, after: Look) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return self._open(path or ".", flags)
        except PermissionError:
            after.locked += 1
            if after.locked > LOCKED_MAX:
                raise
            if path:
                handle = self._open(path, os.O_PATH | os.O_DIRECTORY)
            else:
                handle = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        after.callback(os.close, handle)
        link = f"/proc/self/fd/{handle}"
        after.callback(os.chmod, link, stat.S_IMODE(os.fstat(handle).st_mode))
        os.chmod(link, 0o700)
        return self._open(path or ".", flags)

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents."""
        here = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in [part for part in path.split("/") if part not in ("", ".")]:
                here = self._enter(here, part)
        finally:
            os.close(here)

    def _enter(self, here: int, part: str) -> int:
        """Go one folder down, made when absent; closes the one that it leaves."""
        try:
            os.mkdir(part, 0o755, dir_fd=here)
            made = True
        except FileExistsError:
            made = False
        below = _openat2(here, part, os.O_RDONLY | os.O_DIRECTORY)
        if made and self.uid is not None:
            os.fchown(below, self.uid, self.uid)
        os.close(here)
        return below

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        here = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _openat2(here, path, flags, mode)
        finally:
            os.close(here)

    def _checked(self, fd: int, path: str) -> int:
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind):
            return fd
        os.close(fd)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.ENXIO, "not a regular file", path)


IN_THREAD = 1 << 18
"""Files above this size are read and written in a thread."""


def too_large(path: str, limit: int) -> OSError:
    more = ": download it instead" if limit == READ_MAX else ""
    return OSError(f"{path}: more than {limit} bytes{more}")


def bounded_size(fd: int, path: str, limit: int) -> int:
    """Size of an open file. Closes it and raises OSError when that is above the limit."""
    size = os.fstat(fd).st_size
    if size > limit:
        os.close(fd)
        raise too_large(path, limit)
    return size


async def read_open(fd: int, path: str) -> bytes:
    """What was in the file when it was looked at: its owner may be writing on."""

    def read() -> bytes:
        with open(fd, "rb") as file:
            return file.read(size)

    size = bounded_size(fd, path, READ_MAX)
    return read() if size <= IN_THREAD else await asyncio.to_thread(read)


def write_open(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def copy_in(local: Path, fd: int) -> None:
    with open(fd, "wb") as target, open(local, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)


def copy_out(fd: int, local: Path, left: int) -> None:
    with open(fd, "rb") as source, open(local, "wb") as target:
        while data := source.read(min(left, 1 << 20)):
            target.write(data)
            left -= len(data)
