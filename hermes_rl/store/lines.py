"""Framed lines: `LENGTH CRC32 JSON\\n`, the one format of all journal files.

Length is that of the JSON in bytes, the checksum is 8 hex digits. What a kill tears is the tail of
a file. What a power loss tears are pages that were not yet on disk: they read as zeros, and later
pages may be there. Anything else that is bad is damage, and is never skipped over in silence.

A line says with `synced` how many bytes of its file were on disk when it was written: zeros before
that are damage too.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hermes_rl.errors import StoreError


class DamagedFile(StoreError):
    """A journal file has a bad line that is not its tail."""

    def __init__(self, path: Path, line: int, offset: int) -> None:
        super().__init__(f"{path}: line {line} (byte {offset}) is damaged")
        self.path = path
        self.line = line
        self.offset = offset


@dataclass(frozen=True)
class Line:
    """One line as read."""

    number: int
    """1-based."""
    offset: int
    """Of its first byte."""
    payload: bytes | None
    """None when it is torn or damaged."""
    last: bool
    """Nothing follows it."""
    zeros: bool = False
    """It holds zeros, which no line has: the page was never written. A flipped bit makes one at
    most."""


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


def scan(path: Path) -> Iterator[Line]:
    """All lines of a file, good and bad, one in memory at a time.

    Raises: FileNotFoundError; StoreError when it is no file, or cannot be opened.
    """
    try:
        opened = path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    with opened as file:
        number, offset = 0, 0
        line = file.readline()
        while line:
            # Only the end of a file has no newline: what a writer adds in this moment is not looked
            # at, or the line that it is about to complete would pass for a damaged one.
            after = file.readline() if line.endswith(b"\n") else b""
            number += 1
            yield Line(number, offset, decode_line(line), not after, b"\0\0" in line)
            offset += len(line)
            line = after


def payloads(path: Path, *, sound: bool = True) -> Iterator[bytes]:
    """The payloads of a file without what a kill or a power loss tore.

    Args:
        sound: False passes over damaged lines (repair).

    Raises: DamagedFile for a bad line that is neither the tail nor an unwritten page, when `sound`.
    """
    unwritten: Line | None = None
    for line in scan(path):
        if line.payload is not None:
            if unwritten is not None and _synced(line.payload) > unwritten.offset:
                raise DamagedFile(path, unwritten.number, unwritten.offset)
            yield line.payload
        elif sound and line.zeros:
            unwritten = unwritten or line
        elif sound and not line.last:
            raise DamagedFile(path, line.number, line.offset)


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


class _Synced(msgspec.Struct):
    synced: int = 0


_decode_synced = msgspec.json.Decoder(_Synced).decode


def with_synced(payload: bytes, synced: int) -> bytes:
    """A JSON object that also says how many bytes of its file are on disk."""
    return b'{"synced":%d,' % synced + payload[1:] if synced else payload


def _synced(payload: bytes) -> int:
    return _decode_synced(payload).synced
