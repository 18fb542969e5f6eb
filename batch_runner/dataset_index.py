"""What a resume knows of the dataset's file before it parses a row: the units of each block.

`dataset.index` in the run directory has one record for each block of the file, in order: the digest
of the block's bytes, and the ids that its rows gave. A resume digests each block, which is fast,
and skips those that are unchanged and whose units are all done; it parses only the others. The
index is a cache: without it, or where it is damaged, everything is parsed. Large JSON Lines files
have one.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.identity import IDENTITY_VERSION, digest, unit_key
from hermes_rl.tasks import Columns, LazyRow, lazy_rows

KEY_BYTES = 16
"""Of an id of a unit, and of what is kept of a task's hash."""
LEAST_BYTES = 16 * 2**20
"""Smaller files are parsed within a second."""
BLOCK_BYTES = 2**20
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of a record."""
_VERSION = 1


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of the file."""

    sha256: bytes
    """Of its bytes."""
    lines: int
    """Blank ones, too."""
    tasks: bytes
    """The first 16 bytes of each row's task hash; none if a row of the block could not be read."""
    units: bytes
    """The ids of their units, of 16 bytes each."""
    members: dict[int, int]
    """Row of the block -> units, where that number is not the dataset's."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.tasks) // KEY_BYTES


class DatasetIndex:
    """Reads a dataset with the help of its index, and continues the index.

    Args:
        path: the index; only the driver that holds the run's lock uses it.
        dataset: the JSON Lines file.
        columns: see `hermes_rl.sources.read_rows`.
        repeats: of a row without its own.
        all_done: whether the units of these ids (16 bytes each) are all done.
        block_bytes: of the dataset, at least, for each record.
    """

    def __init__(
        self,
        path: Path,
        dataset: Path,
        *,
        config_hash: str,
        columns: Columns,
        repeats: int,
        all_done: Callable[[bytes], bool],
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._path = path
        self._dataset = dataset
        self._config_hash = config_hash
        self._columns = columns
        self._repeats = repeats
        self._all_done = all_done
        self._block_bytes = block_bytes
        what = [_VERSION, IDENTITY_VERSION, config_hash, dict(columns), repeats, block_bytes]
        self._header = digest(what).encode()
        self._tasks, self._units = bytearray(), bytearray()
        self._members: dict[int, int] = {}
        self._readable = True

    def rows(self) -> Iterator[LazyRow | Block]:
        """The rows in order; a block instead of its rows where all its units are done.

        Blocking. Raises: UserError when the file cannot be read.
        """
        line = index = 0
        try:
            with self._dataset.open("rb") as file, _Records(self._path, self._header) as records:
                for data in self._blocks(file):
                    found = hashlib.sha256(data).digest()
                    block = records.next(found)
                    if block is not None and block.tasks and self._all_done(block.units):
                        yield block
                        line, index = line + block.lines, index + block.rows
                        continue
                    self._begin()
                    for row in lazy_rows(self._lines(data, line), self._columns, index):
                        yield row
                        index += 1
                    line += data.count(b"\n")
                    if block is None:
                        records.append(self._noted(found, data))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError(
                f"{self._dataset}:{line}: no row after this one can be read ({reason})"
            ) from error

    def note(self, task_hash: str, occurrence: int, members: int | None) -> None:
        """Take note of the row that was yielded last.

        Args:
            occurrence: its position among identical rows.
            members: its units; None if it could not be read.
        """
        if members is None:
            self._readable = False
            return
        if members != self._repeats:
            self._members[len(self._tasks) // KEY_BYTES] = members
        self._tasks += bytes.fromhex(task_hash[: 2 * KEY_BYTES])
        for repeat in range(members):
            self._units += unit_key(self._config_hash, task_hash, occurrence, repeat)

    def _blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """The file in pieces that end with a line."""
        while data := file.read(self._block_bytes):
            yield data + (b"" if data.endswith(b"\n") else file.readline())

    def _begin(self) -> None:
        self._tasks, self._units, self._members = bytearray(), bytearray(), {}
        self._readable = True

    def _noted(self, sha256: bytes, data: bytes) -> Block:
        lines = data.count(b"\n")
        if not self._readable:
            return Block(sha256, lines, b"", b"", {})
        return Block(sha256, lines, bytes(self._tasks), bytes(self._units), self._members)

    def _lines(self, data: bytes, before: int) -> Iterator[tuple[bytes, str]]:
        for number, line in enumerate(io.BytesIO(data), start=before + 1):
            if not line.isspace():
                yield line, f"{self._dataset}:{number}"


class _Records:
    """The records of an index: read while they fit the dataset, from then on written.

    Nothing here may fail a run: without a file that can be written there is no index.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self._file: BinaryIO | None = None
        self._reading = False
        with suppress(OSError):
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._reading = self._read() == header
            if not self._reading:
                self._cut(0)
                self._write(header)

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def next(self, sha256: bytes) -> Block | None:
        """The record of the next block of the dataset; None where there is none, or another."""
        if not self._reading or self._file is None:
            return None
        begin = self._file.tell()
        block: Block | None = None
        with suppress(msgspec.MsgspecError):
            block = msgspec.msgpack.decode(self._read() or b"", type=Block)
        if block is not None and block.sha256 == sha256:
            return block
        self._reading = False
        self._cut(begin)
        return None

    def append(self, block: Block) -> None:
        """Write the record of the block that was read last."""
        self._write(msgspec.msgpack.encode(block))

    def _read(self) -> bytes | None:
        """The next record; None at the end, and where it is damaged."""
        assert self._file is not None
        try:
            size, checksum = _FRAME.unpack(self._file.read(_FRAME.size))
            record = self._file.read(size)
        except (OSError, struct.error):
            return None
        return record if len(record) == size and zlib.crc32(record) == checksum else None

    def _cut(self, size: int) -> None:
        if self._file is not None:
            try:
                self._file.seek(size)
                self._file.truncate()
            except OSError:
                self._give_up()

    def _write(self, record: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(_FRAME.pack(len(record), zlib.crc32(record)) + record)
                self._file.flush()
            except OSError:
                self._give_up()

    def _give_up(self) -> None:
        """A full disk: what is there already stays of use."""
        file, self._file = self._file, None
        with suppress(OSError):
            assert file is not None
            file.close()
