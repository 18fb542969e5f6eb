"""How long the event loop keeps others waiting while rewards compute.

    python rl_lag.py URL AGENTS SECONDS here|pool OUT

Runs AGENTS rollouts at once in this process, each with a reward of SECONDS of a processor, and
prints the lag of a task that only sleeps (ms): median, 99th percentile, most; and the units done.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator

from batch_runner import Silent, arun_batch
from hermes_rl.config import parse_config
from hermes_rl.rl import EnvConfig, Environment, Rollout, RolloutContext, Task, make_task

TICK_S = 0.005


def burn(seconds: float) -> float:
    """Count for so many seconds of processor time."""
    turns, end = 0, time.process_time() + seconds
    while time.process_time() < end:
        turns += 1
    return float(turns > 0)


class Config(EnvConfig):
    """How dear the reward is."""

    seconds: float = 0.1
    here: bool = False
    """Compute on the event loop, as one should not: what the row is compared with."""


class Burning(Environment[Config]):
    """Answers are worth nothing but the time of their reward."""

    name = "burning"
    Config = Config
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Numbered."""
        number = 0
        while True:
            yield make_task(f"Task {number}: run the steps.", toolsets=["terminal"])
            number += 1

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        """1."""
        if self.config.here:
            return burn(self.config.seconds)
        return await ctx.cpu(burn, self.config.seconds)


async def _watch(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - began - TICK_S)


async def _measure(url: str, agents: int, seconds: float, where: str, out: str) -> None:
    config = parse_config(
        {
            "dataset": {"limit": agents, "repeats": 1},
            "model": {"name": "echo-2"},
            "endpoint": {"base_url": url, "tokens": "off"},
            "sandbox": {"backend": "none"},
            "run": {"out": out, "workers": 0, "concurrency": agents, "allow_unsandboxed": True},
            "env": {
                "name": __file__,
                "config": {"seconds": seconds, "here": where == "here"},
            },
        }
    )
    lags: list[float] = []
    watching = asyncio.create_task(_watch(lags))
    began = time.perf_counter()
    report = await arun_batch(config, progress=Silent())
    watching.cancel()
    ranked = sorted(1000 * lag for lag in lags)
    found = {
        "done": report.done,
        "seconds": time.perf_counter() - began,
        "median_ms": ranked[len(ranked) // 2],
        "p99_ms": ranked[int(len(ranked) * 0.99)],
        "most_ms": ranked[-1],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    url, agents, seconds, where, out = sys.argv[1:]
    asyncio.run(_measure(url, int(agents), float(seconds), where, out))
