"""Trying an environment in this process: its tasks, and what a few rollouts get.

For tests of environments. A trial goes through the real pipeline (sandbox, agent, grading box) and
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

from hermes_rl.config import parse_config
from hermes_rl.doors import run_sync
from hermes_rl.episode import Tape
from hermes_rl.errors import HermesError, UserError
from hermes_rl.identity import group_id, unit_id, unit_seed
from hermes_rl.ports import WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rl.aside import Nowhere, item_of
from hermes_rl.rl.episodes import open_host
from hermes_rl.rl.opening import env_rows, open_environment, settle_env
from hermes_rl.rollout import run_attempt
from hermes_rl.rows import LazyRow
from hermes_rl.tasks import Task
from hermes_rl.wiring import Workshop, open_workshop

Changed = Callable[[Task], str | None]
"""Another solution for a task: what the model `oracle` plays."""


def first_tasks(
    env: str | Path, count: int, *, split: str = "train", seed: int = 0, **config: Any
) -> list[Task]:
    """The first tasks of an environment's stream, as a run has them but for their position.

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
    """The rewards of one rollout per task; see `trial`. Raises: what ended an attempt, in place of
    a reward that does not exist."""
    rows = trial(env, model, **how)
    for row in rows:
        if row.cause is not None:
            raise HermesError(f"{row.task_id}: {row.cause}: {row.error}")
    return [row.reward for row in rows]


def trial(env: str | Path, model: str = "oracle", **how: Any) -> list[Trajectory]:
    """`atrial`, for synchronous callers."""
    return run_sync(atrial(env, model, **how))


async def atrial(
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
    """One rollout of each of the first tasks, all at once.

    Args:
        env: as `hermes-rl env` takes it.
        model: `oracle`, `noop`, or a model at the endpoint that `sections` names.
        solution: played by the model `oracle` in the place of the task's own.
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
        workshop = await stack.enter_async_context(
            open_workshop(settled, run_id="trial", concurrency=tasks)
        )
        host = await stack.enter_async_context(open_host(opened.section))
        rows = await asyncio.to_thread(list, env_rows(opened, tasks))
        items = [_item(workshop, row, solution) for row in rows]
        runs = (run_attempt(workshop, i, Tape(Nowhere()), make=host.episode) for i in items)
        return list(await asyncio.gather(*runs))


def _item(workshop: Workshop, row: LazyRow, solution: Changed | None) -> WorkItem:
    parsed = row.parse()
    task = parsed.task
    if task is not None and solution is not None:
        task = msgspec.structs.replace(task, oracle=solution(task))
    unit = unit_id(workshop.config_hash, row.task_hash, 0, 0)
    columns = {
        "unit_id": unit,
        "group_id": group_id(workshop.config_hash, row.task_hash, 0),
        "attempt": 0,
        "repeat": 0,
        "row_index": row.index,
        "task_id": parsed.raw_id,
        "task_hash": row.task_hash,
        "seed": unit_seed(0, unit),
    }
    why = f"{row.place}: {parsed.error}" if parsed.error else None
    return item_of(columns, task, bad_row=why)
