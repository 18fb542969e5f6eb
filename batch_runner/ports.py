"""What the dispatcher needs of workers, of their factory and of its listener."""

from __future__ import annotations

from typing import Protocol

from batch_runner.wire import Reply
from hermes_rl.ports import WorkItem


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

    def writer(self, worker: int) -> str:
        """The name of a worker in the journal."""
        ...

    async def start(self, worker: int, capacity: int) -> WorkerHandle:
        """Start worker number `worker`; nothing of it runs on when this fails or is cancelled.

        Raises: HermesError when it cannot be started.
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

    def note(self, text: str) -> None:
        """One line that people should see."""
        ...

    def fault(self, cause: str, text: str) -> None:
        """A worker, or the driver's own journal, can go on no longer."""
        ...
