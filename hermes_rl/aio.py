"""Helpers for asyncio: async code called from synchronous code, and blocking work that a
cancellation does not leave half done.

`run_sync` is for one call. `LoopThread` is an event loop in a thread of its own, for objects whose
connections and sandboxes must stay on one loop over many calls; it works from plain scripts, from
notebooks (where a loop is already running) and from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

from hermes_rl.errors import UserError

T = TypeVar("T")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, whether or not a loop is running in this thread.

    Ctrl-C cancels it, waits for its clean-up, and raises KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with LoopThread() as home:
        return home.run(coroutine)


class LoopThread:
    """An event loop in a thread of its own, started at the first use."""

    def __init__(self, name: str = "hermes-rl") -> None:
        self._name = name
        self._lock = threading.Lock()  # uses and closes come from any thread
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the home loop and wait for it.

        Ctrl-C cancels it, waits for its clean-up (a second Ctrl-C does not), and raises
        KeyboardInterrupt.

        Raises: UserError when called on the home loop itself, where it would wait for ever.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UserError(
                "this agent's callback called one of its synchronous methods, which would wait for "
                "itself. Call `steer` or `interrupt` there, or use another agent"
            )
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda done: _hand_over(done, future))

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # Ctrl-C came before the loop had been asked to begin
                coroutine.close()
                future.set_exception(asyncio.CancelledError())

        try:
            # Inside the `try`: Ctrl-C can come when the loop has begun and this call is not over.
            with self._lock:
                self._start().call_soon_threadsafe(begin)
            return future.result()
        except KeyboardInterrupt:
            with self._lock:
                if not future.done():
                    self._start().call_soon_threadsafe(cancel)
            concurrent.futures.wait([future])
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the home loop and await it on this one; cancelling goes through."""
        if threading.current_thread() is self._thread:
            return await coroutine
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._start())
        return await asyncio.wrap_future(future)

    def _start(self) -> asyncio.AbstractEventLoop:
        """The running loop, started at need. Under the lock, like what is then asked of it: else
        another thread could close it in between, and nobody would ever answer."""
        if self._loop is None:
            ready = threading.Event()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(ready)), name=self._name, daemon=True
            )
            self._thread.start()
            ready.wait()
        assert self._loop is not None
        return self._loop

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        ready.set()
        await self._stop.wait()

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent; a later use starts a new loop."""
        with self._lock:
            if self._loop is None or self._thread is None or self._stop is None:
                return
            self._loop.call_soon_threadsafe(self._stop.set)
            thread = self._thread
            self._loop = self._thread = self._stop = None
        if threading.current_thread() is not thread:
            thread.join()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _hand_over(task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        future.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


_T = TypeVar("_T")


async def to_end(work: Awaitable[_T]) -> _T:
    """Await work to its end; a cancellation is raised after that."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # seen: the cancellation goes first
        raise


async def abandonable(read: Callable[[], _T]) -> _T:
    """Run code that blocks and only reads in a thread. A cancelled caller continues at once, and
    neither the event loop nor the program waits for the thread when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(value: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(_T, value))

    def run() -> None:
        value, error = None, None
        try:
            value = read()
        except BaseException as raised:  # a boundary: whatever it is, the caller gets it
            error = raised
        with suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="reader", daemon=True).start()
    return await future


async def in_thread(work: Callable[..., _T], *args: object) -> _T:
    """Run blocking work in a thread to its end: a cancelled caller continues only when the thread
    has stopped writing."""
    return await to_end(asyncio.to_thread(work, *args))
