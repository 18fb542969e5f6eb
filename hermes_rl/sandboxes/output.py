"""Where a command's output goes while it is produced: bounded, exact, or into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

HEAD_SHARE = 0.4
"""Share of the kept bytes that comes from the beginning; errors stand at the end."""


class Sink(Protocol):
    """Takes output as it arrives."""

    total: int
    """Bytes taken so far."""
    limit: int | None
    """The command is ended when it has printed more bytes; None lets it go on."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        ...


class HeadTail:
    """Keeps the first 40 % and the last 60 % of `kept` bytes, whatever arrives between them."""

    limit: int | None = None

    def __init__(self, kept: int) -> None:
        self.total = 0
        self._head_limit = int(kept * HEAD_SHARE)
        self._tail_limit = kept - self._head_limit
        self._head = b""
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes; memory stays below twice the limit."""
        self.total += len(data)
        left = self._head_limit - len(self._head)
        if left > 0:
            self._head += data[:left]
            data = data[left:]
        if not data:
            return
        self._tail += data[-self._tail_limit :] if self._tail_limit else b""
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: -self._tail_limit]

    @property
    def dropped(self) -> int:
        """Bytes of the middle that are not kept."""
        return max(0, self.total - self._head_limit - self._tail_limit)

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail; together the whole output when nothing was dropped."""
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        return self._head, bytes(tail)

    def text(self) -> str:
        """The kept output as text, a mark where the middle is missing."""
        head, tail = self.parts()
        if not self.dropped:
            return (head + tail).decode("utf-8", "replace")
        mark = f"\n[... {self.dropped} bytes cut here ...]\n"
        return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")


class Everything:
    """Keeps every byte: for files, which are wanted whole."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self.limit: int | None = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        self._data += data

    def value(self) -> bytes:
        """All bytes."""
        return bytes(self._data)


class IntoFile:
    """Writes every byte to a new file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.total = 0
        self.limit: int | None = limit
        self._path = path
        path.write_bytes(b"")

    def feed(self, data: bytes) -> None:
        """Write the next bytes."""
        self.total += len(data)
        with open(self._path, "ab") as file:
            file.write(data)


class Nothing:
    """Takes output that nobody wants."""

    total = 0
    limit: int | None = None

    def feed(self, data: bytes) -> None:
        """Drop it."""
