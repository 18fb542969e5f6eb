"""Ctrl-C and SIGTERM: the first lets a run end well, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Catches signals while it is entered; on another thread than the main one it does nothing.

    Args:
        first: called on the first signal.
        second: called on every further one.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first = first
        self._second = second
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _SIGNALS}
            self._listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around what blocks the loop: a signal is answered there, and raises KeyboardInterrupt."""
        self._leave()
        for number in self._before:
            signal.signal(number, self._break_off)
        try:
            yield
        finally:
            self._listen()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._before:
            loop.add_signal_handler(number, self._hit)

    def _leave(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._before:
            loop.remove_signal_handler(number)

    def _break_off(self, number: int, frame: FrameType | None) -> None:
        self._hit()
        raise KeyboardInterrupt

    def _hit(self) -> None:
        self._count += 1
        if self._count == 1:
            self._first()
        else:
            self._second()


def stopping(running: int, *, unanswered: bool) -> str:
    """What a run says to the first signal.

    Args:
        running: rollouts in flight.
        unanswered: none of their calls was ever answered.
    """
    if unanswered:
        return f"stopping: {running} rollouts without any answer are cancelled"
    if running:
        return f"stopping: {running} running rollouts end first (Ctrl-C again stops at once)"
    return "stopping"
