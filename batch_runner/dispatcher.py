"""The executor: gives a source's attempts to workers and brings their receipts back.

Invariants: an attempt is journalled before it is sent; a worker never holds more than its capacity;
an attempt that was sent comes back as exactly one receipt, from its worker or, when that died, from
the recovery of its journal; a dead worker is fenced before its units are handed out again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from batch_runner.wire import Reply
from hermes_rl.errors import DiskFull, HermesError
from hermes_rl.ports import Receipt, WorkItem, WorkSource

RESTART_PAUSE_S = 1.0
"""A worker that died with nothing in flight is replaced after this pause."""


class WorkerLost(Exception):
    """The worker died, or was not heard for the lease."""


class WorkerHandle(Protocol):
    """The driver's end of one worker."""

    @property
    def writer(self) -> str:
        """Its name in the journal."""
        ...

    async def send(self, item: WorkItem) -> None:
        """Give it an attempt. Raises: WorkerLost."""
        ...

    async def poll(self) -> Reply:
        """What happened since the last poll; waits a few seconds at most. Raises: WorkerLost."""
        ...

    async def close(self) -> Reply:
        """Publish and end; nothing is in flight. Raises: WorkerLost."""
        ...

    async def kill(self) -> None:
        """End it at once; what it had in flight is left to recovery."""
        ...


class WorkerFactory(Protocol):
    """Starts workers."""

    async def start(self, worker: int, capacity: int) -> WorkerHandle:
        """Start worker number `worker`. Raises: HermesError when it cannot be started."""
        ...


class RunJournal(Protocol):
    """What the dispatcher needs of the run's journal."""

    def dispatch(self, item: WorkItem, writer: str) -> None:
        """Note an attempt before it is sent. Raises: DiskFull."""
        ...

    async def recover(self, writer: str, cause: str) -> list[Receipt]:
        """Fence a dead worker; receipts of those of its attempts that had none yet.

        Raises: DiskFull, StoreError.
        """
        ...


class Listener(Protocol):
    """Told what is nobody's receipt."""

    def heard(self, requests: int, throttled: int) -> None:
        """Model requests since the last time, and how many of them were refused with 429."""
        ...

    def lost(self, writer: str, why: str) -> None:
        """A worker died; its attempts come again."""
        ...

    def fault(self, cause: str, text: str) -> None:
        """A worker, or the driver's own journal, can go on no longer."""
        ...


@dataclass(frozen=True)
class Fleet:
    """How many workers, and of what size."""

    workers: int
    concurrency: int
    """Rollouts in flight over all of them."""
    first: int = 1
    """Number of the first worker: 0 is the driver's own process."""

    def capacity(self, slot: int) -> int:
        """Rollouts in flight in one worker."""
        share, more = divmod(self.concurrency, self.workers)
        return max(1, share + (slot < more))


@dataclass
class _Slot:
    capacity: int
    handle: WorkerHandle | None = None
    in_flight: dict[str, WorkItem] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def free(self) -> int:
        if self.handle is None or self.closing.is_set():
            return 0
        return self.capacity - len(self.in_flight)


class Dispatcher:
    """Runs a source's work on workers. See the module's invariants.

    Args:
        listener: told of requests and of faults, beside the source.
    """

    def __init__(
        self, factory: WorkerFactory, journal: RunJournal, fleet: Fleet, listener: Listener
    ) -> None:
        self._factory = factory
        self._journal = journal
        self._fleet = fleet
        self._listener = listener
        self._slots = [_Slot(fleet.capacity(i)) for i in range(fleet.workers)]
        self._numbers = itertools.count(fleet.first)
        self._changed = asyncio.Event()
        self._faulty = False
        self._draining = False

    async def run(self, source: WorkSource) -> None:
        """Return when the source is done and all workers have published and ended.

        When this is cancelled the workers are killed and recovered: nothing finished is lost.
        Raises: HermesError when a worker cannot be started or recovered.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for slot in list(self._slots):
                    group.create_task(self._serve(slot, source))
                broken = await self._feed(source, group)
                self._draining = True
                await self._until(lambda: not any(s.in_flight for s in self._slots))
                for slot in self._slots:
                    slot.closing.set()
            if broken is not None:
                raise broken
        except BaseExceptionGroup as errors:
            await self._kill_all()
            raise _first(errors) from None
        except asyncio.CancelledError:
            for writer in await self._kill_all():
                await self._recover(writer, "interrupted", source)
            raise

    async def _feed(self, source: WorkSource, group: asyncio.TaskGroup) -> HermesError | None:
        """Hand out attempts, each to the worker with the most room, until there are no more.

        Returns the error of a source that broke (a damaged dataset): what runs is to end first.
        """
        # The first worker to stand must not take all of a small dataset.
        await self._until(lambda: self._faulty or all(s.handle is not None for s in self._slots))
        while True:
            await self._until(lambda: self._faulty or self._roomiest().free > 0)
            if self._faulty:
                return None
            try:
                item = await source.next()
            except HermesError as error:
                return error
            if item is None:
                return None
            if item.alone and self._fleet.first > 0:
                slot = _Slot(capacity=1)
                slot.in_flight[item.unit_id] = item
                self._slots.append(slot)
                group.create_task(self._serve_alone(slot, source, item))
                continue
            await self._until(lambda: self._faulty or self._roomiest().free > 0)
            if self._faulty:
                return None
            await self._send(self._roomiest(), item)

    def _roomiest(self) -> _Slot:
        return max(self._slots, key=lambda slot: slot.free)

    async def _send(self, slot: _Slot, item: WorkItem) -> None:
        assert slot.handle is not None
        slot.in_flight[item.unit_id] = item
        try:
            self._journal.dispatch(item, slot.handle.writer)
            await slot.handle.send(item)
        except DiskFull as error:
            slot.in_flight.pop(item.unit_id)
            self._stop("disk", str(error))
        except WorkerLost:
            pass  # the poll of this worker meets it too, and recovers the attempt

    async def _serve(self, slot: _Slot, source: WorkSource) -> None:
        """Keep one worker alive until it is to close."""
        while not (slot.closing.is_set() or self._draining or self._faulty):
            number = next(self._numbers)
            slot.handle = await self._factory.start(number, slot.capacity)
            self._changed.set()
            await self._live(slot, source)

    async def _serve_alone(self, slot: _Slot, source: WorkSource, item: WorkItem) -> None:
        """A fresh worker for one attempt under which earlier workers died."""
        slot.handle = await self._factory.start(next(self._numbers), slot.capacity)
        slot.closing.set()
        await self._send(slot, item)
        await self._live(slot, source)
        self._slots.remove(slot)

    async def _live(self, slot: _Slot, source: WorkSource) -> None:
        """The life of one worker, from its first poll to its end or loss."""
        assert slot.handle is not None
        handle = slot.handle
        try:
            sound = await self._listen(slot, handle, source)
            if sound:
                self._heed(await handle.close())
            else:
                slot.in_flight.clear()  # its disk is full: the next start recovers them
                await handle.kill()
            slot.handle = None  # not before: a cancelled close leaves a worker to kill
        except WorkerLost as error:
            self._listener.lost(handle.writer, str(error))
            slot.handle = None
            idle = not slot.in_flight
            await handle.kill()
            await self._recover(handle.writer, "worker_lost", source)
            slot.in_flight.clear()
            await asyncio.sleep(RESTART_PAUSE_S if idle else 0.0)
        self._changed.set()

    async def _listen(self, slot: _Slot, handle: WorkerHandle, source: WorkSource) -> bool:
        """Bring receipts until the worker is to close and has nothing in flight; False after a
        fault. Raises: WorkerLost."""
        while not slot.closing.is_set() or slot.in_flight:
            reply = await _unless(handle.poll(), slot.closing, slot.in_flight)
            if reply is None:
                break
            for receipt in reply.receipts:
                if slot.in_flight.pop(receipt.unit_id, None) is not None:
                    await source.receive(receipt)
            self._heed(reply)
            if reply.fault is not None:
                return False
            self._changed.set()
        return True

    def _heed(self, reply: Reply) -> None:
        self._listener.heard(reply.requests, reply.throttled)
        if reply.fault is not None:
            self._stop(reply.cause or "harness", reply.fault)

    def _stop(self, cause: str, text: str) -> None:
        self._faulty = True
        self._listener.fault(cause, text)
        self._changed.set()

    async def _recover(self, writer: str, cause: str, source: WorkSource) -> None:
        try:
            receipts = await self._journal.recover(writer, cause)
        except DiskFull as error:
            self._stop("disk", str(error))
            return
        for receipt in receipts:
            await source.receive(receipt)

    async def _kill_all(self) -> list[str]:
        """End all workers at once; returns their names."""
        handles = [slot.handle for slot in self._slots if slot.handle is not None]
        await asyncio.gather(*(handle.kill() for handle in handles))
        return [handle.writer for handle in handles]

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
