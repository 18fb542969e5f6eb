"""Rewards for stored rollouts (`env regrade`) and for whole groups (`score_group`).

This work happens outside a run's attempts, so no attempt is journaled. Its model calls are recorded
in the one row that results: a grade or a group.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from hermes_rl import events as ev
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.definitions import sandbox_limits_of
from hermes_rl.errors import CAUSES, HermesError, TaskFault, VerifierFault, cause_of
from hermes_rl.events import EventLog
from hermes_rl.identity import digest, unit_seed
from hermes_rl.models.rate import Share
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rl import faults
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.episodes import (
    EnvEpisode,
    Host,
    OpensHost,
    call_reward,
    check_reward,
    open_host,
)
from hermes_rl.rl.groups import INTERRUPTED, SCORED_AT_ONCE, Gathered, Scoring
from hermes_rl.rl.loading import Opened, env_rows
from hermes_rl.rl.rewards import Rewards
from hermes_rl.rl.view import Rollout
from hermes_rl.rollout import Stage
from hermes_rl.sandboxes import Sandbox, SandboxSnapshot, SandboxSpec
from hermes_rl.sources import read_rows
from hermes_rl.store import Grade, RunDir, decode_metrics
from hermes_rl.tasks import LazyRow, Task
from hermes_rl.text import scrub
from hermes_rl.trajectory import fold
from hermes_rl.usage import UsageTotal
from hermes_rl.verify import Answer, grade_task
from hermes_rl.wiring import RunContext, open_run_context
from hermes_rl.workspaces import WORKSPACES, Workspaces

T = TypeVar("T")

GROUPS_IN_MEMORY = 64
"""Groups whose rollouts are in memory together."""

_ITEM_COLUMNS = (
    *("unit_id", "group_id", "attempt", "repeat", "row_index", "task_id", "task_hash", "seed"),
)
_BEGUN_COLUMNS = (
    *("run_id", "group_id", "member", "repeat", "row_index", "task_id", "task_hash"),
    *("config_hash", "seed", "model", "api_mode", "endpoint"),
)
_GRADE_COLUMNS = ("trajectory_id", "unit_id", "group_id", "run_id", "task_id", "env_name")


def _work_item(row: Mapping[str, Any], task: Task) -> WorkItem:
    """Describe a stored rollout to its environment as an attempt."""
    return WorkItem(**{name: row[name] for name in _ITEM_COLUMNS}, epoch=0, task=task)


class TaskLookup:
    """Finds rows of a dataset or task stream by index. Blocking, for one thread at a time.

    A stream can only be read from its beginning, so ask for indices in roughly rising order: for an
    earlier one the stream is read again. Memory: the rows that are asked for.

    Args:
        rows: begins the stream.
    """

    def __init__(self, rows: Callable[[], Iterator[LazyRow]]) -> None:
        self._begin = rows
        self._rows: Iterator[LazyRow] = rows()
        self._next = 0
        """Index of the next row of the stream."""

    def find(self, indices: Collection[int]) -> dict[int, LazyRow]:
        """Return the rows at these indices; those beyond the end of the stream are absent.

        Raises: UserError when the stream cannot be read.
        """
        found: dict[int, LazyRow] = {}
        if min(indices, default=self._next) < self._next:
            self._rows, self._next = self._begin(), 0
        last = max(indices, default=-1)
        while self._next <= last and (row := next(self._rows, None)):
            self._next = row.index + 1
            if row.index in indices:
                found[row.index] = row
        return found


@dataclass
class _PublishedRows:
    """Finds rows of rollouts by id, one part in memory at a time. Blocking.

    Rollouts that only a regrade could grade are in `failures`. Memory: an entry for each row of the
    run.
    """

    run_dir: RunDir
    _part_of: dict[str, Path] = field(default_factory=dict)

    def find(self, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return those of the rows that are published."""
        import pyarrow.parquet as pq

        if not self._part_of:
            for part in (p for t in ("trajectories", "failures") for p in self.run_dir.parts(t)):
                ids = pq.read_table(part, columns=["trajectory_id"])["trajectory_id"].to_pylist()
                self._part_of |= dict.fromkeys(ids, part)
        found, kept = {}, Workspaces(self.run_dir.path / WORKSPACES)
        for part in sorted({self._part_of[one] for one in wanted if one in self._part_of}):
            table = pq.read_table(part, filters=[("trajectory_id", "in", list(wanted))])
            for row in table.to_pylist():
                row["metrics"] = decode_metrics(row["metrics"])
                found[row["trajectory_id"]] = kept.as_rolled(row)
        return found


@dataclass(frozen=True)
class StoredRollout:
    """One rollout that is to be graded."""

    row: Mapping[str, Any]
    task: Task
    archive: Path | None
    """None for an environment without sandboxes."""
    changes: SandboxSnapshot | None
    """Of what was changed over an image."""
    state: dict[str, Any]
    grade_id: str


@dataclass(frozen=True)
class GradeResult:
    """The result of grading one rollout."""

    grade: Grade
    stop: HermesError | None = None
    """An error that prevents all other grades too: a refused key, an outage, an exhausted
    budget. The grade then has no reward, and shows what was paid for it."""


@dataclass(frozen=True)
class ReadyGroup:
    """A group with what its environment is shown of it."""

    gathered: Gathered
    task: Task | None
    rows: tuple[dict[str, Any], ...]
    """Rows of its members with a reward, in their order."""


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """The result of a verifier or an environment, with its calls and cost."""

    value: T | None
    error: str | None
    """Why there is no value, scrubbed of secrets."""
    stop: HermesError | None
    record: Trajectory
    """The calls with their usage and cost; `metrics` bounds calls of unknown usage."""


class Grader:
    """Grades stored rollouts and scores groups, with an environment or the tasks' own verifiers.

    Args:
        host: None for the tasks' own verifiers.
    """

    def __init__(self, context: RunContext, host: Host | None, run_dir: RunDir) -> None:
        self.host, self.run_dir, self._context = host, run_dir, context
        dataset = context.config.dataset
        self.tasks = TaskLookup(
            functools.partial(read_rows, dataset.path, columns=dataset.map)
            if host is None
            else functools.partial(env_rows, host.opened)
        )
        """Tasks of the run's dataset, or of its environment's stream."""
        self._rows = _PublishedRows(run_dir)

    @property
    def sandboxed(self) -> bool:
        """Whether grading needs a workspace."""
        return self.host is None or self.host.env.config.sandboxed

    @property
    def scores_groups(self) -> bool:
        """Whether the environment scores whole groups."""
        return self.host is not None and scores_groups(self.host.opened)

    @functools.cached_property
    def _identity(self) -> str:
        assert self.host is not None
        return digest(self.host.opened.identity)

    def grade_id(self, task: Task) -> str:
        """Return the identity of what grades a task's rollouts. Blocking."""
        if self.host is not None:
            return self._identity
        verifier = task.verify
        if verifier is None:
            return digest([])
        files = {name: digest(data.hex()) for name, data in verifier.files.items()}
        how = (verifier.score, verifier.image, verifier.timeout_s)
        return digest([verifier.script, files, *how])

    # Stored rollouts

    def pending(self, stored: StoredRollout) -> Grade:
        """Return the grade that is valid until the rollout is graded."""
        return Grade(
            **{name: stored.row[name] for name in _GRADE_COLUMNS},
            grade_id=stored.grade_id,
            reward=None,
            rewards=[],
            metrics={},
            error=INTERRUPTED,
            calls=[],
            usage=UsageTotal(),
            cost_usd=None,
            seconds=0.0,
            graded_at=time.time_ns() // 1000,
        )

    async def grade(self, stored: StoredRollout, recorder: Recorder) -> GradeResult:
        """Grade one rollout; a fault of the grader results in a grade without a reward.

        Args:
            recorder: takes the events of its calls.

        Raises: DiskFull of the recorder.
        """
        began = time.monotonic()
        outcome = await self._record(
            stored.row, recorder, functools.partial(self._grade_workspace, stored)
        )
        graded, record = outcome.value or ev.Graded(reward=None), outcome.record
        grade = msgspec.structs.replace(
            self.pending(stored),
            reward=graded.reward,
            rewards=list(graded.rewards),
            metrics={**record.metrics, **graded.metrics},
            error=outcome.error,
            calls=record.calls,
            usage=record.usage,
            cost_usd=record.cost_usd,
            seconds=time.monotonic() - began,
        )
        return GradeResult(grade, outcome.stop)

    async def _grade_workspace(self, stored: StoredRollout, log: EventLog) -> ev.Graded:
        if stored.archive is None:
            return await self._grade_in(None, stored, log)
        run = self._context
        spec = SandboxSpec(
            lease=f"{run.run_id}-regrade-{stored.row['trajectory_id'][:16]}",
            image=stored.task.image or run.config.sandbox.image,
            limits=sandbox_limits_of(run.config.sandbox.limits, stored.task),
            snapshot=stored.changes,
        )
        sandbox = await run.backend.lease(spec)
        try:
            try:
                await sandbox.unpack(stored.archive)
            except OSError as error:
                raise TaskFault(str(error)) from error
            return await self._grade_in(sandbox, stored, log)
        finally:
            await asyncio.shield(sandbox.aclose())

    async def _grade_in(
        self, sandbox: Sandbox | None, stored: StoredRollout, log: EventLog
    ) -> ev.Graded:
        if self.host is None:
            row = stored.row
            messages = [m if isinstance(m, str) else json.dumps(m) for m in row["messages"]]
            answer = Answer(row["final_response"] or "", lambda: messages)
            item = _work_item(row, stored.task)
            return await grade_task(
                self._context, item, log, sandbox, answer, self._context.budget()
            )
        episode = EnvEpisode(self.host, self._stage(_work_item(stored.row, stored.task), log))
        episode.ctx.state.update(stored.state)
        return await episode.judge(sandbox, Rollout.of_row(stored.row))

    # Whole groups

    async def ready(self, groups: Sequence[Gathered]) -> AsyncGenerator[ReadyGroup, None]:
        """Read what is needed to score these groups, a bounded number of them at a time.

        Args:
            groups: in the order of the dataset.
        """
        for at in range(0, len(groups), GROUPS_IN_MEMORY):
            for ready in await asyncio.to_thread(self._read, groups[at : at + GROUPS_IN_MEMORY]):
                yield ready

    def _read(self, batch: Sequence[Gathered]) -> list[ReadyGroup]:
        wanted = [
            [m.trajectory_id or "" for m in gathered.members if m.why_invalid is None]
            for gathered in batch
        ]
        rows = self._rows.find({one for ids in wanted for one in ids})
        tasks = self.tasks.find({gathered.row_index for gathered in batch})
        ready = []
        for gathered, ids in zip(batch, wanted, strict=True):
            lazy = tasks.get(gathered.row_index)
            if all(one in rows for one in ids):  # else it waits until they are published
                task = lazy.parse().task if lazy else None
                ready.append(ReadyGroup(gathered, task, tuple(rows[one] for one in ids)))
        return ready

    async def score(self, ready: ReadyGroup, recorder: Recorder) -> Scoring:
        """Return the rewards of a group's members; `error` says why there are none now.

        Args:
            recorder: takes the events of its calls.

        Raises: DiskFull of the recorder.
        """
        if ready.task is None or not ready.rows:
            return Scoring()
        outcome = await self._record(
            ready.rows[0], recorder, functools.partial(self._score_group, ready, ready.task)
        )
        rewards: list[Rewards | float | None] | None = None
        if outcome.value is not None:
            units = (row["unit_id"] for row in ready.rows)
            by_unit = dict(zip(units, outcome.value, strict=True))
            rewards = [by_unit.get(member.unit_id) for member in ready.gathered.members]
        kept = rewards is None and outcome.error is None
        return Scoring(
            by="compute_reward" if kept else "score_group",
            rewards=rewards,
            calls=outcome.record.calls,
            usage=outcome.record.usage,
            cost_usd=outcome.record.cost_usd,
            metrics=outcome.record.metrics,
            error=outcome.error,
            stop=outcome.stop,
        )

    async def _score_group(
        self, ready: ReadyGroup, task: Task, log: EventLog
    ) -> list[Rewards] | None:
        """Raises: VerifierFault, ModelError, CostLimit."""
        assert self.host is not None
        env = self.host.env
        members = [Rollout.of_row(row) for row in ready.rows]
        # The group takes the place of a unit: it has a seed of its own.
        group_id = ready.gathered.facts["group_id"]
        seed = unit_seed(self._context.config.agent.base_seed, group_id)
        item = msgspec.structs.replace(
            _work_item(ready.rows[0], task), unit_id=group_id, attempt=0, repeat=0, seed=seed
        )
        ctx = self.host.context(self._stage(item, log))
        value = await call_reward(self.host, env.score_group, ctx, task, members)
        if value is None:
            return None
        scores = list(value) if isinstance(value, Iterable) else None
        if scores is None or len(scores) != len(members):
            what = f"returned {type(value).__name__}; return a list of rewards, or None"
            if scores is not None:
                what = f"returned {len(scores)} rewards for {len(members)} members"
            raise VerifierFault(faults.describe_misuse(env.name, env.score_group, what))
        pairs = zip(scores, members, strict=True)
        return [check_reward(env, env.score_group, one, member.turns) for one, member in pairs]

    # Both

    def _stage(self, item: WorkItem, log: EventLog) -> Stage:
        assert item.task is not None
        return Stage(self._context, item, item.task, log, self._context.budget())

    async def _record(
        self, row: Mapping[str, Any], recorder: Recorder, work: Callable[[EventLog], Awaitable[T]]
    ) -> _Outcome[T]:
        """Do work about a stored rollout and record its calls.

        Args:
            row: of `trajectories`.

        Raises: DiskFull of the recorder.
        """
        log = EventLog(recorder.record)
        key = ev.AttemptKey(unit_id=row["unit_id"], epoch=0, attempt=row["attempt"])
        columns = {name: row[name] for name in _BEGUN_COLUMNS}
        log.record(ev.Begun(**columns, key=key, started_at=time.time(), prompt=""))
        value, error, stop = None, None, None
        try:
            value = await work(log)
        except HermesError as fault:
            error = scrub(self._context.scrub(f"{type(fault).__name__}: {fault}"))
            stop = fault if CAUSES[cause_of(fault)].breaker else None
        ended = ev.Ended(finished_at=time.time(), end_reason="answered")
        return _Outcome(value, error, stop, fold([*log.events, ended]))


@asynccontextmanager
async def open_grader(
    config: RunConfig,
    run_dir: RunDir,
    run_id: str,
    share: Share,
    *,
    concurrency: int = SCORED_AT_ONCE,
    opens: OpensHost = open_host,
    keys: Mapping[str, str] | None = None,
) -> AsyncIterator[Grader]:
    """Open the grader of a run; the policy itself is never called.

    Args:
        config: of the run; without an environment its dataset's verifiers grade.
        share: limiters, and what is left of the run's budgets.
        opens: the environment.
        keys: API keys by variable, as at the start of the run; None finds them. A command that
            prints keys runs only if one is refused.

    Raises: UserError.
    """
    plain = without_policy(config)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            open_run_context(plain, run_id=run_id, concurrency=concurrency, share=share, keys=keys)
        )
        host = None if plain.env is None else await stack.enter_async_context(opens(plain.env))
        yield Grader(context, host, run_dir)


def without_policy(config: RunConfig) -> RunConfig:
    """Return a run's configuration with a policy that is never called and needs no endpoint."""
    data = config.model_dump(mode="json", exclude_unset=True)
    data["model"] = {"name": "noop"}
    for name in ("fallbacks", "places", "tokens", "tokenizer"):
        data.get("endpoint", {}).pop(name, None)
    env, run = config.env, data.get("run", {})
    used = {place.name for place in (env.judge, env.user) if place} if env else set()
    used |= {judge.name for judge in config.scoring.judges}
    for name in ("model_budgets", "model_token_budgets"):
        if name in run:
            run[name] = {model: most for model, most in run[name].items() if model in used}
    return parse_config(data)


def scores_groups(opened: Opened) -> bool:
    """Whether the environment overrides `score_group`."""
    return type(opened.env).score_group is not Environment.score_group
