"""A worker in the driver's own process: `--workers 0`, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from batch_runner.hosts import Hosts
from batch_runner.open_files import make_room
from batch_runner.wire import Reply, WorkerSpec
from batch_runner.worker import Worker, open_worker
from hermes_rl.errors import HermesError, cause_of
from hermes_rl.models.rate.coordinator import Coordinator
from hermes_rl.ports import WorkItem

_POLL_S = 5.0


@dataclass
class LocalWorker:
    """The driver's end of a worker in its own process: it lives and dies with the driver."""

    worker: Worker
    stack: AsyncExitStack

    @property
    def writer(self) -> str:
        """Its name in the journal."""
        return self.worker.spec.writer

    async def send(self, item: WorkItem) -> None:
        """Start an attempt."""
        self.worker.submit(item)

    async def poll(self) -> Reply:
        """What happened since the last poll."""
        return await self.worker.poll(_POLL_S)

    async def close(self) -> Reply:
        """Publish and end."""
        reply = Reply()
        try:
            await self.worker.publish()
        except HermesError as error:
            reply = Reply(fault=str(error), cause=cause_of(error))
        await self.stack.aclose()
        return reply

    async def kill(self) -> None:
        """Cancel its rollouts and let its journal go; nothing is published."""
        await self.stack.aclose()


@dataclass(frozen=True)
class LocalFactory:
    """Starts the one worker of this process."""

    spec: WorkerSpec
    coordinator: Coordinator
    """Of the run's rates and budgets."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """API keys by variable."""
    hosts: Hosts | None = None
    """Environments of this process, where more is done with them."""

    def writer(self, worker: int) -> str:
        """The name of a worker in the journal."""
        return msgspec.structs.replace(self.spec, worker=worker).writer

    async def start(self, worker: int, capacity: int) -> LocalWorker:
        """Raises: HermesError when the model, the key, the sandbox or room cannot be had."""
        make_room(capacity)
        spec = msgspec.structs.replace(self.spec, worker=worker, capacity=capacity)
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(
                open_worker(spec, self.coordinator, self.keys, self.hosts)
            )
            return LocalWorker(opened, stack.pop_all())
