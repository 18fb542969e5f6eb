"""A governor's side of one lane: its controller, its buckets, and who has which part. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hermes_rl.models.limits.allotment import alone_share, fair_shares, with_headroom
from hermes_rl.models.limits.buckets import Buckets, Rates
from hermes_rl.models.limits.controller import Controller
from hermes_rl.models.limits.governor_wire import Charter, LaneGrant, LaneReport, LaneSummary
from hermes_rl.models.limits.limiter import clamp_by
from hermes_rl.models.limits.quotas import Kind, Quota

TURN_S = 1.0
"""How long the last units of a limit stay with the same workers."""


@dataclass
class _Part:
    """One worker's part of a lane."""

    slots: int = 0
    held: int = 0
    """What it might use when it reported: as many requests may have begun before its grant came."""
    running: int = 0
    peak: int = 0
    demand: int = 0
    alone: int = 0
    heard: float = 0.0

    def out(self, now: float, lease_s: float) -> int:
        """Slots that the worker may be using. Where it is not heard any more it goes on with its
        equal part some time after its grant has ended; see `SharedLane`."""
        fresh = now - self.heard < 1.5 * lease_s
        granted = max(self.slots, self.held) if fresh else self.alone
        return max(granted, self.running)


class Lane:
    """One endpoint, account and model.

    Invariant: what is granted never brings the sum of what is out above the limit.
    """

    def __init__(self, name: str, charter: Charter, now: float) -> None:
        self.name = name
        self.controller = Controller(
            charter.maximum, charter.start, interval_s=charter.cut_interval_s
        )
        self.buckets = Buckets(Rates(**charter.rates), now, window_s=charter.window_s)
        self.quotas: dict[Kind, Quota] = {}
        self._charter = charter
        self._parts: dict[str, _Part] = {}
        self._clean = self._throttled = self._trouble = 0

    def hear(self, worker: str, report: LaneReport, now: float) -> None:
        """Take a worker's news in."""
        part = self._parts.setdefault(worker, _Part())
        part.slots = part.held = report.held
        part.running, part.heard = report.running, now
        part.peak, part.demand = report.peak, report.demand
        self.controller.started(sum(p.peak for p in self._parts.values()))
        for _ in range(report.clean):
            self.controller.heard("clean", now)
        if report.trouble:
            self.controller.heard("trouble", now)
        if report.throttled:
            self.controller.heard("throttled", now)
            self.buckets.throttled(now)
        self._clean += report.clean
        self._throttled += report.throttled
        self._trouble += report.trouble
        for kind, bucket in self.buckets.by_kind.items():
            bucket.fill(now)
            bucket.balance = min(bucket.capacity, bucket.balance + report.purse.get(kind, 0.0))
        if report.quotas:
            self.quotas.update({quota.kind: quota for quota in report.quotas})
            self.buckets.learn(report.quotas, now)
            clamp_by(self.controller, self.buckets, report.quotas, now)

    def grant(self, worker: str, report: LaneReport, now: float, *, settling: bool) -> LaneGrant:
        """What the worker may do from now on.

        Args:
            settling: it is not known yet what others hold: the worker keeps what it has.
        """
        part = self._parts[worker]
        slots = part.slots if settling else self._slots(worker, now)
        part.slots = slots
        limit = self.controller.limit
        promised = sum(p.alone for name, p in self._parts.items() if name != worker)
        equal = alone_share(limit, list(self._parts), worker)
        part.alone = max(0, min(equal, limit - promised))
        purse = {kind: self._scoop(kind, report, now) for kind in self.buckets.by_kind}
        return LaneGrant(
            lane=self.name,
            slots=slots,
            alone=part.alone,
            purse=purse,
            capacity={kind: b.capacity for kind, b in self.buckets.by_kind.items()},
            per_s={k: b.per_s / len(self._parts) for k, b in self.buckets.by_kind.items()},
        )

    def out(self, now: float) -> int:
        """Slots that workers may be using."""
        return sum(part.out(now, self._charter.lease_s) for part in self._parts.values())

    def forget(self, worker: str) -> None:
        """A worker is no more: its part is free."""
        self._parts.pop(worker, None)

    def resume(
        self, known: LaneSummary, quotas: Collection[Quota], live: Sequence[str], now: float
    ) -> None:
        """Go on where a dead governor was. What is left in the buckets is not known: nothing.

        Args:
            live: workers that may be at work with their equal part, though they do not report.
        """
        self.controller.resume(known.state, now)
        for worker in live:
            alone = alone_share(self.controller.limit, live, worker)
            self._parts.setdefault(worker, _Part(alone=alone, heard=-math.inf))
        self._clean, self._throttled = known.clean, known.throttled
        self._trouble = known.trouble
        self.quotas = {quota.kind: quota for quota in quotas}
        self.buckets.learn(quotas, now)
        self.buckets.throttled(now)

    def summary(self, now: float) -> LaneSummary:
        """For manifest and report."""
        return LaneSummary(
            lane=self.name,
            state=self.controller.state(now),
            clean=self._clean,
            throttled=self._throttled,
            trouble=self._trouble,
        )

    def _slots(self, worker: str, now: float) -> int:
        allowed = self.controller.allowed(now)
        demands = {name: part.demand for name, part in self._parts.items()}
        shares = fair_shares(allowed, demands, int(now / TURN_S))
        target = with_headroom(allowed, shares)[worker]
        lease = self._charter.lease_s
        others = sum(p.out(now, lease) for name, p in self._parts.items() if name != worker)
        return max(0, min(target, allowed - others))

    def _scoop(self, kind: Kind, report: LaneReport, now: float) -> float:
        """A worker's part of a bucket. Never a crumb that no request could start with."""
        bucket = self.buckets.by_kind[kind]
        there = bucket.fill(now)
        first = min(report.first.get(kind, 0.0), bucket.capacity)
        if there <= 0 or there < first:
            return 0.0
        part = min(there, max(first, report.want.get(kind, 0.0)))
        bucket.balance -= part
        return part
