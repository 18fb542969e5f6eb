"""Plays recorded answers again: real loop, tools, sandbox and verifier, but no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.config import RunConfig, load_config, parse_config
from hermes_rl.errors import UserError
from hermes_rl.events import EventLog
from hermes_rl.ports import WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rl import env_rows, open_host, settle_env
from hermes_rl.rollout import Episode, MakeEpisode, run_attempt
from hermes_rl.sources import read_rows
from hermes_rl.tasks import LazyRow, Task
from hermes_rl.wiring import open_run_context


async def replay_attempt(
    path: Path, row: Mapping[str, Any], *, allow_unsandboxed: bool = False
) -> Trajectory:
    """Play an attempt again, with the run's own configuration, and return the new row.

    Nothing is written to the run.

    Args:
        path: the run directory.
        row: of `trajectories` or `failures`, JSON columns as text.
        allow_unsandboxed: run the recorded commands in a run without sandboxes too.

    Raises: UserError when the task cannot be found, or when the attempt cannot be played: it
        delegated, its context was compressed, or its environment calls models itself.
    """
    answers = recorded_answers(row)
    config = _replay_config(path)
    if config.sandbox.backend == "none" and not allow_unsandboxed:
        raise UserError(
            f"{path} has no sandboxes (sandbox.backend=none): its commands would run on this "
            "machine. Add --allow-unsandboxed if you trust them"
        )
    settled, opened = settle_env(config)
    if opened is None:
        data = settled.dataset
        rows: Iterable[LazyRow] = read_rows(data.path, columns=data.map, limit=data.limit)
    else:
        rows = env_rows(opened, settled.dataset.limit)
    task = await asyncio.to_thread(_find_task, path, rows, row)
    item = WorkItem(
        **{name: row[name] for name in ("unit_id", "group_id", "attempt", "repeat", "row_index")},
        **{name: row[name] for name in ("task_id", "task_hash", "seed")},
        epoch=0,
        task=msgspec.structs.replace(task, oracle=answers),
    )
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            open_run_context(settled, run_id="replay", concurrency=1)
        )
        make: MakeEpisode = Episode
        if opened is not None:
            make = (await stack.enter_async_context(open_host(opened.section))).episode
        return await run_attempt(context, item, EventLog(), make=make)


def recorded_answers(row: Mapping[str, Any]) -> str:
    """The model's answers of a row, as an oracle with one step per turn.

    Raises: UserError when they are not the whole of what models answered.
    """
    messages = [msgspec.json.decode(text) for text in row["messages"]]
    pairs = list(zip(messages, row["message_info"], strict=True))
    if len(row["contexts"] or ()) > 1:
        raise UserError(f"{row['task_id']}: its context was compressed, so it cannot be replayed")
    others = sorted({call["purpose"] for call in row["calls"]} - {"agent", "probe"})
    if others or any(call["agent"] != row["calls"][0]["agent"] for call in row["calls"]):
        what = f"other model calls ({', '.join(others)})" if others else "sub-agents"
        raise UserError(f"{row['task_id']}: it has {what}, so it cannot be replayed")
    steps = [
        _step(message, info)
        for message, info in pairs
        if message["role"] == "assistant" and info["turn"] > 0 and not info["synthetic"]
    ]
    if not steps:
        raise UserError(f"{row['task_id']}: the model answered nothing that could be replayed")
    return json.dumps(steps)


def _step(message: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    raw = info["raw_arguments"] or []
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "text": message.get("content") or "",
        "reasoning": message.get("reasoning_content"),
        "calls": [
            {
                "name": call["name"],
                "arguments": raw[n] if n < len(raw) and raw[n] else call["arguments"],
            }
            for n, call in enumerate(calls)
        ],
    }


def _replay_config(path: Path) -> RunConfig:
    """The run's configuration with played answers instead of a model and its endpoint."""
    if not (path / "run.yaml").exists():
        raise UserError(f"{path} has no run.yaml, so how to run its tasks is not known")
    data = load_config(path / "run.yaml")
    env = data.get("env") or {}
    for use in ("judge", "user"):
        if env.get(use):
            raise UserError(f"{path}: its environment calls models (env.{use}), so no replay")
    run = {k: v for k, v in (data.get("run") or {}).items() if k in ("allow_unsandboxed",)}
    data |= {"model": {"name": "oracle"}, "endpoint": {}, "run": run}
    return parse_config(data, str(path / "run.yaml"))


def _find_task(path: Path, rows: Iterable[LazyRow], row: Mapping[str, Any]) -> Task:
    for lazy in rows:
        if lazy.task_hash == row["task_hash"]:
            task = lazy.parse().task
            if task is not None:
                return task
    raise UserError(
        f"{path}: the dataset no longer has task {row['task_id']!r} with the same content. Replay "
        "in the folder of the run, with the data that made it"
    )
