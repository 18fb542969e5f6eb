"""Workers on Ray: a cluster of this machine's own, one that is already there, or RAY_ADDRESS.

Ray is imported inside functions: importing it alone already changes the process's environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from batch_runner.actor import Started, WorkerActor
from batch_runner.ports import WorkerLost
from batch_runner.warden import Warden
from batch_runner.wire import NAMESPACE, Reply, WorkerSpec, decode_reply, encode_item, encode_spec
from hermes_rl.errors import UserError
from hermes_rl.models.rate.coordinator import Coordinator
from hermes_rl.models.rate.share import Grant, decode_report, encode
from hermes_rl.ports import WorkItem

_log = logging.getLogger(__name__)

START_S = 120.0
"""A worker that does not stand after this time has no room in the cluster."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Receipts are small and items too: nothing of ours needs Ray's object store."""

WORKER_BYTES = 250 * 2**20
ROLLOUT_BYTES = 3 * 2**20
"""Memory that an actor declares: its own, and for each rollout in flight."""

_HEAD = "node:__internal_head__"

KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""By default an actor that Ray ends kills its child processes first. For a moment it then sees its
sandboxes and verifiers die, and would record that as their end. The watchdog of the sandboxes ends
them once the actor is gone."""


@dataclass
class RayWorker:
    """The driver's end of one actor."""

    actor: Any
    spec: WorkerSpec
    coordinator: Coordinator
    _sharing: asyncio.Task[None] | None = None

    @property
    def writer(self) -> str:
        """Its name in the journal."""
        return self.spec.writer

    async def send(self, item: WorkItem) -> None:
        """Give it an attempt. When the actor is dead the next poll says so."""
        self.actor.send.remote(encode_item(item))

    async def poll(self) -> Reply:
        """What happened since the last poll. Raises: WorkerLost."""
        from ray.exceptions import RayError

        if self._sharing is not None and self._sharing.done() and not self._sharing.cancelled():
            self._sharing.result()  # raises: without grants the worker would wait for ever
        lease = self.spec.lease_s
        try:
            async with asyncio.timeout(lease):
                return decode_reply(await self.actor.poll.remote(lease / 6))
        except TimeoutError:
            self._stop_sharing()
            raise WorkerLost(f"not heard for {lease:g} s") from None
        except RayError as error:
            self._stop_sharing()
            raise WorkerLost(_line(error)) from None

    def share(self) -> None:
        """Carry its reports to the coordinator from now on, and grants back."""
        self._sharing = asyncio.create_task(self._share())

    async def _share(self) -> None:
        from ray.exceptions import RayError

        grant, leaving = Grant(), False
        while not leaving:
            try:
                report = decode_report(await self.actor.share.remote(encode(grant)))
            except RayError:  # the next poll says so
                return
            grant, leaving = self.coordinator.handle(report), report.leaving

    def _stop_sharing(self) -> None:
        """A report after its loss would give it slots that nobody returns."""
        if self._sharing is not None:
            self._sharing.cancel()

    async def close(self) -> Reply:
        """Publish and end, however long that takes, as long as the worker is heard meanwhile.

        Raises: WorkerLost.
        """
        from ray.exceptions import RayError

        closing = asyncio.ensure_future(self.actor.close.remote())
        closing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            while not (await asyncio.wait((closing,), timeout=self.spec.lease_s / 6))[0]:
                await self.poll()
            reply = decode_reply(closing.result())
        except RayError as error:
            raise WorkerLost(_line(error)) from None
        finally:
            closing.cancel()
        await self.kill()
        return reply

    async def kill(self) -> None:
        """End the actor's process at once."""
        import ray

        self._stop_sharing()
        ray.kill(self.actor, no_restart=True)


@dataclass(frozen=True)
class RayFactory:
    """Starts actors, spread over the nodes of the cluster."""

    spec: WorkerSpec
    workers: int
    coordinator: Coordinator
    """Of the run's rates and budgets."""
    warden: Warden | None
    """Ends the processes of this machine's own cluster when the driver is killed."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """API keys by variable: workers of a cluster do not have this process's environment."""

    def writer(self, worker: int) -> str:
        """The name of a worker in the journal."""
        return msgspec.structs.replace(self.spec, worker=worker).writer

    async def start(self, worker: int, capacity: int) -> RayWorker:
        """Raises: UserError when the cluster has no room, or the worker cannot do its work."""
        spec = msgspec.structs.replace(self.spec, worker=worker, capacity=capacity)
        handle = RayWorker(self._actor(worker, capacity), spec, self.coordinator)
        try:
            started = await self._open(handle)
            self._check(handle, started)
        except BaseException:
            await handle.kill()
            raise
        if self.warden is not None:
            self.warden.watch(started.pid)
        handle.share()
        return handle

    async def _open(self, handle: RayWorker) -> Started:
        from ray.exceptions import RayError

        worker = handle.spec.worker
        try:
            async with asyncio.timeout(START_S):
                opening = handle.actor.start.remote(encode_spec(handle.spec), dict(self.keys))
                return msgspec.msgpack.decode(await opening, type=Started)
        except TimeoutError:
            raise UserError(
                f"Ray did not start worker {worker} within {START_S:g} s: the cluster has no room. "
                "Give it a node, or use --workers 0"
            ) from None
        except RayError as error:
            raise UserError(f"worker {worker} could not be started: {_line(error)}") from None

    def _actor(self, worker: int, capacity: int) -> Any:
        import ray

        wanted = WORKER_BYTES + capacity * ROLLOUT_BYTES
        there = float(ray.cluster_resources().get("memory", wanted))
        options = {
            "num_cpus": 0,
            "memory": int(min(wanted, 0.8 * there / self.workers)),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": _strategy(worker),
        }
        if self.warden is None:  # a Ray that we did not start, so not with this setting
            options["runtime_env"] = {"env_vars": KEEP_CHILDREN}
        return ray.remote(WorkerActor).options(**options).remote()

    def _check(self, handle: RayWorker, started: Started) -> None:
        fault = started.fault
        alive = Path(self.spec.run_path) / "journal" / handle.writer / "alive"
        if fault is None and not alive.exists():
            fault = f"it writes to another {self.spec.run_path}: choose --out on shared storage"
        if fault is not None:
            here = os.uname().nodename == started.host
            raise UserError(fault if here else f"worker on {started.host}: {fault}")


def _strategy(worker: int) -> Any:
    """Spread over the nodes; none on the head of a cluster that has others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted(
        node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD not in node["Resources"]
    )
    if not nodes:
        return "DEFAULT"
    return NodeAffinitySchedulingStrategy(nodes[worker % len(nodes)], soft=False)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


@contextmanager
def connected(workers: int) -> Iterator[Warden | None]:
    """Ray, for as long as this is entered. One that was there before is used and left as it is.

    Blocking for some seconds; entered on the main thread where there is a choice.
    Raises: UserError when Ray cannot be reached or started.
    """
    import ray

    if ray.is_initialized():
        yield None
        return
    warden = None
    try:
        if os.environ.get("RAY_ADDRESS"):
            _reach()
        else:
            warden = _start(workers)
        yield warden
    finally:
        ray.shutdown()
        if warden is not None:
            warden.close()


def _reach() -> None:
    """Connect to RAY_ADDRESS. Raises: UserError."""
    import ray

    try:
        ray.init(**_quiet())
    except Exception as error:  # Ray raises bare ones too
        what = f"reach RAY_ADDRESS {os.environ['RAY_ADDRESS']}"
        raise _refusal(what, error, "Correct it, or unset it for a Ray of this machine") from None


def _start(workers: int) -> Warden:
    """A Ray of this machine. Raises: UserError.

    On a busy machine it may miss Ray's own limits (30 s for its raylet): it gets a second chance.
    """
    try:
        return _start_once(workers)
    except Exception as error:  # Ray raises bare ones too: a node that is too slow to start
        _log.info("Ray did not start (%s); once more", _line(error))
    try:
        return _start_once(workers)
    except Exception as error:  # as above
        raise _refusal("start Ray", error, "Use --workers 0") from None


def _start_once(workers: int) -> Warden:
    """Raises: whatever Ray does; nothing of it is left running then."""
    import ray

    watchdog = Warden()
    before = {name: os.environ.get(name) for name in KEEP_CHILDREN}
    os.environ.update(KEEP_CHILDREN)  # Ray's processes inherit it
    try:
        ray.init(
            **_quiet(),
            address="local",
            num_cpus=max(1, workers),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        watchdog.watch_children()
    except BaseException:
        watchdog.watch_children()
        ray.shutdown()
        watchdog.close()
        raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return watchdog


def _quiet() -> dict[str, Any]:
    return {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}


def _refusal(what: str, error: Exception, mend: str) -> UserError:
    return UserError(f"cannot {what}: {_line(error).rstrip('.')}. {mend}")
