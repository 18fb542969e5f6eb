"""The output of commands: named pipes, and where what arrives is kept."""

from __future__ import annotations

import asyncio
import os
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
        """The kept output as text, with a mark in place of the omitted middle."""
        head, tail = self.parts()
        if not self.dropped:
            return (head + tail).decode("utf-8", "replace")
        mark = f"\n[... {self.dropped} bytes omitted ...]\n"
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


CHUNK = 1 << 16
"""Bytes read at once: what a pipe holds."""
DRAIN_PAUSE_S = 0.05
"""Between two looks at a pipe whose writer is silent, or whose output nobody wants."""


LINE_MAX = 4096
"""Bytes of one line of a control channel."""


def make_fifo(path: Path, how: int, mode: int) -> int:
    """Make a named pipe and open it without waiting for its other end."""
    os.mkfifo(path)
    os.chmod(path, mode)
    return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)


class Pipe:
    """A named pipe that takes a command's output, open for reading on the host."""

    def __init__(self, control: Path, name: str) -> None:
        self.name = name
        self.path = control / name
        self.fd = make_fifo(self.path, os.O_RDONLY, 0o620)

    def read_into(self, sink: Sink, most: int) -> bool | None:
        """Move up to `most` bytes to the sink.

        Returns None at the end (no writer) and after `close`, False when a writer is silent, True
        when more may come.
        """
        if self.fd < 0:
            return None
        while most > 0:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return None
            sink.feed(data)
            most -= len(data)
        return True

    def close(self) -> None:
        """Remove the pipe. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.path.unlink(missing_ok=True)


QUIET_S = 0.005
"""A command that ends sooner is read once, at its end; a longer one as it prints."""


class Watch:
    """Reads a command's pipe while it runs, and tells its waiter when the time is up, or more was
    printed than the sink takes (False)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pipe: Pipe,
        sink: Sink,
        waiter: asyncio.Future[bool],
        timeout_s: float | None,
    ) -> None:
        self._loop, self._pipe, self._sink, self._waiter = loop, pipe, sink, waiter
        self._end = None if timeout_s is None else loop.time() + timeout_s
        self._reading = False
        self._stopped = False
        first = QUIET_S if timeout_s is None else min(QUIET_S, timeout_s)
        self._timer: asyncio.TimerHandle | None = loop.call_later(first, self._tick)

    def _tick(self) -> None:
        """The quiet time is over, or the command's time."""
        self._timer = None
        if self._end is not None and self._loop.time() >= self._end:
            if not self._waiter.done():
                self._waiter.set_result(False)
            return
        self.resume()
        if self._end is not None:
            self._timer = self._loop.call_at(self._end, self._tick)

    def resume(self) -> None:
        """Read whenever there is something to read, until `stop`."""
        if not self._reading and not self._stopped:
            self._reading = True
            self._loop.add_reader(self._pipe.fd, self._read)

    def _read(self) -> None:
        more = self._pipe.read_into(self._sink, 16 * CHUNK)
        if self._sink.limit is not None and self._sink.total > self._sink.limit:
            self._unread()
            if not self._waiter.done():
                self._waiter.set_result(False)
        elif more is None:
            # No writer, yet or any more: the selector would report that without end.
            self._unread()
            self._loop.call_later(DRAIN_PAUSE_S, self.resume)

    def _unread(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._pipe.fd)

    def stop(self) -> None:
        """No more reading, no more timer."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unread()

    def finish(self) -> bool | None:
        """Take what is in the pipe now; None when nobody holds it any more."""
        self.stop()
        return self._pipe.read_into(self._sink, 4 << 20)
