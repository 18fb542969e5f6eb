"""Sends the attempts of a source to workers and returns their receipts.

Invariants: an attempt is journaled before it is sent; a worker never holds more than its capacity;
each attempt that was sent gets exactly one receipt, from its worker or, when that died, from the
recovery of its journal; a dead worker is fenced before its units are sent again; a worker that is
lost, or cannot be started, does not affect the rollouts of others.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batch_runner.plan import RunSource
from batch_runner.worker import Reply, writer_name
from hermes_rl.errors import DiskFull, HermesError, StoreError
from hermes_rl.ports import WorkItem
from hermes_rl.store import Driver, NotFenced
from hermes_rl.text import many


class WorkerLost(Exception):
    """The worker died, or did not answer within the lease."""


class WorkerHandle(Protocol):
    """The driver's end of one worker."""

    writer: str
    """Its name in the journal."""

    async def send(self, item: WorkItem) -> None:
        """Send it an attempt. Raises: WorkerLost."""

    async def interrupt(self, units: list[str]) -> None:
        """End the attempts at these units; their rows have the cause `interrupted`."""

    async def poll(self) -> Reply:
        """Return what happened since the last poll; waits a few seconds at most. Raises:
        WorkerLost."""

    async def close(self) -> Reply:
        """Publish and end; nothing is in flight. Raises: WorkerLost."""

    async def kill(self) -> None:
        """End it at once; what it had in flight is left to recovery."""


StartWorker = Callable[[int, int], Awaitable[WorkerHandle]]
"""Starts worker number N with a capacity; leaves no process when it raises or is cancelled.
Raises: HermesError when the worker cannot be started."""


class Listener(Protocol):
    """Receives events that belong to no receipt."""

    def count_requests(self, requests: int, throttled: int) -> None:
        """Count model requests since the last call, and those that were refused with 429."""

    def report_lost_worker(self, writer: str, why: str) -> None:
        """A worker died; its attempts are sent again."""

    def note(self, text: str) -> None:
        """Show one line."""

    def report_fault(self, cause: str, text: str) -> None:
        """A worker, or the journal of the driver, cannot continue."""


class SuspensionDetector:
    """Detects that this process did not run for a while, because it was suspended or its loop was
    blocked. Its workers then ended when their lease expired."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last = _now()
        self._pause, self._ended = 0.0, self._last

    async def watch(self) -> None:
        """Compare the clock at regular intervals."""
        while True:
            self._look()
            await asyncio.sleep(self._lease_s / 12)

    def pause_since_s(self, moment: float) -> float:
        """Return the seconds of the last suspension that ended after a moment; 0 for none."""
        self._look()
        return self._pause if self._ended > moment else 0.0

    def _look(self) -> None:
        now = _now()
        if now - self._last > self._lease_s / 2:
            self._pause, self._ended = now - self._last, now
        self._last = now


def _now() -> float:
    """A clock that includes time in which the machine sleeps, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


RESTART_PAUSE_S = 1.0
"""A worker that died with nothing in flight is replaced after this pause."""

START_PAUSE_S = 0.5
START_PAUSE_MAX_S = 60.0
"""A worker that could not be started is tried again after the first pause, doubling to the second.
"""
START_TRIES = 3
"""After this many failed starts in a row the run no longer waits for a slot."""

ISOLATED_SLOTS = 2
"""Additional workers for units that run alone; further such units wait."""


@dataclass(frozen=True)
class Fleet:
    """The number and capacity of workers."""

    workers: int
    concurrency: int
    """Rollouts in flight over all of them."""
    first: int = 1
    """Number of the first worker: 0 is the driver's own process."""
    lease_s: float = 30.0
    """How long a worker runs without a message from its driver."""

    def capacity(self, slot: int) -> int:
        """Rollouts in flight in one worker."""
        share, more = divmod(self.concurrency, self.workers)
        return max(1, share + (slot < more))


@dataclass(eq=False)
class _Slot:
    capacity: int
    handle: WorkerHandle | None = None
    polled: float = 0.0
    """When the last poll began that the worker answered, or its start ended: it lived then."""
    in_flight: dict[str, WorkItem] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker shall end once nothing is in flight."""
    starting: asyncio.Timeout | None = None
    """Ends a start that is no longer needed."""
    failures: int = 0
    """Starts that failed in a row."""
    refusal: str = ""
    """Why the last of them failed."""

    @property
    def free(self) -> int:
        if self.handle is None or self.closing.is_set():
            return 0
        return self.capacity - len(self.in_flight)

    @property
    def pause_s(self) -> float:
        """Seconds before the next start, after one that failed."""
        return min(START_PAUSE_MAX_S, START_PAUSE_S * 2.0 ** (self.failures - 1))


class Dispatcher:
    """Runs a source's work on workers. See the module's invariants.

    Args:
        listener: receives requests and faults.
    """

    def __init__(
        self, start: StartWorker, driver: Driver, fleet: Fleet, listener: Listener
    ) -> None:
        self._start_worker = start
        self._driver = driver
        self._fleet = fleet
        self._listener = listener
        self._slots = [_Slot(fleet.capacity(i)) for i in range(fleet.workers)]
        self._by_free = [*self._slots]
        """The same by free capacity, ascending."""
        self._isolated_slots: list[_Slot] = []
        self._isolated: deque[WorkItem] = deque()
        """Attempts that wait for their own worker."""
        self._numbers = itertools.count(fleet.first)
        self._suspensions = SuspensionDetector(fleet.lease_s)
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        """Set when no more attempts are sent: the source is done, or a fault occurred."""
        self._any_started = False
        """Whether any worker was started."""

    async def run(self, source: RunSource) -> None:
        """Return when the source is done and all workers have published and ended.

        When this is cancelled the workers are killed and recovered: nothing finished is lost.
        Raises: HermesError when not one worker can be started.
        """
        watchers = [
            asyncio.create_task(self._suspensions.watch()),
            asyncio.create_task(self._end_when_stopped(source)),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._serve(slot, source))
                for _ in range(ISOLATED_SLOTS if self._fleet.first else 0):
                    group.create_task(self._serve_isolated(source))
                await self._feed(source)
                self._end()
                await self._wait_until(lambda: not any(s.in_flight for s in self._all_slots()))
                for slot in self._slots:
                    slot.closing.set()
        except BaseExceptionGroup as errors:
            await self._kill_all()
            raise _first_error(errors) from None
        except asyncio.CancelledError:
            for writer in await self._kill_all():
                await self._recover(writer, "interrupted", source)
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def _feed(self, source: RunSource) -> None:
        """Send attempts, each to the worker with the most free capacity, until there are no
        more."""
        # The first worker to start must not get all units of a small dataset.
        await self._wait_unless_ending(lambda: all(s.handle or s.failures for s in self._slots))
        while True:
            await self._wait_unless_ending(lambda: self._least_loaded().free > 0)
            if self._ending.is_set() or (item := await source.next()) is None:
                return
            if item.isolated and self._fleet.first:
                self._isolated.append(item)
                self._changed.set()
                continue
            await self._wait_unless_ending(lambda: self._least_loaded().free > 0)
            if self._ending.is_set():
                return
            await self._send(self._least_loaded(), item)

    async def interrupt(self, units: Collection[str]) -> None:
        """End the running attempts at these units."""
        for slot in self._all_slots():
            running = [unit for unit in units if unit in slot.in_flight]
            if running and slot.handle is not None:
                await slot.handle.interrupt(running)

    def _least_loaded(self) -> _Slot:
        return self._by_free[-1]

    def _note_free(self, slot: _Slot) -> None:
        """Move a slot in the list: its free capacity has changed."""
        if not slot.closing.is_set():
            self._by_free.remove(slot)
            insort(self._by_free, slot, key=lambda other: other.free)
        self._changed.set()

    def _all_slots(self) -> list[_Slot]:
        return [*self._slots, *self._isolated_slots]

    async def _send(self, slot: _Slot, item: WorkItem) -> None:
        assert slot.handle is not None
        slot.in_flight[item.unit_id] = item
        self._note_free(slot)
        try:
            self._driver.dispatch(item, slot.handle.writer)
            await slot.handle.send(item)
        except DiskFull as error:
            slot.in_flight.pop(item.unit_id)
            self._stop("disk", str(error))
        except WorkerLost:
            pass  # the next poll of this worker raises, too, and recovers the attempt

    async def _serve(self, slot: _Slot, source: RunSource) -> None:
        """Keep one worker running until no more attempts are sent."""
        while not self._ending.is_set():
            if await self._start(slot, source):
                await self._run_worker(slot, source)
            else:
                await self._pause(slot.pause_s)

    async def _serve_isolated(self, source: RunSource) -> None:
        """Run attempts of units under which workers died, each in its own worker."""
        while True:
            await self._wait_unless_ending(lambda: bool(self._isolated))
            if self._ending.is_set():
                return
            item = self._isolated.popleft()
            slot = _Slot(capacity=1, in_flight={item.unit_id: item})
            slot.closing.set()
            self._isolated_slots.append(slot)
            await self._run_isolated(slot, source, item)
            self._isolated_slots.remove(slot)
            self._changed.set()

    async def _run_isolated(self, slot: _Slot, source: RunSource, item: WorkItem) -> None:
        """Run one attempt in a fresh worker."""
        while not self._ending.is_set():
            if await self._start(slot, source):
                await self._send(slot, item)
                await self._run_worker(slot, source)
                return
            if slot.failures == START_TRIES:
                why = f"no worker of its own could be started for a unit ({slot.refusal})"
                await source.leave_open(item.unit_id, why)
                return
            await self._pause(slot.pause_s)

    async def _start(self, slot: _Slot, source: RunSource) -> bool:
        """Try to start the worker of a slot. Returns False when that fails, or the run ends.

        Raises: HermesError when not one worker could be started.
        """
        number = next(self._numbers)
        writer = writer_name(self._driver.epoch, number)
        try:
            slot.handle = await self._start_in_time(slot, number)
        except HermesError as error:
            slot.failures, slot.refusal = slot.failures + 1, str(error)
            self._handle_failed_start(slot, writer, error)
        if slot.handle is None:
            await self._recover(writer, "worker_lost", source)
        else:
            slot.failures, self._any_started, slot.polled = 0, True, _now()
        self._note_free(slot)
        return slot.handle is not None

    async def _start_in_time(self, slot: _Slot, number: int) -> WorkerHandle | None:
        """Start a worker. Returns None when the run ends before the worker is ready."""
        try:
            async with asyncio.timeout(None) as slot.starting:
                return await self._start_worker(number, slot.capacity)
        except TimeoutError:
            if not self._ending.is_set():
                raise
            return None
        finally:
            slot.starting = None

    def _handle_failed_start(self, slot: _Slot, writer: str, error: HermesError) -> None:
        """Continue with fewer workers after a failed start, or stop the run.

        Raises: the error, when no worker was ever started.
        """
        tries = START_TRIES if self._any_started else 1
        others = sum(s.handle is not None for s in self._all_slots())
        if others or any(s.failures < tries for s in self._slots):
            self._listener.note(
                f"worker {writer} could not be started ({error}); {others} still running, "
                f"next try in {slot.pause_s:g} s"
            )
        elif self._any_started:
            self._stop("worker_lost", f"no worker is left, and none can be started ({error})")
        else:
            raise error

    async def _run_worker(self, slot: _Slot, source: RunSource) -> None:
        """Poll one worker until its end or loss."""
        assert slot.handle is not None
        handle = slot.handle
        try:
            if await self._receive_until_closed(slot, handle, source):
                self._note_reply(await handle.close())
            else:
                slot.in_flight.clear()  # after a fault the next start recovers them
                await handle.kill()
            slot.handle = None  # only now: after a cancelled close the worker must be killed
        except WorkerLost as error:
            suspended_s = self._suspensions.pause_since_s(slot.polled)
            why = f"this process did not run for {suspended_s:.0f} s" if suspended_s else str(error)
            self._listener.report_lost_worker(handle.writer, why)
            slot.handle = None
            self._note_free(slot)
            await handle.kill()
            # No unit is the cause when the worker ended because this process was suspended.
            cause = "driver_lost" if suspended_s else "worker_lost"
            await self._recover(handle.writer, cause, source, tuple(slot.in_flight))
            pause_s = 0.0 if slot.in_flight else RESTART_PAUSE_S
            slot.in_flight.clear()
            await self._pause(pause_s)
        self._changed.set()

    async def _receive_until_closed(
        self, slot: _Slot, handle: WorkerHandle, source: RunSource
    ) -> bool:
        """Pass on receipts until the worker shall close and has nothing in flight. Returns False
        after a fault. Raises: WorkerLost."""
        while slot.in_flight or not slot.closing.is_set():
            polled = _now()
            reply = await _poll_unless_closing(handle.poll(), slot.closing, slot.in_flight)
            if reply is None:
                break
            slot.polled = polled
            for receipt in reply.receipts:
                if slot.in_flight.pop(receipt.unit_id, None) is not None:
                    await source.receive(receipt)
            self._note_reply(reply)
            if reply.fault is not None:
                return False
            self._note_free(slot)
        return True

    def _note_reply(self, reply: Reply) -> None:
        self._listener.count_requests(reply.requests, reply.throttled)
        if reply.fault is not None:
            self._stop(reply.cause or "harness", reply.fault)

    def _stop(self, cause: str, text: str) -> None:
        self._listener.report_fault(cause, text)
        self._end()

    def _end(self) -> None:
        """Send no more attempts, and start no worker."""
        self._ending.set()
        for slot in self._all_slots():
            if slot.starting is not None:
                slot.starting.reschedule(0.0)
        self._changed.set()

    async def _end_when_stopped(self, source: RunSource) -> None:
        """Cancel worker starts when the run is stopped."""
        await source.stopped()
        self._end()

    async def _recover(
        self, writer: str, cause: str, source: RunSource, units: Sequence[str] = ()
    ) -> None:
        """Recover the journal of a worker that ended.

        Args:
            units: the units that it had in flight.
        """
        try:
            receipts = await self._driver.recover_worker(writer, cause)
        except NotFenced as error:
            self._listener.note(f"{error}. Left for the next start: {many(len(units), 'unit')}")
            for unit_id in units:
                await source.leave_open(unit_id, str(error))
        except DiskFull as error:
            self._stop("disk", str(error))
        except StoreError as error:
            self._stop("journal", str(error))
        else:
            for receipt in receipts:
                await source.receive(receipt)

    async def _kill_all(self) -> list[str]:
        """Kill all workers. Returns their names."""
        handles = [slot.handle for slot in self._all_slots() if slot.handle is not None]
        await asyncio.gather(*(handle.kill() for handle in handles))
        return [handle.writer for handle in handles]

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until the run ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            pass

    async def _wait_unless_ending(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition condition, or the run ends."""
        await self._wait_until(lambda: self._ending.is_set() or condition())

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


async def _poll_unless_closing(
    poll: Coroutine[Any, Any, Reply], closing: asyncio.Event, in_flight: dict[str, WorkItem]
) -> Reply | None:
    """Return the reply of a poll; None when the worker shall close and has nothing in flight."""
    polling = asyncio.ensure_future(poll)
    watching = asyncio.ensure_future(closing.wait())
    try:
        if in_flight and closing.is_set():
            return await polling
        await asyncio.wait((polling, watching), return_when=asyncio.FIRST_COMPLETED)
        return await polling if polling.done() or in_flight else None
    finally:
        polling.cancel()
        watching.cancel()


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of groups."""
    inner = errors.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
