"""A worker's side of one lane: a limiter whose limit and buckets are granted by the governor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from hermes_rl.models.limits.buckets import Bucket, Buckets, Charge, Estimate, Expectation
from hermes_rl.models.limits.controller import Controller, Signal, signal_of
from hermes_rl.models.limits.governor_wire import LaneGrant, LaneReport
from hermes_rl.models.limits.limiter import Slot
from hermes_rl.models.limits.quotas import Kind, Quota, read_quotas
from hermes_rl.models.limits.slots import Ended, SlotQueue
from hermes_rl.models.limits.traffic import Traffic

STARVED_S = 60.0
"""A worker whose equal part is nothing (more workers than slots) helps itself to one slot after so
long without a governor: something is wrong with the cluster, and units must not wait for ever."""

ON_THE_WAY_S = 5.0
"""A report and a grant take no longer together: an answer that another worker got is at most so
much older than it seems."""


class SharedLane:
    """See the module; made by `Share.limiter`.

    Args:
        hungry: called when calls begin to wait.
    """

    def __init__(self, name: str, hungry: Callable[[], None], clock: Callable[[], float]) -> None:
        self.traffic = Traffic()
        self._name, self._hungry, self._clock = name, hungry, clock
        self._queue = SlotQueue(self, clock)
        self._expected = Expectation()
        self._purse = Buckets()
        self._slots = self._share_alone = 0
        self._until, self._lease_s = clock(), 0.0
        self._own: Controller | None = None
        """Adapts the worker's equal part while no governor answers."""
        self._refill: dict[Kind, float] = {}
        self._heard: dict[Signal, int] = dict.fromkeys(("clean", "throttled", "trouble"), 0)
        self._peak = self._demand = self._started = 0
        self._taken: dict[Kind, float] = {}
        self._quotas: dict[Kind, Quota] = {}
        self._answered: float | None = None
        self._others_answered: float | None = None

    @property
    def answered_at(self) -> float | None:
        """See `Limiter.answered_at`."""
        return self._others_answered

    @property
    def backlog_s(self) -> float:
        """See `Limiter.backlog_s`: by the worker's part of the rate."""
        waiting = self._queue.waiting + 1
        return self._purse.backlog_s(waiting, self._clock(), refill=self._refill)

    def slot(self, estimate: Estimate = Estimate()) -> AbstractAsyncContextManager[Slot]:
        """See `Limiter.slot`."""
        return self._queue.slot(estimate)

    def wake(self) -> None:
        """Let pass whoever may by now."""
        self._queue.wake()

    def report(self) -> LaneReport:
        """What happened since the last answered report."""
        running = self._queue.in_flight
        demand = max(self._demand, running + self._queue.waiting)
        kinds = self._purse.by_kind
        return LaneReport(
            lane=self._name,
            started=self._started,
            clean=self._heard["clean"],
            throttled=self._heard["throttled"],
            trouble=self._heard["trouble"],
            peak=max(self._peak, running),
            demand=demand,
            running=running,
            held=self._allowed(),
            alone=self._share_alone,
            purse={kind: bucket.balance for kind, bucket in kinds.items()},
            want={kind: self._want(kind) for kind in kinds},
            first={kind: (self._queue.first() or {}).get(kind, 0.0) for kind in kinds},
            quotas=tuple(self._quotas.values()),
            answered_s=None if self._answered is None else self._clock() - self._answered,
            unanswered=self.traffic.unanswered(self._clock()),
        )

    def granted(self, report: LaneReport, grant: LaneGrant, lease_s: float) -> None:
        """The answer to a report."""
        now = self._clock()
        self._started -= report.started
        self._heard["clean"] -= report.clean
        self._heard["throttled"] -= report.throttled
        self._heard["trouble"] -= report.trouble
        self._peak, self._demand = self._queue.in_flight, 0
        self._taken = {}
        self._quotas = {k: q for k, q in self._quotas.items() if q not in report.quotas}
        self._slots, self._share_alone = grant.slots, grant.alone
        self._until, self._lease_s = now + lease_s, lease_s
        self._own = None
        if grant.answered_s is not None:
            self._others_answered = now - grant.answered_s - ON_THE_WAY_S
        self._fill_purse(report, grant, now)
        self._queue.wake()

    def charge(self, estimate: Estimate) -> Charge:
        """See `Gate.charge`."""
        self._demand = max(self._demand, self._queue.in_flight + self._queue.waiting + 1)
        return self._expected.charge(estimate)

    def wait_s(self, charge: Charge, in_flight: int) -> float:
        """See `Gate.wait_s`."""
        if in_flight >= self._allowed():
            return math.inf
        return self._purse.wait_s(charge, self._clock())

    def waits(self) -> None:
        """See `Gate.waits`."""
        self._hungry()

    def passed(self, charge: Charge, in_flight: int) -> None:
        """See `Gate.passed`."""
        self._peak = max(self._peak, in_flight)
        self._started += 1
        self._purse.take(charge)
        for kind in self._purse.by_kind:
            self._taken[kind] = self._taken.get(kind, 0.0) + charge.get(kind, 0.0)
        if self._own is not None:
            self._own.started(in_flight)

    def turned_back(self, charge: Charge) -> None:
        """See `Gate.turned_back`."""
        self._purse.give(charge)
        self._started -= 1

    def ended(self, estimate: Estimate, charge: Charge, end: Ended) -> None:
        """See `Gate.ended`."""
        signal = signal_of(end.error)
        if signal != "neutral":
            self._heard[signal] += 1
        if signal == "clean":
            self._answered = self._clock()
        if self._own is not None:
            self._own.heard(signal, self._clock())
        if end.usage is not None:
            self._purse.settle(charge, self._expected.heard(estimate, end.usage))
        if end.headers:
            for quota in read_quotas(end.headers, time.time()):
                self._quotas[quota.kind] = quota

    def _allowed(self) -> int:
        """Requests that may be in flight here."""
        now = self._clock()
        if now < self._until:
            return self._slots
        share = self._share_alone or int(now - self._until > STARVED_S)
        if now < self._until + self._lease_s:
            # Others may still have a grant that is larger than their equal part.
            share = min(share, self._slots)
        if self._own is None:
            self._own = Controller(self._share_alone or 1, self._share_alone or 1)
            for kind, bucket in self._purse.by_kind.items():
                bucket.fill(now)
                bucket.per_s = self._refill.get(kind, 0.0)
        return min(share, self._own.limit)

    def _fill_purse(self, report: LaneReport, grant: LaneGrant, now: float) -> None:
        for kind, amount in grant.purse.items():
            bucket = self._purse.by_kind.get(kind)
            if bucket is None:
                bucket = self._purse.by_kind[kind] = Bucket(0.0, 1.0, now, 0.0)
            bucket.fill(now)
            bucket.per_s, bucket.capacity = 0.0, grant.capacity[kind]
            bucket.balance += amount - report.purse.get(kind, 0.0)
        self._refill = dict(grant.per_s)

    def _want(self, kind: Kind) -> float:
        """What will be used until the next report: as much as since the last, and what waits."""
        head = (self._queue.first() or {}).get(kind, 0.0)
        return 1.5 * self._taken.get(kind, 0.0) + head * self._queue.waiting
