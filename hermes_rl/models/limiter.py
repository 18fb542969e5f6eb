"""How many requests are in flight: adaptive, per endpoint, account and model.

The interface, and its form for one process; a form shared by all workers has the same interface.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from hermes_rl.errors import ModelError
from hermes_rl.models.controller import Controller, Signal, signal_of
from hermes_rl.usage import Usage


@dataclass(frozen=True)
class Estimate:
    """What a request may cost its rate limits, in tokens; 0 where nothing is known."""

    input_tokens: int = 0
    output_tokens: int = 0


class Slot(Protocol):
    """One request's place; it ends with the context that it came from."""

    waited_s: float
    """Seconds that were spent waiting for it."""

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Say how the request ended, at most once. A slot that ends unreported says nothing of the
        rate, and what was estimated for it counts as used.

        Args:
            error: None for an answer.
            usage: of the answer, where it is known; it takes the estimate's place.
            headers: the rate-limit headers of the answer, names in lower case.
        """
        ...


class Limiter(Protocol):
    """Hands out slots."""

    def slot(self, estimate: Estimate = Estimate()) -> AbstractAsyncContextManager[Slot]:
        """Waits for a slot and holds it."""
        ...


class InProcessLimiter:
    """Slots for the rollouts of one process, first come first served.

    Args:
        maximum: the concurrency that was asked for.
        start: where slow start begins.
        clock: seconds, monotonic.
    """

    def __init__(
        self, maximum: int, *, start: int = 32, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.controller = Controller(maximum, start)
        self.in_flight = 0
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self, estimate: Estimate = Estimate()) -> AsyncIterator[Slot]:
        """See `Limiter.slot`."""
        waited = 0.0
        if self._waiting or self.in_flight >= self.controller.limit:
            began = self._clock()
            await self._turn()
            waited = self._clock() - began
        else:
            self._take()
        try:
            yield _Slot(waited, self._heard)
        finally:
            self.in_flight -= 1
            self._wake()

    def _heard(self, signal: Signal) -> None:
        self.controller.heard(signal, self._clock())
        self._wake()

    async def _turn(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._waiting.append(ready)
        try:
            await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                self.in_flight -= 1  # the slot came in the same moment: hand it on
            self._wake()
            raise

    def _take(self) -> None:
        self.in_flight += 1
        self.controller.started(self.in_flight)

    def _wake(self) -> None:
        while self._waiting and self.in_flight < self.controller.limit:
            ready = self._waiting.popleft()
            if not ready.done():  # else its waiter was cancelled
                self._take()  # on the waiter's behalf, so that nobody overtakes it
                ready.set_result(None)


@dataclass
class _Slot:
    waited_s: float
    heard: Callable[[Signal], None]

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See `Slot.report`."""
        self.heard(signal_of(error))
