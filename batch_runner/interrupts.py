"""Ctrl-C and SIGTERM: the first lets a run end well, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import TracebackType
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
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                self._before[number] = signal.getsignal(number)
                loop.add_signal_handler(number, self._hit)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            if handler is not None:
                signal.signal(number, handler)

    def _hit(self) -> None:
        self._count += 1
        if self._count == 1:
            self._first()
        else:
            self._second()
