"""The one limiter and the one budget of a run: pure state that answers reports with grants.

A run has one governor, in a Ray actor of its own or, without Ray, in the driver's process. Every
worker reports about four times a second and gets its part in return: slots on each lane, a part of
each token bucket, the rests of accounts that others learned of, a lease on each budget. What is
granted ends by itself.

When a governor dies its workers go on with what they were granted, and then with an equal part of
the limit each. Its successor is told by the workers what the dead one knew (`Memory`), and hands
out nothing new before all workers that were alive have reported, or their grants have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl.models.limits.governor_wire import (
    Charter,
    Grant,
    LaneGrant,
    Memory,
    PotGrant,
    Report,
    Summary,
)
from hermes_rl.models.limits.lanes import Lane
from hermes_rl.models.limits.pots import Pot, accounts_by_worker
from hermes_rl.models.limits.rests import Rests

MEMORY_S = 1.0
"""Each worker is given the memory to keep at most this often, and at once when others came or went:
a successor must not take the first who reports for the only one."""

DEAD_S = 60.0
"""A worker that was not heard for so long is taken for dead; the driver says so sooner."""


class Governor:
    """See the module.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, charter: Charter, clock: Callable[[], float], rests: Rests) -> None:
        now = clock()
        self.lanes: dict[str, Lane] = {}
        self.pots = {
            name: Pot(name, limit, charter.spent.get(name, 0), charter.maximum)
            for name, limit in charter.pots.items()
        }
        self._charter = charter
        self._clock = clock
        self._rests = rests
        self._heard: dict[str, float] = {}
        self._told: dict[str, tuple[float, frozenset[str]]] = {}
        self._version = 0
        self._awaited: set[str] = set()
        self._resumed = False
        self._settles_at = now + 1.5 * charter.lease_s if charter.successor else now

    def handle(self, report: Report) -> Grant:
        """A worker's report; returns its grant."""
        now = self._clock()
        self._bury(now)
        self._version += 1
        if report.memory is not None:
            self._resume(report.memory, now)
        self._rests.learn(report.rests)
        self._awaited.discard(report.worker)
        if report.leaving:
            return self._dismiss(report, now)
        self._heard[report.worker] = now
        settling = self._settling(now)
        return Grant(
            lanes=tuple(self._lanes(report, now, settling)),
            pots=tuple(self._pots(report, settling)),
            rests=self._rests.current(),
            memory=None if settling else self._memory_for(report.worker, now),
            lease_s=self._charter.lease_s,
        )

    def forget(self, worker: str) -> None:
        """The driver knows that a worker is dead."""
        self._heard.pop(worker, None)
        self._told.pop(worker, None)
        self._awaited.discard(worker)
        for lane in self.lanes.values():
            lane.forget(worker)
        for pot in self.pots.values():
            pot.forget(worker)

    def summary(self) -> Summary:
        """For manifest and report."""
        now = self._clock()
        return Summary(
            lanes=tuple(lane.summary(now) for lane in self.lanes.values()),
            spent={name: pot.spent for name, pot in self.pots.items()},
        )

    def _lanes(self, report: Report, now: float, settling: bool) -> list[LaneGrant]:
        grants = []
        for news in report.lanes:
            lane = self.lanes.get(news.lane)
            if lane is None:
                lane = self.lanes[news.lane] = Lane(news.lane, self._charter, now)
            lane.hear(report.worker, news, now)
            grants.append(lane.grant(report.worker, news, now, settling=settling))
        return grants

    def _pots(self, report: Report, settling: bool) -> list[PotGrant]:
        known = [news for news in report.pots if news.pot in self.pots]
        for news in known:
            self.pots[news.pot].hear(report.worker, news)
        return [self.pots[n.pot].grant(report.worker, n, settling=settling) for n in known]

    def _dismiss(self, report: Report, now: float) -> Grant:
        """The last report of a worker: it holds nothing any more."""
        self._lanes(report, now, settling=False)
        for news in report.pots:
            if news.pot in self.pots:
                self.pots[news.pot].hear(report.worker, news)
        self.forget(report.worker)
        return Grant(lease_s=self._charter.lease_s)

    def _settling(self, now: float) -> bool:
        """Whether it is not known yet what a predecessor handed out."""
        return now < self._settles_at and (bool(self._awaited) or not self._resumed)

    def _resume(self, memory: Memory, now: float) -> None:
        """Learn what the predecessor knew; of several memories the latest."""
        if memory.version < self._version or not self._charter.successor:
            return
        self._version, self._resumed = memory.version + 1, True
        for worker in memory.live:
            if worker not in self._heard:
                self._heard[worker] = now
                self._awaited.add(worker)
        for known in memory.lanes:
            if known.lane not in self.lanes:
                self.lanes[known.lane] = Lane(known.lane, self._charter, now)
            self.lanes[known.lane].resume(known, memory.rates.get(known.lane, ()), memory.live, now)
        for pot in self.pots.values():
            pot.resume({w: a[pot.name] for w, a in memory.accounts.items() if pot.name in a})

    def _memory_for(self, worker: str, now: float) -> Memory | None:
        live = frozenset(self._heard)
        told = self._told.get(worker)
        if told is not None and now - told[0] < MEMORY_S and told[1] == live:
            return None
        self._told[worker] = (now, live)
        return Memory(
            version=self._version,
            lanes=tuple(lane.summary(now) for lane in self.lanes.values()),
            rates={name: tuple(lane.quotas.values()) for name, lane in self.lanes.items()},
            accounts=accounts_by_worker(self.pots.values()),
            live=tuple(self._heard),
        )

    def _bury(self, now: float) -> None:
        for worker in [w for w, heard in self._heard.items() if now - heard > DEAD_S]:
            self.forget(worker)
