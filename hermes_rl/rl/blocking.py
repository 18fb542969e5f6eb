"""A limit for coroutines that block the event loop.

`asyncio.timeout` cannot end code that never yields. A timer interrupts it with an exception: on the
main thread a signal, which also ends sleeps, system calls and regular expressions; on other threads
an exception at the next bytecode. Code that blocks in a C library on another thread is not ended.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_S = 0.2
"""Seconds between two looks at threads that have no signals."""


class Blocked(BaseException):
    """The code held the event loop for too long. Not an Exception, so that `except Exception` in
    the code does not catch it."""


class _Steps:
    """The steps of coroutines that run now, one per thread at most."""

    def __init__(self) -> None:
        self.due: dict[int, float] = {}
        """Thread -> when its step must have ended."""
        self.lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    def begin(self, limit_s: float) -> None:
        thread = threading.get_ident()
        self.due[thread] = time.monotonic() + limit_s
        if self._uses_signals():
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        elif self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="reward-limit", daemon=True)
            self._watcher.start()

    def end(self) -> None:
        with self.lock:
            self.due.pop(threading.get_ident(), None)
        if self._uses_signals():
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _uses_signals(self) -> bool:
        """Whether this is the main thread, and nobody else uses the timer."""
        if threading.current_thread() is not threading.main_thread():
            return False
        there = signal.getsignal(signal.SIGALRM)
        if there is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, _on_alarm)
        return there in (signal.SIG_DFL, _on_alarm)

    def overdue(self, thread: int) -> bool:
        return time.monotonic() >= self.due.get(thread, float("inf"))

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self.lock:
                for thread in [t for t in self.due if self.overdue(t)]:
                    del self.due[thread]
                    raised = ctypes.py_object(Blocked)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_steps = _Steps()


def _on_alarm(number: int, frame: types.FrameType | None) -> None:
    if _steps.overdue(threading.main_thread().ident or 0):
        _steps.due.clear()  # once
        raise Blocked


@types.coroutine
def limit_steps(coroutine: Coroutine[Any, Any, T], limit_s: float) -> Generator[Any, Any, T]:
    """Run a coroutine, of which no step may hold the event loop for more than `limit_s` seconds.

    Raises: Blocked.
    """
    value, error = None, None
    while True:
        _steps.begin(limit_s)
        try:
            waited = coroutine.throw(error) if error is not None else coroutine.send(value)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            _steps.end()
        try:
            value, error = (yield waited), None
        except BaseException as thrown:
            value, error = None, thrown
