"""One worker: one event loop with many rollouts, one journal, one publisher.

The same class runs in the driver's process (`--workers 0`) and inside a Ray actor. Invariants: a
receipt leaves only after the attempt's rows are durable; a worker that stops for a fault, a lost
lease or an abort writes nothing more and leaves the rest to recovery.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batch_runner.budgets import budgets_of
from batch_runner.collector import rare_collections
from batch_runner.hosts import Hosts
from batch_runner.wire import Reply, WorkerSpec
from hermes_rl.config import parse_config
from hermes_rl.config_endpoint import EnvSection
from hermes_rl.errors import DiskFull, HermesError, StoreError, cause_of
from hermes_rl.events import AttemptKey, Ended, EventLog, TokensAdded
from hermes_rl.models.rate.coordinator import Coordinator
from hermes_rl.models.rate.share import Share
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.record import Segment, Trajectory
from hermes_rl.rollout import MakeEpisode, lost_row, run_attempt, task_episode
from hermes_rl.store.journal import JournalWriter, Publisher
from hermes_rl.store.rows import Finished, receipt_of
from hermes_rl.store.rundir import RunDir
from hermes_rl.wiring import RunContext, open_run_context

if TYPE_CHECKING:
    from hermes_rl.rl.episodes import Host

ABORT_S = 10.0
"""How long cancelled rollouts may take to end their sandboxes."""


class Worker:
    """Makes attempts and hands out their receipts; made by `open_worker`."""

    def __init__(
        self,
        spec: WorkerSpec,
        context: RunContext,
        journal: JournalWriter,
        share: Share,
        make: MakeEpisode = task_episode,
    ) -> None:
        self.spec = spec
        self.share = share
        """Of the run's rates and budgets."""
        self._make = make
        self.heard = time.monotonic()
        """When the driver was last heard."""
        self._context = context
        self._journal = journal
        self._publisher = Publisher(journal, every_s=spec.publish_every_s)
        self._publishing = asyncio.create_task(self._publish())
        self._running: set[asyncio.Task[None]] = set()
        self._outbox: list[Receipt] = []
        self._requests = 0
        self._throttled = 0
        self._fault: HermesError | None = None
        self._news = asyncio.Event()

    def submit(self, item: WorkItem) -> None:
        """Start an attempt. After a fault nothing is started any more."""
        self.heard = time.monotonic()
        if self._fault is None:
            task = asyncio.create_task(self._attempt(item))
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def poll(self, wait_s: float, gather_s: float = 0.0) -> Reply:
        """What happened since the last poll; waits a while for something to happen.

        Args:
            wait_s: for something to happen, at most.
            gather_s: for more, after something happened: receipts then travel together.
        """
        self.heard = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
                await asyncio.sleep(gather_s)
        except TimeoutError:
            pass
        self.heard = time.monotonic()
        return self._reply()

    async def publish(self) -> None:
        """Publish all that is finished. Raises: DiskFull."""
        await self._publisher.drain()

    async def abort(self) -> None:
        """Cancel all rollouts and wait until their sandboxes have ended; publish nothing."""
        tasks = [*self._running, self._publishing]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=ABORT_S)

    async def outlive_driver(self) -> None:
        """Return once the driver was not heard for the lease."""
        left = self.spec.lease_s
        while left > 0:
            await asyncio.sleep(left)
            left = self.heard + self.spec.lease_s - time.monotonic()

    def _reply(self) -> Reply:
        self._news.clear()
        receipts, self._outbox = tuple(self._outbox), []
        requests, self._requests = self._requests, 0
        throttled, self._throttled = self._throttled, 0
        fault = self._fault
        if fault is not None:
            self._news.set()
        return Reply(
            receipts=receipts,
            requests=requests,
            throttled=throttled,
            fault=str(fault) if fault else None,
            cause=cause_of(fault) if fault else None,
        )

    async def _attempt(self, item: WorkItem) -> None:
        key = AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt)
        log, segments = EventLog(self._journal.recorder(key).record), tuple[Segment, ...]()
        row = await self._row(item, log)
        if any(isinstance(e, TokensAdded) for e in log.events):
            from hermes_rl.segments import with_segments  # most runs have no tokens

            row, segments = await asyncio.to_thread(with_segments, log.events, row)
        fatal = _fatal_command(log)
        made = Finished(key=key, row=row, segments=segments, fatal_command=fatal)
        await self._journal.finish(made)
        self._outbox.append(receipt_of(made, self.spec.writer))
        self._requests += len(row.calls)
        self._throttled += sum(_was_throttled(call.error) for call in row.calls)
        self._news.set()

    async def _row(self, item: WorkItem, log: EventLog) -> Trajectory:
        try:
            return await run_attempt(self._context, item, log, make=self._make)
        except DiskFull:
            raise
        except Exception as error:  # a bug of ours must end one attempt, not the run
            return lost_row(log, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    async def _publish(self) -> None:
        # Loading Arrow takes a second: better while the first rollouts wait for their model than
        # when the last one has ended.
        await asyncio.to_thread(importlib.import_module, "hermes_rl.store.parts")
        try:
            await self._publisher.run()
        except (HermesError, OSError) as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """End in a fault: no new attempts, and those that run are given up (recovery finds them).

        A full disk would fail each of them at its next event all the same.
        """
        if self._fault is None:
            known = isinstance(error, HermesError)
            fault = error if known else StoreError(f"{type(error).__name__}: {error}")
            assert isinstance(fault, HermesError)
            self._fault = fault
        for task in self._running:
            task.cancel()
        self._news.set()


def _fatal_command(log: EventLog) -> str | None:
    """The tool call under which an attempt's sandbox died: its last event is its end."""
    end = log.events[-1]
    return end.fatal_command if isinstance(end, Ended) else None


def _was_throttled(error: str | None) -> bool:
    return error is not None and error.startswith("RateLimited")


def _prove_sight(run_dir: RunDir, spec: WorkerSpec) -> None:
    """A worker on another machine may see no run directory, or another one of that name."""
    epochs = run_dir.epochs()
    if spec.epoch not in epochs or run_dir.epoch(spec.epoch).run_id != spec.run_id:
        raise StoreError(f"no such run at {spec.run_path}: choose --out on storage that all share")


def _environment(section: EnvSection, hosts: Hosts | None) -> AbstractAsyncContextManager[Host]:
    """The run's environment; its code is imported only where there is one."""
    if hosts is not None:
        return hosts.open(section)
    from hermes_rl.rl.episodes import open_host

    return open_host(section)


@asynccontextmanager
async def open_worker(
    spec: WorkerSpec,
    coordinator: Coordinator | None = None,
    keys: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> AsyncIterator[Worker]:
    """A worker with its journal and context; on leaving, what still runs is aborted.

    Args:
        coordinator: of the run's rates and budgets; None where the driver carries the reports.
        keys: API keys by variable, where this process's environment does not hold them.
        hosts: environments of a process that has more use for them.

    Raises: StoreError when it cannot see the run directory, or comes too late.
    """
    run_dir = RunDir(Path(spec.run_path))
    await asyncio.to_thread(_prove_sight, run_dir, spec)
    config = parse_config(json.loads(spec.config))
    async with AsyncExitStack() as stack:
        writer = JournalWriter(run_dir, spec.epoch, spec.worker, lease_s=spec.lease_s)
        journal = await stack.enter_async_context(writer)
        share = Share(spec.writer, tuple(budgets_of(config)))
        if coordinator is not None:
            await stack.enter_async_context(share.coordinated(coordinator.handle))
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
        if config.run.keep_workspaces:
            context = replace(context, workspaces=run_dir.path / "workspaces")
        make = task_episode
        if config.env is not None:
            make = (await stack.enter_async_context(_environment(config.env, hosts))).episode
        stack.enter_context(rare_collections())
        worker = Worker(spec, context, journal, share, make)
        stack.push_async_callback(worker.abort)
        yield worker
