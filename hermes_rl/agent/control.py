"""Interrupt and steer a run, from any thread, and bound its time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from hermes_rl.errors import Interrupted, Stalled


@asynccontextmanager
async def wall_limit(seconds: float | None) -> AsyncIterator[None]:
    """Run the block for at most so many seconds; None sets no limit. Raises: Stalled."""
    try:
        async with asyncio.timeout(seconds) as wall:
            yield
    except TimeoutError as error:
        if not wall.expired():
            raise
        raise Stalled(f"no end within {seconds:g} s (limits.wall_seconds)") from error


class Control:
    """The handle on one run. `interrupt` and `steer` may be called from any thread.

    An interrupt cancels the run's task, as `asyncio.timeout` does, so the model call or the tool
    in flight ends at once; outside cancellation stays what it is.
    """

    def __init__(self) -> None:
        self.message: str | None = None
        """What the interrupting user said."""
        self._lock = threading.Lock()  # guards all below: other threads write them
        self._interrupted = False
        self._cancelled = False
        self._steers: list[str] = []
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt was asked for."""
        return self._interrupted

    def interrupt(self, message: str | None = None) -> None:
        """End the run now. A later call only replaces the message."""
        with self._lock:
            self.message = message if message is not None else self.message
            first, self._interrupted = not self._interrupted, True
            if first and self._running is not None:
                self._running[0].call_soon_threadsafe(self._cancel)

    def steer(self, text: str) -> None:
        """Say something to the run without ending it: the model reads it at its next turn."""
        with self._lock:
            self._steers.append(text)

    def take_steers(self) -> list[str]:
        """What was said since the last time."""
        if not self._steers:
            return []
        with self._lock:
            texts, self._steers = self._steers, []
        return texts

    def _cancel(self) -> None:
        """On the run's loop; the run may have ended meanwhile."""
        with self._lock:
            if self._running is None:
                return
            self._cancelled = True
            self._running[1].cancel()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run the block under this control, within one task.

        Raises: Interrupted in place of the cancellation that an interrupt brought about.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Control.scope needs a running task")
        with self._lock:
            if self._interrupted:
                raise Interrupted("interrupted before the start")
            self._running = (asyncio.get_running_loop(), task)
        before = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            if self._cancelled and task.uncancel() <= before:
                raise Interrupted("interrupted") from None
            raise
        finally:
            with self._lock:
                self._running = None
