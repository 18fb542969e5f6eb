"""Durable files of a run directory: published ones, and journals of framed lines.

A published file is whole or absent: temporary name, fsync, rename, fsync of the folder. A journal
file is only appended to. Each of its lines is `LENGTH CRC32 JSON\\n`: the length of the JSON in
bytes, and 8 hex digits of checksum.

A kill tears the tail of a journal file. A power loss tears pages that were not yet on disk: they
read as zeros, and later pages may be there. Any other bad line is damage and is reported. A line
says with `synced` how many bytes of its file were on disk when it was written: zeros before that
are damage too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hermes_rl.errors import DiskFull, HermesError, StoreError
from hermes_rl.store.crash import CrashHook
from hermes_rl.text import SECRETS


class DamagedFile(StoreError):
    """A journal file has a bad line that is not its tail."""

    def __init__(self, path: Path, number: int, offset: int) -> None:
        super().__init__(f"{path}: line {number} (byte {offset}) is damaged")
        self.path = path


def encode_line(payload: bytes) -> bytes:
    """A framed line for a payload without raw newlines."""
    return b"%d %08x %b\n" % (len(payload), zlib.crc32(payload), payload)


def decode_line(line: bytes) -> bytes | None:
    """The payload of a line with its newline, or None when it is torn or damaged."""
    head, _, rest = line.partition(b" ")
    checksum, _, body = rest.partition(b" ")
    if not body.endswith(b"\n") or not head.isdigit() or len(checksum) != 8:
        return None
    payload = body[:-1]
    try:
        sound = len(payload) == int(head) and zlib.crc32(payload) == int(checksum, 16)
    except ValueError:
        return None
    return payload if sound else None


class _Synced(msgspec.Struct):
    synced: int = 0


_decode_synced = msgspec.json.Decoder(_Synced).decode


def payloads(path: Path, *, sound: bool = True) -> Iterator[bytes]:
    """The payloads of a file, one in memory at a time, without what a kill or a power loss tore.

    Args:
        sound: False skips damaged lines (repair).

    Raises: FileNotFoundError; StoreError when it is no file; DamagedFile for a bad line that is
        neither the tail nor an unwritten page, when `sound`.
    """
    unwritten: tuple[int, int] | None = None
    for number, offset, line, last in _lines(path):
        payload = decode_line(line)
        if payload is not None:
            if unwritten is not None and _decode_synced(payload).synced > unwritten[1]:
                raise DamagedFile(path, *unwritten)
            yield payload
        elif sound and b"\0\0" in line:  # a flipped bit makes one zero at most
            unwritten = unwritten or (number, offset)
        elif sound and not last:
            raise DamagedFile(path, number, offset)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes, bool]]:
    """Number, offset and bytes of each line, and whether it is the last."""
    try:
        opened = path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    with opened as file:
        number, offset = 1, 0
        line = file.readline()
        while line:
            # Only the end of a file has no newline. What a writer adds at this moment is ignored,
            # or the line that it is about to complete would be taken for a damaged one.
            after = file.readline() if line.endswith(b"\n") else b""
            yield number, offset, line, not after
            number, offset, line = number + 1, offset + len(line), after


def file_sha256(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_DIGEST = b',"sha256":"'


def with_digest(content: bytes) -> bytes:
    """A JSON object that also has the digest of itself, as its last field."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:-1] + _DIGEST + digest + b'"}'


def check_digest(content: bytes) -> bytes:
    """The same content, as `with_digest` made it; one without a digest is an older version's.

    Raises: ValueError when it was changed.
    """
    at = content.rfind(_DIGEST, -len(_DIGEST) - 66)
    if at >= 0 and content != with_digest(content[:at] + b"}"):
        raise ValueError("its content does not have the sha256 that it names")
    return content


def with_synced(payload: bytes, synced: int) -> bytes:
    """A JSON object that also says how many bytes of its file are on disk."""
    return b'{"synced":%d,' % synced + payload[1:] if synced else payload


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Storage:
    """The published files of a run; names are relative to the run directory. All verbs block.

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
        """The names in a folder, sorted; empty when there is no such folder."""
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        """The content. Raises: FileNotFoundError."""
        return (self._root / name).read_bytes()

    def put(self, name: str, data: bytes, *, point: str = "") -> None:
        """Write or replace a file of text, without secrets of this process; it is whole and durable
        on return. Raises: DiskFull."""
        data = SECRETS.scrub_bytes(data)
        self.put_file(name, self._write_temporary(name, data), point=point)

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; False when it does. Raises: DiskFull."""
        local = self._write_temporary(name, data)
        final = self._root / name
        with disk_errors():
            self.sync_path(local)
            try:
                os.link(local, final)  # refuses an existing name, unlike rename
            except FileExistsError:
                return False
            finally:
                local.unlink()
            self.sync_path(final.parent)
        return True

    def put_file(self, name: str, local: Path, *, point: str = "") -> None:
        """Move a complete local file to its final name. Raises: DiskFull."""
        final = self._root / name
        with disk_errors():
            self.sync_path(local)
            self._crash(f"{point}-written")
            os.rename(local, final)
            self._crash(f"{point}-renamed")
            self.sync_path(final.parent)
            self._crash(f"{point}-durable")

    def sync_path(self, path: Path) -> None:
        """fsync a file, or a folder: names made or changed in it are durable."""
        fd = os.open(path, os.O_RDONLY)
        try:
            time.sleep(self._delay)
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self, fd: int) -> None:
        """fdatasync an open file. Raises: DiskFull."""
        time.sleep(self._delay)
        with disk_errors():
            os.fdatasync(fd)

    def temporary(self, name: str) -> Path:
        """Make an empty file in tmp/, for what will be published as `name`. Its path is its own:
        no other process or thread has it. Raises: DiskFull."""
        local = self._root / "tmp" / f"{name.replace('/', '.')}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with disk_errors():
            os.close(os.open(local, flags, 0o644))
        return local

    def _write_temporary(self, name: str, data: bytes) -> Path:
        local = self.temporary(name)
        with disk_errors():
            try:
                local.write_bytes(data)
            except OSError:
                local.unlink(missing_ok=True)
                raise
        return local


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
