"""Starts workers: in this process, or as Ray actors (a cluster of this machine's own, one that is
already there, or RAY_ADDRESS).

Ray is imported inside functions: importing it alone already changes the process's environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batch_runner.dispatcher import StartWorker, WorkerLost
from batch_runner.settings import Settings
from batch_runner.worker import (
    Reply,
    Worker,
    WorkerSpec,
    exchange_reports,
    open_worker,
    raise_exchange_error,
    raise_file_limit,
)
from hermes_rl.errors import HermesError, UserError, cause_of
from hermes_rl.input_errors import unknown
from hermes_rl.models.rate import Coordinator, Grant, Report, decode_grant, decode_report, encode
from hermes_rl.ports import WorkItem
from hermes_rl.sandboxes import processes
from hermes_rl.store import CommitBatch, Prepared, RunDir

if TYPE_CHECKING:
    from hermes_rl.store import RelayedWriter

_log = logging.getLogger(__name__)

STARTS = 2
"""Attempts at starting Ray on this machine."""

NAMESPACE = "hermes_rl"
"""Namespace of the actors in a Ray cluster."""

START_S = 120.0
"""Time after which a cluster is assumed to have no resources for a worker."""
INSTALL_S = 900.0
"""The same where nodes first install packages or unpack folders (`run.runtime_env`)."""

GATHER_S = 0.01
"""Receipts that arrive within this time of the first are sent together."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Receipts and items are small: Ray's object store is not needed."""

WORKER_BYTES = 250 * 2**20
ROLLOUT_BYTES = 3 * 2**20
"""Memory that an actor declares: its own, and for each rollout in flight."""

PUBLISHERS = 2
"""Batches that the driver publishes at once for workers that do not see the run directory; more
would keep its threads from other work."""
FILES_PER_RELAY = 8
"""Open files of the driver for a worker that does not see the run directory: its journal."""

KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""By default Ray kills the child processes of an actor first. The actor would record that as the
death of its sandboxes and verifiers. Their own watchdog ends them after the actor."""

_HEAD = "node:__internal_head__"

decode_item = msgspec.msgpack.Decoder(WorkItem).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


@contextmanager
def open_pool(
    settings: Settings,
    spec: WorkerSpec,
    coordinator: Coordinator,
    commit: CommitBatch,
    note: Callable[[str], None],
) -> Iterator[StartWorker]:
    """Open the starter of workers: in this process, or on a Ray cluster.

    Args:
        spec: of every worker, without number and capacity.
        commit: of the driver.
        note: shows a line.

    Raises: UserError when Ray cannot be reached or started, or has no such runtime environment.
    """
    wanted = settings.config.run.runtime_env
    if settings.workers:
        _check_runtime_env(wanted)
        joint = settings.joint
        connect, runs = (connect_ray, 1) if joint is None else (joint.ray, joint.runs)
        with connect(settings.workers) as watchdog:
            if watchdog is None:  # an existing Ray, without this setting
                wanted = {**wanted, "env_vars": {**KEEP_CHILDREN, **wanted.get("env_vars", {})}}
            keys, workers = settings.keys, settings.workers
            relays = Relays(spec, workers, commit, note)
            every = workers * runs
            pool = RayPool(spec, every, coordinator, commit, watchdog, wanted, keys, relays)
            yield pool.start
        return
    if wanted:
        raise UserError("'run.runtime_env' is for Ray workers, and --workers 0 has none")

    async def start(worker: int, capacity: int) -> Worker:
        worker_spec = msgspec.structs.replace(spec, worker=worker, capacity=capacity)
        return await open_worker(worker_spec, coordinator, settings.keys, settings.hosts, commit)

    yield start


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's answer to its start."""

    pid: int
    host: str
    relayed: bool = False
    """Whether its lines travel through the driver."""
    fault: str | None = None
    """Why it could not start, for people."""


class WorkerActor:
    """A worker as a Ray actor. Ray neither restarts nor retries it: the driver recovers the journal
    of a dead actor. Without a message from its driver for the lease it ends and publishes
    nothing."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, spec: bytes, keys: dict[str, str]) -> bytes:
        """Open the worker, in place of an earlier one; returns `Started`."""
        fault, relayed = None, False
        try:
            if self._worker is not None and self._watch is not None:
                self._watch.cancel()
                await self._worker.kill()
            decoded = msgspec.msgpack.decode(spec, type=WorkerSpec)
            self._worker = await open_worker(decoded, keys=keys)
            relayed = self._worker.relayed
            self._watch = asyncio.create_task(self._end_after_lost_lease())
        except HermesError as error:
            fault = str(error)
        host = socket.gethostname()
        return encode(Started(pid=os.getpid(), host=host, relayed=relayed, fault=fault))

    async def send(self, item: bytes) -> None:
        """Start an attempt."""
        await self._require_worker().send(decode_item(item))

    async def interrupt(self, units: list[str]) -> None:
        """End the attempts at these units."""
        await self._require_worker().interrupt(units)

    async def poll(self, wait_s: float) -> bytes:
        """Return receipts since the last poll, after a short wait. Also the heartbeat."""
        return encode(await self._require_worker().poll(wait_s, GATHER_S))

    async def beat(self) -> None:
        """Take a sign of life of the driver."""
        self._require_worker().beat()

    async def share(self, grant: bytes) -> bytes:
        """Follow a grant of the coordinator; return the next report."""
        share = self._require_worker().share
        share.take_grant(decode_grant(grant))
        return encode(await share.next_report())

    async def committed(self, fault: str | None, cause: str | None) -> None:
        """The outcome of the batch that was in a reply; see `Worker.committed`."""
        self._require_worker().committed(fault, cause)

    async def close(self) -> bytes:
        """Publish finished attempts and close the journal. It may take longer than a lease, since
        the driver polls meanwhile."""
        return encode(await self._require_worker().close())

    def _require_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _end_after_lost_lease(self) -> None:
        await self._require_worker().wait_for_lost_lease()
        await self._require_worker().kill()
        # Ray would keep the process for a driver that may have ended.
        os._exit(1)


@dataclass
class RayWorker:
    """The driver's end of one actor."""

    actor: Any
    writer: str
    lease_s: float
    commit: CommitBatch
    """Of the driver."""
    files: Sequence[str] = ()
    """Of the last batch that it passed on: each try of a batch has other ones."""
    committing: asyncio.Task[None] | None = None
    """The commit of that batch."""
    sharing: asyncio.Task[None] | None = None
    """Exchanges its reports for grants of the coordinator."""
    relay: RelayedWriter | None = None
    """Writes its lines, where it does not see the run directory."""

    async def send(self, item: WorkItem) -> None:
        """Send it an attempt. When the actor is dead, the next poll raises."""
        self.actor.send.remote(encode(item))

    async def interrupt(self, units: list[str]) -> None:
        """End the attempts at these units."""
        self.actor.interrupt.remote(units)

    async def poll(self) -> Reply:
        """Return what happened since the last poll. Raises: WorkerLost."""
        from ray.exceptions import RayError

        raise_exchange_error(self.sharing)
        try:
            async with asyncio.timeout(self.lease_s):
                reply = decode_reply(await self.actor.poll.remote(self.lease_s / 6))
            batch = reply.prepared
            if batch is not None and batch.files != self.files:
                self.files = batch.files
                # Keep polling: a slow disk must not end the lease.
                self.committing = asyncio.create_task(self._commit(batch))
                self.committing.add_done_callback(_ignore_outcome)
        except (TimeoutError, RayError) as error:
            # A report after its loss would give it slots that are never returned.
            self._stop_sharing()
            silent = isinstance(error, TimeoutError)
            why = f"not heard for {self.lease_s:g} s" if silent else _first_line(error)
            raise WorkerLost(why) from None
        return await self._write(reply)

    async def _write(self, reply: Reply, *, last: bool = False) -> Reply:
        """Write the lines of a reply, if any. Returns it with the receipts of those that are
        durable.

        Args:
            last: also publish all rows.
        """
        if self.relay is None:
            return reply
        beating = asyncio.create_task(self._beat())
        try:
            receipts = await self.relay.take(reply.lines)
            if last:
                await self.relay.drain()
        except (HermesError, OSError) as error:
            return Reply(fault=str(error), cause=cause_of(error))
        finally:
            beating.cancel()
        return msgspec.structs.replace(reply, receipts=receipts, lines=())

    async def _beat(self) -> None:
        """Keep the worker alive while it is not polled: a slow disk must not end its lease."""
        while True:
            await asyncio.sleep(self.lease_s / 6)
            self.actor.beat.remote()

    async def _commit(self, prepared: Prepared) -> None:
        fault = cause = None
        try:
            await self.commit(prepared)
        except Exception as error:  # the worker waits for an answer
            fault = str(error) if isinstance(error, HermesError) else repr(error)
            cause = cause_of(error)
        self.actor.committed.remote(fault, cause)

    def share(self, coordinator: Coordinator) -> None:
        """Exchange reports and grants with the coordinator from now on."""
        from ray.exceptions import RayError

        async def exchange(grant: Grant) -> Report:
            return decode_report(await self.actor.share.remote(encode(grant)))

        async def carry() -> None:
            try:
                await exchange_reports(exchange, coordinator)
            except RayError:  # the next poll raises it, too
                pass

        self.sharing = asyncio.create_task(carry())

    def _stop_sharing(self) -> None:
        if self.sharing is not None:
            self.sharing.cancel()

    async def close(self) -> Reply:
        """Publish and end. It may take long, as long as the worker answers polls, which bring the
        batches to commit.

        Raises: WorkerLost.
        """
        from ray.exceptions import RayError

        closing = asyncio.ensure_future(self.actor.close.remote())
        closing.add_done_callback(_ignore_outcome)
        try:
            while not closing.done():
                polling = asyncio.ensure_future(self.poll())
                polling.add_done_callback(_ignore_outcome)
                await asyncio.wait((closing, polling), return_when=asyncio.FIRST_COMPLETED)
                if not closing.done():
                    await polling
                polling.cancel()
            reply = await self._write(decode_reply(closing.result()), last=True)
        except RayError as error:
            raise WorkerLost(_first_line(error)) from None
        finally:
            closing.cancel()
        await self.kill()
        return reply

    async def kill(self) -> None:
        """End the actor's process at once."""
        import ray

        self._stop_sharing()
        ray.kill(self.actor, no_restart=True)
        if self.relay is not None:
            with suppress(OSError):  # it was reported, and recovery reads what was written
                await self.relay.aclose()


@dataclass(frozen=True)
class Relays:
    """The writers of workers that do not see the run directory."""

    spec: WorkerSpec
    workers: int
    commit: CommitBatch
    """Of the driver."""
    note: Callable[[str], None]
    """Shows a line."""
    _hosts: set[str] = field(default_factory=set)
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PUBLISHERS))

    async def open(self, worker: int, host: str) -> RelayedWriter:
        """Open the writer of a worker; the first of a node is reported.

        Raises: StoreError; UserError when this process may not open enough files.
        """
        from hermes_rl.store import JournalWriter, Publisher, RelayedWriter  # few runs need it

        spec = self.spec
        raise_file_limit(self.workers, FILES_PER_RELAY, "relayed workers")
        run_dir = RunDir(Path(spec.run_path))
        publisher = partial(
            Publisher, every_s=spec.publish_every_s, commit=self.commit, turn=self._turn
        )
        relay = RelayedWriter(JournalWriter(run_dir, spec.epoch, worker), publisher)
        await relay.open()
        if host not in self._hosts:
            self._hosts.add(host)
            self.note(
                f"worker {worker} on {host} does not see {spec.run_path}: its rows travel through "
                "the driver"
            )
        return relay


@dataclass(frozen=True)
class RayPool:
    """Starts actors, spread over the nodes of the cluster."""

    spec: WorkerSpec
    workers: int
    """Of all runs that share this Ray."""
    coordinator: Coordinator
    """Of the run's rates and budgets."""
    commit: CommitBatch
    """Of the driver."""
    watchdog: Watchdog | None
    """Ends the processes of a local cluster when the driver is killed."""
    runtime_env: Mapping[str, Any]
    """Of the actors, for Ray."""
    keys: Mapping[str, str] = field(repr=False)
    """API keys by variable: workers of a cluster do not have this process's environment."""
    relays: Relays
    """For workers that do not see the run directory."""

    async def start(self, worker: int, capacity: int) -> RayWorker:
        """Raises: UserError when the cluster has no resources for it, or it cannot work;
        StoreError."""
        spec = msgspec.structs.replace(self.spec, worker=worker, capacity=capacity)
        handle = RayWorker(self._actor(worker, capacity), spec.writer, spec.lease_s, self.commit)
        try:
            started = await self._open(handle.actor, spec)
            alive = Path(spec.run_path) / "journal" / spec.writer / "alive"
            if not (started.fault or started.relayed or alive.exists()):  # another folder there
                again = msgspec.structs.replace(spec, relayed=True)
                started = await self._open(handle.actor, again)
            if started.fault is not None:
                here = os.uname().nodename == started.host
                place = "" if here else f"worker on {started.host}: "
                raise UserError(f"{place}{started.fault}")
            if started.relayed:
                handle.relay = await self.relays.open(worker, started.host)
        except BaseException:
            await handle.kill()
            raise
        if self.watchdog is not None:
            self.watchdog.watch(started.pid)
        handle.share(self.coordinator)
        return handle

    async def _open(self, actor: Any, spec: WorkerSpec) -> Started:
        from ray.exceptions import RayError

        patience = START_S if self.runtime_env.keys() <= {"env_vars"} else INSTALL_S
        try:
            async with asyncio.timeout(patience):
                answer = await actor.start.remote(encode(spec), dict(self.keys))
                return msgspec.msgpack.decode(answer, type=Started)
        except TimeoutError:
            raise UserError(
                f"Ray did not start worker {spec.worker} within {patience:g} s: the cluster lacks "
                "free memory, or is too busy. Add a node, or use --workers 0"
            ) from None
        except RayError as error:
            raise UserError(
                f"worker {spec.worker} could not be started: {_first_line(error)}"
            ) from None

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
        if self.runtime_env:
            options["runtime_env"] = dict(self.runtime_env)
        return ray.remote(WorkerActor).options(**options).remote()


def _check_runtime_env(wanted: Mapping[str, Any]) -> None:
    """Raises: UserError."""
    if not wanted:
        return
    from ray.runtime_env import RuntimeEnv

    for key in wanted.keys() - RuntimeEnv.known_fields:
        raise UserError(unknown("key of 'run.runtime_env'", key, RuntimeEnv.known_fields))
    try:
        RuntimeEnv(**wanted)
    except Exception as error:  # Ray raises bare exceptions, too
        raise UserError(f"'run.runtime_env': {_first_line(error)}") from None


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


def _ignore_outcome(ended: asyncio.Future[Any]) -> None:
    """Retrieve the error of a call, which asyncio would print."""
    if not ended.cancelled():
        ended.exception()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


@contextmanager
def connect_ray(workers: int) -> Iterator[Watchdog | None]:
    """Connect to Ray, or start it, for the duration of this context. An existing Ray is left as it
    is.

    Blocking for some seconds; entered on the main thread where there is a choice.
    Raises: UserError when Ray cannot be reached or started.
    """
    import ray

    if ray.is_initialized():
        yield None
        return
    quiet = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    watchdog = None
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(**quiet)
            except Exception as error:  # Ray raises bare exceptions, too
                fix = "Correct it, or unset it for a Ray of this machine"
                raise _refusal(f"reach RAY_ADDRESS {address}", error, fix) from None
        else:
            watchdog = _start(workers, quiet)
        yield watchdog
    finally:
        ray.shutdown()
        if watchdog is not None:
            watchdog.close()


class SharedRay:
    """A Ray for several runs: the first that has workers starts it, and it ends with this
    context."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        """Notes for all runs that were shown."""
        self._stack = ExitStack()
        self._started: list[Watchdog | None] = []

    def __enter__(self) -> SharedRay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @contextmanager
    def connect(self, workers: int) -> Iterator[Watchdog | None]:
        """Like `connect_ray`, but Ray stays."""
        if not self._started:
            self._started.append(self._stack.enter_context(connect_ray(workers)))
        yield self._started[0]


def _start(workers: int, quiet: dict[str, Any]) -> Watchdog:
    """Start a Ray of this machine. Raises: UserError.

    On a busy machine a start may exceed Ray's own limits (30 s for its raylet); it is repeated
    once."""
    for _ in range(STARTS):
        try:
            return _start_once(workers, quiet)
        except Exception as error:  # Ray raises bare exceptions, too
            _log.info("Ray did not start (%s)", _first_line(error))
            failure = error
    raise _refusal("start Ray", failure, "Use --workers 0") from None


def _start_once(workers: int, quiet: dict[str, Any]) -> Watchdog:
    """Start Ray once. Raises: the error of Ray, after ending all its processes."""
    import ray

    watchdog = Watchdog()
    before = {name: os.environ.get(name) for name in KEEP_CHILDREN}
    os.environ.update(KEEP_CHILDREN)  # Ray's processes inherit it
    try:
        ray.init(
            **quiet,
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


def _refusal(what: str, error: Exception, fix: str) -> UserError:
    return UserError(f"cannot {what}: {_first_line(error).rstrip('.')}. {fix}")


_WATCHDOG = """
watched=
while read -r pid start; do watched="$watched $pid:$start"; done
for entry in $watched; do
    pid=${entry%:*}
    { read -r stat < "/proc/$pid/stat"; } 2>/dev/null || continue
    set -- ${stat##*) }
    [ "${20}" = "${entry#*:}" ] && kill -9 "$pid" 2>/dev/null
done
"""


class Watchdog:
    """Ends processes that a killed driver leaves: Ray's agents stay for about a minute. Linux only.

    It is a small shell that reads process ids from a pipe; when the pipe closes, because the driver
    ended or died, it kills those that still run. Start times protect recycled ids.
    """

    def __init__(self) -> None:
        self._before = set(processes.descendants(os.getpid()))
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """End this process too."""
        if (found := processes.find(pid)) is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{pid} {found.start}\n".encode())
            self._process.stdin.flush()

    def watch_children(self) -> None:
        """End all descendants of this process that started after the watchdog."""
        for found in processes.descendants(os.getpid()):
            if found not in self._before and found.pid != self._process.pid:
                self.watch(found.pid)

    def close(self) -> None:
        """End the watched processes and the watchdog."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=10)
