"""Reading what a command prints while it runs, and its time."""

from __future__ import annotations

import asyncio

from hermes_rl.sandboxes.output import Sink
from hermes_rl.sandboxes.pipes import CHUNK, DRAIN_PAUSE_S, Pipe

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
