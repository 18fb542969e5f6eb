"""The driver's side of rates and budgets: one limit for all workers, divided by their demand. Pure.

A lane is one endpoint, account and model. Each worker's report is answered by a grant, which holds
until the next one. Several runs may share limits, see `JointLimits`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
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
"""Without a report from any worker for this long, all were stopped."""

SILENT_S = 5.0
"""Longer than the time between two reports of a worker."""

MANY, SLOWEST = 100, 16.0
"""Above this number, workers report less often, so that the number of all reports stays the same;
but often enough that refusals arrive well before the limit may be cut again."""

ROTATE_S = 1.0
"""Seconds of use after which a slot above the level moves to another worker."""


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


@dataclass(eq=False)
class WorkerShare:
    """One worker's part of a lane."""

    report: LaneReport
    reported_at: float = 0.0
    slots: int = 0
    out: int = 0
    """Slots that it may be using: before a grant arrives it uses the previous one."""
    granted: Orders | None = None
    """The orders of its last grant."""
    obeys: Orders | None = None
    """Those that it has taken."""

    def first(self, kind: Kind) -> float:
        """Return what its first queued request would use."""
        return self.report.first.get(kind, 0.0)


class SlotShares:
    """Divides a limit of requests in flight by max-min fairness. The cost of a report does not
    depend on the number of workers, because sums over them are kept.

    All get their demand up to a level. Where it does not suffice, some get one slot more, in turn.
    Once all demands are met, the surplus is spread: it lets a worker start more calls without
    waiting for its next grant. One part of it stays in reserve.

    Invariant: grants never raise the slots in use above the limit.
    """

    def __init__(self) -> None:
        self.running = self.peak = self.out = self.workers = 0
        """Sums over the workers."""
        self._by_demand = Counter[int]()
        """Number of workers, by demand."""
        self._level = self._filled = self._above = 0
        """The level, the demands up to it, and the number of workers that demand more."""
        self._turns: dict[WorkerShare, float] = {}
        """Workers with one slot above the level, and since when they can use it (inf: not yet)."""
        self._line = OrderedDict[WorkerShare, None]()
        """Workers that wait for such a slot, the first in front."""

    def add(self, part: WorkerShare, sign: int = 1) -> None:
        """Add a worker to the sums, or take it from them."""
        demand = part.report.demand
        self.running += sign * part.report.events.running
        self.peak += sign * part.report.peak
        self.out += sign * part.out
        self.workers += sign
        self._by_demand[demand] += sign
        self._filled += sign * min(demand, self._level)
        self._above += sign * (demand > self._level)

    def update(self, part: WorkerShare, report: LaneReport) -> None:
        """Process the report of a worker that was added."""
        self.add(part, -1)
        part.report, part.out = report, max(part.slots, report.events.running)
        self.add(part)

    def grant(self, part: WorkerShare, limit: int, now: float) -> int:
        """Return a worker's slots until its next grant."""
        self.out -= part.out
        share = self._fair_share(part, limit, now) if limit > 0 else 0
        part.slots = max(0, min(share, limit - self.out))
        if share and part in self._turns:  # else it waits for a request that still runs
            self._turns[part] = min(self._turns[part], now) if part.slots == share else math.inf
        part.out = max(part.out, part.slots)
        self.out += part.out
        return part.slots

    def remove(self, part: WorkerShare) -> None:
        """Remove a worker: its slots are free."""
        self.add(part, -1)
        self._end_turn(part)

    def _fair_share(self, part: WorkerShare, limit: int, now: float) -> int:
        while self._above and self._filled + self._above <= limit:
            self._filled += self._above
            self._level += 1
            self._above -= self._by_demand[self._level]
        while self._filled > limit:
            self._above += self._by_demand[self._level]
            self._filled -= self._above
            self._level -= 1
        demand, left = part.report.demand, limit - self._filled
        if demand > self._level:
            return self._level + self._has_turn(part, left, now)
        self._end_turn(part)
        return demand if self._above else demand + left // (self.workers + (self.workers > 1))

    def _has_turn(self, part: WorkerShare, turns: int, now: float) -> bool:
        """Return whether a worker has a slot above the level; at most this number have."""
        began, running = self._turns.get(part, math.inf), part.report.events.running
        if len(self._turns) > turns or (self._line and now - began >= ROTATE_S):
            self._turns.pop(part, None)
        if part not in self._turns and (running <= self._level or not self._line):
            self._line.setdefault(part)  # what it still uses is for the worker that has its turn
        if self._line and len(self._turns) < turns:
            self._turns[self._line.popitem(last=False)[0]] = math.inf
        return part in self._turns

    def _end_turn(self, part: WorkerShare) -> None:
        self._turns.pop(part, None)
        self._line.pop(part, None)


class _Lane:
    """One lane.

    Args:
        beside: a lane with the same limit of requests in flight and the same pace.
    """

    def __init__(self, name: str, rate: AdaptiveRate, beside: _Lane | None = None) -> None:
        self.name, self.rate = name, rate
        self.endpoint, self.account, self.model = name.split("|", 2)
        self.parts: dict[str, WorkerShare] = {}
        self.slots: SlotShares = SlotShares() if beside is None else beside.slots
        self.joined: list[_Lane] = [] if beside is None else beside.joined
        self.joined.append(self)
        self.counts = {"clean": 0, "throttled": 0, "trouble": 0}
        self._demand = 0
        self._answered_at = -math.inf
        """When any worker was last answered."""
        self._lines: dict[Kind, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """Workers that wait for their part of a bucket, by kind; the first in front."""

    def update(self, worker: str, report: LaneReport, now: float) -> None:
        """Process a worker's report."""
        if worker not in self.parts:
            self.parts[worker] = WorkerShare(LaneReport(lane=self.name))
            self.slots.add(self.parts[worker])
        part = self.parts[worker]
        self._demand += report.demand - part.report.demand
        self.slots.update(part, report)
        part.reported_at = now
        part.obeys = part.granted  # it has taken the last grant
        if report.answered_s is not None:
            self._answered_at = max(self._answered_at, now - report.answered_s)
        for name in self.counts:
            self.counts[name] += getattr(report.events, name)
        for kind, bucket in self.rate.buckets.by_kind.items():
            bucket.fill(now)
            bucket.balance = min(bucket.capacity, bucket.balance + report.balance.get(kind, 0.0))
        self.rate.concurrency.note_started(self.slots.peak)
        in_use = sum(lane._demand > 0 for lane in self.joined)
        self.rate.update(
            msgspec.structs.replace(report.events, running=self.slots.running),
            now,
            pace_share=1 / (in_use or 1),
        )

    def grant(self, worker: str, now: float, orders: Orders = Orders()) -> LaneGrant:
        """Return a worker's grant; in a pause no request may start."""
        part, limit = self.parts[worker], 0 if orders.paused else self.rate.concurrency.limit
        part.granted = orders
        buckets = self.rate.buckets.by_kind
        return LaneGrant(
            lane=self.name,
            slots=self.slots.grant(part, limit, now),
            balance={kind: self._withdraw(kind, worker, now) for kind in buckets},
            capacity={kind: bucket.capacity for kind, bucket in buckets.items()},
            per_s={kind: bucket.per_s / len(self.parts) for kind, bucket in buckets.items()},
            answered_s=None if math.isinf(self._answered_at) else now - self._answered_at,
            weights=orders.weights,
        )

    def remove(self, worker: str) -> None:
        """Remove a worker."""
        if (part := self.parts.pop(worker, None)) is not None:
            self._demand -= part.report.demand
            self.slots.remove(part)
            for line in self._lines.values():
                line.pop(worker, None)

    def _withdraw(self, kind: Kind, worker: str, now: float) -> float:
        """Take a worker's part from a bucket: at least the need of one request, but nothing that a
        worker ahead in the line waits for (reports come in a fixed order, and the first after a
        refill would take everything)."""
        bucket, line, part = self.rate.buckets.by_kind[kind], self._lines[kind], self.parts[worker]
        first, available = min(part.first(kind), bucket.capacity), bucket.fill(now)
        if first and part.slots:
            line.setdefault(worker)
        else:
            line.pop(worker, None)
        while line and now - self.parts[next(iter(line))].reported_at > SILENT_S:
            line.popitem(last=False)
        left = available
        for name in line:
            if name == worker or left < first:
                break
            left -= min(self.parts[name].first(kind), bucket.capacity)
        if not part.slots or left <= 0 or left < first:
            return 0.0
        others = len(line) - (worker in line)
        wanted = min(part.report.want.get(kind, 0.0), available / (1 + others))
        amount = min(left, max(first, wanted))
        bucket.balance -= amount
        if first:
            line.move_to_end(worker)
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
            unanswered=self._unanswered(),
            **self.counts,
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
            never=math.isinf(self._answered_at),
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
            every = (o for o in self._lanes.values() if [o.endpoint, o.account] == place)
            beside = next(every, None)
            rate = make(None if beside is None else beside.rate)
            self._lanes[name] = _Lane(name, rate, beside)
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
        self._reported_at: float | None = None
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
        if self._reported_at is not None and now - self._reported_at > STOPPED_S:
            for lane in self._lanes.values():
                lane.rate.pace.restart(now)
        self._reported_at = now
        self._cooldowns.update(report.cooldowns)
        for lane_report in report.lanes:
            self._lane(lane_report.lane).update(worker, lane_report, now)
        for lease in report.leases:
            self.ledgers[lease.budget].update(worker, lease)
        if report.leaving:
            self.remove(report.worker)
            return Grant()
        called = (self._lanes[lane_report.lane] for lane_report in report.lanes)
        lanes = (lane.grant(worker, now, self.orders(lane.model)) for lane in called)
        leases = (self.ledgers[lease.budget].grant(worker) for lease in report.leases)
        workers = max((len(lane.parts) for lane in self._lanes.values()), default=0)
        return Grant(
            lanes=tuple(lanes),
            leases=tuple(leases),
            cooldowns=self._cooldowns.current(),
            interval=min(SLOWEST, max(1.0, workers / MANY)),
        )

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            joint, make = self._joint, self._make_rate
            found = _Lane(name, make(None)) if joint is None else joint.lane(name, make)
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
            lane.remove(self._prefix + worker)
        for ledger in self.ledgers.values():
            ledger.remove(self._prefix + worker)

    def close(self) -> None:
        """Remove the workers that did not leave, as after a fault: what several runs share would
        keep their slots and leases from the other runs."""
        for worker in {name for lane in self._lanes.values() for name in lane.parts}:
            if worker.startswith(self._prefix):
                self.remove(worker.removeprefix(self._prefix))

    def summary(self) -> Summary:
        """Return the state of all lanes and budgets."""
        return Summary(
            lanes=tuple(lane.summary() for lane in self._lanes.values()),
            spent={name: ledger.spent for name, ledger in self.ledgers.items()},
        )
