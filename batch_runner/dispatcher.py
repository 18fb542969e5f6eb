"""Gives a source's attempts to workers and brings their receipts back.

Invariants: an attempt is journalled before it is sent; a worker never holds more than its capacity;
an attempt that was sent comes back as exactly one receipt, from its worker or, when that died, from
the recovery of its journal; a dead worker is fenced before its units are handed out again; a worker
that is lost, or cannot be started, costs no other worker its rollouts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batch_runner.plan import RunSource
from batch_runner.worker import Reply, writer_name
from hermes_rl.errors import DiskFull, HermesError, StoreError
from hermes_rl.ports import WorkItem
from hermes_rl.store import Driver, NotFenced


class WorkerLost(Exception):
    """The worker died, or was not heard for the lease."""


class WorkerHandle(Protocol):
    """The driver's end of one worker."""

    writer: str
    """Its name in the journal."""

    async def send(self, item: WorkItem) -> None:
        """Send it an attempt. Raises: WorkerLost."""

    async def poll(self) -> Reply:
        """Return what happened since the last poll; waits a few seconds at most. Raises:
        WorkerLost."""

    async def close(self) -> Reply:
        """Publish and end; nothing is in flight. Raises: WorkerLost."""

    async def kill(self) -> None:
        """End it at once; what it had in flight is left to recovery."""


StartWorker = Callable[[int, int], Awaitable[WorkerHandle]]
"""Starts worker number N with a capacity; nothing of it runs on when this raises or is cancelled.
Raises: HermesError when it cannot be started."""


class Listener(Protocol):
    """Receives what belongs to no receipt."""

    def heard(self, requests: int, throttled: int) -> None:
        """Model requests since the last time, and how many of them were refused with 429."""

    def lost(self, writer: str, why: str) -> None:
        """A worker died; its attempts come again."""

    def note(self, text: str) -> None:
        """One line for people."""

    def fault(self, cause: str, text: str) -> None:
        """A worker, or the driver's own journal, has stopped for good."""


class Pulse:
    """Notices that this process did not run for a while: it was stopped, or its loop was blocked.
    Its workers ended by themselves then, whatever they were running."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last = _now()
        self._pause, self._until = 0.0, self._last

    async def beat(self) -> None:
        """Look at the clock again and again."""
        while True:
            self._look()
            await asyncio.sleep(self._lease_s / 12)

    def pause(self) -> float:
        """Seconds of the last pause that may have cost workers their lease; 0 for none."""
        self._look()
        return self._pause if _now() - self._until < 2 * self._lease_s else 0.0

    def _look(self) -> None:
        now = _now()
        if now - self._last > self._lease_s / 2:
            self._pause, self._until = now - self._last, now
        self._last = now


def _now() -> float:
    """A clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


RESTART_PAUSE_S = 1.0
"""A worker that died with nothing in flight is replaced after this pause."""

START_PAUSE_S = 0.5
START_PAUSE_MAX_S = 60.0
"""A worker that could not be started is tried again after the first pause, doubling to the second.
"""
START_TRIES = 3
"""After so many failed starts in a row a slot no longer keeps the run waiting."""

ALONE_SLOTS = 2
"""Workers, beside the others, for units that run alone; further such units wait."""


@dataclass(frozen=True)
class Fleet:
    """How many workers, and of what size."""

    workers: int
    concurrency: int
    """Rollouts in flight over all of them."""
    first: int = 1
    """Number of the first worker: 0 is the driver's own process."""
    lease_s: float = 30.0
    """How long a worker lives without hearing from its driver."""

    def capacity(self, slot: int) -> int:
        """Rollouts in flight in one worker."""
        share, more = divmod(self.concurrency, self.workers)
        return max(1, share + (slot < more))


@dataclass(eq=False)
class _Slot:
    capacity: int
    handle: WorkerHandle | None = None
    in_flight: dict[str, WorkItem] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker is to end once nothing is in flight."""
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
        listener: told of requests and of faults, beside the source.
    """

    def __init__(
        self, start: StartWorker, driver: Driver, fleet: Fleet, listener: Listener
    ) -> None:
        self._start_worker = start
        self._driver = driver
        self._fleet = fleet
        self._listener = listener
        self._slots = [_Slot(fleet.capacity(i)) for i in range(fleet.workers)]
        self._alone_slots: list[_Slot] = []
        self._alone: deque[WorkItem] = deque()
        """Attempts that wait for a worker of their own."""
        self._numbers = itertools.count(fleet.first)
        self._pulse = Pulse(fleet.lease_s)
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        """Nothing more is handed out: the source is done, or something is broken."""
        self._worked = False
        """A worker was started."""

    async def run(self, source: RunSource) -> None:
        """Return when the source is done and all workers have published and ended.

        When this is cancelled the workers are killed and recovered: nothing finished is lost.
        Raises: HermesError when not one worker can be started.
        """
        watchers = [
            asyncio.create_task(self._pulse.beat()),
            asyncio.create_task(self._end_with(source)),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._serve(slot, source))
                for _ in range(ALONE_SLOTS if self._fleet.first else 0):
                    group.create_task(self._serve_alone(source))
                await self._feed(source)
                self._end()
                await self._until(lambda: not any(s.in_flight for s in self._all_slots()))
                for slot in self._slots:
                    slot.closing.set()
        except BaseExceptionGroup as errors:
            await self._kill_all()
            raise _first(errors) from None
        except asyncio.CancelledError:
            for writer in await self._kill_all():
                await self._recover(writer, "interrupted", source)
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def _feed(self, source: RunSource) -> None:
        """Hand out attempts, each to the worker with the most room, until there are no more."""
        # The first worker that is up must not take all of a small dataset.
        await self._until_fed(lambda: all(s.handle or s.failures for s in self._slots))
        while True:
            await self._until_fed(lambda: self._roomiest().free > 0)
            if self._ending.is_set() or (item := await source.next()) is None:
                return
            if item.alone and self._fleet.first:
                self._alone.append(item)
                self._changed.set()
                continue
            await self._until_fed(lambda: self._roomiest().free > 0)
            if self._ending.is_set():
                return
            await self._send(self._roomiest(), item)

    def _roomiest(self) -> _Slot:
        return max(self._slots, key=lambda slot: slot.free)

    def _all_slots(self) -> list[_Slot]:
        return [*self._slots, *self._alone_slots]

    async def _send(self, slot: _Slot, item: WorkItem) -> None:
        assert slot.handle is not None
        slot.in_flight[item.unit_id] = item
        try:
            self._driver.dispatch(item, slot.handle.writer)
            await slot.handle.send(item)
        except DiskFull as error:
            slot.in_flight.pop(item.unit_id)
            self._stop("disk", str(error))
        except WorkerLost:
            pass  # the poll of this worker meets it too, and recovers the attempt

    async def _serve(self, slot: _Slot, source: RunSource) -> None:
        """Keep one worker alive until nothing more is handed out."""
        while not self._ending.is_set():
            if await self._start(slot, source):
                await self._live(slot, source)
            else:
                await self._pause(slot.pause_s)

    async def _serve_alone(self, source: RunSource) -> None:
        """Run attempts of units under which workers died, one after the other."""
        while True:
            await self._until_fed(lambda: bool(self._alone))
            if self._ending.is_set():
                return
            item = self._alone.popleft()
            slot = _Slot(capacity=1, in_flight={item.unit_id: item})
            slot.closing.set()
            self._alone_slots.append(slot)
            await self._run_alone(slot, source, item)
            self._alone_slots.remove(slot)
            self._changed.set()

    async def _run_alone(self, slot: _Slot, source: RunSource, item: WorkItem) -> None:
        """Run one attempt in a fresh worker."""
        while not self._ending.is_set():
            if await self._start(slot, source):
                await self._send(slot, item)
                await self._live(slot, source)
                return
            if slot.failures == START_TRIES:
                why = f"no worker of its own could be started for a unit ({slot.refusal})"
                await source.leave(item.unit_id, why)
                return
            await self._pause(slot.pause_s)

    async def _start(self, slot: _Slot, source: RunSource) -> bool:
        """Try to start a slot's worker; False when that failed, or nothing more is handed out.

        Raises: HermesError when not one worker could be started.
        """
        number = next(self._numbers)
        writer = writer_name(self._driver.epoch, number)
        try:
            slot.handle = await self._start_in_time(slot, number)
        except HermesError as error:
            slot.failures, slot.refusal = slot.failures + 1, str(error)
            self._judge_failure(slot, writer, error)
        if slot.handle is None:
            await self._recover(writer, "worker_lost", source)
        else:
            slot.failures, self._worked = 0, True
        self._changed.set()
        return slot.handle is not None

    async def _start_in_time(self, slot: _Slot, number: int) -> WorkerHandle | None:
        """Start a worker; None when nothing more is handed out before it is up."""
        try:
            async with asyncio.timeout(None) as slot.starting:
                return await self._start_worker(number, slot.capacity)
        except TimeoutError:
            if not self._ending.is_set():
                raise
            return None
        finally:
            slot.starting = None

    def _judge_failure(self, slot: _Slot, writer: str, error: HermesError) -> None:
        """What a failed start means: fewer workers for a while, or the end of the run.

        Raises: the error, when no other worker was ever there.
        """
        tries = START_TRIES if self._worked else 1
        others = sum(s.handle is not None for s in self._all_slots())
        if others or any(s.failures < tries for s in self._slots):
            self._listener.note(
                f"worker {writer} could not be started ({error}); {others} still running, "
                f"next try in {slot.pause_s:g} s"
            )
        elif self._worked:
            self._stop("worker_lost", f"no worker is left, and none can be started ({error})")
        else:
            raise error

    async def _live(self, slot: _Slot, source: RunSource) -> None:
        """The life of one worker, from its first poll to its end or loss."""
        assert slot.handle is not None
        handle = slot.handle
        try:
            if await self._listen(slot, handle, source):
                self._note_reply(await handle.close())
            else:
                slot.in_flight.clear()  # its disk is full: the next start recovers them
                await handle.kill()
            slot.handle = None  # not before: a cancelled close leaves a worker to kill
        except WorkerLost as error:
            away = self._pulse.pause()
            why = f"this process did not run for {away:.0f} s" if away else str(error)
            self._listener.lost(handle.writer, why)
            slot.handle = None
            await handle.kill()
            # A worker that ended because this process was away died of nothing that it ran.
            cause = "driver_lost" if away else "worker_lost"
            await self._recover(handle.writer, cause, source, tuple(slot.in_flight))
            pause_s = 0.0 if slot.in_flight else RESTART_PAUSE_S
            slot.in_flight.clear()
            await self._pause(pause_s)
        self._changed.set()

    async def _listen(self, slot: _Slot, handle: WorkerHandle, source: RunSource) -> bool:
        """Bring receipts until the worker is to close and has nothing in flight; False after a
        fault. Raises: WorkerLost."""
        while slot.in_flight or not slot.closing.is_set():
            reply = await _unless(handle.poll(), slot.closing, slot.in_flight)
            if reply is None:
                break
            for receipt in reply.receipts:
                if slot.in_flight.pop(receipt.unit_id, None) is not None:
                    await source.receive(receipt)
            self._note_reply(reply)
            if reply.fault is not None:
                return False
            self._changed.set()
        return True

    def _note_reply(self, reply: Reply) -> None:
        self._listener.heard(reply.requests, reply.throttled)
        if reply.fault is not None:
            self._stop(reply.cause or "harness", reply.fault)

    def _stop(self, cause: str, text: str) -> None:
        self._listener.fault(cause, text)
        self._end()

    def _end(self) -> None:
        """Hand out nothing more, and start no worker."""
        self._ending.set()
        for slot in self._all_slots():
            if slot.starting is not None:
                slot.starting.reschedule(0.0)
        self._changed.set()

    async def _end_with(self, source: RunSource) -> None:
        """A run that is stopped waits for no worker that is still to be started."""
        await source.stopped()
        self._end()

    async def _recover(
        self, writer: str, cause: str, source: RunSource, units: Sequence[str] = ()
    ) -> None:
        """Take over from a worker that is gone.

        Args:
            units: what it had in flight.
        """
        try:
            receipts = await self._driver.recover_worker(writer, cause)
        except NotFenced as error:
            self._listener.note(f"{error}. {len(units)} units wait for the next start")
            for unit_id in units:
                await source.leave(unit_id, str(error))
        except DiskFull as error:
            self._stop("disk", str(error))
        except StoreError as error:
            self._stop("journal", str(error))
        else:
            for receipt in receipts:
                await source.receive(receipt)

    async def _kill_all(self) -> list[str]:
        """End all workers at once; returns their names."""
        handles = [slot.handle for slot in self._all_slots() if slot.handle is not None]
        await asyncio.gather(*(handle.kill() for handle in handles))
        return [handle.writer for handle in handles]

    async def _pause(self, seconds: float) -> None:
        """Wait, but not when nothing more is handed out."""
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            pass

    async def _until_fed(self, holds: Callable[[], bool]) -> None:
        """Until a condition holds, or nothing more is handed out."""
        await self._until(lambda: self._ending.is_set() or holds())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


async def _unless(
    poll: Coroutine[Any, Any, Reply], closing: asyncio.Event, in_flight: dict[str, WorkItem]
) -> Reply | None:
    """A poll's reply; None when the worker is to close and nothing is in flight any more."""
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


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of groups."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
