"""The groups of a live run: which start, when one is complete, and what became of it.

A complete group has a durable row before it is delivered, and an acknowledgement is durable before
`ack` returns, so a kill loses and repeats neither. Rows of members are read from the journal while
it has them (files that are published meanwhile stay open here), else from their Parquet part; so
neither time nor memory depends on the length of the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from batch_runner.budgets import budgets_of, open_budget_share
from batch_runner.live_rows import GroupReader, MemberRows, OpenGroup, Rows, load_state
from batch_runner.plan import Plan, RunSource, Unit
from batch_runner.progress import Sink
from batch_runner.report import Stop
from batch_runner.settings import Settings
from hermes_rl.errors import HermesError, UserError, cause_of
from hermes_rl.identity import group_id, trajectory_id, unit_id
from hermes_rl.models.rate import Coordinator, Orders, Share
from hermes_rl.models.tokens import TokenPlan
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.rl import (
    INTERRUPTED,
    SCORED_AT_ONCE,
    Difficulty,
    Gathered,
    Grader,
    LiveGroup,
    LiveOptions,
    Member,
    ReadyGroup,
    RolloutsStopped,
    Scoring,
    env_rows,
    make_group,
    make_live_group,
    mask_segment,
    open_grader,
    scores_groups,
    solve_rate,
)
from hermes_rl.store import (
    Delivery,
    Derived,
    DerivedWriter,
    Driver,
    Group,
    Place,
    open_derived_writer,
)
from hermes_rl.tasks import Task

_log = logging.getLogger(__name__)

FRUITLESS = 16
"""Groups in a row without a single reward at which a run ends."""


class GroupPlan(Plan):
    """The open units of the stream; tells the groups of every unit, also of those that ended."""

    def __init__(self, reader: GroupReader, driver: Driver, seed: int, live: LiveGroups) -> None:
        super().__init__(reader, driver.ledger, epoch=driver.epoch, seed=seed)
        self.groups = reader
        self._live = live

    def members_of(self, row_index: int) -> int | None:
        """See `Plan`; the stream is read in order, so nothing is kept."""
        return self.groups._repeats

    def extra_item(self, unit: Unit) -> WorkItem | None:
        """Return the work item of a further member; None if that has ended."""
        return super()._item(unit)

    def _item(self, unit: Unit) -> WorkItem | None:
        item = super()._item(unit)
        size = 1 if unit.row.task is None else unit.row.repeats or self.groups._repeats
        if item is not None:
            item = msgspec.structs.replace(item, repeats=size)
        self._live.plan_member(unit, item, size)
        return item


class GroupSource(RunSource):
    """Hands out the members of groups; a new group starts only if the trainer keeps up."""

    def __init__(self, plan: GroupPlan, driver: Driver, sink: Sink, live: LiveGroups) -> None:
        super().__init__(plan, driver, sink)
        self._live = live

    def wake(self) -> None:
        """Look again at what may start."""
        self._changed.set()

    async def has_work(self) -> bool:
        """Whether there is an attempt to make."""
        while not self._live.planned and not self._plan.counts.complete and self.stop is None:
            await self._read()
        return bool(self._live.planned or self._live.starting)

    async def next(self) -> WorkItem | None:
        """See `RunSource`."""
        self._live.pass_on_orders()
        while self.stop is None:
            if not self._live.options.policy.paused:
                item = self._due_retry() or self._live.take()
                if item is not None and item.attempt and self._live.drop_stale(item):
                    continue
                if item is not None:
                    self.in_flight[item.unit_id] = item
                    return item
                if not self._plan.counts.complete and self._live.wants_tasks():
                    await self._read()
                    continue
            if self._is_over():
                if self._left_open_reason is not None:
                    self.halt(Stop("worker_lost", self._left_open_reason))
                return None
            await self._wait()
        return None

    async def _read(self) -> None:
        await super()._read()
        self._buffer.clear()  # the groups have them

    def _is_over(self) -> bool:
        over = self._plan.counts.complete and not self._live.planned and not self._live.starting
        return over and not self._retries and not self.in_flight

    async def receive(self, receipt: Receipt) -> None:
        """See `RunSource`."""
        item = self.in_flight.get(receipt.unit_id)
        await super().receive(receipt)
        if item is None:
            return
        stale = receipt.cause == "interrupted" and self._live.is_stale(item)
        if stale or self._driver.ledger.disposition(receipt.unit_id) != "open":
            self._live.end_member(item, receipt)


class LiveGroups:
    """The groups of one start of a live run (`hermes_rl.rl.LiveRun`)."""

    def __init__(self, options: LiveOptions) -> None:
        self.options = options
        self.planned: dict[str, OpenGroup] = {}
        """Groups that have not started."""
        self.starting: deque[WorkItem] = deque()
        """Members of started groups."""
        self.tokens: TokenPlan | None = None
        """See `LiveRun`."""
        self.ready = asyncio.Event()
        """Set when the run can deliver."""
        curriculum = options.selection.curriculum
        self._difficulty = None if curriculum is None else Difficulty(curriculum)
        self._open: dict[str, OpenGroup] = {}
        self._known: dict[str, Member] = {}
        """Unit -> its member, for groups that an earlier start left incomplete."""
        self._queue: deque[tuple[dict[str, Any], bool]] = deque()
        """Rows of groups to deliver, and whether they were delivered before."""
        self._undecided: dict[str, Delivery] = {}
        """Groups without an acknowledgement, complete or delivered."""
        self._warned = False
        self._fruitless = 0
        """Complete groups without a reward since the last one with some."""
        self._last_error: str | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._left = asyncio.Event()
        self._wanted = 0
        """Groups that the trainer waits for."""
        self._over = False
        self._error: BaseException | None = None
        self._grading = asyncio.Lock()
        self._grader: Grader | None = None
        self._stack = AsyncExitStack()

    # The run

    @property
    def run_id(self) -> str:
        """See `LiveRun`."""
        return self._driver.run_id

    def make_source(
        self, settings: Settings, driver: Driver, sink: Sink
    ) -> tuple[GroupPlan, GroupSource]:
        """Make the plan and the source of the run."""
        opened, dataset = settings.opened, settings.config.dataset
        assert opened is not None
        self._settings, self._driver = settings, driver
        self._scores = scores_groups(opened)
        self._range = opened.env.config.reward_range
        rows = env_rows(opened, dataset.limit)
        reader = GroupReader(rows, settings.config_hash, dataset.repeats, dataset.path)
        self._plan = GroupPlan(reader, driver, settings.config.agent.base_seed, self)
        self.source = GroupSource(self._plan, driver, sink, self)
        return self._plan, self.source

    @asynccontextmanager
    async def opened(
        self,
        coordinator: Callable[[], Coordinator | None],
        end: Callable[[], None],
        interrupt: Callable[[Collection[str]], Awaitable[None]],
    ) -> AsyncIterator[None]:
        """Deliver what earlier starts left, then what the run adds.

        Args:
            coordinator: of the run's budgets, while it has workers.
            end: cancels the running rollouts.
            interrupt: ends the running rollouts of these units.
        """
        driver, every_s = self._driver, self._settings.config.run.publish_every_s
        self._coordinator, self._cancel, self._interrupt = coordinator, end, interrupt
        state = await asyncio.to_thread(load_state, driver, self.options.resume_step)
        self._plan.groups.closed, self._known = state.closed, state.known
        self._rows = MemberRows(driver.run_dir, state.places)
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._end_stale)
            loop.call_soon_threadsafe(self.source.wake)

        async with AsyncExitStack() as self._stack:
            writer = open_derived_writer(
                driver.run_dir, driver.epoch, every_s=every_s, commit=driver.commit
            )
            self._writer: DerivedWriter = await self._stack.enter_async_context(writer)
            policy = self.options.policy
            policy.listeners.append(wake)
            policy.behind.append(self._behind)
            self._stack.callback(policy.behind.remove, self._behind)
            self._stack.callback(policy.listeners.remove, wake)
            self._stack.callback(self._rows.close)
            if state.reopened:
                await self._writer.add(Derived(deliveries=tuple(state.reopened)))
            for level, rate in state.results:
                if self._difficulty is not None:
                    self._difficulty.record(level, rate)
            for row in state.pending:
                self._undecided[row["group_id"]] = self._delivery_of(row, -1, None)
                self._queue.append((row, True))
            self.ready.set()
            yield

    async def wait_for_consumer(self) -> None:
        """Return when the consumer has left. Nothing runs any more."""
        while self._closing:
            await asyncio.wait(self._closing)
        self._over = True
        self._changed.set()
        await self._left.wait()

    def pass_on_orders(self) -> None:
        """Tell the workers of pauses and new weights."""
        policy, coordinator = self.options.policy, self._coordinator()
        if coordinator is not None:
            coordinator.orders = lambda model: (
                Orders(policy.paused, policy.announced) if model == policy.model else Orders()
            )

    def _behind(self) -> list[str]:
        coordinator = self._coordinator()
        return [] if coordinator is None else coordinator.behind(self.options.policy.model)

    def leave(self) -> None:
        """The consumer leaves: running rollouts are cancelled, and their groups stay open."""
        self._left.set()
        self.source.halt(Stop("interrupted", "the stream was closed"))
        self._cancel()

    # What starts

    def plan_member(self, unit: Unit, item: WorkItem | None, size: int) -> None:
        """Take a unit of the stream; `item` is None for one that ended in an earlier start."""
        name = group_id(self._plan.groups.config_hash, unit.row.task_hash, unit.occurrence)
        group = self._open.get(name)
        if group is None:
            curriculum = self.options.selection.curriculum
            level = None if curriculum is None else curriculum.level_of(unit.row.task)
            group = OpenGroup(unit, name, size, level)
            self._open[name] = self.planned[name] = group
        group.seen += 1
        if item is not None:
            group.waiting.append(item)
        else:
            known = Member(unit.repeat, unit.unit_id, None, None, "driver_lost")
            group.members[unit.repeat] = self._known.pop(unit.unit_id, known)
        if group.seen == group.size and not group.waiting:
            del self.planned[name]
            self._refill_or_close(group)

    def wants_tasks(self) -> bool:
        """Whether further tasks of the stream are needed."""
        curriculum = self.options.selection.curriculum
        window = 1 if curriculum is None else curriculum.window
        return self._keeps_up() and len(self.planned) < window

    def _keeps_up(self) -> bool:
        """Whether the trainer keeps up with the groups, or waits for one more."""
        started = sum(group.started for group in self._open.values())
        complete = len(self._queue) + len(self._closing)
        most, open_groups = self.options.max_unacknowledged, len(self._undecided)
        if open_groups + len(self._closing) + started >= most:
            if open_groups >= most and not self._warned:
                self._warned = True
                _log.warning(
                    "no further group starts: %d groups are neither acknowledged nor rejected. Call"
                    " group.ack or group.reject, or set max_unacknowledged",
                    open_groups,
                )
            return False
        if self.options.ahead:
            return complete < self.options.ahead
        return complete + started < self._wanted

    def take(self) -> WorkItem | None:
        """Return the next member; None if none may start now."""
        free = not self.starting and self._keeps_up() and self._may_start()
        if free and (group := self._choose()) is not None:
            del self.planned[group.group_id]
            group.started, group.version = True, self.options.policy.version
            first = self.options.selection.early_stop
            if first is not None and first < group.size:
                group.early = first
                first = max(0, first - len(group.members))
            else:
                first = len(group.waiting)
            self._start(group, first)
            if group.early and not self.starting:
                self._continue_or_end(group)
        return self.starting.popleft() if self.starting else None

    def _may_start(self) -> bool:
        """Whether no group in progress is so old that it should end first."""
        started = (group.version for group in self._open.values() if group.started)
        oldest = min((version for version in started if version is not None), default=None)
        now = self.options.policy.version
        return self.options.staleness.decide("start", now, oldest) == "start"

    def _end_stale(self) -> None:
        """End the groups that are too old since the last update, and their running rollouts."""
        now, staleness = self.options.policy.version, self.options.staleness
        for group in [*self._open.values()]:
            if not group.started or group.stale is not None:
                continue
            if staleness.decide("update", now, group.version) == "end":
                group.stale, group.early = staleness.why(now, group.version), 0
                started = [i for i in self.starting if i.group_id != group.group_id]
                group.extra -= len(group.waiting) + len(self.starting) - len(started)
                self.starting, group.waiting = deque(started), []
                if len(group.members) == group.size + group.extra:
                    self._close(group, group.stale)
                    continue
                running = self.source.in_flight.values()
                units = [item.unit_id for item in running if item.group_id == group.group_id]
                self._background(self._interrupt(units))

    def is_stale(self, item: WorkItem) -> bool:
        """Whether the group of a member has become too old, and ends."""
        group = self._open.get(item.group_id)
        return group is not None and group.stale is not None

    def drop_stale(self, item: WorkItem) -> bool:
        """Whether a retry is not made, because its group has ended."""
        if not self.is_stale(item):
            return False
        self._end(
            self._open[item.group_id], Member(item.repeat, item.unit_id, None, None, "interrupted")
        )
        return True

    def _start(self, group: OpenGroup, count: int) -> None:
        self.starting.extend(group.waiting[:count])
        del group.waiting[:count]

    def _choose(self) -> OpenGroup | None:
        """Return the group that starts next."""
        whole = {n: group for n, group in self.planned.items() if group.seen == group.size}
        if not whole:
            return None
        if self._difficulty is None:
            return next(iter(whole.values()))
        best = self._difficulty.choose({n: group.level for n, group in whole.items()})
        for name, group in whole.items():
            if name == best:
                break
            group.passed += 1
            if group.passed > self._difficulty.curriculum.window and not group.members:
                self._skip(group)
        return whole[best]

    def _skip(self, group: OpenGroup) -> None:
        del self.planned[group.group_id], self._open[group.group_id]
        why = f"curriculum: other levels were preferred to {group.level}"
        self._background(self._store(self._delivery_of_open(group), "skipped", why))

    # What ends

    def end_member(self, item: WorkItem, receipt: Receipt) -> None:
        """Record the end of a member that is not retried."""
        group = self._open[item.group_id]
        name = trajectory_id(receipt.unit_id, receipt.epoch, receipt.attempt)
        ok, judged = receipt.status == "ok", receipt.reward is not None
        self._last_error = receipt.error or self._last_error
        why = None if ok and judged else "not graded" if ok else str(receipt.cause)
        member = Member(
            index=item.repeat,
            unit_id=receipt.unit_id,
            trajectory_id=name if ok else None,
            reward=receipt.reward if ok else None,
            why_invalid=why,
            unjudged=name if receipt.cause == "verifier" else None,
        )
        if ok and receipt.stem is not None:
            self._rows.note(name, Place(stem=receipt.stem, offset=receipt.offset))
        self._end(group, member)

    def _end(self, group: OpenGroup, member: Member) -> None:
        group.members[member.index] = member
        if len(group.members) == group.size + group.extra:
            self._refill_or_close(group)
        elif group.early and group.waiting and len(group.members) == group.early:
            self._continue_or_end(group)

    def _refill_or_close(self, group: OpenGroup) -> None:
        """Start members in place of those that failed, or close the group."""
        if group.stale is not None:
            self._close(group, group.stale)
            return
        invalid = {m.why_invalid for m in group.members.values() if m.reward is None} - {"task"}
        missing = group.size - sum(m.reward is not None for m in group.members.values())
        while invalid and missing and group.extra < self.options.selection.refill:
            repeat, row = group.size + group.extra, group.item.row
            group.extra += 1
            unit = unit_id(self._plan.groups.config_hash, row.task_hash, 0, repeat)
            item = self._plan.extra_item(Unit(unit, row, 0, repeat))
            if item is None:
                lost = Member(repeat, unit, None, None, "driver_lost")
                group.members[repeat] = self._known.pop(unit, lost)
                missing -= group.members[repeat].reward is not None
            else:
                self.starting.append(item)
                missing -= 1
        if len(group.members) == group.size + group.extra:
            self._close(group)
        self.source.wake()

    def _continue_or_end(self, group: OpenGroup) -> None:
        """Start the other members, unless the first ones show that the group is refused."""
        rewards = [member.reward for member in group.members.values()]
        why = self.options.selection.ends_early(rewards, group.size)
        group.early = 0
        if why is None:
            self._start(group, len(group.waiting))
            self.source.wake()
        else:
            self._close(group, why)

    def _close(self, group: OpenGroup, why: str | None = None) -> None:
        del self._open[group.group_id]
        self._background(self._finish(group, why))

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._error is None:
            self._error = error
            cause = cause_of(error) if isinstance(error, HermesError) else "harness"
            self.source.halt(Stop(cause, str(error)))
        self.source.wake()
        self._changed.set()

    async def _finish(self, group: OpenGroup, why: str | None) -> None:
        """Write the row of a group, and deliver or reject it."""
        settings, opened = self._settings, self._settings.opened
        assert opened is not None
        gathered = Gathered(
            {
                "group_id": group.group_id,
                "run_id": self._driver.run_id,
                "task_id": group.task_id,
                "task_hash": group.item.row.task_hash,
                "env_name": opened.env.name,
                "split": opened.section.split,
            },
            tuple(group.members[index] for index in sorted(group.members)),
            group.row_index,
        )
        row = make_group(gathered)
        if self._scores and why is None and settings.hosts is not None:
            scored = await self._score(gathered, group.task)
            if scored is None:
                self._note_yield(0)
                return
            row = scored
        if why is None:
            self._note_yield(row.n_valid)
        why = why or self.options.selection.refuse(row, self._range)
        delivery = self._delivery_of(row, group.row_index, group.level)
        if self._difficulty is not None:
            self._difficulty.record(group.level, delivery.solve_rate)
        rejected = msgspec.structs.replace(delivery, event="rejected", reason=why)
        await self._writer.add(
            Derived(groups=(row,), deliveries=() if why is None else (rejected,))
        )
        self._driver.ledger.forget(row.unit_ids)
        if why is not None:
            self._rows.drop(row.trajectory_ids)
            self._counts[f"rejected {why.partition(':')[0]}"] += 1
            return
        self._undecided[group.group_id] = delivery
        self._queue.append((msgspec.structs.asdict(row), False))

    async def _score(self, gathered: Gathered, task: Task | None) -> Group | None:
        """Return the row of a group that its environment scores; None when it cannot now."""
        grader = await self._open_grader()
        ids = [m.trajectory_id for m in gathered.members if m.trajectory_id and not m.why_invalid]
        found = await asyncio.to_thread(self._rows.read, ids)
        ready = ReadyGroup(gathered, task, tuple(found[one].row for one in ids))
        cut = make_group(gathered, Scoring(by="score_group", error=INTERRUPTED))
        pending = self._writer.begin(Derived(groups=(cut,)))
        scoring = await grader.score(ready, pending)
        row = make_group(gathered, scoring)
        if scoring.error is None:
            await self._writer.add(None, pending)
            return row
        await self._writer.add(Derived(groups=(row,)), pending)
        self._rows.drop(row.trajectory_ids)
        self._counts["unscored"] += 1
        if scoring.error != self._last_error:
            _log.warning("the group of task %s was not scored: %s", row.task_id, scoring.error)
        self._last_error = scoring.error
        if scoring.stop is not None:
            self.source.halt(Stop(cause_of(scoring.stop), scoring.error))
        return None

    def _note_yield(self, rewards: int) -> None:
        """Note the rewards of a complete group. Many groups in a row without any end the run: a
        broken environment would use up its tasks, and an endless one never end."""
        self._fruitless = 0 if rewards else self._fruitless + 1
        if self._fruitless == FRUITLESS:
            why = f"{FRUITLESS} groups in a row got no reward, the last one: {self._last_error}"
            self.source.halt(Stop("verifier", why))

    async def _open_grader(self) -> Grader:
        async with self._grading:
            if self._grader is None:
                settings, driver = self._settings, self._driver
                config, coordinator = settings.config, self._coordinator()
                assert settings.hosts is not None
                if coordinator is None:  # nothing is left to roll out
                    opening = open_budget_share(config, driver.run_dir, SCORED_AT_ONCE, {})
                    share = await self._stack.enter_async_context(opening)
                else:
                    share = Share("driver", tuple(budgets_of(config)))
                    sharing = share.coordinated(coordinator.handle)
                    await self._stack.enter_async_context(sharing)
                grader = open_grader(
                    config, driver.run_dir, driver.run_id, share,
                    opens=settings.hosts.open, keys=settings.keys,
                )  # fmt: skip
                self._grader = await self._stack.enter_async_context(grader)
            return self._grader

    # The consumer

    async def next(self) -> LiveGroup | None:
        """See `hermes_rl.rl.LiveRun`."""
        while (found := await self._next()) is not None:
            policy, staleness = self.options.policy, self.options.staleness
            oldest = found.versions[0] if found.versions else None
            what = staleness.decide("deliver", policy.version, oldest)
            if what == "reject":
                why = staleness.why(policy.version, oldest)
                await self.decide(found.group_id, "rejected", reason=why)
                continue
            self._counts["delivered"] += 1
            if what != "mask" or policy.version is None:
                return found
            least = policy.version - staleness.max_lag
            masked = [
                replace(m, segments=[mask_segment(s, least) for s in m.segments])
                for m in found.members
            ]
            return replace(found, members=masked)
        return None

    async def _next(self) -> LiveGroup | None:
        """Return the next complete group; None after the last one."""
        self._wanted += 1
        self.source.wake()
        try:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                if self._over:
                    self._raise_stop()
                    if self._counts and not self._counts["delivered"]:
                        _log.warning("the tasks ended without a group: %s", self.counts())
                    return None
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._wanted -= 1
        row, again = self._queue.popleft()
        self.source.wake()
        ids = [one for one in row["trajectory_ids"] if one is not None]
        try:
            found: Rows = await asyncio.to_thread(self._rows.read, ids)
        except asyncio.CancelledError:  # the consumer waited with a time limit
            self._queue.appendleft((row, again))
            self._changed.set()
            raise
        self._rows.drop(ids)
        rows, kind = {one: found[one].decoded() for one in ids}, self.options.advantage
        return make_live_group(row, rows, advantage=kind, again=again, handle=self)

    def _raise_stop(self) -> None:
        stop = self.source.stop
        if stop is not None and not self._left.is_set():
            config = self._settings.config
            text = stop.explain(config, sum(self._counts.values()))
            raise RolloutsStopped(f"{text}. {stop.hint(config)}")

    def end(self, work: asyncio.Task[Any]) -> None:
        """The run has ended, with an error if it failed."""
        self._over = True
        if not work.cancelled() and self._error is None:
            self._error = work.exception()
        self._changed.set()

    async def decide(
        self, group_id: str, event: str, *, reason: str | None = None, step: int | None = None
    ) -> None:
        """See `hermes_rl.rl.LiveRun`. Raises: UserError after the end of the stream."""
        if self._left.is_set():
            raise UserError("the stream is closed; the next start delivers this group again")
        if (delivery := self._undecided.get(group_id)) is not None:
            await self._store(delivery, event, reason, step)

    def counts(self) -> dict[str, int]:
        """See `hermes_rl.rl.LiveRun`."""
        return dict(self._counts)

    async def _store(
        self, delivery: Delivery, event: str, reason: str | None, step: int | None = None
    ) -> None:
        now = time.time_ns() // 1000
        made = msgspec.structs.replace(
            delivery, event=event, reason=reason, step=step, created_at=now
        )
        self._undecided.pop(delivery.group_id, None)
        try:
            await self._writer.add(Derived(deliveries=(made,)))
        except BaseException:
            self._undecided[delivery.group_id] = delivery
            raise
        self._counts[event] += 1
        self.source.wake()

    def _delivery_of_open(self, group: OpenGroup) -> Delivery:
        row = {"group_id": group.group_id, "task_id": group.task_id, "rewards": []}
        return self._delivery_of(row, group.row_index, group.level)

    def _delivery_of(
        self, row: dict[str, Any] | Group, row_index: int, level: str | None
    ) -> Delivery:
        columns = msgspec.structs.asdict(row) if isinstance(row, Group) else row
        return Delivery(
            group_id=columns["group_id"],
            run_id=self._driver.run_id,
            task_id=columns["task_id"],
            row_index=row_index,
            event="",
            reason=None,
            step=None,
            level=level,
            solve_rate=solve_rate(columns["rewards"], self._range),
            created_at=time.time_ns() // 1000,
        )
