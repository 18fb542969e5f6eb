"""The driver's side of rates and budgets: one limit for all workers, divided by their demand. Pure.

A lane is one endpoint, account and model. Each worker's report is answered by a grant, which holds
until the next one. Several runs may share limits, see `JointLimits`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from hermes_rl.models.rate.adaptive import AdaptiveRate, Change, Rates
from hermes_rl.models.rate.budgets import RUN_USD
from hermes_rl.models.rate.headers import Kind
from hermes_rl.models.rate.ledger import Ledger
from hermes_rl.models.rate.limiter import Announced, LaneGrant, LaneReport, Unanswered
from hermes_rl.models.rate.share import Cooldowns, Grant, Report

STOPPED_S = 2.0
"""Workers report four times a second: without a report for this long, all were stopped."""

ROTATE_S = 1.0
"""Interval at which the remainder of a limit moves to other workers."""


def divide_slots(limit: int, demands: Mapping[str, int], offset: int = 0) -> dict[str, int]:
    """Divide a limit by max-min fairness, then spread the surplus.

    No worker gets more than its demand while another gets less. The surplus lets a worker start
    more calls without waiting for its next grant. One part of it stays in reserve.

    Args:
        offset: of the worker that gets the remainder first.
    """
    shares, left = dict.fromkeys(demands, 0), max(0, limit)
    names = sorted(demands)
    begin = offset % len(names) if names else 0
    short = [n for n in (*names[begin:], *names[:begin]) if demands[n] > 0]
    while left and short:
        each = left // len(short)
        for name in short if each else short[:left]:
            more = min(max(each, 1), demands[name] - shares[name])
            shares[name] += more
            left -= more
        short = [n for n in short if shares[n] < demands[n]]
    parts = len(shares) + (len(shares) > 1)
    return {name: share + left // parts for name, share in shares.items()} if shares else {}


@dataclass(frozen=True)
class LaneSummary:
    """One lane, for the manifest, the report and live messages."""

    endpoint: str
    account: str
    model: str
    limit: int
    limits: tuple[Change[int], ...]
    per_s: float | None
    paces: tuple[Change[float], ...]
    clean: int
    throttled: int
    trouble: int
    unanswered: Unanswered | None


@dataclass(frozen=True)
class Summary:
    """The state of a run's rates and budgets."""

    lanes: tuple[LaneSummary, ...] = ()
    spent: dict[str, int] = field(default_factory=dict)
    """By budget, earlier starts and leases of lost workers included."""


@dataclass(frozen=True)
class Orders:
    """What a trainer wants of the workers that call a model."""

    paused: bool = False
    """No request may start."""
    weights: Announced | None = None


@dataclass
class _WorkerShare:
    """One worker's part of a lane."""

    report: LaneReport
    reported_at: float = 0.0
    answered_at: float | None = None
    slots: int = 0
    granted: Orders | None = None
    """The orders of its last grant."""
    obeys: Orders | None = None
    """Those that it has taken."""
    out: int = 0
    """Slots that it may be using: before a grant arrives it uses the previous one."""
    served: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """When it last got what it waited for, by kind."""

    def waits(self, kind: Kind, now: float) -> bool:
        """Return whether it waits for its part of a bucket and could use it."""
        return self.slots > 0 and self.first(kind) > 0 and now - self.reported_at < ROTATE_S

    def first(self, kind: Kind) -> float:
        """Return what its first queued request would use."""
        return self.report.first.get(kind, 0.0)


class _Lane:
    """Invariant: grants never raise the slots in use above the limit.

    Args:
        joined: the lanes with the same limit of requests in flight and the same pace; this one is
            added.
    """

    def __init__(self, name: str, rate: AdaptiveRate, joined: list[_Lane]) -> None:
        self.name, self.rate = name, rate
        self.endpoint, self.account, self.model = name.split("|", 2)
        self.parts: dict[str, _WorkerShare] = {}
        self.joined = joined
        joined.append(self)
        self.counts = {"clean": 0, "throttled": 0, "trouble": 0}

    def update(self, worker: str, report: LaneReport, now: float) -> None:
        """Process a worker's report."""
        known = self._joined_parts().values()
        if known and now - max(p.reported_at for p in known) > STOPPED_S:
            self.rate.pace.restart(now)
        part = self.parts.setdefault(worker, _WorkerShare(report))
        part.report, part.reported_at = report, now
        part.out = max(part.slots, report.events.running)
        part.obeys = part.granted  # it has taken the last grant
        if report.answered_s is not None:
            part.answered_at = now - report.answered_s
        for name in self.counts:
            self.counts[name] += getattr(report.events, name)
        for kind, bucket in self.rate.buckets.by_kind.items():
            bucket.fill(now)
            bucket.balance = min(bucket.capacity, bucket.balance + report.balance.get(kind, 0.0))
        every = self._joined_parts().values()
        self.rate.concurrency.note_started(sum(p.report.peak for p in every))
        running = sum(p.report.events.running for p in every)
        in_use = sum(any(p.report.demand for p in lane.parts.values()) for lane in self.joined)
        self.rate.update(
            msgspec.structs.replace(report.events, running=running),
            now,
            pace_share=1 / (in_use or 1),
        )

    def _joined_parts(self) -> dict[str, _WorkerShare]:
        """The parts of all joined lanes."""
        return {
            f"{worker} {lane.model}": part
            for lane in self.joined
            for worker, part in lane.parts.items()
        }

    def grant(self, worker: str, now: float, orders: Orders = Orders()) -> LaneGrant:
        """Return a worker's grant; in a pause no request may start."""
        part, limit = self.parts[worker], 0 if orders.paused else self.rate.concurrency.limit
        part.granted = orders
        every, key = self._joined_parts(), f"{worker} {self.model}"
        shares = divide_slots(limit, {n: p.report.demand for n, p in every.items()}, int(now))
        taken = sum(p.out for p in every.values() if p is not part)
        part.slots = max(0, min(shares[key], limit - taken))
        part.out = max(part.out, part.slots)
        others = [p for p in self.parts.values() if p is not part]
        answered = max((p.answered_at for p in others if p.answered_at is not None), default=None)
        buckets = self.rate.buckets.by_kind
        return LaneGrant(
            lane=self.name,
            slots=part.slots,
            balance={kind: self._withdraw(kind, part, now) for kind in buckets},
            capacity={kind: bucket.capacity for kind, bucket in buckets.items()},
            per_s={kind: bucket.per_s / len(self.parts) for kind, bucket in buckets.items()},
            answered_s=None if answered is None else now - answered,
            weights=orders.weights,
        )

    def _withdraw(self, kind: Kind, part: _WorkerShare, now: float) -> float:
        """Take a worker's part from a bucket: at least the need of one request, but nothing that a
        worker waits for which was served earlier (reports come in a fixed order, and the first
        after a refill would take everything)."""
        bucket = self.rate.buckets.by_kind[kind]
        available = bucket.fill(now)
        first = min(part.first(kind), bucket.capacity)
        others = [p for p in self.parts.values() if p is not part and p.waits(kind, now)]
        ahead = (p for p in others if p.served[kind] < part.served[kind])
        left = available - sum(min(p.first(kind), bucket.capacity) for p in ahead)
        if not part.slots or left <= 0 or left < first:
            return 0.0
        wanted = min(part.report.want.get(kind, 0.0), available / (1 + len(others)))
        amount = min(left, max(first, wanted))
        bucket.balance -= amount
        if first:
            part.served[kind] = now
        return amount

    def summary(self) -> LaneSummary:
        """Return the state of the lane."""
        return LaneSummary(
            endpoint=self.endpoint,
            account=self.account,
            model=self.model,
            limit=self.rate.concurrency.limit,
            limits=self.rate.concurrency.history.changes,
            per_s=self.rate.pace.per_s,
            paces=self.rate.pace.history.changes,
            clean=self.counts["clean"],
            throttled=self.counts["throttled"],
            trouble=self.counts["trouble"],
            unanswered=self._unanswered(),
        )

    def _unanswered(self) -> Unanswered | None:
        """Summarize the waiting calls of all workers; an answer to one counts for all."""
        parts = self.parts.values()
        found = [p.report.unanswered for p in parts if p.report.unanswered is not None]
        if not found:
            return None
        longest = max(found, key=lambda u: (u.message != "", u.since_s))
        answered = (p.report.answered_s for p in parts if p.report.answered_s is not None)
        return Unanswered(
            message=longest.message,
            waiting=sum(u.waiting for u in found),
            since_s=min((longest.since_s, *answered)),
            never=all(p.answered_at is None for p in parts),
            alive=any(u.alive for u in found),
        )


class JointLimits:
    """What several runs share: at each endpoint and account all models have one limit of requests
    in flight and one pace, which they divide evenly; limits in headers count for their model.

    Args:
        usd: the budget of all runs together, in nanodollars; None for a budget of each run.
    """

    def __init__(self, usd: Ledger | None = None) -> None:
        self.usd = usd
        self._lanes: dict[str, _Lane] = {}
        self._runs = count()

    def join(self) -> str:
        """Return a prefix for the names of a further run's workers."""
        return f"{next(self._runs)}:"

    def lane(self, name: str, make: Callable[[AdaptiveRate | None], AdaptiveRate]) -> _Lane:
        """Return a lane, which all runs share that call this model."""
        if name not in self._lanes:
            place = name.split("|", 2)[:2]
            beside = (o for o in self._lanes.values() if [o.endpoint, o.account] == place)
            first = next(beside, None)
            rate = make(None if first is None else first.rate)
            self._lanes[name] = _Lane(name, rate, [] if first is None else first.joined)
        return self._lanes[name]


class Coordinator:
    """Answers the reports of a run's workers.

    Args:
        maximum: of requests in flight on each lane, for the complete run.
        budgets: limits by budget.
        spent: by earlier starts of the run, by budget.
        clock: monotonic, in seconds.
        unix: the time of day.
        start: initial limit of slow start.
        rates: known limits per minute.
        joint: what other runs share with this one.
    """

    def __init__(
        self,
        maximum: int,
        budgets: Mapping[str, int],
        spent: Mapping[str, int],
        *,
        clock: Callable[[], float],
        unix: Callable[[], float],
        start: int = 32,
        rates: Rates = Rates(),
        joint: JointLimits | None = None,
    ) -> None:
        self._joint, self._prefix = joint, "" if joint is None else joint.join()
        self.ledgers = {
            name: Ledger(name, limit, spent.get(name, 0), maximum)
            for name, limit in budgets.items()
        }
        if joint is not None and joint.usd is not None and RUN_USD in budgets:
            self.ledgers[RUN_USD] = joint.usd
        self._lanes: dict[str, _Lane] = {}
        self.orders: Callable[[str], Orders] = lambda model: Orders()
        """What a trainer wants of a model's workers; asked for each grant."""
        self._clock, self._cooldowns = clock, Cooldowns(unix)
        self._make_rate: Callable[[AdaptiveRate | None], AdaptiveRate] = lambda beside: (
            AdaptiveRate(maximum, clock(), start=start, rates=rates, beside=beside)
        )

    @property
    def budgets(self) -> Sequence[str]:
        """The names of the run's budgets."""
        return tuple(self.ledgers)

    def handle(self, report: Report) -> Grant:
        """Process a worker's report and return its grant."""
        now, worker = self._clock(), self._prefix + report.worker
        self._cooldowns.update(report.cooldowns)
        for lane_report in report.lanes:
            self._lane(lane_report.lane).update(worker, lane_report, now)
        for lease in report.leases:
            self.ledgers[lease.budget].update(worker, lease)
        if report.leaving:
            self.remove(report.worker)
            return Grant()
        lanes = [
            lane.grant(worker, now, self.orders(lane.model))
            for lane in (self._lanes[lane_report.lane] for lane_report in report.lanes)
        ]
        leases = (self.ledgers[lease.budget].grant(worker) for lease in report.leases)
        return Grant(lanes=tuple(lanes), leases=tuple(leases), cooldowns=self._cooldowns.current())

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            joint, make = self._joint, self._make_rate
            found = _Lane(name, make(None), []) if joint is None else joint.lane(name, make)
            self._lanes[name] = found
        return self._lanes[name]

    def behind(self, model: str) -> list[str]:
        """Return the workers that do not obey the present orders for a model yet.

        A worker has other orders also when they are on their way: it obeys the present ones when
        it has taken them and the last grant had them too.
        """
        lanes = [lane for lane in [*self._lanes.values()] if lane.model == model]
        parts = [part for lane in lanes for part in [*lane.parts.items()]]
        return [
            worker.removeprefix(self._prefix)
            for worker, part in parts
            if {part.obeys, part.granted} != {self.orders(model)}
        ]

    def remove(self, worker: str) -> None:
        """Remove a worker: its slots are free, and its leases count as spent."""
        for lane in self._lanes.values():
            lane.parts.pop(self._prefix + worker, None)
        for ledger in self.ledgers.values():
            ledger.remove(self._prefix + worker)

    def summary(self) -> Summary:
        """Return the state of all lanes and budgets."""
        return Summary(
            lanes=tuple(lane.summary() for lane in self._lanes.values()),
            spent={name: ledger.spent for name, ledger in self.ledgers.items()},
        )
