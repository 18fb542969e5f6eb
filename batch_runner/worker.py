"""One worker: one event loop with many rollouts, one journal, one publisher.

The same class runs in the process of the driver (`--workers 0`) and in a Ray actor. Invariants: a
receipt is sent only after the rows of the attempt are durable; a worker that stops for a fault, a
lost lease or an abort writes nothing more and leaves its attempts to recovery.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batch_runner.budgets import budgets_of
from batch_runner.settings import Hosts, open_hosts
from hermes_rl.agent import Control
from hermes_rl.checkpoints import CHECKPOINTS, Checkpoints
from hermes_rl.config import RunSection, parse_config
from hermes_rl.errors import DiskFull, HermesError, StoreError, UserError, cause_of
from hermes_rl.events import AttemptKey, Ended, EventLog, TokensAdded
from hermes_rl.models.rate import Coordinator, Grant, Report, Share
from hermes_rl.models.tokens import TokenPlan
from hermes_rl.network import PROXY_CONNECTIONS
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.record import Segment, Trajectory
from hermes_rl.rollout import Episode, MakeEpisode, lost_row, run_attempt
from hermes_rl.sandboxes import OPEN_FILES
from hermes_rl.store import (
    CommitBatch,
    Finished,
    JournalWriter,
    Prepared,
    Publisher,
    RelayedLine,
    RunDir,
    receipt_of,
)
from hermes_rl.trajectory import fold_subagents
from hermes_rl.wiring import RunContext, open_run_context

if TYPE_CHECKING:
    from hermes_rl.store import RelayJournal

ABORT_S = 10.0
"""How long cancelled rollouts may take to end their sandboxes."""

POLL_S = 5.0
"""How long a poll waits for something to happen."""

FILES_PER_ROLLOUT = 12
"""Open files of one rollout: measured were 8 without a sandbox, and 10 with one."""
OTHER_FILES = 256
"""Other open files of a worker: its journal, parts, libraries."""

GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the garbage collector. Python's defaults cost a tenth of the CPU of a turn,
although nearly all objects of a rollout are kept until its end or have no cycles."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a worker."""

    run_path: str
    """Absolute path of the run directory."""
    run_id: str
    epoch: int
    worker: int
    """Unique within the epoch; 0 is the driver's own process."""
    capacity: int
    """Rollouts in flight at most."""
    lease_s: float
    """How long it runs without a message from its driver."""
    publish_every_s: float
    config: bytes
    """The run's configuration as JSON."""
    config_hash: str
    """As computed by the driver; the digest of an image may differ on another machine."""
    tokens: TokenPlan | None = None
    """How the run gets token ids."""
    relayed: bool = False
    """Whether its lines travel through the driver; False decides it by what the worker sees."""

    @property
    def writer(self) -> str:
        """The worker's name in the journal."""
        return writer_name(self.epoch, self.worker)


def writer_name(epoch: int, worker: int) -> str:
    """Name a worker in the journal: EPOCH-WORKER."""
    return f"{epoch}-{worker}"


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to one poll."""

    receipts: tuple[Receipt, ...] = ()
    requests: int = 0
    """Model requests of the attempts that finished since the last poll."""
    throttled: int = 0
    """Of those, how many were refused with 429."""
    fault: str | None = None
    """Why the worker cannot continue."""
    cause: str | None = None
    """The fault's cause, a key of `errors.CAUSES`."""
    prepared: Prepared | None = None
    """A batch for the driver to commit, until `Worker.committed` gets the outcome."""
    lines: tuple[RelayedLine, ...] = ()
    """Of a worker that does not see the run directory; its receipts are in them."""


class Worker:
    """Runs attempts and returns their receipts; made by `open_worker`.

    Args:
        sharing: exchanges reports with the coordinator; None when the driver does.
        commit: of the driver in this process; None passes batches on in replies.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        context: RunContext,
        journal: JournalWriter | RelayJournal,
        share: Share,
        make: MakeEpisode,
        sharing: asyncio.Task[None] | None,
        commit: CommitBatch | None,
    ) -> None:
        self.writer = spec.writer
        self.share = share
        """Of the rates and budgets of the run."""
        self.stack = AsyncExitStack()
        """Closes all resources."""
        self._sharing = sharing
        self._make = make
        self._lease_s = spec.lease_s
        self._last_heard = time.monotonic()
        """When the driver last called."""
        self._context = context
        self._journal = journal
        self._publisher, self._relay = None, None
        if isinstance(journal, JournalWriter):
            self._publisher = Publisher(
                journal, every_s=spec.publish_every_s, commit=commit or self._pass_on
            )
            self._publishing = {asyncio.create_task(self._publish(self._publisher))}
        else:
            self._relay, self._publishing = journal, set()
        self._prepared: Prepared | None = None
        """A batch that goes with every reply until the driver answers: a reply may get lost."""
        self._outcome: asyncio.Future[None] | None = None
        """Of the batch that the driver commits."""
        self._running: set[asyncio.Task[None]] = set()
        self._cancels = False
        """The worker cancels its attempts; else their own code did, and they end as failures."""
        self._controls: dict[str, Control] = {}
        self._outbox: list[Receipt] = []
        self._requests = 0
        self._throttled = 0
        self._fault: HermesError | None = None
        self._news = asyncio.Event()
        self.relayed = self._relay is not None
        """Whether its lines travel through the driver."""
        if self._relay is not None:
            self._relay.notify = self._news.set
        if sharing is not None:
            sharing.add_done_callback(lambda _: self._news.set())

    async def send(self, item: WorkItem) -> None:
        """Start an attempt, except after a fault."""
        self.beat()
        if self._fault is None:
            task = asyncio.create_task(self._attempt(item))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def beat(self) -> None:
        """Take a sign of life of the driver."""
        self._last_heard = time.monotonic()

    async def interrupt(self, units: Sequence[str]) -> None:
        """End the attempts at these units; their rows have the cause `interrupted`."""
        for unit in units:
            if (control := self._controls.get(unit)) is not None:
                control.interrupt()

    async def poll(self, wait_s: float = POLL_S, gather_s: float = 0.0) -> Reply:
        """Return the events since the last poll.

        Args:
            wait_s: maximum wait for the first event.
            gather_s: wait for more after it, so that receipts are sent together.

        Raises: an error of the coordinator, without which no call would be granted.
        """
        self._last_heard = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
                await asyncio.sleep(gather_s)
        except TimeoutError:
            pass
        self._last_heard = time.monotonic()
        raise_exchange_error(self._sharing)
        return self._reply()

    async def _pass_on(self, prepared: Prepared) -> None:
        """Let the driver commit a batch. Raises: what failed there."""
        self._prepared = prepared
        self._outcome = asyncio.get_running_loop().create_future()
        self._news.set()
        await self._outcome

    def committed(self, fault: str | None = None, cause: str | None = None) -> None:
        """Take the outcome of the batch that was in a reply.

        Args:
            fault: why it was not committed.
            cause: of that, a key of `errors.CAUSES`.
        """
        self._last_heard = time.monotonic()
        self._prepared = None
        if self._outcome is None or self._outcome.done():
            return
        if fault is None:
            self._outcome.set_result(None)
        else:
            error = DiskFull(fault) if cause == DiskFull.cause else StoreError(fault)
            self._outcome.set_exception(error)

    async def close(self) -> Reply:
        """Publish finished attempts and end. The driver keeps polling meanwhile."""
        reply = Reply(lines=self._relay.take() if self._relay else ())
        try:
            if self._publisher is not None:
                await self._publisher.drain()
            await self.share.leave()
        except HermesError as error:
            reply = Reply(fault=str(error), cause=cause_of(error))
        await self.stack.aclose()
        return reply

    async def kill(self) -> None:
        """Cancel the rollouts and close the journal without publishing."""
        await self.stack.aclose()

    async def abort(self) -> None:
        """Cancel all rollouts and wait for the end of their sandboxes."""
        self._cancels = True
        self.committed("the worker ends")  # no answer will come
        tasks = [*self._running, *self._publishing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_S)

    async def wait_for_lost_lease(self) -> None:
        """Return when the driver has not called for the duration of the lease."""
        left = self._lease_s
        while left > 0:
            await asyncio.sleep(left)
            left = self._last_heard + self._lease_s - time.monotonic()

    def _reply(self) -> Reply:
        self._news.clear()
        lines = self._relay.take() if self._relay else ()
        # After the fault nothing more is polled, so all lines go first.
        fault = self._fault if self._relay is None or self._relay.empty else None
        reply = Reply(
            receipts=tuple(self._outbox),
            requests=self._requests,
            throttled=self._throttled,
            fault=str(fault) if fault else None,
            cause=cause_of(fault) if fault else None,
            prepared=self._prepared,
            lines=lines,
        )
        self._outbox, self._requests, self._throttled = [], 0, 0
        if fault is not None:
            self._news.set()
        return reply

    async def _attempt(self, item: WorkItem) -> None:
        key = AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt)
        log, segments = EventLog(self._journal.recorder(key).record), tuple[Segment, ...]()
        self._controls[item.unit_id] = Control()
        try:
            row = await self._row(item, log)
        finally:
            del self._controls[item.unit_id]
        if any(isinstance(e, TokensAdded) for e in log.events):
            from hermes_rl.segments import with_segments  # most runs have no tokens

            row, segments = await asyncio.to_thread(with_segments, log.events, row)
        end = log.events[-1]
        fatal = end.fatal_command if isinstance(end, Ended) else None
        made = Finished(
            key=key,
            row=row,
            subagents=fold_subagents(log.events, row),
            segments=segments,
            fatal_command=fatal,
        )
        place = await self._journal.finish(made)
        if self._context.checkpoints is not None:
            await self._context.checkpoints.settle(item.unit_id, row.cause)
        if place is not None:  # else the receipt travels with the rows
            self._outbox.append(receipt_of(made, self.writer, place))
        self._requests += len(row.calls)
        self._throttled += sum((call.error or "").startswith("RateLimited") for call in row.calls)
        self._news.set()

    async def _row(self, item: WorkItem, log: EventLog) -> Trajectory:
        try:
            return await run_attempt(
                self._context, item, log, self._controls[item.unit_id], make=self._make
            )
        except DiskFull:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancels or task is None:
                raise
            while task.uncancel():
                pass
            why = "code of the environment, a tool or a scorer cancelled the task that it runs in"
            return lost_row(log, RuntimeError(why))
        except Exception as error:  # an internal error ends one attempt, not the run
            return lost_row(log, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    async def _publish(self, publisher: Publisher) -> None:
        # Loading Arrow takes a second; do it while the first rollouts wait for their model.
        await asyncio.to_thread(importlib.import_module, "hermes_rl.store.parts")
        try:
            await publisher.run()
        except (HermesError, OSError) as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Stop after a fault: start no attempts, and cancel the running ones for recovery."""
        if self._fault is None:
            if not isinstance(error, HermesError):
                error = StoreError(f"{type(error).__name__}: {error}")
            self._fault = error
        self._cancels = True
        for task in self._running:
            task.cancel()
        self._news.set()


async def open_worker(
    spec: WorkerSpec,
    coordinator: Coordinator | None = None,
    keys: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
    commit: CommitBatch | None = None,
) -> Worker:
    """Open a worker with its journal and all resources of its rollouts. Where it does not see the
    run directory, its lines are in its replies.

    Args:
        coordinator: of the rates and budgets of the run; None when the driver carries the reports.
        keys: API keys by variable; None reads the environment of this process.
        hosts: environments that this process shares.
        commit: see `Worker`.

    Raises: StoreError when it comes too late; UserError when the process may not open enough files,
        for a model, key or sandbox that cannot be had, or for files of rollouts that have no place.
    """
    run_dir = RunDir(Path(spec.run_path))
    config = parse_config(json.loads(spec.config))
    relayed = spec.relayed or not await asyncio.to_thread(_sees, run_dir, spec)
    if relayed:
        _refuse_files(config.run, spec.run_path)
    proxied = not isinstance(config.sandbox.network, bool)
    raise_file_limit(spec.capacity, FILES_PER_ROLLOUT + (2 * PROXY_CONNECTIONS if proxied else 0))
    async with AsyncExitStack() as stack:
        journal: JournalWriter | RelayJournal
        if relayed:
            from hermes_rl.store import RelayJournal  # few workers need it

            journal = RelayJournal(spec.writer)
        else:
            journal = JournalWriter(run_dir, spec.epoch, spec.worker, lease_s=spec.lease_s)
            await stack.enter_async_context(journal)
        share = Share(spec.writer, tuple(budgets_of(config)))
        sharing = None
        if coordinator is not None:
            sharing = await stack.enter_async_context(share.coordinated(coordinator.handle))
        context = await stack.enter_async_context(
            open_run_context(
                config,
                run_id=spec.run_id,
                concurrency=spec.capacity,
                config_hash=spec.config_hash,
                keys=keys,
                share=share,
                tokens=spec.tokens,
            )
        )
        context = _with_files(context, run_dir, journal)
        make: MakeEpisode = Episode
        if config.env is not None:
            opened = await stack.enter_async_context(open_hosts(hosts))
            make = (await stack.enter_async_context(opened.open(config.env))).episode
        stack.enter_context(_reduce_garbage_collection())
        worker = Worker(spec, context, journal, share, make, sharing, commit)
        stack.push_async_callback(worker.abort)
        worker.stack = stack.pop_all()
        return worker


async def exchange_reports(
    exchange: Callable[[Grant], Awaitable[Report]], coordinator: Coordinator
) -> None:
    """Pass reports of a worker to the coordinator and grants back, until the worker leaves."""
    grant, leaving = Grant(), False
    while not leaving:
        report = await exchange(grant)
        grant, leaving = coordinator.handle(report), report.leaving


def raise_exchange_error(sharing: asyncio.Task[None] | None) -> None:
    """Raise the error that ended the exchange with the coordinator."""
    if sharing is not None and sharing.done() and not sharing.cancelled():
        sharing.result()


def raise_file_limit(number: int, each: int, what: str = "rollouts") -> None:
    """Raise the limit of open files of this process (`ulimit -Sn`) as rollouts require; many
    systems start with 1,024. Sandboxes have their own limit, `OPEN_FILES`.

    Args:
        number: rollouts, or others that `what` names. each: open files of one of them.

    Raises: UserError when the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(OTHER_FILES + each * number, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = (hard - OTHER_FILES) // each
        fewer = f", use --concurrency {most}, or more --workers" if hard >= OPEN_FILES else ""
        if what != "rollouts":
            fewer = f", or use --workers {most}"
        raise UserError(
            f"{number} {what} in one process need {wanted:,} open files, and the limit is "
            f"{hard:,} (ulimit -Hn). Raise it{fewer}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _reduce_garbage_collection() -> Iterator[None]:
    """Collect garbage less often, and never loaded modules. Undone at the end, because a run
    without Ray shares the process of its caller."""
    before = gc.get_threshold()
    if before == GC_THRESHOLDS:  # another run does this
        yield
        return
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _sees(run_dir: RunDir, spec: WorkerSpec) -> bool:
    """Whether the path is the run directory and may be written: another machine may have none, or
    another one."""
    try:
        if spec.epoch not in run_dir.epochs():
            return False
        same = run_dir.epoch(spec.epoch).run_id == spec.run_id
    except (OSError, StoreError):
        return False
    return same and os.access(run_dir.path / "journal", os.W_OK)


def _refuse_files(run: RunSection, path: str) -> None:
    """Raises: UserError for files that only a run directory that all nodes see can have."""
    wanted = {
        "run.keep_workspaces": run.keep_workspaces,
        "run.checkpoint_turns": run.checkpoint_turns is not None,
    }
    for name in (name for name, value in wanted.items() if value):
        raise UserError(
            f"{name} writes files to {path}, which this node does not see. Leave it out, or choose "
            "--out on storage that all nodes share"
        )


def _with_files(
    context: RunContext, run_dir: RunDir, journal: JournalWriter | RelayJournal
) -> RunContext:
    """A context with the places of the further files that rollouts write."""
    config = context.config
    if config.run.keep_workspaces:
        context = replace(context, workspaces=run_dir.path / "workspaces")
    turns = config.run.checkpoint_turns
    if turns is not None or (config.scoring.judges and config.env is None):
        context = replace(context, checkpoints=Checkpoints(run_dir.path / CHECKPOINTS, turns))
    if not isinstance(config.sandbox.network, bool):
        context = replace(context, network_log=journal.append_connection)
    return context
