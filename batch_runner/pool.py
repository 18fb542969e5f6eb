"""Workers on Ray: a cluster of this machine's own, one that is already there, or RAY_ADDRESS."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batch_runner.actor import Started, WorkerActor
from batch_runner.dispatcher import WorkerLost
from batch_runner.warden import Warden
from batch_runner.wire import Reply, WorkerSpec, decode_reply, encode_item, encode_spec
from hermes_rl.errors import UserError
from hermes_rl.ports import WorkItem

START_S = 120.0
"""A worker that does not stand after this time has no room in the cluster."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Receipts are small and items too: nothing of ours needs Ray's object store."""

WORKER_BYTES = 250 * 2**20
ROLLOUT_BYTES = 3 * 2**20
"""Memory that an actor declares: its own, and for each rollout in flight."""

NAMESPACE = "hermes_rl"
_HEAD = "node:__internal_head__"


@dataclass
class RayWorker:
    """The driver's end of one actor."""

    actor: Any
    spec: WorkerSpec

    @property
    def writer(self) -> str:
        """Its name in the journal."""
        return self.spec.writer

    async def send(self, item: WorkItem) -> None:
        """Give it an attempt. When the actor is dead the next poll says so."""
        self.actor.send.remote(encode_item(item))

    async def poll(self) -> Reply:
        """What happened since the last poll. Raises: WorkerLost."""
        lease = self.spec.lease_s
        try:
            async with asyncio.timeout(lease):
                return decode_reply(await self.actor.poll.remote(lease / 6))
        except TimeoutError:
            raise WorkerLost(f"not heard for {lease:g} s") from None
        except RayError as error:
            raise WorkerLost(_line(error)) from None

    async def close(self) -> Reply:
        """Publish and end. Raises: WorkerLost."""
        try:
            reply = decode_reply(await self.actor.close.remote())
        except RayError as error:
            raise WorkerLost(_line(error)) from None
        await self.kill()
        return reply

    async def kill(self) -> None:
        """End the actor's process at once."""
        ray.kill(self.actor, no_restart=True)


@dataclass(frozen=True)
class RayFactory:
    """Starts actors, spread over the nodes of the cluster."""

    spec: WorkerSpec
    workers: int
    warden: Warden | None
    """Ends the processes of this machine's own cluster when the driver is killed."""

    async def start(self, worker: int, capacity: int) -> RayWorker:
        """Raises: UserError when the cluster has no room, or the worker cannot do its work."""
        spec = msgspec.structs.replace(self.spec, worker=worker, capacity=capacity)
        actor = ray.remote(WorkerActor).options(
            num_cpus=0,
            memory=self._memory(capacity),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=_strategy(worker),
        )
        handle = RayWorker(actor.remote(), spec)
        try:
            async with asyncio.timeout(START_S):
                data = await handle.actor.start.remote(encode_spec(spec))
        except TimeoutError:
            await handle.kill()
            raise UserError(
                f"Ray did not start worker {worker} within {START_S:g} s: the cluster has no room. "
                "Give it a node, or use --workers 0"
            ) from None
        except RayError as error:
            raise UserError(f"worker {worker} could not be started: {_line(error)}") from None
        started = msgspec.msgpack.decode(data, type=Started)
        await self._check(handle, started)
        if self.warden is not None:
            self.warden.watch(started.pid)
        return handle

    async def _check(self, handle: RayWorker, started: Started) -> None:
        fault = started.fault
        alive = Path(self.spec.run_path) / "journal" / handle.writer / "alive"
        if fault is None and not alive.exists():
            fault = f"it writes to another {self.spec.run_path}: choose --out on shared storage"
        if fault is not None:
            await handle.kill()
            here = os.uname().nodename == started.host
            raise UserError(fault if here else f"worker on {started.host}: {fault}")

    def _memory(self, capacity: int) -> int:
        wanted = WORKER_BYTES + capacity * ROLLOUT_BYTES
        there = float(ray.cluster_resources().get("memory", wanted))
        return int(min(wanted, 0.8 * there / self.workers))


def _strategy(worker: int) -> Any:
    """Spread over the nodes; none on the head of a cluster that has others."""
    nodes = sorted(
        node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD not in node["Resources"]
    )
    if not nodes:
        return "DEFAULT"
    return NodeAffinitySchedulingStrategy(nodes[worker % len(nodes)], soft=False)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


@asynccontextmanager
async def open_pool(workers: int, spec: WorkerSpec) -> AsyncIterator[RayFactory]:
    """Connect to Ray for one run. A Ray that was there before is used and left as it is."""
    if ray.is_initialized():
        yield RayFactory(spec, workers, None)
        return
    local = not os.environ.get("RAY_ADDRESS")
    warden = Warden() if local else None
    try:
        connect(workers, local=local)
        if warden is not None:
            warden.watch_children()
        yield RayFactory(spec, workers, warden)
    finally:
        ray.shutdown()
        if warden is not None:
            warden.close()


def connect(workers: int, *, local: bool) -> None:
    """`ray.init`, quietly. Blocking, and for the main thread where there is a choice."""
    quiet: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if not local:
        ray.init(**quiet)
        return
    ray.init(
        num_cpus=max(1, workers),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **quiet,
    )
