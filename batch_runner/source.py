"""Where work comes from: plan, retries and the breaker.

Invariants: a unit is handed out only while it is open and not in flight; only receipts change the
ledger; once stopped, nothing more is handed out.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import deque

import msgspec

from batch_runner.plan import ALONE_AFTER, Plan
from batch_runner.sink import Sink
from batch_runner.stops import Stop
from hermes_rl.errors import CAUSES, UserError
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.store.driver import Driver
from hermes_rl.store.ledger import Ledger

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""A failed unit waits before its next attempt: from the first value, doubling, to the second."""


class RunSource:
    """Hands out the plan's attempts and the retries; takes receipts back.

    Args:
        window: waiting retries beyond this hold the plan back, so that memory stays bounded.
    """

    def __init__(
        self, plan: Plan, driver: Driver, sink: Sink, ledger: Ledger, *, window: int = 1024
    ) -> None:
        self.stop: Stop | None = None
        self.in_flight: dict[str, WorkItem] = {}
        """By unit id."""
        self._plan = plan
        self._ledger = ledger
        self._driver = driver
        self._sink = sink
        self._window = window
        self._buffer: deque[WorkItem] = deque()
        self._retries: list[tuple[float, int, WorkItem]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._left: str | None = None
        """Why units were left to the next start."""

    def halt(self, stop: Stop) -> None:
        """Hand out nothing more. The first reason stands."""
        self.stop = self.stop or stop
        self._stopped.set()
        self._changed.set()

    async def stopped(self) -> None:
        """Return once the run is to stop."""
        await self._stopped.wait()

    async def has_work(self) -> bool:
        """Whether there is an attempt to make; where there is none, no worker is started."""
        while not self._buffer and not self._plan.counts.complete and self.stop is None:
            await self._read()
        return bool(self._buffer)

    async def fewer_than(self, units: int, seconds: float) -> bool:
        """Whether fewer attempts are to be made. Reads no further than that takes, and not longer
        than `seconds`: then it is False."""
        until = time.monotonic() + seconds
        while len(self._buffer) < units and not self._plan.counts.complete and self.stop is None:
            if time.monotonic() > until:
                return False
            await self._read()
        return len(self._buffer) < units

    async def next(self) -> WorkItem | None:
        """The next attempt; waits while some may still come; None when done or stopped."""
        while self.stop is None:
            item = self._due_retry() or (self._buffer.popleft() if self._buffer else None)
            if item is not None:
                self.in_flight[item.unit_id] = item
                return item
            if not self._plan.counts.complete and len(self._retries) < self._window:
                await self._read()
            elif self._retries or self.in_flight:
                await self._wait()
            elif self._left is not None:
                self.halt(Stop("worker_lost", self._left))
            else:
                return None
        return None

    async def receive(self, receipt: Receipt) -> None:
        """Take a receipt: the unit is done, given up, tried again, or stops the run."""
        item = self.in_flight.pop(receipt.unit_id, None)
        disposition = self._driver.receive(receipt)
        self._sink.receive(receipt, disposition)
        consequence = CAUSES[receipt.cause] if receipt.cause else None
        if consequence is not None and consequence.breaker:
            self.halt(Stop(receipt.cause or "", receipt.error or receipt.cause or ""))
        elif item is not None and disposition == "open" and _again(receipt.cause):
            self._retry(item, receipt.cause or "")
        self._changed.set()

    async def _read(self) -> None:
        """Read on in the dataset. When it cannot be read, the run stops: what runs ends first."""
        try:
            self._buffer.extend(await self._plan.take())
        except UserError as error:
            self.halt(Stop("dataset", str(error)))

    async def leave(self, unit_id: str, reason: str) -> None:
        """An attempt was sent or waits, and will have no receipt in this run: its unit is left to
        the next start, and the run stops once there is no other work."""
        self.in_flight.pop(unit_id, None)
        self._left = self._left or reason
        self._changed.set()

    def _retry(self, item: WorkItem, cause: str) -> None:
        unit = item.unit_id
        failures = self._ledger.counted_failures(unit)
        lost = self._ledger.lost_workers(unit)
        wait = 0.0 if cause in ("worker_lost", "driver_lost") else _backoff(failures)
        again = msgspec.structs.replace(
            item,
            attempt=self._ledger.next_attempt(unit),
            alone=lost >= ALONE_AFTER,
            fatal_commands=self._ledger.fatal_commands(unit),
            enqueued_at=time.time() + wait,
        )
        due = time.monotonic() + wait
        heapq.heappush(self._retries, (due, next(self._order), again))

    def _due_retry(self) -> WorkItem | None:
        if self._retries and self._retries[0][0] <= time.monotonic():
            return heapq.heappop(self._retries)[2]
        return None

    async def _wait(self) -> None:
        """Until something changes or the next retry is due."""
        self._changed.clear()
        due = self._retries[0][0] - time.monotonic() if self._retries else None
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due)):
                await self._changed.wait()
        except TimeoutError:
            pass


def _again(cause: str | None) -> bool:
    """Whether this run tries the unit again: what the operator ended waits for the next start."""
    return cause is not None and CAUSES[cause].retry and CAUSES[cause].owner != "operator"


def _backoff(failures: int) -> float:
    ceiling = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** max(0, failures - 1))
    return ceiling * random.uniform(0.5, 1.0)
