"""The queue in front of a limit: first come, first served, and nobody overtakes.

Who may pass is the gate's matter: `SlotQueue` keeps the order, wakes whoever waits, and hands a
slot on when its waiter was cancelled in the very moment in which it came.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from hermes_rl.errors import ModelError
from hermes_rl.models.limits.buckets import Charge, Estimate
from hermes_rl.usage import Usage


@dataclass(frozen=True)
class Ended:
    """How a request ended."""

    error: ModelError | None
    usage: Usage | None
    headers: Mapping[str, str]


class Gate(Protocol):
    """Decides who may pass."""

    def charge(self, estimate: Estimate) -> Charge:
        """What a request is expected to use."""
        ...

    def wait_s(self, charge: Charge, in_flight: int) -> float:
        """Seconds until one more may pass; 0 now, infinite until something is heard."""
        ...

    def waits(self) -> None:
        """Somebody waits, and nobody did before."""
        ...

    def passed(self, charge: Charge, in_flight: int) -> None:
        """One more is in flight; `in_flight` counts it."""
        ...

    def turned_back(self, charge: Charge) -> None:
        """One that had passed did not send its request."""
        ...

    def ended(self, estimate: Estimate, charge: Charge, end: Ended) -> None:
        """A request ended and said how."""
        ...


@dataclass(frozen=True, eq=False)
class _Waiter:
    ready: asyncio.Future[None]
    charge: Charge


class SlotQueue:
    """The asyncio side of a limiter; `gate` is its judgement.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, gate: Gate, clock: Callable[[], float]) -> None:
        self.in_flight = 0
        self._gate = gate
        self._clock = clock
        self._waiting: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def first(self) -> Charge | None:
        """What the first in the queue is expected to use."""
        return self._waiting[0].charge if self._waiting else None

    @asynccontextmanager
    async def slot(self, estimate: Estimate) -> AsyncIterator[HeldSlot]:
        """See `hermes_rl.models.limits.limiter.Limiter.slot`."""
        charge, waited = self._gate.charge(estimate), 0.0
        if self._waiting or self._gate.wait_s(charge, self.in_flight) > 0:
            began = self._clock()
            await self._turn(charge)
            waited = self._clock() - began
        else:
            self._take(charge)
        try:
            yield HeldSlot(waited, estimate, charge, self._heard)
        finally:
            self.in_flight -= 1
            self.wake()

    def wake(self) -> None:
        """Let pass whoever may."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.ready.done():  # cancelled a moment ago
                self._waiting.popleft()
                continue
            wait = self._gate.wait_s(waiter.charge, self.in_flight)
            if wait > 0:
                self._wake_in(wait)
                return
            self._waiting.popleft()
            self._take(waiter.charge)  # on the waiter's behalf, so that nobody overtakes it
            waiter.ready.set_result(None)

    def _heard(self, estimate: Estimate, charge: Charge, end: Ended) -> None:
        self._gate.ended(estimate, charge, end)
        self.wake()

    async def _turn(self, charge: Charge) -> None:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), charge)
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            self._gate.waits()
            self.wake()  # sets the timer of its turn
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.cancelled():
                with suppress(ValueError):  # it was taken out as soon as it was cancelled
                    self._waiting.remove(waiter)
            else:  # the slot came in the same moment: hand it on
                self.in_flight -= 1
                self._gate.turned_back(charge)
            self.wake()
            raise

    def _take(self, charge: Charge) -> None:
        self.in_flight += 1
        self._gate.passed(charge, self.in_flight)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not math.isinf(seconds):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self.wake)


@dataclass
class HeldSlot:
    """A slot; see `hermes_rl.models.limits.limiter.Slot`."""

    waited_s: float
    estimate: Estimate
    charge: Charge
    heard: Callable[[Estimate, Charge, Ended], None]

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See `Slot.report`."""
        self.heard(self.estimate, self.charge, Ended(error, usage, headers))
