"""A worker's part of what the workers of a run share: slots, buckets, rests of accounts, budgets.

One `Share` per process. It sends its governor one report about four times a second, and at once
when calls begin to wait; what comes back holds for some seconds. Without a governor's answer it
goes on with its last grant and then with its equal part, and keeps what a new governor has to know.

    async with Share("1-2", line, pots) as share:
        limiter = share.limiter("api.example.com", "EXAMPLE_API_KEY", "some-model")
        budget = share.budget()
        pool = MyPool(rests=share.rests)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import Charter, Grant, Memory, Report
from hermes_rl.models.limits.limiter import Limiter
from hermes_rl.models.limits.rests import Rests
from hermes_rl.models.limits.shared_lane import SharedLane
from hermes_rl.models.limits.spending import NO_UNIT, Lease, SharedBudget

TICK_S = 0.25
"""Between two reports."""

GAP_S = 0.02
"""Between two reports at least, when calls wait."""

FAREWELL_S = 2.0
"""How long the last report may take."""


class LineDown(Exception):
    """The governor did not answer."""


class Line(Protocol):
    """The way to a governor."""

    async def exchange(self, report: Report) -> Grant:
        """Raises: LineDown."""
        ...


class DirectLine:
    """To a governor in the same process."""

    def __init__(self, governor: Governor) -> None:
        self.governor = governor

    async def exchange(self, report: Report) -> Grant:
        """See `Line`."""
        return self.governor.handle(report)


class Share:
    """See the module.

    Args:
        worker: its name, unique in the run.
        pots: the budgets that there are.
        tick_s: between two reports.
        clock: seconds, monotonic.
        unix: the time of day, for rests.
    """

    def __init__(
        self,
        worker: str,
        line: Line,
        pots: Sequence[str] = (),
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.rests = Rests(unix)
        """Accounts that must rest, here and at the other workers."""
        self._worker, self._line = worker, line
        self._tick_s, self._clock = tick_s, clock
        self._lanes: dict[str, SharedLane] = {}
        self._news = asyncio.Event()
        self._leases = {pot: Lease(pot, self._news.set) for pot in pots}
        self._memory: Memory | None = None
        self._cut_off = False
        self._leaving = False
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def limiter(self, endpoint: str, account: str, model: str) -> Limiter:
        """The limiter of one endpoint, account and model; the same at every call."""
        name = f"{endpoint}|{account}|{model}"
        if name not in self._lanes:
            self._lanes[name] = SharedLane(name, self._news.set, self._clock)
        return self._lanes[name]

    def budget(self, place: int = NO_UNIT) -> SharedBudget | None:
        """The run's budgets, for the calls of one unit; None where there is none.

        Args:
            place: of the unit in the dataset: earlier ones have priority.
        """
        return SharedBudget(self._leases, place) if self._leases else None

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.create_task(self._run()), asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        running, _ = self._tasks
        self._leaving = True
        self._news.set()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.wait((running,))
                if not running.cancelled() and running.exception() is None:
                    await self._exchange(leaving=True)
        except TimeoutError:
            pass  # the governor takes it for dead some time later
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and (bug := task.exception()) is not None:
                raise bug

    async def _run(self) -> None:
        """One report at a time, however slow its answer: what it says would else be told twice."""
        while not self._leaving:
            await self._exchange()
            await asyncio.sleep(GAP_S)
            try:
                async with asyncio.timeout(max(0.0, self._tick_s - GAP_S)):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _watch(self) -> None:
        """A grant may end for want of a newer one, and what may be done then changes."""
        while True:
            await asyncio.sleep(self._tick_s)
            for lane in self._lanes.values():
                lane.wake()

    async def _exchange(self, *, leaving: bool = False) -> None:
        self._news.clear()
        report = Report(
            worker=self._worker,
            lanes=tuple(lane.report() for lane in self._lanes.values()),
            rests=self.rests.current(),
            pots=tuple(lease.report(leaving=leaving) for lease in self._leases.values()),
            leaving=leaving,
            memory=self._memory if self._cut_off else None,
        )
        try:
            grant = await self._line.exchange(report)
        except LineDown:
            self._cut_off = True
            return
        self._cut_off = False
        self._take(report, grant)

    def _take(self, report: Report, grant: Grant) -> None:
        self._memory = grant.memory or self._memory
        self.rests.learn(grant.rests)
        reported = {lane.lane: lane for lane in report.lanes}
        for given in grant.lanes:
            self._lanes[given.lane].granted(reported[given.lane], given, grant.lease_s)
        for lease in grant.pots:
            self._leases[lease.pot].granted(lease)


def alone(maximum: int, clock: Callable[[], float] = time.monotonic) -> Share:
    """A share for a process that is alone: its governor is its own."""
    charter = Charter(maximum=maximum)
    return Share("0", DirectLine(Governor(charter, clock, Rests())), clock=clock)
