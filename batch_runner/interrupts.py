"""Ctrl-C and SIGTERM: the first lets a run end well, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catching(first: Callable[[], None], second: Callable[[], None]) -> Iterator[Interrupts]:
    """Catch signals; on another thread than the main one this does nothing.

    Args:
        first: called on the first signal.
        second: called on every further one.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
    caught = Interrupts(first, second, before)
    caught.listen()
    try:
        yield caught
    finally:
        caught.leave()
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _without_interrupts(report: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that nobody can handle, such as in a callback after a fork. Python
    drops a KeyboardInterrupt there and prints its traceback; the signal was counted before."""

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    return hook


class Interrupts:
    """Signals that are caught; made by `catching`."""

    def __init__(
        self, first: Callable[[], None], second: Callable[[], None], signals: Iterable[int]
    ) -> None:
        self._first = first
        self._second = second
        self._count = 0
        self._signals = signals

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around what blocks the loop: a signal is answered there, and raises KeyboardInterrupt."""
        self.leave()
        for number in self._signals:
            signal.signal(number, self._break_off)
        report = sys.unraisablehook
        sys.unraisablehook = _without_interrupts(report)
        try:
            yield
        finally:
            sys.unraisablehook = report
            self.listen()

    def listen(self) -> None:
        """Answer signals in the running loop."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._hit)

    def leave(self) -> None:
        """Answer them in the loop no longer."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
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
