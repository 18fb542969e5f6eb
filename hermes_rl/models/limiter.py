"""How many requests are in flight: adaptive, per endpoint, account and model.

`Controller` is the pure part: it hears how requests end and says how many may run. The limiter is
its asyncio form for one process; a form shared by all workers has the same interface.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from hermes_rl.errors import ModelError, Overloaded, RateLimited, ServerError
from hermes_rl.usage import Usage

Signal = Literal["clean", "throttled", "trouble", "neutral"]
"""What one request's end says about the rate: fine; ours is too high; the server's own trouble;
nothing."""


@dataclass(frozen=True)
class Estimate:
    """What a request may cost its rate limits, in tokens; 0 where nothing is known."""

    input_tokens: int = 0
    output_tokens: int = 0


class Limiter(Protocol):
    """Hands out slots."""

    def slot(self, estimate: Estimate = Estimate()) -> AbstractAsyncContextManager[float]:
        """Holds one slot; yields the seconds that were spent waiting for it."""
        ...

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Say how a request ended.

        Args:
            error: None for an answer.
            usage: of the answer, where it is known.
            headers: the rate-limit headers of the answer, names in lower case.
        """
        ...


def signal_of(error: ModelError | None) -> Signal:
    """What an end says about the rate."""
    if error is None:
        return "clean"
    if isinstance(error, RateLimited):
        return "throttled"
    return "trouble" if isinstance(error, Overloaded | ServerError) else "neutral"


class Controller:
    """The limit as a function of what was heard (additive increase, multiplicative decrease).

    - Slow start: one more per clean request while the limit is used, until the first throttling.
    - Then 5 % more (at least one) after each clean round. A round is as many requests as the limit;
      it is clean without throttling or trouble, and counts only when 80 % of the limit was in use.
    - Throttling (429): four fifths, at most once per 15 s, because the refusals of one burst speak
      of one cause. Until another cut is due the limit stays below 95 % of where it was refused, so
      that the next refusals are answered at once.
    - Trouble of the server (529, 5xx) only begins the round anew: it is not our rate.
    - Retry-After has no say here: it delays the one request that it was sent to.

    Args:
        maximum: never more than this, at least 1.
        start: where slow start begins.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    CUT_INTERVAL_S = 15.0
    HEADROOM = 0.95

    def __init__(self, maximum: int, start: int = 32) -> None:
        self.maximum = max(1, maximum)
        self.limit = max(1, min(start, self.maximum))
        self.slow_start = True
        self._ended = 0
        self._peak = 0
        self._last_cut: float | None = None
        self._refused_at = self.limit

    def started(self, in_flight: int) -> None:
        """A request began; `in_flight` counts it."""
        self._peak = max(self._peak, in_flight)

    def heard(self, signal: Signal, now: float) -> None:
        """A request ended.

        Args:
            now: seconds of a monotonic clock.
        """
        if signal == "throttled":
            self._cut(now)
        elif signal == "trouble":
            self._new_round()
        elif signal == "clean":
            self._grow(now)

    def _grow(self, now: float) -> None:
        saturated = self._peak >= self.SATURATED * self.limit
        if self.slow_start:
            if saturated:
                self.limit = min(self.maximum, self.limit + 1)
            return
        self._ended += 1
        if self._ended < self.limit:
            return
        if saturated:
            grown = max(self.limit + 1, int(self.limit * self.GROWTH))
            if not self._may_cut(now):
                grown = min(grown, max(self.limit, int(self._refused_at * self.HEADROOM)))
            self.limit = min(self.maximum, grown)
        self._new_round()

    def _cut(self, now: float) -> None:
        self.slow_start = False
        self._new_round()
        if self._may_cut(now):
            self._last_cut = now
            self._refused_at = self.limit
            self.limit = max(1, int(self.limit * self.CUT))

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self.CUT_INTERVAL_S

    def _new_round(self) -> None:
        self._ended = self._peak = 0


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
    async def slot(self, estimate: Estimate = Estimate()) -> AsyncIterator[float]:
        """See `Limiter.slot`."""
        waited = 0.0
        if self._waiting or self.in_flight >= self.controller.limit:
            began = self._clock()
            await self._turn()
            waited = self._clock() - began
        else:
            self._take()
        try:
            yield waited
        finally:
            self.in_flight -= 1
            self._wake()

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See `Limiter.report`."""
        self.controller.heard(signal_of(error), self._clock())
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
