"""Calls of `score_group`: within the budgets of all starts, and with the run's keys."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_kit import Written, ran, table, tokens

from batch_runner.budgets import spent_before
from batch_runner.manifest import read_manifest
from hermes_rl.models.rate.budgets import RUN_TOKENS
from hermes_rl.rl.groups import group_report
from hermes_rl.store.reader import load_run
from hermes_rl.store.rundir import RunDir
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

ENV = """
uses = ("judge",)

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"Write {n}.", id=f"t{n}", toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
    if not READY.exists():
        raise CannotJudge("not yet")
    texts = {str(m.member): m.final_response for m in members}
    verdict = await ctx.judge.verdict("Which is best?", texts, choices=tuple(texts))
    return [float(str(m.member) == verdict.choice) for m in members]
"""


async def test_score_group_asks_no_judge_beyond_the_budget(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    ready, out, judged = tmp_path / "ready", tmp_path / "run", []

    def critic(request: Any) -> str:
        judged.append(request)
        return '{"reason": "It is.", "verdict": "1"}'

    head = f"from pathlib import Path\nREADY = Path({str(ready)!r})"
    env = write_env(ENV, head).path
    plays: Any = {"critic": critic, "policy": lambda request: "something"}
    async with FakeServer(FakeConfig(plays=plays)) as server:

        async def start(budget: int) -> None:
            await ran(
                env,
                out,
                server,
                env={"judge": {"name": "critic", "max_tokens": 50}},
                dataset={"repeats": 2},
                model={"max_tokens": 50},
                run={"budget_tokens": budget},
            )

        await start(1_000_000)
        used = tokens(table(out))
        unscored = table(out, "groups")
        assert (len(table(out)), len(unscored)) == (6, 3)
        assert all(row["error"] for row in unscored)
        ready.touch()
        await start(used + 1)
        assert (judged, table(out, "groups")) == ([], unscored)
        await start(used + 1_000_000)
        groups = [row for row in table(out, "groups") if row["error"] is None]
        assert [row["rewards"] for row in groups] == [[0.0, 1.0]] * 3
        assert len(judged) == 3
    spent = spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)
    assert spent[RUN_TOKENS] == used + tokens(groups)
    assert tokens(groups) > 0


def spent_of(out: Path) -> int:
    return spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)[RUN_TOKENS]


TWICE = """
uses = ("judge",)

def tasks(self, split, seed):
    for n in range(2):
        yield make_task(f"Write {n}.", id=f"t{n}", toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
    await ctx.judge.verdict("Is one better?")
    if task.id == "t1" and not READY.exists():
        raise CannotJudge("the second look is not ready")
    return [float(m.member) for m in members] if task.id == "t0" else None
"""


async def test_every_paid_call_of_score_group_is_in_the_books(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    """Also those of a group that was not scored in the end, and of one that keeps its rewards."""
    ready, out = tmp_path / "ready", tmp_path / "run"
    env = write_env(TWICE, f"from pathlib import Path\nREADY = Path({str(ready)!r})").path
    plays: Any = {"critic": lambda r: '{"verdict": "yes"}', "policy": lambda r: "something"}
    async with FakeServer(FakeConfig(plays=plays)) as server:

        async def start() -> None:
            await ran(
                env,
                out,
                server,
                env={"judge": {"name": "critic", "max_tokens": 50}},
                dataset={"repeats": 2},
                model={"max_tokens": 50},
                run={"budget_tokens": 1_000_000},
            )

        await start()
        scored, failed = sorted(table(out, "groups"), key=lambda row: row["task_id"])
        assert (scored["rewards"], scored["scored_by"]) == ([0.0, 1.0], "score_group")
        assert (failed["n_valid"], failed["sendable"]) == (0, False)
        assert failed["why_invalid"] == ["not scored"] * 2
        assert "the second look is not ready" in failed["error"]
        assert len(failed["calls"]) == 1
        told = read_manifest(RunDir(out))["budgets"][RUN_TOKENS]["spent"]
        assert told == spent_of(out) == tokens(table(out)) + tokens([scored, failed])
        report = group_report(load_run(out))
        assert (report.sendable, report.unscored) == (1, 1)
        assert any("unscored: 1" in line for line in report.lines())
        ready.touch()
        await start()
        rows = table(out, "groups")
        assert len(rows) == 3
        assert spent_of(out) == tokens(table(out)) + tokens(rows)
    (kept,) = [row for row in rows if row["task_id"] == "t1" and row["error"] is None]
    assert (kept["rewards"], kept["scored_by"]) == ([0.5, 0.5], "compute_reward")
    assert len(kept["calls"]) == 1
    newest = load_run(out).groups
    assert sorted(newest["n_valid"]) == [2, 2]


async def test_unknown_usage_of_score_group_counts_with_its_bound(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    out, ready = tmp_path / "run", tmp_path / "ready"
    ready.touch()
    env = write_env(TWICE, f"from pathlib import Path\nREADY = Path({str(ready)!r})").path
    silent = {"text": '{"verdict": "yes"}', "fault": "no_usage"}
    plays: Any = {"policy": lambda r: "something", "critic": lambda r: silent}
    async with FakeServer(FakeConfig(plays=plays)) as server:
        await ran(
            env,
            out,
            server,
            env={"judge": {"name": "critic", "max_tokens": 50}},
            dataset={"repeats": 2},
            model={"max_tokens": 50},
        )
    bounds = [{m["name"]: m["value"] for m in row["metrics"]} for row in table(out, "groups")]
    assert [row["usage"]["unknown_calls"] for row in table(out, "groups")] == [1, 1]
    assert [bound["unknown_output_tokens_max"] for bound in bounds] == [50, 50]
    assert spent_of(out) == tokens(table(out)) + sum(sum(bound.values()) for bound in bounds)


async def test_a_budget_that_ends_while_groups_are_scored_stops_the_run(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    ready, out = tmp_path / "ready", tmp_path / "run"
    ready.touch()
    env = write_env(ENV, f"from pathlib import Path\nREADY = Path({str(ready)!r})").path
    plays: Any = {
        "critic": lambda r: '{"reason": "It is.", "verdict": "1"}',
        "policy": lambda r: "something",
    }
    async with FakeServer(FakeConfig(plays=plays)) as server:
        report = await ran(
            env,
            out,
            server,
            env={"judge": {"name": "critic", "max_tokens": 5_000}},
            dataset={"repeats": 2},
            model={"max_tokens": 50},
            run={"budget_tokens": 4_000},
        )
    assert (report.stopped, report.done) == ("cost_limit", 6)
    assert table(out, "groups") == []


KILLED = """
class Config(EnvConfig):
    sandboxed: bool = False

def tasks(self, split, seed):
    for n in range(4):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"], oracle='["done"]')

async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
    with PAID.open("a") as paid:
        paid.write(task.id + "\\n")
    if task.id == "t3" and not AGAIN.exists():
        while sum(map(lines, (OUT / "journal").glob("*derived*/done-*"))) < 3:
            await asyncio.sleep(0.01)
        AGAIN.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(m.member) for m in members]
"""
HEAD = """
import asyncio, os, signal
from pathlib import Path
HERE = Path({here!r})
PAID, AGAIN, OUT = HERE / "paid", HERE / "again", HERE / "run"

def lines(path):
    return len(path.read_bytes().splitlines())
"""
START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from rl_kit import configured
from batch_runner import run_batch
run_batch(configured(sys.argv[1], Path(sys.argv[2]), None, dataset={"repeats": 2, "limit": None}))
"""


def test_groups_that_were_scored_outlive_a_kill(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out = write_env(KILLED, HEAD.format(here=str(tmp_path))).path, tmp_path / "run"
    argv = [sys.executable, "-c", START, str(env), str(out), str(Path(__file__).parent)]
    killed = subprocess.run(argv, check=False, timeout=120, capture_output=True)
    assert killed.returncode == -9
    again = subprocess.run(argv, check=False, timeout=120, capture_output=True)
    assert again.returncode == 0, again.stderr
    paid = (tmp_path / "paid").read_text().split()
    assert sorted(paid) == ["t0", "t1", "t2", "t3", "t3"], "only the one that was cut is paid again"
    rows = table(out, "groups")
    assert sorted(row["task_id"] for row in rows) == ["t0", "t1", "t2", "t3"]
    assert [row["rewards"] for row in rows] == [[0.0, 1.0]] * 4


KEYED = """
uses = ("judge",)

def tasks(self, split, seed):
    yield make_task("Write.", id="t", toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
    verdict = await ctx.judge.verdict("Which is best?", choices=("0", "1"))
    return [float(str(m.member) == verdict.choice) for m in members]
"""


async def test_score_group_uses_the_key_that_the_run_began_with(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    (tmp_path / "key").write_text("key-123456")
    once = f"mkdir {tmp_path}/login && cat {tmp_path}/key"  # fails a second time
    plays: Any = {
        "critic": lambda request: '{"reason": "It is.", "verdict": "1"}',
        "policy": lambda request: "something",
    }
    out = tmp_path / "run"
    async with FakeServer(FakeConfig(key="key-123456", plays=plays)) as server:
        await ran(
            write_env(KEYED).path,
            out,
            server,
            env={"judge": {"name": "critic"}},
            endpoint={"api_key_env": "MY_KEY", "key_commands": {"MY_KEY": once}},
            dataset={"repeats": 2},
        )
    assert [group["rewards"] for group in table(out, "groups")] == [[0.0, 1.0]]
