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
from pathlib import Path

from batch_runner import arun_batch
from batch_runner.progress import Silent
from hermes_rl.config import parse_config

TICK_S = 0.005


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
                "name": str(Path(__file__).with_name("lag_env.py")),
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
