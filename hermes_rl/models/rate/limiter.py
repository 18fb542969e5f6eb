"""The queue in front of one endpoint, account and model: when a request may be sent.

First come, first served. In a process of its own a limiter adapts by itself; in a run it follows
the grants of the driver's coordinator (`share`), so that all workers keep one limit together.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.models.rate.adaptive import AdaptiveRate, Events, Signal, signal_of
from hermes_rl.models.rate.buckets import Bucket, Buckets, Charge, Estimate, Expectation, Rates
from hermes_rl.models.rate.headers import Kind, Quota, read_quotas
from hermes_rl.models.rate.traffic import Traffic, Unanswered
from hermes_rl.usage import Usage

ON_THE_WAY_S = 5.0
"""A report and its grant take no longer together: an answer that another worker got is at most so
much older than it seems."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one lane (endpoint, account and model) at a worker since its last report."""

    lane: str
    events: Events = Events()
    peak: int = 0
    """Most requests in flight at a time."""
    demand: int = 0
    """Most requests in flight and waiting at a time."""
    balance: dict[Kind, float] = {}
    """What is left of the worker's share of each bucket; returned with this report."""
    want: dict[Kind, float] = {}
    """What the worker would use until its next report."""
    first: dict[Kind, float] = {}
    """What the first request in the queue would use."""
    answered_s: float | None = None
    """Seconds since the last answer."""
    unanswered: Unanswered | None = None


class LaneGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may do on one lane until its next grant."""

    lane: str
    slots: int
    """Requests in flight."""
    balance: dict[Kind, float] = {}
    """The worker's share of each bucket, in place of what it returned."""
    capacity: dict[Kind, float] = {}
    """Of the whole buckets: a request larger than that starts when so much is there."""
    per_s: dict[Kind, float] = {}
    """How fast the worker's share is filled, on average."""
    answered_s: float | None = None
    """Seconds since another worker was last answered."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    ready: asyncio.Future[None]
    charge: Charge


@dataclass
class Slot:
    """Permission for one request. It ends with the context that it came from."""

    waited_s: float
    """Seconds spent waiting for it."""
    limiter: Limiter
    estimate: Estimate
    charge: Charge

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Report how the request ended, at most once. An unreported end means nothing for the rate,
        and the estimate counts as used.

        Args:
            error: None for an answer.
            usage: the answer's, where known; it replaces the estimate.
            headers: the response's rate-limit headers, names in lower case.
        """
        self.limiter.end(self, error, usage, headers)


class Limiter:
    """Hands out slots.

    Args:
        maximum: requests in flight, at most; None follows grants.
        start: where slow start begins.
        rates: limits per minute that are known; others are learned from headers.
        name: of the lane, in reports.
        on_demand: called when requests begin to wait.
        clock: monotonic, in seconds.
        unix: the time of day, for resets.
    """

    def __init__(
        self,
        maximum: int | None,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        name: str = "",
        on_demand: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.traffic = Traffic()
        self.answered_at: float | None = None
        """When another worker was last answered, not later than it was; None where unknown."""
        self.in_flight = 0
        self.rate: AdaptiveRate | None = None
        """None where grants say how much may run."""
        self._buckets = Buckets()
        if maximum is not None:
            self.rate = AdaptiveRate(maximum, clock(), start=start, rates=rates)
            self._buckets = self.rate.buckets
        self._name, self._on_demand, self._clock, self._unix = name, on_demand, clock, unix
        self._waiting: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._expected = Expectation()
        self._slots = 0
        self._per_s: dict[Kind, float] | None = None
        self._ended: dict[Signal, int] = dict.fromkeys(("clean", "throttled", "trouble"), 0)
        self._started = self._peak = self._demand = 0
        self._taken: dict[Kind, float] = {}
        self._quotas: dict[Kind, Quota] = {}
        self._returned: Mapping[Kind, float] = {}

    @property
    def backlog_s(self) -> float:
        """Seconds until one more request could start behind those that wait, by the request rate
        that is known; 0 where it could start now or no rate is known."""
        return self._buckets.backlog_s(len(self._waiting) + 1, self._clock(), self._per_s)

    @asynccontextmanager
    async def slot(self, estimate: Estimate = Estimate()) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it."""
        charge, waited = self._expected.charge(estimate), 0.0
        self._demand = max(self._demand, self.in_flight + len(self._waiting) + 1)
        if self._waiting or self._wait_s(charge) > 0:
            began = self._clock()
            await self._turn(charge)
            waited = self._clock() - began
        else:
            self._take(charge)
        try:
            yield Slot(waited, self, estimate, charge)
        finally:
            self.in_flight -= 1
            self._wake()

    def end(
        self,
        slot: Slot,
        error: ModelError | None,
        usage: Usage | None,
        headers: Mapping[str, str],
    ) -> None:
        """Take in how a slot's request ended: see `Slot.report`."""
        signal, now = signal_of(error), self._clock()
        if usage is not None:
            self._buckets.settle(slot.charge, self._expected.learn(slot.estimate, usage))
        quotas = read_quotas(headers, self._unix()) if headers else ()
        if self.rate is None:
            if signal != "neutral":
                self._ended[signal] += 1
            self._quotas.update({quota.kind: quota for quota in quotas})
        else:
            ended = {} if signal == "neutral" else {signal: 1}
            self.rate.update(Events(running=self.in_flight, quotas=quotas, **ended), now)
        self._wake()

    def report(self) -> LaneReport:
        """Return what happened since the last report. A grant answers it."""
        running, waiting = self.in_flight, len(self._waiting)
        now, balances = self._clock(), self._buckets.by_kind
        first = dict(self._waiting[0].charge) if self._waiting else {}
        answered = self.traffic.answered_at
        report = LaneReport(
            lane=self._name,
            events=Events(
                started=self._started,
                running=running,
                quotas=tuple(self._quotas.values()),
                **self._ended,
            ),
            peak=max(self._peak, running),
            demand=max(self._demand, running + waiting),
            balance={kind: bucket.balance for kind, bucket in balances.items()},
            # As much as since the last report, and what waits.
            want={
                kind: 1.5 * self._taken.get(kind, 0.0) + waiting * first.get(kind, 0.0)
                for kind in balances
            },
            first={kind: first.get(kind, 0.0) for kind in balances},
            answered_s=None if answered is None else now - answered,
            unanswered=self.traffic.unanswered(now),
        )
        self._ended = dict.fromkeys(self._ended, 0)
        self._started, self._peak, self._demand = 0, running, 0
        self._taken, self._quotas, self._returned = {}, {}, report.balance
        return report

    def take_grant(self, grant: LaneGrant) -> None:
        """Follow a grant from now on."""
        now = self._clock()
        self._slots, self._per_s = grant.slots, grant.per_s
        if grant.answered_s is not None:
            self.answered_at = now - grant.answered_s - ON_THE_WAY_S
        for kind in self._buckets.by_kind.keys() - grant.balance.keys():
            del self._buckets.by_kind[kind]
        for kind, amount in grant.balance.items():
            bucket = self._buckets.by_kind.setdefault(kind, Bucket(0.0, 1.0, now, 0.0))
            bucket.capacity = grant.capacity[kind]
            bucket.balance += amount - self._returned.get(kind, 0.0)
        self._returned = {}
        self._wake()

    def _wait_s(self, charge: Charge) -> float:
        """Seconds until one more request may start; infinite until something changes."""
        limit = self._slots if self.rate is None else self.rate.concurrency.limit
        if self.in_flight >= limit:
            return math.inf
        return self._buckets.wait_s(charge, self._clock())

    def _take(self, charge: Charge) -> None:
        self.in_flight += 1
        self._buckets.take(charge)
        if self.rate is not None:
            self.rate.concurrency.note_started(self.in_flight)
            self.rate.update(Events(started=1, running=self.in_flight), self._clock())
            return
        self._peak = max(self._peak, self.in_flight)
        self._started += 1
        for kind in self._buckets.by_kind:
            self._taken[kind] = self._taken.get(kind, 0.0) + charge.get(kind, 0.0)

    def _give_back(self, charge: Charge) -> None:
        """A request that had a slot was not sent."""
        self.in_flight -= 1
        self._buckets.give(charge)
        if self.rate is not None:
            self.rate.update(Events(started=-1, running=self.in_flight), self._clock())
        self._started -= 1

    async def _turn(self, charge: Charge) -> None:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), charge)
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            self._on_demand()
            self._wake()  # sets the timer of its turn
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.cancelled():
                with suppress(ValueError):  # it was removed as soon as it was cancelled
                    self._waiting.remove(waiter)
            else:  # the slot came in the same moment: hand it on
                self._give_back(charge)
            self._wake()
            raise

    def _wake(self) -> None:
        """Let requests start, in order."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.ready.done():  # cancelled a moment ago
                self._waiting.popleft()
                continue
            wait_s = self._wait_s(waiter.charge)
            if wait_s > 0:
                self._wake_in(wait_s)
                return
            self._waiting.popleft()
            self._take(waiter.charge)  # on the waiter's behalf, so that nobody overtakes it
            waiter.ready.set_result(None)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not math.isinf(seconds):
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)
