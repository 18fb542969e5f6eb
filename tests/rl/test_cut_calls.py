"""A kill amid calls of the driver's own: what was paid, or may have been, is in the books."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, ran, table, tokens

from batch_runner.budgets import spent_before
from batch_runner.regrade import regrade
from hermes_rl.models.rate.budgets import RUN_TOKENS
from hermes_rl.store.rundir import RunDir
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

ENV = """
class Config(EnvConfig):
    sandboxed: bool = False
    ask: bool = False

uses = ("judge",)

def tasks(self, split, seed):
    yield make_task("Write.", id="t", toolsets=["none"])

async def twice(self, ctx):
    await ctx.judge.verdict("Is it good?")
    await ctx.judge.verdict("Is it really good?")

async def compute_reward(self, task, trajectory, ctx):
    if self.config.ask:
        await self.twice(ctx)
    return 0.5
"""
SCORED = """
async def score_group(self, task, members, ctx):
    await self.twice(ctx)
    return [float(m.member) for m in members]
"""
PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from rl_kit import configured
from batch_runner import run_batch
judge = {"judge": {"name": "critic", "max_tokens": 50}}
server = SimpleNamespace(base_url=sys.argv[4])
dataset = {"repeats": 2, "limit": None}
run_batch(configured(sys.argv[2], Path(sys.argv[3]), server, env=judge, dataset=dataset))
"""
REGRADE = """
import asyncio, sys
from pathlib import Path
from batch_runner.regrade import regrade
asyncio.run(regrade(Path(sys.argv[3]), [("env.config.ask", True)], concurrency=1))
"""


class Killer:
    """A judge that ends the process that asks it, at the second question."""

    def __init__(self) -> None:
        self.asked = 0
        self.child: asyncio.subprocess.Process | None = None

    def __call__(self, request: Any) -> Any:
        self.asked += 1
        if self.asked == 2:
            assert self.child is not None
            os.kill(self.child.pid, signal.SIGKILL)
        return '{"verdict": "yes"}'

    async def run(self, script: str, *words: str) -> None:
        here = str(Path(__file__).parent)
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, here, *words, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(120):
            assert await self.child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("what", ["groups", "grades"])
async def test_calls_that_a_kill_cut_are_in_the_books_once(
    tmp_path: Path, write_env: Callable[..., Written], what: str
) -> None:
    out, killer = tmp_path / "run", Killer()
    env = write_env(ENV + (SCORED if what == "groups" else "")).path
    plays: Any = {"critic": killer, "policy": lambda request: "something"}
    judge = {"judge": {"name": "critic", "max_tokens": 50}}
    async with FakeServer(FakeConfig(plays=plays)) as server:

        async def start() -> None:
            kept = {"keep_workspaces": True}
            await ran(env, out, server, env=judge, dataset={"repeats": 2, "limit": None}, run=kept)

        if what == "groups":
            await killer.run(PROCESS, str(env), str(out), server.base_url)
            await start()
        else:
            await start()
            await killer.run(REGRADE, str(env), str(out))
            await regrade(out, [("env.config.ask", True)])
        await start()  # one more: nothing is told twice
    rows = table(out, what)
    (cut,) = [row for row in rows if row["error"] is not None]
    assert cut["error"] == "driver_lost: killed"
    assert [call["outcome"] for call in cut["calls"]] == ["ok", "unknown"]
    assert cut["usage"]["unknown_calls"] == 1
    assert sum(len(row["calls"]) for row in rows) == killer.asked
    bound = sum(m["value"] for m in cut["metrics"])
    assert bound > 50
    spent = spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)[RUN_TOKENS]
    assert spent == tokens(table(out)) + tokens(rows) + bound
    assert list((out / "journal").iterdir()) == []
