"""How many requests are in flight: adaptive, per endpoint, account and model.

The interface, and its form for one process; `share` has the form that all workers of a run share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Protocol

from hermes_rl.errors import ModelError
from hermes_rl.models.limits.buckets import Charge, Estimate, Expectation, Rates
from hermes_rl.models.limits.controller import signal_of
from hermes_rl.models.limits.quotas import read_quotas
from hermes_rl.models.limits.regulator import News, Regulator
from hermes_rl.models.limits.slots import Ended, SlotQueue
from hermes_rl.models.limits.traffic import Traffic
from hermes_rl.usage import Usage

__all__ = ["Estimate", "InProcessLimiter", "Limiter", "Rates", "Slot"]


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

    @property
    def traffic(self) -> Traffic:
        """What the calls of this process see there."""
        ...

    @property
    def answered_at(self) -> float | None:
        """When another process was last answered, not later than it was; seconds of the clock. None
        where that is not known."""
        ...

    @property
    def backlog_s(self) -> float:
        """Seconds until one more request could start behind those that wait, by the request rate
        that is known; 0 where it could start now or no rate is known."""
        ...

    def slot(self, estimate: Estimate = Estimate()) -> AbstractAsyncContextManager[Slot]:
        """Waits for a slot and holds it."""
        ...


class InProcessLimiter:
    """Slots for the rollouts of one process, first come first served.

    Args:
        maximum: the concurrency that was asked for.
        start: where slow start begins.
        rates: limits per minute that are known; others are learned from headers.
        clock: seconds, monotonic.
        unix: the time of day, for resets.
    """

    def __init__(
        self,
        maximum: int,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.traffic = Traffic()
        self._regulator = Regulator(maximum, clock(), start=start, rates=rates)
        self.controller = self._regulator.controller
        self.buckets = self._regulator.buckets
        self._expected = Expectation()
        self._clock, self._unix = clock, unix
        self._queue = SlotQueue(self, clock)

    @property
    def answered_at(self) -> float | None:
        """See `Limiter.answered_at`: it knows of no other process."""
        return None

    @property
    def backlog_s(self) -> float:
        """See `Limiter.backlog_s`."""
        return self.buckets.backlog_s(self._queue.waiting + 1, self._clock())

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return self._queue.in_flight

    def slot(self, estimate: Estimate = Estimate()) -> AbstractAsyncContextManager[Slot]:
        """See `Limiter.slot`."""
        return self._queue.slot(estimate)

    def charge(self, estimate: Estimate) -> Charge:
        """See `Gate.charge`."""
        return self._expected.charge(estimate)

    def wait_s(self, charge: Charge, in_flight: int) -> float:
        """See `Gate.wait_s`."""
        now = self._clock()
        if in_flight >= self.controller.limit:
            return float("inf")
        held = self.controller.clamped_s(now) if in_flight >= self.controller.allowed(now) else 0.0
        return held or self.buckets.wait_s(charge, now)

    def waits(self) -> None:
        """See `Gate.waits`."""

    def passed(self, charge: Charge, in_flight: int) -> None:
        """See `Gate.passed`."""
        self.buckets.take(charge)
        self.controller.started(in_flight)
        self._regulator.heard(News(started=1, running=in_flight), self._clock())

    def turned_back(self, charge: Charge) -> None:
        """See `Gate.turned_back`."""
        self.buckets.give(charge)
        self._regulator.heard(News(started=-1), self._clock())

    def ended(self, estimate: Estimate, charge: Charge, end: Ended) -> None:
        """See `Gate.ended`."""
        signal = signal_of(end.error)
        if end.usage is not None:
            self.buckets.settle(charge, self._expected.heard(estimate, end.usage))
        news = News(
            clean=signal == "clean",
            throttled=signal == "throttled",
            trouble=signal == "trouble",
            running=self._queue.in_flight,
            quotas=read_quotas(end.headers, self._unix()) if end.headers else (),
        )
        self._regulator.heard(news, self._clock())
