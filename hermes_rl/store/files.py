"""Durable files of a run directory: published ones, and journals of framed lines.

A published file is whole or absent: temporary name, fsync, rename, fsync of the folder. A journal
file is only appended to. Each of its lines is `LENGTH CRC32 JSON\\n`: the length of the JSON in
bytes, and 8 hex digits of checksum. Instead of a long JSON there is `=SYNCED BASE64`, the same
compressed by zlib; versions that do not know that cannot take it for a line without rows.

A kill leaves an incomplete last line, without its newline. A power loss loses pages that were not
yet on disk: they read as zeros, even before later pages. Any other bad line is damage and is
reported. `synced` in a line is the number of bytes of its file that were on disk before; zeros in
them are damage, too.
"""

from __future__ import annotations

import binascii
import errno
import hashlib
import os
import secrets
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


PACKED_BYTES = 500
"""Longer JSON is compressed: rows become a third of their size."""
LARGE_BYTES = 65536
"""JSON that takes milliseconds to compress, which is then a thread's work."""


def pack(payload: bytes, *, in_thread: bool = False) -> bytes:
    """Return the JSON of a line, compressed if it is long.

    Args:
        in_thread: compress JSON of any size. Without it, other rollouts wait: large JSON stays.
    """
    large = len(payload) >= LARGE_BYTES and not in_thread
    if len(payload) < PACKED_BYTES or large or payload.startswith(b"="):
        return payload
    return b"=" + binascii.b2a_base64(zlib.compress(payload, 1), newline=False)


def _unpack(payload: bytes) -> bytes:
    """Raises: ValueError and zlib.error when it is damaged."""
    if not payload.startswith(b"="):
        return payload
    synced, _, packed = payload[1:].partition(b" ")
    return add_synced(zlib.decompress(binascii.a2b_base64(packed)), int(synced))


def encode_line(payload: bytes) -> bytes:
    """A framed line for a payload without raw newlines."""
    return b"%d %08x %b\n" % (len(payload), zlib.crc32(payload), payload)


def decode_line(line: bytes) -> bytes | None:
    """The JSON of a line with its newline; None when it is incomplete or damaged."""
    head, _, rest = line.partition(b" ")
    checksum, _, body = rest.partition(b" ")
    if not body.endswith(b"\n") or not head.isdigit() or len(checksum) != 8:
        return None
    payload = body[:-1]
    try:
        sound = len(payload) == int(head) and zlib.crc32(payload) == int(checksum, 16)
        return _unpack(payload) if sound else None
    except (ValueError, zlib.error):
        return None


class _Synced(msgspec.Struct):
    synced: int = 0


_decode_synced = msgspec.json.Decoder(_Synced).decode


def read_payloads(path: Path, *, strict: bool = True) -> Iterator[bytes]:
    """Yield the payloads of a file, without lines that a kill or a power loss damaged.

    Args:
        strict: False skips damaged lines (repair).

    Raises: FileNotFoundError; StoreError for anything but a file; DamagedFile for a bad line that
        is neither a last one without its newline nor an unwritten page, when `strict`.
    """
    unwritten: tuple[int, int] | None = None
    for number, offset, line, last in _lines(path):
        payload = decode_line(line)
        if payload is not None:
            if unwritten is not None and _decode_synced(payload).synced > unwritten[1]:
                raise DamagedFile(path, *unwritten)
            yield payload
        elif strict and b"\0\0" in line:  # a flipped bit gives at most one zero byte
            unwritten = unwritten or (number, offset)
        elif strict and (not last or line.endswith(b"\n")):  # a torn line lacks its newline
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
            # Only the last line has no newline. A writer may be completing it: it is the last one
            # even if more follows now.
            after = file.readline() if line.endswith(b"\n") else b""
            yield number, offset, line, not after
            number, offset, line = number + 1, offset + len(line), after


def file_sha256(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_DIGEST = b',"sha256":"'


def add_digest(content: bytes) -> bytes:
    """Add the digest of a JSON object to it as the last field."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:-1] + _DIGEST + digest + b'"}'


def check_digest(content: bytes) -> bytes:
    """Check and return content of `add_digest`; older versions wrote no digest.

    Raises: ValueError when it was changed.
    """
    at = content.rfind(_DIGEST, -len(_DIGEST) - 66)
    if at >= 0 and content != add_digest(content[:at] + b"}"):
        raise ValueError("its content does not match its sha256")
    return content


def add_synced(payload: bytes, synced: int) -> bytes:
    """Add the number of bytes on disk to a JSON object, or to a packed one."""
    if payload.startswith(b"="):
        return b"=%d %b" % (synced, payload[1:])
    return b'{"synced":%d,' % synced + payload[1:] if synced else payload


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Storage:
    """The published files of a run; names are relative to the run directory. All methods block.

    Args:
        root: the run directory.
        crash: crash points `POINT-written`, `POINT-renamed` and `POINT-durable` of every put.
    """

    def __init__(self, root: Path, crash: CrashHook) -> None:
        self._root = root
        self._crash = crash
        self.gate: Path | None = None
        """The folder of this driver's epoch, through which its files get their names. The next
        driver removes it, and no file passes after that."""

    def names(self, folder: str) -> list[str]:
        """The sorted names in a folder; empty when it does not exist."""
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        """The content. Raises: FileNotFoundError."""
        return (self._root / name).read_bytes()

    def put(self, name: str, data: bytes, *, point: str = "") -> None:
        """Write or replace a text file atomically, without secrets of this process; it is durable
        on return. Raises: DiskFull."""
        data = SECRETS.scrub_bytes(data)
        self.put_file(name, self._write_temporary(name, data), point=point)

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a new file. Returns False when it exists. Raises: DiskFull."""
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
        """Move a complete local file to its final name.

        Raises: StoreError when another driver has begun; DiskFull.
        """
        final, gate = self._root / name, self.gate
        with disk_errors():
            try:
                self.sync_path(local)
                self._crash(f"{point}-written")
                if gate is not None:
                    os.rename(local, gate / local.name)
                    local = gate / local.name
                os.rename(local, final)
            except FileNotFoundError:
                if gate is None or gate.is_dir():
                    raise
                raise StoreError(f"{self._root} was taken over by another driver") from None
            self._crash(f"{point}-renamed")
            self.sync_path(final.parent)
            self._crash(f"{point}-durable")

    def gated(self, path: Path) -> Path:
        """A path below the run directory that leads through the gate: nothing is found there once
        another driver has begun."""
        if self.gate is None:
            return path
        return self.gate / os.pardir / os.pardir / path.relative_to(self._root)

    def sync_path(self, path: Path) -> None:
        """fsync a file, or a folder, whose names are durable then."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self, fd: int) -> None:
        """fdatasync an open file. Raises: DiskFull."""
        with disk_errors():
            os.fdatasync(fd)

    def temporary(self, name: str) -> Path:
        """Create an empty file with a unique name in tmp/, to be published as `name`. Raises:
        DiskFull."""
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
    """Convert errors of a full disk to DiskFull."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFull) or error.errno not in _FULL:
            raise
        raise DiskFull(f"the disk is full: {error}. Free some space and run again") from error


@contextmanager
def convert_os_errors(run: Path) -> Iterator[None]:
    """Convert file system errors, such as a folder instead of a file, to StoreError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HermesError):
            raise
        raise StoreError(f"{run} cannot be used: {error}. See hermes-rl check {run}") from error


class AppendFile:
    """A file that this process creates and alone appends to, line by line.

    A short or failed write is truncated, so that the file contains only whole lines while its
    writer runs.
    """

    def __init__(self, path: Path, crash: CrashHook, point: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        with disk_errors():
            self._fd = os.open(path, flags, 0o644)
        self.path = path
        self.size = 0
        """Bytes of whole lines."""
        self.synced = 0
        """How many of them are on disk."""
        self._crash = crash
        self._point = point

    def append(self, payload: bytes) -> None:
        """Append one framed line: plain write(2), no fsync. Raises: DiskFull.

        Args:
            payload: JSON, or what `pack` made of it.
        """
        line = encode_line(add_synced(pack(payload), self.synced))
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
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
