"""The few file-system verbs that published things need, and files that are only appended to.

`Storage` is the seam for object stores: names are relative to the run directory, every `put` is
whole or
absent, and durable when it returns. Journals are always local files.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hermes_rl.errors import DiskFull, HermesError, StoreError
from hermes_rl.store.crash import CrashHook
from hermes_rl.store.lines import encode_line, with_synced

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Storage(Protocol):
    """Where the published files of a run live. All verbs block: call them in threads."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty when there is no such folder."""
        ...

    def read(self, name: str) -> bytes:
        """The content. Raises: FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes, *, point: str = "") -> None:
        """Write or replace. Raises: DiskFull."""
        ...

    def put_new(self, name: str, data: bytes) -> bool:
        """Write unless it exists; False when it does. Raises: DiskFull."""
        ...

    def put_file(self, name: str, local: Path, *, point: str = "") -> None:
        """Move a complete local file there. Raises: DiskFull."""
        ...

    def delete(self, name: str) -> None:
        """Remove; nothing happens when it is absent."""
        ...


class LocalStorage:
    """A local folder: temporary name, fsync, rename, fsync of the folder.

    Args:
        root: the run directory.
        crash: crash points `POINT-written`, `POINT-renamed` and `POINT-durable` of every put.
        fsync_delay_s: slows every fsync, for tests.
    """

    def __init__(self, root: Path, crash: CrashHook, fsync_delay_s: float = 0.0) -> None:
        self._root = root
        self._crash = crash
        self._delay = fsync_delay_s

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def put(self, name: str, data: bytes, *, point: str = "") -> None:
        self.put_file(name, self._temporary(name, data), point=point)

    def put_new(self, name: str, data: bytes) -> bool:
        local = self._temporary(name, data)
        final = self._root / name
        with disk_errors():
            self.sync_file(local)
            try:
                os.link(local, final)  # refuses an existing name, unlike rename
            except FileExistsError:
                return False
            finally:
                local.unlink()
            self.sync_folder(final.parent)
        return True

    def put_file(self, name: str, local: Path, *, point: str = "") -> None:
        final = self._root / name
        with disk_errors():
            self.sync_file(local)
            self._pass(point, "written")
            os.rename(local, final)
            self._pass(point, "renamed")
            self.sync_folder(final.parent)
            self._pass(point, "durable")

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def sync_file(self, path: Path) -> None:
        """fsync a file (or a folder) by name."""
        fd = os.open(path, os.O_RDONLY)
        try:
            self._wait()
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """fsync a folder: names made or changed in it are durable."""
        self.sync_file(path)

    def sync(self, fd: int) -> None:
        """fdatasync an open file. Raises: DiskFull."""
        self._wait()
        with disk_errors():
            os.fdatasync(fd)

    def _wait(self) -> None:
        if self._delay:
            time.sleep(self._delay)

    def temporary(self, name: str) -> Path:
        """A new empty file in tmp/, for what will be published as `name`. No other process or
        thread has its path. Raises: DiskFull."""
        local = self._root / "tmp" / f"{name.replace('/', '.')}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with disk_errors():
            os.close(os.open(local, flags, 0o644))
        return local

    def _temporary(self, name: str, data: bytes) -> Path:
        local = self.temporary(name)
        with disk_errors():
            try:
                local.write_bytes(data)
            except OSError:
                local.unlink(missing_ok=True)
                raise
        return local

    def _pass(self, point: str, step: str) -> None:
        if point:
            self._crash(f"{point}-{step}")


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn the errors of a full disk into DiskFull."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFull) or error.errno not in _FULL:
            raise
        raise DiskFull(f"the disk is full: {error}. Free some space and run again") from error


@contextmanager
def one_line_errors(run: Path) -> Iterator[None]:
    """Turn errors of the file system, such as a folder in the place of a file, into StoreError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HermesError):
            raise
        raise StoreError(f"{run} cannot be used: {error}. See hermes-rl check {run}") from error


class AppendFile:
    """A file that this process makes and alone appends to, line by line.

    A short or failed write is undone to the last good offset, so that the file only ever holds
    whole lines while its writer lives.
    """

    def __init__(self, path: Path, crash: CrashHook, point: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        with disk_errors():
            self._fd = os.open(path, flags, 0o644)
        self.path = path
        self.size = 0
        """Bytes of whole lines."""
        self.synced = 0
        """How many of them are known to be on disk."""
        self._crash = crash
        self._point = point

    def append(self, payload: bytes) -> None:
        """Append one framed line: plain write(2), no fsync. Raises: DiskFull."""
        line = encode_line(with_synced(payload, self.synced))
        if self._crash.due(f"{self._point}-torn"):
            os.write(self._fd, line[: len(line) // 2])
            self._crash.die()
        view = memoryview(line)
        with disk_errors():
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                os.ftruncate(self._fd, self.size)
                raise
        self.size += len(line)
        self._crash(self._point)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Close; the content stays as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
