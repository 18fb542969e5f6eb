"""Groups under fire: sandbox hosts that die and an endpoint that fails, on the real runner."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, configured

from batch_runner import arun_batch
from batch_runner.progress import Silent
from hermes_rl.rl.advantages import EPSILON
from hermes_rl.rl.group_report import group_report
from hermes_rl.sandboxes import processes
from hermes_rl.store.reader import Run, load_run
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.faults import FaultPlan

GROUPS, SIZE = 24, 4
DRAWN = """
    class Config(EnvConfig):
        toolsets: tuple[str, ...] | None = ("terminal",)

    def tasks(self, split, seed):
        for n in range(24):
            steps = '[{"run": "sleep 0.2; echo $((RANDOM % 2)) >out.txt"}, "done"]'
            yield make_task(f"draw {n}\\nSCRIPT: {steps}", id=f"t{n}")

    async def compute_reward(self, task, trajectory, ctx):
        return float((await ctx.grading.read_file("out.txt")).decode())
"""


def own_advantages(run: Run) -> dict[str, list[tuple[float, float] | None]]:
    """(GRPO, RLOO) of the members in order, computed from the rows with the dead left out."""
    found: dict[str, list[tuple[float, float] | None]] = {}
    for group, rows in run.trajectories.groupby("group_id"):
        alive = dict(zip(rows["member"], rows["reward"], strict=True))
        values = list(alive.values())
        centre = statistics.fmean(values)
        scale = statistics.stdev(values) if len(values) > 1 else 0.0
        found[group] = [
            ((r - centre) / (scale + EPSILON), (r - centre) * len(values) / (len(values) - 1))
            if (r := alive.get(member)) is not None and len(values) > 1
            else None
            for member in range(SIZE)
        ]
    return found


async def kill_hosts(share: float, seen: set[int]) -> None:
    """End a share of the sandboxes from outside, as a host that dies does."""
    draw = random.Random(4)
    while True:
        for pid in processes.children(os.getpid()):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            if pid in seen or name != "bwrap":  # not yet: it becomes one in a moment
                continue
            seen.add(pid)
            if draw.random() < share:
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_the_dead_are_in_no_baseline(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env = write_env(DRAWN).path
    faults = FaultPlan(seed=3, rates={"server_error": 0.03, "reset": 0.02})
    async with FakeServer(FakeConfig(faults=faults)) as server:
        run: dict[str, Any] = {"concurrency": 16, "max_attempts": 1, "allow_unsandboxed": False}
        config = configured(
            env,
            tmp_path / "run",
            server,
            dataset={"limit": GROUPS},
            sandbox={"backend": "bubblewrap"},
            run=run,
        )
        killer = asyncio.create_task(kill_hosts(0.10, set(processes.children(os.getpid()))))
        try:
            report = await arun_batch(config, progress=Silent())
        finally:
            killer.cancel()
    found = load_run(tmp_path / "run")
    assert report.given_up > 0, "no host died: the test shows nothing"
    assert set(found.failures["cause"]) <= {"sandbox_died", "sandbox_start"}
    assert found.failures["reward"].isna().all()
    own = own_advantages(found)
    groups = found.groups.to_dict("records")
    assert len(groups) == GROUPS
    shifted = False
    for group in groups:
        expected = own.get(group["group_id"], [None] * SIZE)
        for member in range(SIZE):
            grpo, rloo = group["grpo"][member], group["rloo"][member]
            if expected[member] is None:
                assert grpo is None or grpo != grpo
            else:
                assert (grpo, rloo) == pytest.approx(expected[member])
        rewards = [r for r in group["rewards"] if r is not None and r == r]
        assert group["n_valid"] == len(rewards)
        assert group["sendable"] == (len(rewards) >= 2)
        # The planted bug: a dead member kept at 0.0 moves the mean of such a group.
        shifted |= len(rewards) < SIZE and sum(rewards) > 0
    assert shifted
    told = group_report(found)
    assert told.kept.count + told.dropped.count == GROUPS * SIZE
    dead = sum(told.dropped.endings.get(cause, 0) for cause in ("sandbox_died", "sandbox_start"))
    assert dead == report.given_up
    assert any("dropped:" in line for line in told.lines())
