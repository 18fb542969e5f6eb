"""A pool of processes for CPU-bound rewards (`RolloutContext.cpu`).

The workers are fresh interpreters that start when they are first needed; functions are sent by
import name. A worker that dies or runs too long fails only its own call.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from typing import Any, Self

from hermes_rl.errors import CannotJudge, NoVerdict, UserError
from hermes_rl.rl.cpu_worker import HEAD, frame, resolve

MAX_DEFAULT_WORKERS = 4
"""Most workers of a pool by default; fewer if the machine has fewer cores."""

PREPARE_S = 600.0
"""Limit of `prepare`, with the start of the process."""
_FRAME_BYTES = 1 << 30
_DYING_S = 5.0


class RanTooLong(NoVerdict):
    """A call was killed at its time limit."""


class _Died(Exception):
    """The worker ended during a call."""


class Pool:
    """Worker processes that call functions. An async context manager.

    Args:
        workers: concurrent processes; further calls wait.
        modules: (module, file) that a worker loads before it resolves functions.
    """

    def __init__(
        self, workers: int | None = None, modules: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._modules = modules
        self._turns = asyncio.Semaphore(
            workers or min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))
        )
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float,
        prepare: tuple[Callable[..., Any], *tuple[Any, ...]] | None = None,
    ) -> Any:
        """Call a function in a worker (`RolloutContext.cpu`).

        Args:
            prepare: a function and its arguments, called before it in the same worker; its time
                does not count.

        Raises: UserError for a function that has no import name, or arguments that do not pickle;
            CannotJudge when the worker died or `timeout_s` passed; what the function raises.
        """
        job = self._job(function, args)
        async with self._turns:
            worker = self._take_idle() or await self._start()
            try:
                answer: Any = ("ok", None)
                if prepare is not None:
                    async with asyncio.timeout(PREPARE_S):
                        answer = await _exchange(worker, self._job(prepare[0], prepare[1:]))
                if answer[0] == "ok":
                    async with asyncio.timeout(timeout_s):
                        answer = await _exchange(worker, job)
            except TimeoutError:
                await self._end(worker)
                raise RanTooLong(f"{function.__name__} ran for more than {timeout_s:g} s") from None
            except _Died:
                code = await self._end(worker, _DYING_S)
                why = f"signal {-code}" if code < 0 else f"exit {code}"
                raise CannotJudge(
                    f"the process that ran {function.__name__} died ({why})"
                ) from None
            except BaseException:
                await asyncio.shield(self._end(worker))
                raise
            self._idle.append(worker)
        if answer[0] == "ok":
            return answer[1]
        _, text, pickled = answer
        try:
            error = pickle.loads(pickled)
        except Exception:  # an exception's constructor may raise anything
            error = None
        if isinstance(error, Exception):
            error.add_note(text)
            raise error
        raise CannotJudge(f"{function.__name__} failed: {text.strip().splitlines()[-1]}")

    def _job(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
        return frame((self._modules, *_name_of(function), _pickled(function, args)))

    def _take_idle(self) -> Process | None:
        """Take an idle worker; forget those that died meanwhile."""
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:
                return worker
            self._all.discard(worker)
        return None

    async def _start(self) -> Process:
        # The child gets this process's import path.
        code = f"import sys; sys.path[:] = {sys.path!r}; "
        code += "from hermes_rl.rl.cpu_worker import main; main()"
        started = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=1 << 20,
                start_new_session=True,
            )
        )
        try:
            worker = await asyncio.shield(started)
        except asyncio.CancelledError:
            worker = await started
            self._all.add(worker)
            await self._end(worker)
            raise
        self._all.add(worker)
        return worker

    async def _end(self, worker: Process, patience_s: float = 0.0) -> int:
        """Wait for a worker to end, else kill it; return its exit code.

        Args:
            patience_s: before the kill, for a worker that seems to have died. (A signal to a dead
                process would take its exit code away from the event loop.)
        """
        try:
            async with asyncio.timeout(patience_s):
                await worker.wait()
        except TimeoutError:
            try:
                os.killpg(worker.pid, signal.SIGKILL)  # with what the function has started
            except ProcessLookupError:
                pass
        code = await worker.wait()
        self._all.discard(worker)
        return code

    async def aclose(self) -> None:
        """End all workers, running ones included. Idempotent."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self.aclose())


async def _exchange(worker: Process, job: bytes) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(job)
        await worker.stdin.drain()
        (length,) = HEAD.unpack(await worker.stdout.readexactly(HEAD.size))
        if length > _FRAME_BYTES:
            raise _Died
        data = await worker.stdout.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise _Died from None
    return pickle.loads(data)


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Return module and name, checked to resolve to the function. Raises: UserError."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    try:
        if module in sys.modules and module != "__main__" and resolve(module, name) is function:
            return module, name
    except (ImportError, AttributeError):
        pass
    shown = name or repr(function)
    raise UserError(f"ctx.cpu({shown}): give a function at the top of an imported module")


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(args)
    except Exception as error:  # pickling a user's object may raise anything
        raise UserError(
            f"ctx.cpu({function.__name__}): its arguments do not pickle: {error}. Pass plain data"
        ) from error
