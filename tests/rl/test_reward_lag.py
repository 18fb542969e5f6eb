"""Rollouts at once whose rewards compute: the loop that serves them all stays free.

`make bench` measures it with 500 agents; here it is held against the same rewards computed on the
loop, on the same machine, whatever else that does.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.testing.fake_server import FakeConfig, FakeServer

PROGRAM = Path(__file__).parents[1] / "bench" / "rl_lag.py"
AGENTS, SECONDS = 100, 0.02


def lags(url: str, where: str, out: Path) -> dict[str, Any]:
    """What `rl_lag.py` measures, in a process of its own."""
    words = (url, str(AGENTS), str(SECONDS), where, str(out))
    done = subprocess.run(
        [sys.executable, PROGRAM, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["done"] == AGENTS
    return found


@pytest.mark.slow
async def test_rewards_that_compute_do_not_hold_the_loop(tmp_path: Path) -> None:
    found = {}
    async with FakeServer(FakeConfig(latency_s=0.2)) as server:
        for where in ("pool", "here"):
            found[where] = await asyncio.to_thread(lags, server.base_url, where, tmp_path / where)
    assert found["pool"]["p99_ms"] < found["here"]["p99_ms"] / 2, found
    assert found["pool"]["median_ms"] < 1_000 * SECONDS, found
