"""Try an environment in this process: its first tasks, and the rewards of a few rollouts.

For tests of environments. A trial uses the real pipeline (sandbox, agent, grading sandbox) and
writes no run directory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.aio import run_sync
from hermes_rl.config import parse_config
from hermes_rl.errors import HermesError, UserError
from hermes_rl.events import EventLog
from hermes_rl.identity import group_id, unit_id, unit_seed
from hermes_rl.ports import WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rl.episodes import open_host
from hermes_rl.rl.loading import env_rows, open_environment, settle_env
from hermes_rl.rollout import run_attempt
from hermes_rl.tasks import LazyRow, Task
from hermes_rl.wiring import RunContext, open_run_context

Changed = Callable[[Task], str | None]
"""Task -> another solution for it, which the model `oracle` plays."""


def first_tasks(
    env: str | Path, count: int, *, split: str = "train", seed: int = 0, **config: Any
) -> list[Task]:
    """Return the first tasks of an environment's stream, as in a run but without their position.

    Args:
        env: as `hermes-rl env` takes it.
        config: the environment's own configuration.

    Raises: UserError.
    """
    section = {"name": str(env), "split": split, "seed": seed, "config": config}
    parsed = parse_config({"model": {"name": "noop"}, "env": section}, "first_tasks")
    assert parsed.env is not None
    opened = open_environment(parsed.env, to_run=False)
    found = []
    for row in itertools.islice(env_rows(opened, count), count):
        task = row.parse().task
        if task is None:
            raise UserError(f"{row.place}: {row.parse().error}")
        known = {k: v for k, v in task.metadata.items() if k not in ("split", "position")}
        found.append(msgspec.structs.replace(task, metadata=known))
    return found


def rewards_of(env: str | Path, model: str = "oracle", **how: Any) -> list[float | None]:
    """Return the rewards of one rollout per task (`trial`).

    Raises: HermesError for an attempt that failed and so has no reward.
    """
    rows = run_trial(env, model, **how)
    for row in rows:
        if row.cause is not None:
            raise HermesError(f"{row.task_id}: {row.cause}: {row.error}")
    return [row.reward for row in rows]


def run_trial(env: str | Path, model: str = "oracle", **how: Any) -> list[Trajectory]:
    """Run `arun_trial` from synchronous code."""
    return run_sync(arun_trial(env, model, **how))


async def arun_trial(
    env: str | Path,
    model: str = "oracle",
    *,
    tasks: int = 3,
    solution: Changed | None = None,
    split: str = "train",
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Run one rollout of each of the first tasks, all concurrently.

    Args:
        env: as `hermes-rl env` takes it.
        model: `oracle`, `noop`, or a model at the endpoint that `sections` names.
        solution: what the model `oracle` plays instead of the task's own.
        config: the environment's own configuration.
        sections: further sections of a run's configuration: `endpoint`, `sandbox`, `run`, and `env`
            with a judge or a user.

    Raises: UserError when the environment cannot be opened.
    """
    more = dict(sections or {})
    section = {"name": str(env), "split": split, "seed": seed, "config": dict(config or {})}
    data = {"model": {"name": model}, **more, "env": {**section, **more.get("env", {})}}
    data["dataset"] = {"limit": tasks, **more.get("dataset", {})}
    settled, opened = settle_env(parse_config(data, "trial"))
    assert opened is not None
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            open_run_context(settled, run_id="trial", concurrency=tasks)
        )
        host = await stack.enter_async_context(open_host(opened.section))
        rows = await asyncio.to_thread(list, env_rows(opened, tasks))
        runs = (
            run_attempt(context, item_of(context, row, solution), EventLog(), make=host.episode)
            for row in rows
        )
        return list(await asyncio.gather(*runs))


def item_of(
    context: RunContext, row: LazyRow, solution: Changed | None = None, repeat: int = 0
) -> WorkItem:
    """Return the first attempt at a repeat of the task of a row."""
    parsed = row.parse()
    task = parsed.task
    if task is not None and solution is not None:
        task = msgspec.structs.replace(task, oracle=solution(task))
    unit = unit_id(context.config_hash, row.task_hash, 0, repeat)
    return WorkItem(
        unit_id=unit,
        group_id=group_id(context.config_hash, row.task_hash, 0),
        epoch=0,
        attempt=0,
        repeat=repeat,
        row_index=row.index,
        task_id=parsed.raw_id,
        task=task,
        task_hash=row.task_hash,
        seed=unit_seed(0, unit),
        bad_row=f"{row.place}: {parsed.error}" if parsed.error else None,
    )
