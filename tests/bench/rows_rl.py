"""Environments: what rewards that compute do to the rollouts beside them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import meter
from setting import HERE, Bench, Row

SECONDS = 0.1
"""Of a processor, for each reward."""

FEW = 50
"""Agents of the run that does it wrong: it stands still for as long as they all compute."""


def reward_lag(bench: Bench) -> Row:
    """The loop's lag with 500 rollouts whose rewards compute."""
    agents = min(500, max(10, bench.sizes.small * 5 // 2))
    with bench.server("--latency", "0.2") as url:
        pool = _lag(bench, url, agents, "pool")
        here = _lag(bench, url, min(agents, FEW), "here")
    bench.say(f"loop lag p99: {pool['p99_ms']:.0f} ms, rewards on the loop {here['p99_ms']:.0f}")
    return Row(
        f"event loop lag (p99), {agents} agents, rewards of {SECONDS} s of CPU in ctx.cpu",
        f"{pool['p99_ms']:.0f} ms (median {pool['median_ms']:.1f}, most {pool['most_ms']:.0f})",
        "250 ms",
        pool["p99_ms"] < 250,
        f"{min(agents, FEW)} agents with the same rewards on the loop: {here['p99_ms']:.0f} ms",
        data={"pool": pool, "here": here},
    )


def _lag(bench: Bench, url: str, agents: int, where: str) -> dict[str, Any]:
    """Raises: RuntimeError unless all units are done."""
    out = Path(tempfile.mkdtemp(dir=bench.folder)) / "run"
    program = HERE / "rl_lag.py"
    line = meter.python(program, url, str(agents), str(SECONDS), where, out)
    cost = meter.measure(line, name="lag")
    found: dict[str, Any] = json.loads(cost.out.strip().splitlines()[-1])
    if found["done"] != agents:
        raise RuntimeError(f"{found['done']} of {agents} units are done: {cost.out[-500:]}")
    return found
