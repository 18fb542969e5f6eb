"""A governor's side of one lane: its controller, its buckets, and who has which part. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hermes_rl.models.limits.allotment import alone_share, fair_shares, with_headroom
from hermes_rl.models.limits.buckets import Rates
from hermes_rl.models.limits.governor_wire import (
    Charter,
    LaneGrant,
    LaneReport,
    LaneSummary,
    Unanswered,
)
from hermes_rl.models.limits.quotas import Kind, Quota
from hermes_rl.models.limits.regulator import News, Regulator

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
    answered: float | None = None
    """When it was last answered."""
    unanswered: Unanswered | None = None
    first: dict[Kind, float] = field(default_factory=dict)
    """What the first that waits there would use."""
    served: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """When it was last given what it waited for."""

    def hungry(self, kind: Kind, now: float) -> bool:
        """Whether it waits for its part of a bucket, and could use it."""
        waits = self.slots > 0 and self.first.get(kind, 0.0) > 0
        return waits and now - self.heard < TURN_S

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
        self._regulator = Regulator(
            charter.maximum,
            now,
            start=charter.start,
            rates=Rates(**charter.rates),
            interval_s=charter.cut_interval_s,
            window_s=charter.window_s,
        )
        self.controller = self._regulator.controller
        self.buckets = self._regulator.buckets
        self.pace = self._regulator.pace
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
        part.alone, part.unanswered = report.alone, report.unanswered
        if report.answered_s is not None:
            part.answered = now - report.answered_s
        self.controller.started(sum(p.peak for p in self._parts.values()))
        self.quotas.update({quota.kind: quota for quota in report.quotas})
        self._clean += report.clean
        self._throttled += report.throttled
        self._trouble += report.trouble
        for kind, bucket in self.buckets.by_kind.items():
            bucket.fill(now)
            bucket.balance = min(bucket.capacity, bucket.balance + report.purse.get(kind, 0.0))
        news = News(
            started=report.started,
            clean=report.clean,
            throttled=report.throttled,
            trouble=report.trouble,
            running=sum(p.running for p in self._parts.values()),
            quotas=report.quotas,
        )
        self._regulator.heard(news, now)

    def grant(self, worker: str, report: LaneReport, now: float, *, settling: bool) -> LaneGrant:
        """What the worker may do from now on.

        Args:
            settling: it is not known yet what others hold: the worker keeps what it has.
        """
        part = self._parts[worker]
        slots = part.slots if settling else self._slots(worker, now)
        part.slots = slots
        if not settling:
            limit = self.controller.limit
            promised = sum(p.alone for name, p in self._parts.items() if name != worker)
            equal = alone_share(limit, list(self._parts), worker)
            part.alone = max(0, min(equal, limit - promised))
        purse = {kind: self._scoop(kind, part, report, now) for kind in self.buckets.by_kind}
        return LaneGrant(
            lane=self.name,
            slots=slots,
            alone=part.alone,
            purse=purse,
            capacity={kind: b.capacity for kind, b in self.buckets.by_kind.items()},
            per_s={k: b.per_s / len(self._parts) for k, b in self.buckets.by_kind.items()},
            answered_s=self._answered_s(worker, now),
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
        self.pace.resume(known.pace, now)
        for worker in live:
            equal = alone_share(self.controller.limit, live, worker)
            alone = known.alone.get(worker, equal)
            self._parts.setdefault(worker, _Part(alone=alone, heard=-math.inf))
        self._clean, self._throttled = known.clean, known.throttled
        self._trouble = known.trouble
        self.quotas = {quota.kind: quota for quota in quotas}
        self.buckets.learn(quotas, now)
        if self.pace.per_s is not None:
            self.buckets.pace(self.pace.per_s, now)
        self.buckets.throttled(now)

    def summary(self, now: float) -> LaneSummary:
        """For manifest and report."""
        return LaneSummary(
            lane=self.name,
            state=self.controller.state(now),
            pace=self.pace.state(now),
            clean=self._clean,
            throttled=self._throttled,
            trouble=self._trouble,
            alone={name: part.alone for name, part in self._parts.items()},
            unanswered=self._unanswered(now),
        )

    def _unanswered(self, now: float) -> Unanswered | None:
        """What all workers' calls wait for, as one; an answer anywhere counts for all."""
        parts = self._parts.values()
        found = [part.unanswered for part in parts if part.unanswered is not None]
        if not found:
            return None
        longest = max(found, key=lambda t: (t.said != "", t.since_s))
        answered = (now - part.answered for part in parts if part.answered is not None)
        return Unanswered(
            said=longest.said,
            waiting=sum(t.waiting for t in found),
            since_s=min((longest.since_s, *answered)),
            never=all(part.answered is None for part in parts),
            alive=any(t.alive for t in found),
        )

    def _answered_s(self, worker: str, now: float) -> float | None:
        """Seconds since another worker was last answered."""
        others = (p.answered for name, p in self._parts.items() if name != worker)
        last = max((at for at in others if at is not None), default=None)
        return None if last is None else now - last

    def _slots(self, worker: str, now: float) -> int:
        allowed = self.controller.allowed(now)
        demands = {name: part.demand for name, part in self._parts.items()}
        shares = fair_shares(allowed, demands, int(now / TURN_S))
        target = with_headroom(allowed, shares)[worker]
        lease = self._charter.lease_s
        others = sum(p.out(now, lease) for name, p in self._parts.items() if name != worker)
        return max(0, min(target, allowed - others))

    def _scoop(self, kind: Kind, part: _Part, report: LaneReport, now: float) -> float:
        """A worker's part of a bucket. Never a crumb that no request could start with, and nothing
        that a worker waits for who was served longer ago: reports come in a fixed order, and the
        first after a refill would take it all, each time."""
        bucket = self.buckets.by_kind[kind]
        there = bucket.fill(now)
        first = min(report.first.get(kind, 0.0), bucket.capacity)
        part.first[kind] = first
        others = [p for p in self._parts.values() if p is not part and p.hungry(kind, now)]
        ahead = sum(p.first[kind] for p in others if p.served[kind] < part.served[kind])
        left = there - ahead
        if not part.slots or left <= 0 or left < first:
            return 0.0
        wanted = min(report.want.get(kind, 0.0), there / (1 + len(others)))
        amount = min(left, max(first, wanted))
        bucket.balance -= amount
        if first:
            part.served[kind] = now
        return amount
