"""A worker's share of the rates and budgets of its run.

A worker reports to the driver's coordinator about four times a second, and at once if calls wait;
less often where there are more than a hundred.
In return it gets slots, bucket contents, leases of budgets and cooldowns of accounts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from hermes_rl.models.rate.budgets import NO_UNIT, Budget, Lease, LeaseGrant, LeaseReport
from hermes_rl.models.rate.limiter import Cooldown, Cooldowns, LaneGrant, LaneReport, Limiter

TICK_S = 0.25
"""Seconds between two reports."""

HELD_S = 0.05
"""The same while calls wait and none may start: a pause should end soon for all."""

GAP_S = 0.02
"""Minimum seconds between two reports, if calls wait."""


LEAVE_S = 2.0
"""Seconds that the last report may take."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker to the coordinator."""

    worker: str
    lanes: tuple[LaneReport, ...] = ()
    leases: tuple[LeaseReport, ...] = ()
    cooldowns: tuple[Cooldown, ...] = ()
    leaving: bool = False
    """The worker's last report: what it holds is free."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """From the coordinator to a worker; holds until the next one."""

    lanes: tuple[LaneGrant, ...] = ()
    leases: tuple[LeaseGrant, ...] = ()
    cooldowns: tuple[Cooldown, ...] = ()
    interval: float = 1.0
    """Factor of the time between two reports; more than 1 for a worker of many."""


encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_grant = msgspec.msgpack.Decoder(Grant).decode


class Share:
    """Limiters, budgets and cooldowns of one process.

    Args:
        worker: its name, unique in the run.
        budgets: names of the run's budgets.
        maximum: of requests in flight on each lane, for a process without a coordinator.
        tick_s: seconds between two reports.
        clock: monotonic, in seconds.
        unix: the time of day.
    """

    def __init__(
        self,
        worker: str = "",
        budgets: Sequence[str] = (),
        *,
        maximum: int | None = None,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.cooldowns = Cooldowns(unix)
        self.version: str | None = None
        """Of the policy's weights before the first call, where the engine has named it."""
        self._worker, self._maximum, self._tick_s = worker, maximum, tick_s
        self._clock, self._unix = clock, unix
        self._limiters: dict[str, Limiter] = {}
        self._demand = asyncio.Event()
        self._leases = {name: Lease(name, on_demand=self._demand.set) for name in budgets}
        self._interval = 1.0
        self._left = asyncio.Event()
        self._leaving = False

    def limiter(self, endpoint: str, account: str, model: str) -> Limiter:
        """Return the limiter of one endpoint, account and model; the same at every call."""
        name = f"{endpoint}|{account}|{model}"
        if name not in self._limiters:
            self._limiters[name] = Limiter(
                self._maximum,
                name=name,
                on_demand=self._demand.set,
                clock=self._clock,
                unix=self._unix,
            )
            self._limiters[name].traffic.weights.see(self.version)
        return self._limiters[name]

    def budget(self, place: int = NO_UNIT, limits: dict[str, int] | None = None) -> Budget | None:
        """Return the budget of one attempt; None if unlimited.

        Args:
            place: of the unit in the dataset; earlier ones have priority.
            limits: of this attempt, by budget.
        """
        return Budget(self._leases, place, limits) if self._leases or limits else None

    async def next_report(self) -> Report:
        """Wait until a report is due or calls wait, and return it."""
        held = any(limiter.held for limiter in self._limiters.values())
        tick_s = self._interval * (min(HELD_S, self._tick_s) if held else self._tick_s)
        gap_s = min(self._interval * GAP_S, tick_s)
        await asyncio.sleep(gap_s)
        try:
            async with asyncio.timeout(tick_s - gap_s):
                await self._demand.wait()
        except TimeoutError:
            pass
        return self.report()

    def report(self) -> Report:
        """Return what happened since the last report."""
        if not self._leaving:
            self._demand.clear()
        report = Report(
            worker=self._worker,
            lanes=tuple(limiter.report() for limiter in self._limiters.values()),
            leases=tuple(lease.report(leaving=self._leaving) for lease in self._leases.values()),
            cooldowns=self.cooldowns.current(),
            leaving=self._leaving,
        )
        if self._leaving:
            self._left.set()
        return report

    def take_grant(self, grant: Grant) -> None:
        """Obey a grant from now on."""
        self._interval = grant.interval
        self.cooldowns.update(grant.cooldowns)
        for lane in grant.lanes:
            self._limiters[lane.lane].take_grant(lane)
        for lease in grant.leases:
            self._leases[lease.budget].take_grant(lease)

    async def leave(self) -> None:
        """End reporting, and wait a short time until the last report was taken."""
        self._leaving = True
        self._demand.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._left.wait()

    @asynccontextmanager
    async def coordinated(
        self, handle: Callable[[Report], Grant]
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Report to a coordinator in the same process. Yields the reporting task: if it fails,
        there are no more grants, and calls would wait forever."""

        async def exchange() -> None:
            report = self.report()
            while not report.leaving:
                self.take_grant(handle(report))
                report = await self.next_report()
            handle(report)

        exchanging = asyncio.create_task(exchange())
        try:
            yield exchanging
        finally:
            self._leaving = True
            self._demand.set()
            await exchanging
