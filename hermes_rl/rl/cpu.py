"""A pool of processes for rewards that need a processor (`RolloutContext.cpu`).

The workers are fresh interpreters, started when they are first needed; functions go there by import
name. A worker that dies or runs too long takes only its own call with it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from hermes_rl.errors import CannotJudge, UserError
from hermes_rl.rl.cpu_worker import HEAD, frame, resolve
from hermes_rl.rl.faults import NoVerdict

MOST = 4
"""Workers at most, where nothing is said."""
_FRAME_BYTES = 1 << 30
_DYING_S = 5.0


def default_workers() -> int:
    """One per core, at most four."""
    return min(MOST, len(os.sched_getaffinity(0)))


class _Died(Exception):
    """The worker ended in the midst of a call."""


class Pool:
    """See the module. An async context manager.

    Args:
        workers: processes at once; further calls wait.
        modules: (module, file) that a worker loads before it looks for functions.
    """

    def __init__(
        self, workers: int | None = None, modules: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._modules = modules
        self._turns = asyncio.Semaphore(workers or default_workers())
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def run(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """See `RolloutContext.cpu`.

        Raises: UserError for a function that has no import name, or arguments that do not pickle;
            CannotJudge when the worker died or `timeout_s` passed; what the function raises.
        """
        job = frame((self._modules, *_name_of(function), _pickled(function, args)))
        async with self._turns:
            worker = self._rested() or await self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await _exchange(worker, job)
            except TimeoutError:
                await self._end(worker)
                raise NoVerdict(f"{function.__name__} ran for more than {timeout_s:g} s") from None
            except _Died:
                code = await self._end(worker, _DYING_S)
                raise CannotJudge(
                    f"the process that ran {function.__name__} died ({_ended_by(code)})"
                ) from None
            except BaseException:
                await asyncio.shield(self._end(worker))
                raise
            self._idle.append(worker)
        if answer[0] == "ok":
            return answer[1]
        _, text, pickled = answer
        error = _exception(pickled)
        if error is not None:
            error.add_note(text)
            raise error
        raise CannotJudge(f"{function.__name__} failed: {text.strip().splitlines()[-1]}")

    def _rested(self) -> Process | None:
        """An idle worker; those that died meanwhile are forgotten."""
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:
                return worker
            self._all.discard(worker)
        return None

    async def _start(self) -> Process:
        # The child finds what this process finds, wherever it was started.
        code = f"import sys; sys.path[:] = {sys.path!r}; "
        code += "from hermes_rl.rl.cpu_worker import main; main()"
        started = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=1 << 20
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
        """Wait for a worker's end, and kill it when that does not come; its return code.

        Args:
            patience_s: for one that seems to have died. (A signal to a dead process would take its
                return code away from the event loop.)
        """
        try:
            async with asyncio.timeout(patience_s):
                await worker.wait()
        except TimeoutError:
            try:
                worker.kill()
            except ProcessLookupError:
                pass
        code = await worker.wait()
        self._all.discard(worker)
        return code

    async def aclose(self) -> None:
        """End all workers, also those that run. Idempotent."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def _exception(pickled: bytes) -> Exception | None:
    """What the function raised; None for what does not come back, or was to end its process."""
    try:
        error = pickle.loads(pickled)
    except Exception:  # whatever an exception's own constructor raises
        return None
    return error if isinstance(error, Exception) else None


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name, seen to lead back to the function. Raises: UserError."""
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
    except Exception as error:  # whatever an object's own pickling raises
        raise UserError(
            f"ctx.cpu({function.__name__}): its arguments do not pickle: {error}. Pass plain data"
        ) from error


def _ended_by(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit {code}"
