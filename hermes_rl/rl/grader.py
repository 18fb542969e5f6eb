"""What grades a stored rollout: an environment, or a task's own verifier."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.episode import Stage, Tape
from hermes_rl.errors import CAUSES, HermesError, TaskFault, cause_of
from hermes_rl.identity import digest
from hermes_rl.models.errors.classify import scrub
from hermes_rl.models.providers.routing import Common
from hermes_rl.ports import Recorder
from hermes_rl.rl.aside import CUT, books_of, item_of, tape_of
from hermes_rl.rl.episodes import EnvEpisode, Host, open_host
from hermes_rl.rl.opening import Opened, env_rows
from hermes_rl.rl.view import Rollout
from hermes_rl.rows import LazyRow
from hermes_rl.sandboxes.base import Sandbox, SandboxSpec
from hermes_rl.sources import read_rows
from hermes_rl.store.rows import Grade
from hermes_rl.tasks import Task
from hermes_rl.usage import UsageTotal
from hermes_rl.verify import verify
from hermes_rl.wiring import Workshop, open_workshop


@dataclass(frozen=True)
class Stored:
    """One rollout that is to be graded."""

    row: Mapping[str, Any]
    task: Task
    archive: Path | None
    """None for an environment without sandboxes."""
    state: dict[str, Any]
    grade_id: str


@dataclass(frozen=True)
class Judged:
    """What came of grading one rollout."""

    grade: Grade
    stop: HermesError | None = None
    """What keeps every other rollout from being graded too: a refused key, an outage, a budget that
    is used up. The grade then has no reward, and what was paid for it."""


@dataclass(frozen=True)
class Grader:
    """What judges; made by `open_grader`."""

    workshop: Workshop
    host: Host | None
    """None for the tasks' own verifiers."""
    identity: str
    """Of the environment; empty without one."""
    rows: Callable[[], Iterator[LazyRow]]
    """Begins the run's dataset, or its environment's stream."""

    @property
    def sandboxed(self) -> bool:
        """Whether it judges over a workspace."""
        return self.host is None or self.host.env.config.sandboxed

    def grade_id(self, task: Task) -> str:
        """Names what judges a task's rollouts."""
        if self.host is not None:
            return self.identity
        verifier = task.verify
        if verifier is None:
            return digest([])
        files = {name: digest(data.hex()) for name, data in verifier.files.items()}
        how = (verifier.score, verifier.image, verifier.timeout_s)
        return digest([verifier.script, files, *how])

    def pending(self, stored: Stored) -> Grade:
        """The grade as it is until there is one."""
        row = stored.row
        return Grade(
            trajectory_id=row["trajectory_id"],
            unit_id=row["unit_id"],
            group_id=row["group_id"],
            run_id=row["run_id"],
            task_id=row["task_id"],
            env_name=row["env_name"],
            grade_id=stored.grade_id,
            reward=None,
            rewards=[],
            metrics={},
            error=CUT,
            calls=[],
            usage=UsageTotal(),
            cost_usd=None,
            seconds=0.0,
            graded_at=time.time_ns() // 1000,
        )

    async def grade(self, stored: Stored, recorder: Recorder) -> Judged:
        """One grade; a fault of the grader's makes one without a reward.

        Args:
            recorder: takes the events of its calls.

        Raises: DiskFull of the recorder.
        """
        began = time.monotonic()
        tape = tape_of(stored.row, recorder)
        graded, error, stop = ev.Graded(reward=None), None, None
        try:
            graded = await self._judge(stored, tape)
        except HermesError as fault:
            error = scrub(self.workshop.scrub(f"{type(fault).__name__}: {fault}"))
            stop = fault if CAUSES[cause_of(fault)].breaker else None
        books = books_of(tape)
        grade = msgspec.structs.replace(
            self.pending(stored),
            reward=graded.reward,
            rewards=list(graded.rewards),
            metrics={**books.metrics, **graded.metrics},
            error=error,
            calls=books.calls,
            usage=books.usage,
            cost_usd=books.cost_usd,
            seconds=time.monotonic() - began,
        )
        return Judged(grade, stop)

    async def _judge(self, stored: Stored, tape: Tape) -> ev.Graded:
        workshop, task, row = self.workshop, stored.task, stored.row
        if stored.archive is None:
            return await self._verdict(None, stored, tape)
        spec = SandboxSpec(
            lease=f"{workshop.run_id}-regrade-{row['trajectory_id'][:16]}",
            image=task.image or workshop.config.sandbox.image,
        )
        sandbox = await workshop.backend.lease(spec)
        try:
            try:
                await sandbox.unpack(stored.archive)
            except OSError as error:
                raise TaskFault(str(error)) from error
            return await self._verdict(sandbox, stored, tape)
        finally:
            await asyncio.shield(sandbox.aclose())

    async def _verdict(self, sandbox: Sandbox | None, stored: Stored, tape: Tape) -> ev.Graded:
        if self.host is None:
            assert sandbox is not None
            return await verify(sandbox, stored.task.verify)
        item = item_of(stored.row, stored.task)
        stage = Stage(self.workshop, item, stored.task, tape, self.workshop.budget())
        episode = EnvEpisode(self.host, stage)
        episode.ctx.state.update(stored.state)
        return await episode.judge(sandbox, Rollout.of_row(stored.row))


@asynccontextmanager
async def open_grader(
    config: RunConfig, opened: Opened | None, run_id: str, concurrency: int, share: Common
) -> AsyncIterator[Grader]:
    """The grader of a run.

    Args:
        config: with a policy that is never asked (`without_policy`).
        opened: the run's environment; None takes the verifiers of its dataset.
        share: limiters, and what is left of the run's budgets.

    Raises: UserError.
    """
    async with AsyncExitStack() as stack:
        workshop = await stack.enter_async_context(
            open_workshop(config, run_id=run_id, concurrency=concurrency, share=share)
        )
        if opened is None or config.env is None:
            dataset = config.dataset
            plain = functools.partial(read_rows, dataset.path, columns=dataset.map)
            yield Grader(workshop, None, "", plain)
            return
        host = await stack.enter_async_context(open_host(config.env))
        yield Grader(workshop, host, digest(opened.identity), functools.partial(env_rows, opened))


def without_policy(config: RunConfig) -> RunConfig:
    """A run's configuration with a policy that is never asked, so that it needs no endpoint."""
    data = config.model_dump(mode="json", exclude_unset=True)
    data["model"] = {"name": "noop"}
    for name in ("fallbacks", "places", "tokens", "tokenizer"):
        data.get("endpoint", {}).pop(name, None)
    env, run = config.env, data.get("run", {})
    asked = {place.name for place in (env.judge, env.user) if place} if env else set()
    for name in ("model_budgets", "model_token_budgets"):
        if name in run:
            run[name] = {model: most for model, most in run[name].items() if model in asked}
    return parse_config(data)
