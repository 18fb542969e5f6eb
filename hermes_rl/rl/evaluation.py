"""The files of `env evaluate`: metrics.json and samples.jsonl, in the format of Atropos.

The format is that of `evaluate_log` in atroposlib 0.4.0. There each environment chooses the keys of
a sample; the keys here are those that its environments commonly use.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hermes_rl.config import RunConfig, parse_config
from hermes_rl.errors import UserError
from hermes_rl.evals import SOLVED, summary
from hermes_rl.rl import faults
from hermes_rl.rl.environment import Environment, Metrics
from hermes_rl.rl.episodes import OpensHost, call_method, open_host
from hermes_rl.rl.loading import Opened, settle_env
from hermes_rl.store import Run, load_run

_FINISH = {
    "answered": "stop",
    "output_truncated": "length",
    "token_limit": "length",
    "context_overflow": "length",
}
"""End reason -> finish reason of chat endpoints; every other end reason keeps its name."""


SUMMARY_METRICS = frozenset(
    (
        *("reward", "reward_low", "reward_high", "solved", "solved_low", "solved_high"),
        *("tasks", "units", "never_graded", "failed_attempts"),
    )
)
"""Metrics of every evaluation."""


async def write_evaluation(path: Path, opens: OpensHost = open_host) -> Metrics:
    """Write metrics.json, samples.jsonl and evaluate_config.yaml of a finished evaluation.

    Args:
        path: the run directory of `hermes-rl env evaluate`.
        opens: the environment, if it overrides `evaluate`.

    Returns: the metrics: those of `hermes_rl.evals.summary` and of the environment's `evaluate`.

    Raises: UserError for a run without an environment, and when `evaluate` raises or does not
        return a mapping of names to finite numbers.
    """
    text = await asyncio.to_thread((path / "run.yaml").read_text, encoding="utf-8")
    config, opened = settle_env(parse_config(yaml.safe_load(text), str(path / "run.yaml")))
    if opened is None:
        raise UserError(f"{path}: a run of a dataset. Evaluate it with hermes_rl.evals")
    run = await asyncio.to_thread(load_run, path)
    metrics = await asyncio.to_thread(_summary, run)
    metrics.update(await _env_metrics(opened, run, opens))
    await asyncio.to_thread(_write, run, config, opened.env.name, metrics, text)
    return metrics


def _summary(run: Run) -> Metrics:
    found = summary(run)
    figures = {
        "reward": found.reward.mean,
        "reward_low": found.reward.low,
        "reward_high": found.reward.high,
        "solved": found.solved.mean,
        "solved_low": found.solved.low,
        "solved_high": found.solved.high,
        "tasks": float(found.tasks),
        "units": float(found.units),
        "never_graded": float(found.never_graded),
        "failed_attempts": float(found.failed_attempts),
    }
    # Without a graded task there is no mean, and JSON has no NaN.
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


async def _env_metrics(opened: Opened, run: Run, opens: OpensHost) -> Metrics:
    """Return the metrics of the environment's own `evaluate`."""
    if type(opened.env).evaluate is Environment.evaluate:
        return {}
    async with opens(opened.section) as host:
        env = host.env
        returned: Any = await call_method(env, env.evaluate, UserError, run)
    try:
        metrics = {str(name): float(value) for name, value in dict(returned).items()}
        if all(map(math.isfinite, metrics.values())):
            return metrics
    except (TypeError, ValueError):
        pass
    what = "did not return a mapping of names to finite numbers"
    raise UserError(faults.describe_misuse(env.name, env.evaluate, what))


def _write(run: Run, config: RunConfig, name: str, metrics: Metrics, text: str) -> None:
    rows = run.trajectories
    seconds = 0.0
    if len(rows):
        seconds = (rows["finished_at"].max() - rows["started_at"].min()).total_seconds()
    content = {
        "config_general": {
            "model_name": config.model.name,
            "total_evaluation_time_seconds": str(seconds),
            "generation_parameters": _generation(run),
        },
        "results": {f"atropos|{name}_eval|0": metrics, "all": metrics},
    }
    storage = run.run_dir.storage
    storage.put("metrics.json", msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    storage.put("evaluate_config.yaml", text.encode())
    storage.put("samples.jsonl", b"".join(_samples(run)))


def _generation(run: Run) -> dict[str, Any]:
    """Return the sampling parameters that were sent, with Atropos's name for `max_tokens`."""
    rows = run.trajectories
    sent: dict[str, Any] = dict(rows["sampling"].iloc[0] or {}) if len(rows) else {}
    sent.pop("seed", None)  # differs per rollout
    return sent if "max_tokens" not in sent else {**sent, "max_new_tokens": sent["max_tokens"]}


def _samples(run: Run) -> Iterator[bytes]:
    """Encode one line per graded rollout, in the order of the tasks."""
    rows = run.trajectories.sort_values(["row_index", "repeat"])
    for row in rows.to_dict("records"):
        reward = row["reward"]
        score = None if reward is None or math.isnan(reward) else float(reward)
        sample = {
            "task_id": row["task_id"],
            "repeat": int(row["repeat"]),
            "question": row["task_prompt"],
            "messages": list(row["messages"]),
            "model_response": row["final_response"],
            "score": score,
            "correct": None if score is None else score >= SOLVED,
            "finish_reason": _FINISH.get(row["end_reason"], row["end_reason"]),
            "turns": int(row["turns"]),
            "metadata": row["metadata"],
            "trajectory_id": row["trajectory_id"],
        }
        yield msgspec.json.encode(sample) + b"\n"
