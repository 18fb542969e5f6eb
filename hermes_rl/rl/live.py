"""Rollouts that feed a trainer while it learns: complete groups as soon as their last member ends.

    async with rollouts("my_env", Policy(model="m", base_url=URL), out="runs/live") as stream:
        async for group in stream:
            ...                       # group.members: rewards, advantages, segments
            await group.ack(step=3)   # durable

The rollouts are a run: `out` is a run directory with all of its promises. The batch runner, which
is above this package and is found by name, runs them in this process or on Ray.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import operator
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from hermes_rl.aio import LoopThread
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.errors import HermesError, UserError
from hermes_rl.input_errors import check_fields
from hermes_rl.models.rate import Announced
from hermes_rl.models.tokens import TokenPlan
from hermes_rl.record import Segment
from hermes_rl.rl.environment import EnvConfig, Environment
from hermes_rl.rl.loading import name_environment
from hermes_rl.rl.selection import Selection
from hermes_rl.rl.staleness import Staleness

Advantage = Literal["grpo", "rloo", "dr_grpo"]
_RUNNER = "batch_runner"
_HOLD_S = 0.01
MAX_UNACKNOWLEDGED = 10_000
WARN_S = 3.0
"""Seconds after which `pause` names the workers that it waits for."""
_log = logging.getLogger(__name__)


class RolloutsStopped(HermesError):
    """No rollouts can be made at present: a refused key, an exhausted budget, a full disk."""


def _whole(value: Any, what: str) -> int | None:
    """As `_number`; None stays."""
    return None if value is None else _number(value, what)


def _number(value: Any, what: str) -> int:
    """A whole number from 0, also one of NumPy or a tensor. Raises: UserError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UserError(f"{what} must be a whole number from 0 on, not {value!r}")
    return number


def _reason(reason: Any) -> str:
    """Raises: UserError if there is none."""
    text = "" if reason is None else str(reason).strip()
    if not text:
        raise UserError(f"reason must say why the group is not used, not {reason!r}")
    return text


class Policy:
    """The sampler whose rollouts are wanted.

    Args:
        model: its name at the endpoint; `oracle` plays the tasks' own solutions.
        base_url: of an OpenAI-compatible endpoint.
        api_key_env: variable with the key.
        tokens, tokenizer: how token ids are got; see docs/exact-tokens.md.
        version: of the weights that the sampler has now.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = None,
        tokens: str = "auto",
        tokenizer: str | Path | None = None,
        version: int | None = None,
    ) -> None:
        self.model, self.version = model, _whole(version, "version")
        self.endpoint: dict[str, Any] = {"base_url": base_url, "api_key_env": api_key_env}
        self.endpoint |= {"tokens": tokens, "tokenizer": tokenizer and str(tokenizer)}
        self.endpoint = {name: value for name, value in self.endpoint.items() if value is not None}
        self.paused = False
        self.listeners: list[Callable[[], None]] = []
        """Called after each change, on the thread of the change."""
        self.behind: list[Callable[[], list[str]]] = []
        """Each returns the workers of a run that do not obey yet."""
        self.announced = Announced(version=None if version is None else str(self.version))
        """What the workers know of the weights."""

    async def set_version(self, version: int, *, in_pause: bool = True) -> None:
        """Note the version of the weights that the sampler has now: call it after they are loaded.

        Tokens have the version that the engine names. It is certain for a whole answer only if this
        one, or an earlier answer, named it before the request. An engine that names none is
        believed to have this one, if it was set in a pause; in a pause it is set when all workers
        know of it.

        Args:
            in_pause: False for what another program reports: the weights came at another time, and
                may be earlier ones.

        Raises: UserError for anything but a whole number, and for a version below the last one
            while a stream is open.
        """
        self.version = self._next_version(version, may_fall=not in_pause)
        self.announced = Announced(version=str(self.version), complete=self.paused and in_pause)
        self._notify()
        if self.paused:
            await self._obeyed("set_version")

    def _next_version(self, version: Any, *, may_fall: bool) -> int:
        """Raises: UserError."""
        number, last = _number(version, "version"), self.version or 0
        if number < last and self.listeners and not may_fall:
            raise UserError(
                f"policy.set_version({number}) after version {last}: versions increase while"
                f" rollouts() is open. After a rollback, open it again with resume_step, or call"
                f" these weights {last + 1}"
            )
        return number

    async def pause(self) -> None:
        """Start no model calls and no further rollouts, for example while weights are loaded.

        On return, no further request of the policy starts in any worker. Requests in flight
        continue until the engine ends or cuts them; what it cuts continues after `resume`.
        """
        self.paused = True
        self._notify()
        await self._obeyed("pause")

    async def _obeyed(self, what: str) -> None:
        """Return when all workers obey: they report several times a second. One that is silent for
        its lease (30 s) is replaced; until then it is waited for."""
        began, warned = time.monotonic(), False
        while self.paused and (names := [name for one in self.behind for name in one()]):
            if not warned and time.monotonic() - began > WARN_S:
                warned = True
                shown = ", ".join(sorted(set(names)))
                _log.warning("policy.%s waits for workers that do not report: %s", what, shown)
            await asyncio.sleep(_HOLD_S)

    async def resume(self) -> None:
        """Start model calls and rollouts again."""
        self.paused = False
        self._notify()

    def _notify(self) -> None:
        for listener in list(self.listeners):
            listener()


@dataclass(frozen=True)
class LiveMember:
    """One rollout of a group."""

    index: int
    unit_id: str
    trajectory_id: str | None
    """None if it was given up."""
    reward: float | None
    valid: bool
    why_invalid: str | None
    advantage: float | None
    """Of the kind that was asked for; None if it is not valid."""
    trajectory: dict[str, Any] | None
    """Its row, with decoded JSON columns."""
    segments: list[Segment]
    """Its token-exact branches; empty without exact tokens. The advantage is that of the rollout:
    all its trained tokens share it."""


@dataclass(frozen=True)
class GroupData:
    """A complete group."""

    group_id: str
    task_id: str
    row_index: int
    """Position of its task in the stream."""
    members: list[LiveMember]
    mean: float | None
    std: float | None
    row: dict[str, Any] = field(repr=False)
    """Its row of table `groups`."""
    again: bool
    """It was delivered before, and not acknowledged."""
    handle: LiveRun = field(repr=False)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The least and the greatest policy version of its sampled tokens, where known."""
        known = [
            version
            for member in self.members
            for segment in member.segments
            for version, sampled in zip(segment.version_ids, segment.sampled_mask, strict=True)
            if sampled and version >= 0
        ]
        return (min(known), max(known)) if known else None


class LiveGroup(GroupData):
    """A group of `rollouts()`."""

    async def ack(self, step: int | None = None) -> None:
        """Record that the trainer has used the group. Durable on return; twice is like once.

        Args:
            step: of the trainer; a later start with `resume_step` below it delivers the group
                again.

        Raises: DiskFull; UserError for a wrong step, and after the end of the stream.
        """
        await self.handle.decide(self.group_id, "acknowledged", step=_whole(step, "step"))

    async def reject(self, reason: str) -> None:
        """Record that the trainer does not use the group, and why. Durable on return."""
        await self.handle.decide(self.group_id, "rejected", reason=_reason(reason))


class SyncGroup(GroupData):
    """A group of `rollouts().sync()`."""

    home: LoopThread

    def ack(self, step: int | None = None) -> None:
        """See `LiveGroup.ack`."""
        whole = _whole(step, "step")
        self.home.run(self.handle.decide(self.group_id, "acknowledged", step=whole))

    def reject(self, reason: str) -> None:
        """See `LiveGroup.reject`."""
        self.home.run(self.handle.decide(self.group_id, "rejected", reason=_reason(reason)))


class LiveRun(Protocol):
    """The run under a stream."""

    tokens: TokenPlan | None
    """How it gets token ids; None without an endpoint."""

    @property
    def run_id(self) -> str:
        """Of its run directory."""

    async def next(self) -> LiveGroup | None:
        """Return the next group; None after the last one. Raises: RolloutsStopped and others."""

    async def decide(
        self, group_id: str, event: str, *, reason: str | None = None, step: int | None = None
    ) -> None:
        """Record what became of a group, `acknowledged` or `rejected`; the first call counts."""

    def counts(self) -> dict[str, int]:
        """Return counts of groups by what became of them in this start."""


@dataclass(frozen=True)
class LiveOptions:
    """What a stream asks of its run."""

    policy: Policy
    selection: Selection
    advantage: Advantage
    ahead: int
    resume_step: int | None
    staleness: Staleness = field(default_factory=lambda: Staleness("none"))
    max_unacknowledged: int = MAX_UNACKNOWLEDGED

    def __post_init__(self) -> None:
        object.__setattr__(self, "resume_step", _whole(self.resume_step, "resume_step"))
        check_fields(self, "rollouts")
        if self.ahead < 0:
            raise UserError("ahead must be at least 0")
        if self.max_unacknowledged < 1:
            raise UserError("max_unacknowledged must be at least 1")


class Runner(Protocol):
    """What the batch runner offers to this package."""

    def open_live(
        self, config: RunConfig, options: LiveOptions
    ) -> AbstractAsyncContextManager[LiveRun]:
        """Start a run and pass on its groups; ends it at exit."""

    def connect_ray(self, workers: int) -> AbstractAsyncContextManager[object]:
        """Connect to Ray on this thread."""


class RolloutStream:
    """An async context manager and iterator over groups; made by `rollouts`."""

    def __init__(self, config: RunConfig, options: LiveOptions) -> None:
        self.config, self._options = config, options
        self._stack = AsyncExitStack()
        self._run: LiveRun | None = None

    async def __aenter__(self) -> Self:
        runner: Runner = importlib.import_module(_RUNNER)
        opening = runner.open_live(self.config, self._options)
        self._run = await self._stack.enter_async_context(opening)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def __aiter__(self) -> AsyncIterator[LiveGroup]:
        return self

    async def __anext__(self) -> LiveGroup:
        group = await self.run.next()
        if group is None:
            raise StopAsyncIteration
        return group

    @property
    def run(self) -> LiveRun:
        """The run under it. Raises: UserError outside of `async with`."""
        if self._run is None:
            raise UserError(
                "rollouts(...) is not open. Use `async with rollouts(...) as stream`, or"
                " `with rollouts(...).sync() as stream`"
            )
        return self._run

    def require_ids(self) -> TokenPlan:
        """Return how the run gets token ids. Raises: UserError if it gets none."""
        plan = self.run.tokens
        if plan is None or not plan.exact:
            why = (plan and plan.why) or "this model gives no token ids"
            raise UserError(f"a trainer needs exact tokens: {why} (docs/exact-tokens.md)")
        return plan

    def counts(self) -> dict[str, int]:
        """Return counts of groups by what became of them in this start."""
        return self.run.counts()

    def sync(self) -> SyncRollouts:
        """Return the same for synchronous code: `with rollouts(...).sync() as stream`."""
        return SyncRollouts(self)


class SyncRollouts:
    """A stream for synchronous trainers; its rollouts run on a thread of their own."""

    def __init__(self, stream: RolloutStream) -> None:
        self._stream, self._stack = stream, ExitStack()
        self._home: LoopThread | None = None

    def __enter__(self) -> Self:
        workers = self._stream.config.run.workers
        if workers:  # Ray starts on the thread of the caller
            ray = importlib.import_module(_RUNNER).connect_ray(workers)
            self._stack.enter_context(ray)
        self._home = self._stack.enter_context(LoopThread("hermes-rl-rollouts"))
        self._stack.callback(self._home.run, self._stream.__aexit__())
        try:
            self._home.run(self._stream.__aenter__())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[SyncGroup]:
        run, home = self._stream.run, self._home
        assert home is not None
        while (group := home.run(run.next())) is not None:
            made = SyncGroup(**vars(group))
            object.__setattr__(made, "home", home)
            yield made

    def counts(self) -> dict[str, int]:
        """See `RolloutStream.counts`."""
        return self._stream.counts()


def rollouts(
    env: str | Path | type[Environment[Any]] | Environment[Any],
    policy: Policy,
    *,
    out: str | Path,
    group_size: int = 8,
    concurrency: int = 64,
    seed: int = 0,
    workers: int = 0,
    split: str = "train",
    limit: int | None = None,
    advantage: Advantage = "grpo",
    ahead: int | None = None,
    max_unacknowledged: int = MAX_UNACKNOWLEDGED,
    selection: Selection | None = None,
    resume_step: int | None = None,
    staleness: Staleness | None = None,
    config: Mapping[str, Any] | None = None,
) -> RolloutStream:
    """Roll out an environment and yield complete groups, with advantages and segments.

    Args:
        env: an environment, its class, a name, or `file.py:Class`.
        out: run directory. The same call continues it: groups that were not acknowledged come
            first, in their order.
        group_size: rollouts of each task.
        concurrency: rollouts in flight.
        seed: of the task stream and of sampling.
        workers: Ray workers; 0 runs in this process.
        limit: tasks of the stream; None is all, also of an endless stream.
        advantage: the kind in `member.advantage`.
        ahead: complete groups that wait for the trainer, at most; no new group starts beyond that.
            0 starts a group only when the trainer waits for one.
        max_unacknowledged: groups without `ack` and `reject`; at that number no new group starts.
        selection: which groups are delivered.
        resume_step: the step of the checkpoint that the trainer was restored from. Groups that were
            acknowledged with a later step are delivered again.
        staleness: what becomes of groups that are older than `policy.version`; None delivers all.
        config: further sections of the run's configuration, such as `{"sandbox": {...}}`.

    Raises: UserError; StoreError for a run of another configuration.
    """
    _check_places(policy, out)
    section = {**_env_section(env), "split": split, "seed": seed, "mode": "live"}
    data: dict[str, Any] = {
        "dataset": {"limit": limit, "repeats": group_size},
        "model": {"name": policy.model},
        "agent": {"seed": seed},
        "endpoint": policy.endpoint,
        "run": {"out": str(out), "workers": workers, "concurrency": concurrency},
        "env": section,
    }
    parsed = parse_config(_merge(data, config or {}), "rollouts")
    size = parsed.dataset.repeats
    waiting = max(2, 2 * -(-(parsed.run.concurrency or 64) // size)) if ahead is None else ahead
    old = Staleness("none") if staleness is None else staleness
    chosen = Selection() if selection is None else selection
    options = LiveOptions(policy, chosen, advantage, waiting, resume_step, old, max_unacknowledged)
    _check_size(size, options.selection.min_valid)
    return RolloutStream(parsed, options)


def _check_size(size: int, least: int) -> None:
    """Raises: UserError."""
    if size < least:
        raise UserError(
            f"group_size {size} is less than selection.min_valid {least}, so no group would be"
            " delivered. Change one of them"
        )


def _check_places(policy: Any, out: Any) -> None:
    """Raises: UserError."""
    if not isinstance(policy, Policy):
        raise UserError(f"policy: {policy!r} is not a hermes_rl.rl.Policy(model=..., base_url=...)")
    if not isinstance(out, str | Path):
        raise UserError(f"out: {out!r} is not a folder")


def _env_section(env: str | Path | type[Environment[Any]] | Environment[Any]) -> dict[str, Any]:
    """Return the name and the configuration of an environment."""
    if isinstance(env, str | Path):
        return {"name": str(env)}
    if not isinstance(env, type | Environment):
        raise UserError(f"env: {env!r} is not a name, file.py:Class, a class or an environment")
    section: dict[str, Any] = {
        "name": name_environment(env if isinstance(env, type) else type(env))
    }
    if isinstance(env, Environment) and isinstance(env.config, EnvConfig):
        section["config"] = env.config.model_dump(mode="json", exclude_unset=True)
    return section


def _merge(data: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with further keys in its sections."""
    if not isinstance(more, Mapping):
        raise UserError(f"config: {more!r} is not a mapping of sections")
    merged = dict(data)
    for name, section in more.items():
        both = isinstance(section, Mapping) and isinstance(data.get(name), dict)
        merged[name] = {**data[name], **section} if both else section
    return merged


def make_live_group(
    row: dict[str, Any],
    rows: Mapping[str, tuple[dict[str, Any], list[Segment]]],
    *,
    advantage: Advantage,
    again: bool,
    handle: LiveRun,
) -> LiveGroup:
    """Make a group from its row and those of its members, by trajectory id."""
    columns: Sequence[str] = ("members", "unit_ids", "trajectory_ids", "rewards", "valid")
    listed = zip(*(row[name] for name in (*columns, "why_invalid", advantage)), strict=True)
    members = []
    for index, unit, trajectory, reward, valid, why, value in listed:
        found = rows.get(trajectory) if trajectory is not None else None
        row_found, segments = found if found is not None else (None, [])
        members.append(
            LiveMember(index, unit, trajectory, reward, valid, why, value, row_found, segments)
        )
    return LiveGroup(
        group_id=row["group_id"],
        task_id=row["task_id"],
        row_index=next((m.trajectory["row_index"] for m in members if m.trajectory), -1),
        members=members,
        mean=row["mean"],
        std=row["std"],
        row=row,
        again=again,
        handle=handle,
    )
