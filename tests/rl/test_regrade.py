"""Grading again: within the budgets, in the books, and only what is still the same task."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, configured, ran, table, tokens

from batch_runner import arun_batch, run_batch
from batch_runner.budgets import spent_before
from batch_runner.manifest import read_manifest
from batch_runner.progress import Silent
from batch_runner.regrade import regrade
from hermes_rl.aio import run_sync
from hermes_rl.cli import main
from hermes_rl.models.rate.budgets import RUN_TOKENS
from hermes_rl.store.rundir import RunDir
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

JUDGED = """
class Config(EnvConfig):
    sandboxed: bool = False
    ask: bool = False

uses = ("judge",)

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"Write {n}.", id=f"t{n}", toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    if not self.config.ask:
        return 0.5
    said = {"text": trajectory.final_response}
    for _ in range(2):
        verdict = await ctx.judge.verdict("Is it good?", said)
    return float(verdict.choice == "yes")
"""
ASKS = 2
"""The judge is asked so often for one grade."""


class Critic:
    """A judge at a fake server that may refuse its key for good after some answers."""

    def __init__(self) -> None:
        self.answers = 0
        self.refuses_after = 10**6

    def __call__(self, request: Any) -> Any:
        if self.answers >= self.refuses_after:
            return {"fault": "auth"}
        self.answers += 1
        return '{"reason": "It is.", "verdict": "yes"}'


async def made(env: Path, out: Path, server: FakeServer) -> None:
    """A run of six rollouts that no judge was asked about, kept for grading again."""
    await ran(
        env,
        out,
        server,
        env={"judge": {"name": "critic", "max_tokens": 50}},
        dataset={"repeats": 2, "limit": None},
        run={"keep_workspaces": True},
    )


def plays(critic: Critic) -> FakeConfig:
    return FakeConfig(plays={"critic": critic, "policy": lambda request: "something"})


async def test_a_judge_is_asked_within_the_budget_and_nothing_is_lost_at_its_end(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out, critic = write_env(JUDGED).path, tmp_path / "run", Critic()
    ask = ("env.config.ask", True)
    async with FakeServer(plays(critic)) as server:
        await made(env, out, server)
        used, groups = tokens(table(out)), table(out, "groups")
        none = await regrade(out, [ask, ("run.budget_tokens", used + 1)])
        assert (none.stopped, none.graded, table(out, "grades")) == ("cost_limit", 0, [])
        assert critic.answers == 0
        one = await regrade(out, [ask], concurrency=1)
        of_one = tokens(table(out, "grades")) // 6  # every grade asks the same
        assert (one.stopped, one.graded, critic.answers) == (None, 6, 6 * ASKS)
        spent = spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)
        assert spent[RUN_TOKENS] == used + 6 * of_one
        assert of_one > 0
        # Another grader, and a budget that is used up in the middle of its work.
        tight = [ask, ("env.config.group_size", 3), ("run.budget_tokens", spent[RUN_TOKENS] + 900)]
        some = await regrade(out, tight, concurrency=1)
        paid = critic.answers - 6 * ASKS
        assert some.stopped == "cost_limit"
        assert "budget" in some.why
        assert 0 < some.graded < 6
        rows = [row for row in table(out, "grades") if row["reward"] is not None][6:]
        assert len(rows) == some.graded
        grades = table(out, "grades")
        assert sum(len(row["calls"]) for row in grades[6:]) == paid, "every paid call is in a row"
        now = spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)[RUN_TOKENS]
        assert now <= spent[RUN_TOKENS] + 900
        told = read_manifest(RunDir(out))["budgets"][RUN_TOKENS]
        assert told == {"budget": spent[RUN_TOKENS] + 900, "spent": now}
        assert len(table(out, "groups")) == len(groups) + 3, "groups follow when all are graded"
        rest = await regrade(out, tight[:2], concurrency=4)
        assert (rest.stopped, rest.graded, rest.known) == (None, 6 - some.graded, some.graded)
        assert len(table(out, "groups")) == len(groups) + 6


async def test_what_was_graded_before_a_key_was_refused_stays(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out, critic = write_env(JUDGED).path, tmp_path / "run", Critic()
    ask = ("env.config.ask", True)
    async with FakeServer(plays(critic)) as server:
        await made(env, out, server)
        critic.refuses_after = 2 * ASKS + 1  # in the middle of the third grade
        first = await regrade(out, [ask], concurrency=1)
        assert (first.stopped, first.graded, first.groups) == ("auth", 2, 0)
        rows = table(out, "grades")
        assert [row["reward"] for row in rows] == [1.0, 1.0, None]
        answered = [c for row in rows for c in row["calls"] if c["outcome"] == "ok"]
        assert len(answered) == critic.answers
        assert (rows[2]["error"] or "").startswith("AuthError")
        critic.refuses_after = 10**6
        second = await regrade(out, [ask], concurrency=3)
        assert (second.stopped, second.graded, second.known) == (None, 4, 2)
        assert critic.answers == 2 * ASKS + 1 + 4 * ASKS
        assert second.groups == 3


def dataset_run(tmp_path: Path, rows: list[dict[str, Any]], **run: Any) -> Path:
    data, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    write_rows(data, rows)
    run_batch(
        {
            "dataset": {"path": str(data)},
            "model": {"name": "oracle"},
            "sandbox": {"backend": "none"},
            "run": {
                "out": str(out),
                "workers": 0,
                "allow_unsandboxed": True,
                "keep_workspaces": True,
                **run,
            },
        },
        progress=Silent(),
    )
    return out


def write_rows(data: Path, rows: list[dict[str, Any]]) -> None:
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_task_whose_content_changed_is_refused_or_said(tmp_path: Path) -> None:
    row = {"prompt": "write", "oracle": "echo 1 >out.txt", "verify": "true", "answer": 1}
    rows = [{**row, "id": name} for name in ("same", "verifier", "files", "prompt", "answer")]
    out = dataset_run(tmp_path, rows)
    edits: list[dict[str, Any]] = [
        {},
        {"verify": "false"},
        {"files": {"a": "b"}},
        {"prompt": "write another"},
        {"answer": 2},
    ]
    changed = [{**row, **edit} for row, edit in zip(rows, edits, strict=True)]
    write_rows(tmp_path / "tasks.jsonl", changed)
    done = run_sync(regrade(out))
    assert (done.graded, done.edited_task, done.other_task) == (3, 2, 2)
    grades = {grade["task_id"]: grade["reward"] for grade in table(out, "grades")}
    assert grades == {"same": 1.0, "verifier": 0.0, "files": 1.0}
    assert any("2 are of a task whose verifier" in line for line in done.lines())
    assert any("2 are of a task that is another one" in line for line in done.lines())


def test_a_verifier_with_another_timeout_is_another_grader(tmp_path: Path) -> None:
    verify = {"script": "sleep 2", "timeout_s": 0.5}
    row = {"id": "a", "prompt": "write", "oracle": "true", "verify": verify}
    out = dataset_run(tmp_path, [row])
    assert [row["reward"] for row in table(out)] == [0.0]
    write_rows(tmp_path / "tasks.jsonl", [{**row, "verify": {**verify, "timeout_s": 60}}])
    assert run_sync(regrade(out)).changed == 1
    write_rows(tmp_path / "tasks.jsonl", [row])
    done = run_sync(regrade(out))
    assert (done.graded, done.known, done.changed) == (1, 0, 0)


def test_the_command_finds_an_environment_beside_the_caller(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    write_env(COMPARED, name="beside")
    door = "import sys; from hermes_rl.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", door, "env"]  # as installed: not looking here itself
    flags = ["--model", "oracle", "--limit", "3", "--workers", "0", "--out", "run"]
    flags += ["--set", "run.keep_workspaces=true"]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    ran = call("process", "beside:Made", *flags)
    assert ran.returncode == 0, ran.stderr
    graded = call("regrade", "run", "--set", "env.config.best=2")
    assert (graded.returncode, graded.stderr) == (1, "")
    assert "12 graded" in graded.stdout
    assert "1 groups could not be scored" in graded.stdout
    stopped = call("regrade", "run", "--set", "model.name=other")
    assert stopped.returncode == 2
    assert "below 'env' and 'endpoint'" in stopped.stderr


STRANGE = """
    class Config(EnvConfig):
        sandboxed: bool = False

    def tasks(self, split, seed):
        yield make_task("say it", id="one", oracle='["yes"]')

    async def start(self, task, ctx):
        ctx.state["place"] = object()

    async def compute_reward(self, task, trajectory, ctx):
        return 0.5
"""


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({}, "kept no workspaces, so nothing of it can be graded again. Make the run in another"),
        ({"keep_workspaces": True}, "nothing could be graded (exit 2)"),
    ],
)
async def test_a_regrade_that_finds_nothing_to_grade_is_a_mistake_and_says_which(
    tmp_path: Path,
    write_env: Callable[..., Written],
    capsys: pytest.CaptureFixture[str],
    run: dict[str, Any],
    says: str,
) -> None:
    out = tmp_path / "run"
    await ran(write_env(STRANGE).path, out, run=run)
    code = await asyncio.to_thread(main, ["env", "regrade", str(out)])
    told = capsys.readouterr()
    assert (code, told.err.count("\n")) == (2, 1)
    assert says in told.err
    assert run == {} or "4 have no stored workspace (or a ctx.state that is no" in told.out


def test_a_regrade_leaves_the_runs_own_words_as_they_are(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "write", "oracle": "echo 1 >out.txt", "verify": "true"}]
    out = dataset_run(tmp_path, rows, max_attempts=7)
    before = RunDir(out).epoch(1)
    assert run_sync(regrade(out)).graded == 1
    after = RunDir(out).epoch(2)
    assert after.max_attempts == before.max_attempts == 7
    assert after.meta["config_hash"] == before.meta["config_hash"]


COMPARED = """
    class Config(EnvConfig):
        sandboxed: bool = False
        best: int = 0

    def tasks(self, split, seed):
        for n in range(3):
            yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"], oracle='["done"]')

    async def compute_reward(self, task, trajectory, ctx):
        return 0.5

    async def score_group(self, task, members, ctx):
        if task.id == "t2" and self.config.best == 2:
            raise CannotJudge("not yet")
        return [float(m.member == self.config.best) for m in members]
"""


async def test_an_environment_that_compares_members_does_so_again(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    out = tmp_path / "run"
    config = configured(
        write_env(COMPARED).path, out, None, run={"keep_workspaces": True}, dataset={"limit": None}
    )
    await arun_batch(config, progress=Silent())
    first = await regrade(out, [("env.config.best", 1)])
    assert (first.graded, first.groups, first.unscored) == (12, 3, 0)
    newest = table(out, "groups")[3:]
    assert [row["rewards"] for row in newest] == [[0.0, 1.0, 0.0, 0.0]] * 3
    assert {row["scored_by"] for row in newest} == {"score_group"}
    assert (await regrade(out, [("env.config.best", 1)])).groups == 0
    second = await regrade(out, [("env.config.best", 2)])
    assert (second.groups, second.unscored) == (2, 1)
    third = await regrade(out, [("env.config.best", 2)])
    assert (third.graded, third.groups, third.unscored) == (0, 0, 1), "tried again"


KILLED = """
class Config(EnvConfig):
    sandboxed: bool = False
    again: bool = False

def tasks(self, split, seed):
    for n in range(4):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"], oracle='["done"]')

async def compute_reward(self, task, trajectory, ctx):
    if not self.config.again:
        return 0.5
    with (HERE / "paid").open("a") as paid:
        paid.write(f"{task.id}/{ctx.member}\\n")
    if (task.id, ctx.member) == ("t3", 0) and not (HERE / "killed").exists():
        while sum(map(lines, (HERE / "run" / "journal").glob("*derived*/done-*"))) < 7:
            await asyncio.sleep(0.01)
        (HERE / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(ctx.member)
"""
HEAD = """
import asyncio, os, signal
from pathlib import Path
HERE = Path({here!r})

def lines(path):
    return len(path.read_bytes().splitlines())
"""


def test_a_regrade_that_is_killed_has_lost_none_of_its_grades(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out = write_env(KILLED, HEAD.format(here=str(tmp_path))).path, tmp_path / "run"
    how = {"run": {"keep_workspaces": True}, "dataset": {"repeats": 2, "limit": None}}
    run_batch(configured(env, out, None, **how), progress=Silent())
    door = "import sys; from hermes_rl.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", door, "env", "regrade", str(out)]
    argv += ["--set", "env.config.again=true"]
    killed = subprocess.run(argv, check=False, timeout=120, capture_output=True)
    assert killed.returncode == -9
    again = subprocess.run(argv, check=False, timeout=120, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("1 graded (1 with another reward), 0 could not be judged, 7")
    all_of_them = [f"t{n}/{m}" for n in range(4) for m in range(2)]
    assert sorted((tmp_path / "paid").read_text().split()) == sorted([*all_of_them, "t3/0"])
    rows, grades = table(out), table(out, "grades")
    assert {g["trajectory_id"]: g["reward"] for g in grades} == {
        row["trajectory_id"]: float(row["member"]) for row in rows
    }
    assert len(grades) == len(rows) == 8
    newest = table(out, "groups")[4:]
    assert sorted(row["task_id"] for row in newest) == ["t0", "t1", "t2", "t3"]
    assert [row["rewards"] for row in newest] == [[0.0, 1.0]] * 4
