"""A whole run: open the run directory, run all open units, and report the result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_runner.budgets import make_coordinator, refuse_unpriced, summary_as_dict
from batch_runner.control import cause_named, count_of, dollars_of, open_control
from batch_runner.dispatcher import Dispatcher, Fleet, StartWorker
from batch_runner.interrupts import Interrupts, catch_signals
from batch_runner.joint import JointProgress, JointRuns, joint_limits
from batch_runner.manifest import capabilities, start_meta, write_manifest
from batch_runner.plan import (
    Pilot,
    Plan,
    RunSource,
    UnitReader,
    estimate_units,
    open_indexed,
    open_reader,
    refuse_other_dataset,
    store_rows,
)
from batch_runner.pool import SharedRay, connect_ray, open_pool
from batch_runner.progress import Progress, Sink, Trouble, TroubleMonitor, View, default_progress
from batch_runner.report import Report, Stop
from batch_runner.settings import (
    SMALL_S,
    SMALL_UNITS,
    Hosts,
    Settings,
    as_config,
    choose_workers,
    may_be_small,
    open_hosts,
    resolve_settings,
)
from batch_runner.worker import WorkerSpec
from hermes_rl.aio import abandonable, in_thread, run_sync
from hermes_rl.checkpoints import CHECKPOINTS, clear
from hermes_rl.config import RunConfig, to_yaml
from hermes_rl.definitions import (
    extra_body_of,
    missing_tools,
    policy_of,
    sampling_of,
    sent_seed,
)
from hermes_rl.errors import DiskFull, StoreError, UserError, cause_of
from hermes_rl.models.rate import NANO, RUN_USD, Coordinator
from hermes_rl.models.tokens import TokenPlan
from hermes_rl.sandboxes import BuildFailed
from hermes_rl.store import (
    OLD_FILES_S,
    Driver,
    Mirror,
    OpenOptions,
    compute_stats,
    open_mirror,
    open_run,
    read_commit,
    url_of,
    write_stats,
)
from hermes_rl.text import many
from hermes_rl.wiring import reach

if TYPE_CHECKING:
    from batch_runner.images import Images
    from batch_runner.live import LiveGroups


def run_batch(
    config: RunConfig | Mapping[str, Any],
    *,
    progress: Progress | None = None,
    pilot: Pilot | None = None,
) -> Report:
    """Run or resume a dataset. Also works where an event loop is running, as in notebooks.

    Args:
        config: a `RunConfig`, or the same as plain data: `{"dataset": {"path": ...}, ...}`.
        progress: shows the progress; None prints to stderr, and below the cell of a notebook.
        pilot: only these units; the others stay open.

    Raises: UserError for bad input; Outage when an endpoint does not answer at the start;
    StoreError for a run directory that is in use, damaged or of another configuration.
    """
    config, progress = as_config(config), progress or default_progress()
    with _ray_on_this_thread(config):
        return run_sync(arun_batch(config, progress=progress, pilot=pilot))


async def arun_batch(
    config: RunConfig | Mapping[str, Any],
    *,
    progress: Progress | None = None,
    pilot: Pilot | None = None,
    hosts: Hosts | None = None,
    live: LiveGroups | None = None,
    joint: JointRuns | None = None,
) -> Report:
    """`run_batch` for callers with a loop of their own.

    Args:
        hosts: for callers that use the environment, too, so that it is set up once.
        live: passes on groups as they end; see `batch_runner.live`.
        joint: runs at the same time; see `arun_jointly`.
    """
    config = as_config(config)
    url = url_of(config.run.out or "")
    if url is None:
        return await _run_on_disk(config, progress, pilot, hosts, live, joint)
    mirror = await in_thread(open_mirror, url, config.run.lease_s)
    try:
        return await _run_on_disk(config, progress, pilot, hosts, live, joint, mirror)
    finally:
        mirror.close()


async def _run_on_disk(
    config: RunConfig,
    progress: Progress | None,
    pilot: Pilot | None,
    hosts: Hosts | None,
    live: LiveGroups | None,
    joint: JointRuns | None,
    mirror: Mirror | None = None,
) -> Report:
    settings = replace(resolve_settings(config), joint=joint)
    refuse_unpriced(config)
    reader = open_reader(settings)
    await abandonable(reader.check_first_row)  # it may load a dataset for minutes
    probed = await reach(settings.config, settings.keys)
    section = settings.config.run
    options = OpenOptions(
        max_attempts=section.max_attempts,
        retry_failed=section.retry_failed,
        first_epoch=mirror.first_epoch if mirror else 1,
    )
    identity, meta = settings.identity, start_meta(settings)
    async with (
        open_hosts(hosts) as shared,
        await open_run(settings.out, identity, meta, options) as driver,
    ):
        if mirror is not None:
            await in_thread(mirror.claim, driver.epoch)
        kept = await asyncio.to_thread(store_rows, settings.config, driver.run_dir)
        settings = replace(settings, config=kept, hosts=shared)
        reader = open_indexed(settings, driver.run_dir, driver.ledger) or reader
        run = _Run(settings, driver, reader, progress or default_progress(), pilot)
        run.mirror = mirror
        run.manifest["capabilities"] = capabilities(settings.config, probed)
        run.note_tokens(probed.tokens if probed else None)
        if live is None:
            return await run.run()
        run.live, live.tokens = live, run.tokens
        run.plan, run.source = live.make_source(settings, driver, run.sink)
        async with live.opened(lambda: run.coordinator, run.end_at_once, run.interrupt):
            return await run.run()


async def arun_jointly(
    configs: Mapping[str, RunConfig],
    *,
    progress: Progress | None = None,
    budget_usd: float | None = None,
    ray: SharedRay | None = None,
) -> dict[str, Report]:
    """Run several configurations at the same time, with one limit of requests for the models of an
    endpoint, and an equal part of the rollouts in flight for each.

    Args:
        configs: name -> a run.
        progress: shows all runs; None prints to stderr.
        budget_usd: of all runs together, earlier starts included, where all prices are known.
        ray: for callers that run configurations several times; None starts one here if needed.

    Raises: as `arun_batch`, after the other runs have ended their rollouts.
    """
    limits, configs = await asyncio.to_thread(joint_limits, configs, budget_usd)
    with ExitStack() as stack:
        ray = ray or stack.enter_context(SharedRay())
        shown = JointProgress(progress or default_progress(), ray.notes)
        joint = JointRuns(len(configs), limits, ray)
        joint.interrupts = stack.enter_context(catch_signals(joint.drain, joint.end_at_once))
        showing = asyncio.create_task(shown.show())
        runs = [
            joint.one(arun_batch(config, progress=shown.of(name), joint=joint))
            for name, config in configs.items()
        ]
        try:
            ended = await asyncio.gather(*runs, return_exceptions=True)
        finally:
            showing.cancel()
            await asyncio.wait((showing,))
    reports = dict[str, Report]()
    for name, report in zip(configs, ended, strict=True):
        if isinstance(report, BaseException):
            raise report
        # A caller with further rounds must not begin one after Ctrl-C.
        done = joint.interrupts.fired and report.stopped is None
        reports[name] = replace(report, stopped="interrupted") if done else report
    return reports


@contextmanager
def _ray_on_this_thread(config: RunConfig) -> Iterator[None]:
    """Start Ray on this thread when a running loop moves the run to another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    settings = resolve_settings(config)
    workers = choose_workers(settings, may_be_small(settings) and _is_small(settings))
    if workers == 0:
        yield
        return
    with connect_ray(workers):
        yield


def _is_small(settings: Settings) -> bool:
    """Whether the whole dataset is small, including finished units."""
    reader = open_reader(settings)
    return len(reader.take(SMALL_UNITS, SMALL_S)) < SMALL_UNITS and reader.ended


class _Run:
    """One start of a run, which connects its parts."""

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        reader: UnitReader,
        progress: Progress,
        pilot: Pilot | None = None,
    ) -> None:
        self.settings = settings
        self.driver = driver
        self.progress = progress
        self.started = time.monotonic()
        self.manifest: dict[str, Any] = {}
        """Further entries of manifest.json; see `write_manifest`."""
        self.tokens: TokenPlan | None = None
        self.coordinator: Coordinator | None = None
        self.limits: dict[str, Any] = {}
        """Limits and spending after the end; see `summary_as_dict`."""
        self.estimate = 0
        """The approximate number of units until the dataset was read completely."""
        self.monitor = TroubleMonitor(settings.config.endpoint, self._show, self._store_trouble)
        self.work: asyncio.Task[None] | None = None
        self._dispatcher: Dispatcher | None = None
        self.images: Images | None = None
        """Builds of missing images, if any."""
        self.live: LiveGroups | None = None
        """Passes on groups as they end, in a live run."""
        self.mirror: Mirror | None = None
        """Of a run on an object store."""
        self._unmerged = False  # whether merging failed, which is not tried again
        self._unscored = 0  # groups
        self.known = len(driver.ledger)
        """Units of earlier starts."""
        before = driver.ledger.summary.counts
        self.solved_before, self.graded_before = before.get("solved", 0), before.get("graded", 0)
        self.committed = frozenset(driver.run_dir.commit_stems())
        seed = settings.config.agent.base_seed
        self.plan = Plan(reader, driver.ledger, epoch=driver.epoch, seed=seed, pilot=pilot)
        self.sink = Sink(progress)
        window = max(256, 4 * settings.concurrency)
        self.source = RunSource(self.plan, driver, self.sink, window=window)

    async def run(self) -> Report:
        """Run all units, write the files of the driver, and report."""
        if self.mirror is None:
            return await self._run()
        async with self.mirror.running(self.progress.note, self._replaced):
            report = await self._run()
        with self._catch(self.mirror.stop, self.mirror.stop):
            why = await self.mirror.finish()
        if not why or report.stopped == "replaced":
            return report
        stop = Stop("store", why)
        hint = stop.hint(self.settings.config)
        return replace(report, stopped=stop.cause, detail=why, hint=hint)

    def _replaced(self, why: str) -> None:
        """End at once: another driver has the run."""
        self.source.halt(Stop("replaced", why))
        self.end_at_once()

    async def _run(self) -> Report:
        for note in (*self.driver.report.notes(), *missing_tools(self.settings.config)):
            self.progress.note(note)
        run_dir, ledger = self.driver.run_dir, self.driver.ledger
        await asyncio.to_thread(refuse_other_dataset, self.settings, run_dir, ledger)
        await asyncio.to_thread(self._write_start)
        estimate = await asyncio.to_thread(estimate_units, self.settings.config.dataset)
        self.estimate = estimate or 0
        ticker = asyncio.create_task(self._tick())
        try:
            async with open_control(run_dir.path, self._obey):
                await self._run_open_units()
        finally:
            ticker.cancel()
            if self.images is not None:
                await self.images.aclose()
            self.progress.close(self.view())
        left = run_dir.path / CHECKPOINTS
        if self._ended and left.is_dir():  # of units that were given up, or done before a kill
            await asyncio.to_thread(clear, left, lambda unit: ledger.disposition(unit) == "done")
        await self._close_groups()
        stats = await asyncio.to_thread(self._write_end)
        if self.source.stop is None or self.live is not None:  # which its consumer always stops
            await self._tend_at_end()
        return self.report(stats)

    def _catch(self, *on: Callable[[], Any]) -> AbstractContextManager[Interrupts]:
        """Catch Ctrl-C, unless a consumer, or other runs beside this one, do that."""
        return catch_signals(*on, wanted=self.live is None and self.settings.joint is None)

    async def _run_open_units(self) -> None:
        joint = self.settings.joint
        if joint is not None:
            joint.add(self)
        with self._catch(self.drain, self.end_at_once) as interrupts:
            if await self.source.has_work():
                await self._warn_of_network()
                await self._open_images()
                await self._choose_workers()
                await self._run_workers(interrupts)

    def _obey(self, command: str, value: str | None) -> dict[str, Any]:
        """Carry out a command of `hermes-rl ctl`; returns the state. Raises: UserError."""
        source, more = self.source, dict[str, Any]()
        if source.stop is not None and command not in ("state", "drain"):
            raise UserError("the run is ending; run the same command again, then steer that")
        match command:
            case "pause" | "resume":
                source.hold(paused=command == "pause")
            case "drain":
                if source.stop is None:
                    self.drain()
            case "concurrency":
                source.hold(most=count_of(value, self.settings.concurrency))
            case "budget":
                self._set_budget(dollars_of(value))
            case "requeue":
                more["requeued"] = source.requeue(cause_named(value))
            case other if other != "state":
                raise UserError(f"no command {command!r}")
        if command != "state":
            self.progress.note(f"hermes-rl ctl: {command} {value or ''}".rstrip())
        ledgers = self.coordinator.ledgers if self.coordinator is not None else {}
        return {
            "state": "draining" if source.stop else "paused" if source.paused else "running",
            "running": len(source.in_flight),
            "concurrency": source.most or self.settings.concurrency,
            "budget_usd": ledgers[RUN_USD].limit / NANO if RUN_USD in ledgers else None,
            **more,
        }

    def _set_budget(self, dollars: float) -> None:
        if self.coordinator is None or RUN_USD not in self.coordinator.ledgers:
            raise UserError(
                "this start has no budget in dollars, so its calls are not counted against one. "
                "Start it with --budget-usd"
            )
        self.coordinator.ledgers[RUN_USD].limit = round(dollars * NANO)

    async def _tend_at_end(self) -> None:
        """Write a checkpoint, and merge files. A failure, or Ctrl-C, ends only that."""
        ends = threading.Event()
        try:
            await self.driver.write_checkpoint()
            if self._unmerged or not await asyncio.to_thread(self.driver.has_many_small_files):
                return
            self.driver.many_files.set()
            with self._catch(ends.set, ends.set):
                await self._merge_files(ends.is_set)
        except (StoreError, OSError) as error:
            self.progress.note(f"small files were not merged: {error}")

    async def _merge_files(self, ends: Callable[[], bool] = lambda: False) -> None:
        quiet = self.mirror.quiet if self.mirror is not None else None
        await self.driver.merge_files(ends=ends, quiet=quiet)

    async def _merge_while_running(self, ends: Callable[[], bool]) -> None:
        """Merge many small files, and remove old ones. No failure ends the run."""
        while not self._unmerged:
            with suppress(TimeoutError):
                async with asyncio.timeout(OLD_FILES_S):
                    await self.driver.many_files.wait()
            try:
                await self._merge_files(ends)
            except (StoreError, OSError) as error:
                self._unmerged = True
                self.progress.note(f"small files are not merged: {error}")

    async def _warn_of_network(self) -> None:
        """Warn once when tasks need the network and the run has none."""
        dataset, network = self.settings.config.dataset, self.settings.config.sandbox.network
        path = Path(dataset.path).expanduser()
        if network is not False or not path.is_dir():
            return
        # Most datasets have no folders.
        from hermes_rl.task_folders import describe_network_requests

        if wish := await asyncio.to_thread(describe_network_requests, path, dataset.limit):
            self.progress.note(
                f"warning: {wish}, which is off. Use --network on, or --network HOSTS"
            )

    async def _open_images(self) -> None:
        """Prepare builds of the images that tasks need and this machine lacks.

        Raises: UserError when this machine cannot build images.
        """
        if not Path(self.settings.config.dataset.path).expanduser().is_dir():
            return
        from batch_runner.images import Images, find_missing  # most datasets have no images

        builds = await asyncio.to_thread(find_missing, self.settings)
        if builds is None:
            return
        self.source.images = self.images = Images(builds, self.progress.note)
        try:
            await self.images.open()
        except BuildFailed as error:
            if self.source.stop is None:
                raise UserError(f"sandbox.build.aliases: {error}") from error

    async def _choose_workers(self) -> None:
        """Decide where units run, and print the decision."""
        settings = self.settings
        small = may_be_small(settings) and await self.source.fewer_than(SMALL_UNITS, SMALL_S)
        workers = choose_workers(settings, small)
        self.settings = replace(settings, workers=workers)
        if workers:
            self.progress.note(f"starting {many(workers, 'Ray worker')}")
        elif settings.workers is None:
            self.progress.note_for_all(
                f"running in this process: fewer than {SMALL_UNITS} units (--workers N starts Ray)"
            )

    async def _run_workers(self, interrupts: Interrupts) -> None:
        """Start workers and run the units. Ctrl-C while Ray starts cancels the start."""
        config, run_dir, joint = self.settings.config, self.driver.run_dir, self.settings.joint
        limits = None if joint is None else joint.limits
        self.coordinator = await asyncio.to_thread(
            make_coordinator, config, run_dir, self.settings.concurrency, limits
        )
        with ExitStack() as stack:
            try:
                with interrupts.raising_in_blocking_code():
                    wanted = self.settings, self._worker_spec(), self.coordinator
                    opening = open_pool(*wanted, self.driver.commit, self.progress.note)
                    start = stack.enter_context(opening)
            except KeyboardInterrupt:
                return
            if self.source.stop is None:
                await self._run_monitored(start, self.coordinator)

    def _worker_spec(self) -> WorkerSpec:
        settings, driver, run = self.settings, self.driver, self.settings.config.run
        return WorkerSpec(
            run_path=str(driver.run_dir.path.resolve()),
            run_id=driver.run_id,
            epoch=driver.epoch,
            worker=0,
            capacity=settings.concurrency,
            lease_s=run.lease_s,
            publish_every_s=run.publish_every_s,
            config=settings.config.model_dump_json().encode(),
            config_hash=settings.config_hash,
            tokens=self.tokens,
        )

    async def _run_monitored(self, start: StartWorker, coordinator: Coordinator) -> None:
        """Run the units; monitor endpoints, and tend the store, meanwhile."""
        ends = threading.Event()
        jobs = [self.monitor.run(coordinator), self._merge_while_running(ends.is_set)]
        beside = [asyncio.create_task(job) for job in [*jobs, self.driver.write_checkpoints()]]
        try:
            await self._dispatch_all(start)
        finally:
            ends.set()
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            limits = {name: ledger.limit for name, ledger in coordinator.ledgers.items()}
            self.limits = summary_as_dict(coordinator.summary(), limits)
            coordinator.close()

    @property
    def _ended(self) -> bool:
        """Whether no unit is left open; a pilot leaves some."""
        return self.plan.counts.complete and self.source.stop is None and self.plan.pilot is None

    async def _close_groups(self) -> None:
        """Write the groups that are final, except for groups of one member."""
        if self.live is not None:
            await self.live.wait_for_consumer()
            return
        counts, repeats = self.plan.counts, self.settings.config.dataset.repeats
        if repeats == 1 and counts.units <= counts.rows:
            return
        from batch_runner.groups import write_groups  # most runs have no groups

        try:
            size, paid = None if self._ended else self.plan.members_of, self.source.stop is None
            ways = self._catch, self.progress.note
            closed = await write_groups(self.settings, self.driver, *ways, size=size, paid=paid)
        except DiskFull as error:
            self.report_fault("disk", str(error))
            return
        if closed.limits:  # they include the spending of the workers
            lanes = [*self.limits.get("rate_limits", ()), *closed.limits["rate_limits"]]
            self.limits = {**closed.limits, "rate_limits": lanes}
        self._unscored = closed.unscored
        if closed.stop is not None:
            self.source.halt(Stop(cause_of(closed.stop), closed.why))
        elif closed.unscored:
            left = f"{many(closed.unscored, 'group')} could not be scored ({closed.why})"
            self.progress.note(f"{left}; the next start tries them again")

    async def _dispatch_all(self, start: StartWorker) -> None:
        settings = self.settings
        workers, lease_s = settings.workers or 0, settings.config.run.lease_s
        fleet = Fleet(max(1, workers), settings.concurrency, 1 if workers else 0, lease_s)
        dispatcher = self._dispatcher = Dispatcher(start, self.driver, fleet, self)
        self.work = asyncio.create_task(dispatcher.run(self.source))
        try:
            await self.work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            self.source.halt(Stop("interrupted", "interrupted"))

    def note_tokens(self, plan: TokenPlan | None) -> None:
        """Store and print how the run gets token ids, if it uses them."""
        self.tokens = plan
        config = self.settings.config
        sampling = policy_of(config).complete(sampling_of(config.model, sent_seed(config, 0)))
        extra = extra_body_of(config, config.model.name)
        for line in plan.lines(sampling, extra) if plan is not None else ():
            self.progress.note(line)

    def count_requests(self, requests: int, throttled: int) -> None:
        """Count requests. This and the next three methods implement the dispatcher's `Listener`."""
        self.sink.tally.requests += requests
        self.sink.tally.throttled += throttled

    def report_lost_worker(self, writer: str, why: str) -> None:
        """See `Listener`."""
        self.progress.note(f"worker {writer} was lost ({why}); its units run again")
        if self.coordinator is not None:
            self.coordinator.remove(writer)

    def note(self, text: str) -> None:
        """See `Listener`."""
        self.progress.note(text)

    def report_fault(self, cause: str, text: str) -> None:
        """See `Listener`."""
        full = cause == "disk" and "is full" in text
        self.source.halt(Stop(cause, f"the disk of {self.settings.out} is full" if full else text))

    def drain(self) -> None:
        """Handle the first Ctrl-C. Rollouts without any answer are cancelled at once."""
        self.source.halt(Stop("interrupted", "interrupted"))
        if self.images is not None:
            self.images.stop()
        running = len(self.source.in_flight)
        unanswered = bool(self.monitor.troubles) and not self.monitor.answered
        text = "stopping"
        if unanswered:
            text += f": {running} rollouts without any answer are cancelled"
        elif running:
            text += f": {running} running rollouts end first (Ctrl-C again stops at once)"
        self.progress.note(text)
        if unanswered or not (running or self.sink.tally.attempts):
            self.end_at_once()

    def end_at_once(self) -> None:
        """Cancel the running rollouts; finished ones are kept."""
        if self.work is not None:
            self.work.cancel()

    async def interrupt(self, units: Collection[str]) -> None:
        """End the running attempts at these units; they are not retried."""
        if self._dispatcher is not None:
            await self._dispatcher.interrupt(units)

    async def _store_trouble(self, found: tuple[Trouble, ...]) -> None:
        """Store trouble for `status`."""
        more = {**self.manifest, **({"trouble": found} if found else {})}
        with suppress(DiskFull):  # the run raises it, too
            await asyncio.to_thread(write_manifest, self.driver, self.settings, more)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.progress.every_s)
            self._show()

    def _show(self) -> None:
        self.progress.tick(self.view())

    def view(self) -> View:
        """The current state."""
        counts, tally = self.plan.counts, self.sink.tally
        return View(
            units=counts.units if counts.complete else max(counts.units, self.estimate),
            complete=counts.complete,
            ended=counts.done + counts.given_up + tally.done + tally.given_up,
            solved=self.solved_before + tally.solved,
            given_up=counts.given_up + tally.given_up,
            running=len(self.source.in_flight),
            tally=tally,
            rates=self.sink.rates(),
            graded=self.graded_before,
            trouble=tuple(trouble.line for trouble in self.monitor.troubles),
            images=self.images.counts if self.images is not None else None,
        )

    def _write_start(self) -> None:
        run = self.settings.config.run.model_copy(update={"out": self.settings.place})
        text = to_yaml(self.settings.config.model_copy(update={"run": run}))
        self.driver.run_dir.storage.put("run.yaml", text.encode())
        write_manifest(self.driver, self.settings, self.manifest)

    def _write_end(self) -> dict[str, Any]:
        run_dir, ledger = self.driver.run_dir, self.driver.ledger
        for stem in run_dir.commit_stems():
            if stem not in self.committed:
                ledger.summary.merge(read_commit(run_dir, stem).summary)
        counts = self.plan.counts
        plan = {
            "units": counts.units if counts.complete else None,
            "rows": counts.rows if counts.complete else None,
            "bad_rows": counts.bad_rows,
            "left": self._left(),
        }
        try:
            more = {**self.manifest, "plan": plan, **self.limits}
            write_manifest(self.driver, self.settings, more)
            return write_stats(run_dir, ledger, plan)
        except DiskFull as error:
            self.report_fault("disk", str(error))
            return compute_stats(ledger.summary, ledger, plan)

    def _left(self) -> int:
        return self.known - self.plan.counts.known if self.plan.counts.complete else 0

    def report(self, stats: dict[str, Any]) -> Report:
        """The report of this start."""
        counts, tally, ledger = self.plan.counts, self.sink.tally, self.driver.ledger
        done, given_up = counts.done + tally.done, counts.given_up + tally.given_up
        stop, config = self.source.stop, self.settings.config
        still = counts.units - done - given_up if counts.complete else None
        if stop is not None and stop.cause == "interrupted" and (still, self._unscored) == (0, 0):
            stop = None
        return Report(
            path=self.settings.place,
            run_id=self.driver.run_id,
            units=counts.units if counts.complete else None,
            done=done if counts.complete else ledger.done,
            solved=stats["reward"]["solved"],
            graded=stats["reward"]["graded"],
            mean_reward=stats["reward"]["mean"],
            given_up=given_up,
            open=still,
            left=self._left(),
            bad_rows=counts.bad_rows,
            failed_attempts=stats["attempts"]["failed"],
            causes=stats["causes"],
            input_tokens=stats["tokens"]["input_tokens"],
            output_tokens=stats["tokens"]["output_tokens"],
            unknown_calls=stats["calls"]["unknown"],
            cost_usd=stats["cost_usd"],
            unpriced_calls=stats["calls"]["unpriced"],
            seconds=time.monotonic() - self.started,
            resume=self.settings.resume,
            stopped=stop.cause if stop else None,
            detail=stop.explain(config, tally.attempts) if stop else None,
            hint=stop.hint(config) if stop else None,
            given_up_error=tally.given_up_error,
            stats=stats,
            limits=self.limits,
        )
