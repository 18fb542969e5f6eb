"""What a rollout left, as an archive or a copy, in bounded time and space whatever the agent made.

An agent can leave folders thousands of levels deep, folders and files that it locked, and files
that are nothing but holes. So the walk is a loop, only data is read, and what exceeds the bounds
is refused: that is no fault of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hermes_rl.aio import in_thread

T = TypeVar("T")

FORMAT = "tar.gz"
_LEVEL = 1
"""Of gzip: a workspace is written once for each rollout and seldom read."""
MAX_ENTRIES = 400_000
MAX_BYTES = 4 << 30
"""Of data; holes are not counted. Both are twice what a sandbox may hold."""
MAX_S = 300.0
MAX_PATH = 3_500
"""Bytes of a path: the machine's limit is 4,096, with the folders above the workspace."""
CHUNK = 1 << 20
_BLOCK = 512
_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of reading that the agent can bring about."""
Extent = tuple[int, int]
"""Offset and length of data in a file."""


class Unpackable(Exception):
    """What an agent left exceeds the bounds; the message says which."""


class Packing:
    """One walk through a folder in which nothing runs any more; it blocks, for threads. `reading`
    makes them."""

    def __init__(self, folder: Path, cancelled: threading.Event) -> None:
        self._folder = folder
        self._entries = self._bytes = 0
        self._deadline = time.monotonic() + MAX_S
        self.locked: list[tuple[str, int]] = []
        """Paths that were unlocked, with their modes before."""
        self._cancelled = cancelled

    def pack(self, target: Path) -> None:
        """Write the folder's content as a compressed archive, which appears whole or not at all.

        Links are stored as links, pipes as pipes, sockets are left out; owners are stored as
        nobody's. Raises: Unpackable; OSError, as of a full disk.
        """
        half = target.with_name(f".{target.name}.half")
        known: dict[tuple[int, int], str] = {}
        try:
            with tarfile.open(
                half, "w:gz", compresslevel=_LEVEL, format=tarfile.PAX_FORMAT
            ) as archive:
                for path, found in self._walk():
                    self._add(archive, path, found, known)
            with half.open("rb") as file:
                os.fsync(file.fileno())
            half.rename(target)
        finally:
            half.unlink(missing_ok=True)

    def copy(self, target: Path, uid: int | None = None) -> None:
        """Copy the folder: links as links, times and modes kept, pipes and sockets left out; the
        copy belongs to `uid`. Raises: Unpackable; OSError, as of a full disk.
        """
        folders = [("", os.lstat(self._folder))]
        os.mkdir(target, 0o700)
        for path, found in self._walk():
            made = os.path.join(target, path)
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(made, 0o700)
                folders.append((path, found))
            elif stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(self._folder / path), made)
                if uid is not None:
                    os.lchown(made, uid, uid)
            elif stat.S_ISREG(found.st_mode):
                self._copy_file(path, found, made)
                _finish(made, found, uid)
        for path, found in reversed(folders):
            _finish(os.path.join(target, path), found, uid)

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """All below the folder, each folder before what is in it: paths from it on, as they were
        found."""
        todo = [""]
        while todo:
            path = todo.pop()
            if len(os.fsencode(path)) > MAX_PATH:
                raise Unpackable(f"the workspace holds paths of more than {MAX_PATH} bytes")
            with _reading():
                found = os.lstat(self._folder / path)
            if path:
                self._count(entries=1)
                yield path, found
            if stat.S_ISDIR(found.st_mode):
                with _reading():
                    self._unlock(self._folder / path, found, 0o700)
                    names = sorted(os.listdir(self._folder / path), reverse=True)
                self._count(waiting=len(todo) + len(names))
                todo += [os.path.join(path, name) for name in names]

    def _unlock(self, path: Path, found: os.stat_result, needed: int) -> None:
        mode = stat.S_IMODE(found.st_mode)
        if mode & needed != needed and os.geteuid() != 0:
            os.chmod(path, mode | needed)
            self.locked.append((str(path), mode))

    def _count(self, *, entries: int = 0, size: int = 0, waiting: int = 0) -> None:
        """Raises: Unpackable when a bound is exceeded."""
        self._entries += entries
        self._bytes += size
        if self._cancelled.is_set():
            raise Unpackable("cancelled")
        if self._entries + waiting > MAX_ENTRIES:
            raise Unpackable(f"the workspace holds more than {MAX_ENTRIES} files")
        if self._bytes > MAX_BYTES:
            raise Unpackable(f"the workspace holds more than {MAX_BYTES} bytes")
        if time.monotonic() > self._deadline:
            raise Unpackable(f"the workspace takes more than {MAX_S:g} s to read")

    @contextlib.contextmanager
    def _open(self, path: str, found: os.stat_result) -> Iterator[tuple[int, list[Extent]]]:
        """A regular file, and where its data is."""
        with _reading():
            self._unlock(self._folder / path, found, 0o400)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._folder / path, flags)
        try:
            yield fd, [*_extents(fd, found)]
        finally:
            os.close(fd)

    def _read(self, fd: int, extents: list[Extent]) -> Iterator[tuple[int, bytes]]:
        """The data, with the offset of each chunk."""
        for offset, length in extents:
            for at in range(offset, offset + length, CHUNK):
                size = min(CHUNK, offset + length - at)
                self._count(size=size)
                yield at, os.pread(fd, size, at).ljust(size, b"\0")

    def _copy_file(self, path: str, found: os.stat_result, made: str) -> None:
        with self._open(path, found) as (fd, extents), open(made, "xb", buffering=0) as target:
            for at, data in self._read(fd, extents):
                target.seek(at)
                target.write(data)
            target.truncate(found.st_size)

    def _add(
        self,
        archive: tarfile.TarFile,
        path: str,
        found: os.stat_result,
        known: dict[tuple[int, int], str],
    ) -> None:
        """Add one entry to an archive. `known` names files that have several names."""
        info = tarfile.TarInfo(path)
        info.mode, info.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
        kind = _TYPES.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return
        info.type = kind
        if stat.S_ISLNK(found.st_mode):
            info.linkname = os.readlink(self._folder / path)
        elif kind != tarfile.DIRTYPE and found.st_nlink > 1:
            info.linkname = known.setdefault((found.st_dev, found.st_ino), path)
            if info.linkname != path:
                info.type = tarfile.LNKTYPE
            else:
                info.linkname = ""
        info.devmajor, info.devminor = os.major(found.st_rdev), os.minor(found.st_rdev)
        if info.type != tarfile.REGTYPE:
            archive.addfile(info)
            return
        with self._open(path, found) as (fd, extents):
            head = _sparse(info, found.st_size, extents)
            data = _Stream(head, (data for _, data in self._read(fd, extents)))
            archive.addfile(info, data)  # type: ignore[arg-type]


_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}


class _Stream:
    """Chunks as a file to read from."""

    def __init__(self, head: bytes, chunks: Iterator[bytes]) -> None:
        self._kept = bytearray(head)
        self._chunks = chunks

    def read(self, size: int) -> bytes:
        while len(self._kept) < size and (data := next(self._chunks, b"")):
            self._kept += data
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken


def _sparse(info: tarfile.TarInfo, size: int, extents: list[Extent]) -> bytes:
    """Set an entry's size; returns what stands before its data.

    A file with holes is stored in the PAX format 1.0 for sparse files of GNU tar, whose manual
    describes it ("Storing Sparse Files"): a map of the data, then the data.
    """
    stored = sum(length for _, length in extents)
    if stored == size:
        info.size = size
        return b""
    if not extents or sum(extents[-1]) < size:
        extents = [*extents, (size, 0)]
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    head = "".join(f"{number}\n" for number in numbers).encode()
    head = head.ljust(-(-len(head) // _BLOCK) * _BLOCK, b"\0")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size),
    }
    folder, name = os.path.split(info.name)
    info.name = os.path.join(folder, "GNUSparseFile.0", name)
    info.size = len(head) + stored
    return head


def _extents(fd: int, found: os.stat_result) -> Iterator[Extent]:
    """Where a file has data; all of it where the file system does not say."""
    end = found.st_size
    if found.st_blocks * _BLOCK >= end:
        if end:
            yield 0, end
        return
    at = 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        yield start, at - start


def _finish(made: str, found: os.stat_result, uid: int | None) -> None:
    if uid is not None:
        os.chown(made, uid, uid)
    os.chmod(made, stat.S_IMODE(found.st_mode))
    os.utime(made, ns=(found.st_atime_ns, found.st_mtime_ns))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise Unpackable(f"the workspace cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def reading(folder: Path, cancelled: threading.Event | None = None) -> Iterator[Packing]:
    """A walk through a folder; what an ordinary user's agent locked is locked again after it.

    Args:
        folder: the folder.
        cancelled: once set, from any thread, the walk ends soon, with Unpackable.
    """
    packing = Packing(folder, cancelled or threading.Event())
    try:
        yield packing
    finally:
        for path, mode in reversed(packing.locked):
            with contextlib.suppress(OSError):
                os.chmod(path, mode)


async def pack_in_thread(folder: Path, work: Callable[[Packing], T]) -> T:
    """Walk through a folder in a thread, which ends soon when the caller is cancelled."""
    cancelled = threading.Event()

    def walk() -> T:
        with reading(folder, cancelled) as packing:
            return work(packing)

    walking = asyncio.ensure_future(in_thread(walk))
    try:
        return await asyncio.shield(walking)
    except asyncio.CancelledError:
        cancelled.set()
        with contextlib.suppress(Exception):  # the cancellation goes first
            await walking
        raise


UNPACK = (
    "tar --extract --gzip --no-same-owner --file={archive} --directory=. "
    "$(tar --help | grep -o -m1 -e --delay-directory-restore)"
)
"""The command that puts it back, in a sandbox of its own. Locked folders are locked at the end."""
