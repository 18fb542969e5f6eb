"""Ctrl-C and SIGTERM: the first signal lets running rollouts finish, the second cancels them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catch_signals(
    first: Callable[[], None], second: Callable[[], object], *, wanted: bool = True
) -> Iterator[Interrupts]:
    """Catch signals; does nothing outside the main thread.

    Args:
        wanted: False catches none: they belong to the program that calls.
        first: called on the first signal.
        second: called on every further one.
    """
    main = wanted and threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
    caught = Interrupts(first, second, before)
    caught.listen()
    try:
        yield caught
    finally:
        caught.stop_listening()
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _without_interrupts(report: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wrap the hook for exceptions that cannot be raised, such as in a callback after a fork, so
    that it prints no KeyboardInterrupt: the signal was counted already."""

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    return hook


class Interrupts:
    """Counts caught signals; made by `catch_signals`."""

    def __init__(
        self, first: Callable[[], None], second: Callable[[], object], signals: Iterable[int]
    ) -> None:
        self._first = first
        self._second = second
        self._count = 0
        self._signals = signals
        self._process = os.getpid()

    @property
    def fired(self) -> bool:
        """Whether a signal came."""
        return self._count > 0

    @contextmanager
    def raising_in_blocking_code(self) -> Iterator[None]:
        """Use around code that blocks the loop: a signal raises KeyboardInterrupt there."""
        self.stop_listening()
        for number in self._signals:
            signal.signal(number, self._interrupt)
        report = sys.unraisablehook
        sys.unraisablehook = _without_interrupts(report)
        try:
            yield
        finally:
            sys.unraisablehook = report
            self.listen()

    def listen(self) -> None:
        """Handle signals in the running loop."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._count_signal)

    def stop_listening(self) -> None:
        """Stop handling signals in the loop."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:  # else a child that Ray forked, before it is a program
            self._count_signal()
        raise KeyboardInterrupt

    def _count_signal(self) -> None:
        self._count += 1
        if self._count == 1:
            self._first()
        else:
            self._second()
