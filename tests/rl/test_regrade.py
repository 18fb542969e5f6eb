"""Regrading stored rollouts: without the model, within budgets, and only of unchanged tasks."""

import asyncio
import json
import os
from contextlib import chdir
from typing import Any

import forks
import pytest
from runs import Lab, start_server, tokens, tokens_spent

from batch_runner import Silent, arun_batch, read_manifest, regrade_run
from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.models.rate import RUN_TOKENS
from hermes_rl.rl import group_report
from hermes_rl.store import RunDir, load_run

KEPT: dict[str, Any] = {"run": {"keep_workspaces": True}, "dataset": {"limit": None}}
TASKS = """
def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"task {n}", id=f"t{n}", oracle="echo $RANDOM >out.txt; exit 0")
"""
BARE = """
class Config(EnvConfig):
    sandboxed: bool = False
    again: bool = False
    best: int = 0

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"], oracle='["done"]')
"""


GRADED = """
class Config(EnvConfig):
    strict: bool = False

async def start(self, task, ctx):
    ctx.state["noted"] = ctx.member

async def compute_reward(self, task, trajectory, ctx):
    drawn = int((await ctx.grading.read_file("out.txt")).decode())
    result = await ctx.grading.run('test -s "$WORKSPACE/out.txt"')
    assert result.ok and ctx.state["noted"] == ctx.member
    return 1.0 if drawn % 2 == 0 and not self.config.strict else 0.0
"""


async def test_stored_rollouts_are_graded_again_without_the_model(lab: Lab) -> None:
    env, strict = lab.write(TASKS + GRADED).path, [("env.config.strict", True)]
    await lab.run(env, **KEPT)
    before = load_run(lab.out)
    rewards = [list(r) for r in before.groups["rewards"]]
    assert len(list((lab.out / "workspaces").iterdir())) == 24

    same = await regrade_run(lab.out)
    assert (same.graded, same.changed, same.failed, same.not_kept) == (12, 0, 0, 0)
    again = await regrade_run(lab.out)
    assert (again.graded, again.known, again.groups) == (0, 12, 0)

    other = await regrade_run(lab.out, strict)
    solved = int((before.trajectories["reward"] == 1.0).sum())
    assert (other.graded, other.changed, other.groups) == (12, solved, 3)
    after = load_run(lab.out)
    assert after.trajectories["reward"].tolist() == before.trajectories["reward"].tolist()
    assert len(after.grades) == 24
    assert (after.groups["scored_by"] == "regrade").all()
    assert [list(r) for r in after.groups["rewards"]] == [[0.0] * 4] * 3
    assert len(after.calls) == len(before.calls)

    # Groups have the rewards of the last regrade, also of a repeated one.
    back = await regrade_run(lab.out)
    assert (back.graded, back.known, back.groups) == (0, 12, 3)
    assert [list(r) for r in load_run(lab.out).groups["rewards"]] == rewards
    assert (await lab.run(env, **KEPT)).done == 12, "the run still opens"


STATE = """
async def start(self, task, ctx):
    ctx.state["noted"] = ctx.member

async def compute_reward(self, task, trajectory, ctx):
    if AWAY.exists() and task.id == "t1" and ctx.member == 2:
        raise CannotJudge("the judge is away")
    assert ctx.state["noted"] == ctx.member
    return Rewards([part("all", float(trajectory.final_response == "done"))],
                   {"noted": 0.5 if self.config.again else 0.25})
"""
COMPARED = """
async def score_group(self, task, members, ctx):
    assert {m.metrics["noted"] for m in members} == {0.5 if self.config.again else 0.25}
    if task.id == "t2" and self.config.best == 2:
        raise CannotJudge("not yet")
    return [float(m.member == self.config.best) for m in members]
"""
AGAIN = ("env.config.again", True)


@pytest.mark.parametrize("compared", ["", COMPARED])
async def test_failed_grades_are_retried_and_their_groups_updated(lab: Lab, compared: str) -> None:
    """Without sandboxes; `score_group` gets the members with their grades and metrics."""
    away = lab.path / "away"
    head = f"from pathlib import Path\nAWAY = Path({str(away)!r})"
    await lab.run(lab.write(BARE + STATE + compared, head).path, **KEPT)
    away.touch()
    first = await regrade_run(lab.out, [AGAIN])
    assert (first.graded, first.failed, first.groups) == (11, 1, 3)
    group = lab.groups()["t1"]
    assert (group["n_valid"], group["valid"][2], group["why_invalid"][2]) == (
        3, False, "not graded",
    )  # fmt: skip
    away.unlink()
    second = await regrade_run(lab.out, [AGAIN])
    assert (second.graded, second.failed, second.known, second.groups) == (1, 0, 11, 1)
    rewards = [1.0, 0.0, 0.0, 0.0] if compared else [1.0] * 4
    assert [group["rewards"] for group in lab.groups().values()] == [rewards] * 3
    assert len(load_run(lab.out).grades) == 12
    assert (await regrade_run(lab.out, [AGAIN])).groups == 0


async def test_a_regrade_calls_score_group_again(lab: Lab) -> None:
    head = "from pathlib import Path\nAWAY = Path('/nowhere')"
    await lab.run(lab.write(BARE + STATE + COMPARED, head).path, **KEPT)
    best = [AGAIN, ("env.config.best", 1)]
    first = await regrade_run(lab.out, best)
    assert (first.graded, first.groups, first.unscored) == (12, 3, 0)
    groups = lab.groups().values()
    assert [row["rewards"] for row in groups] == [[0.0, 1.0, 0.0, 0.0]] * 3
    assert {row["scored_by"] for row in groups} == {"score_group"}
    best[1] = ("env.config.best", 2)
    second = await regrade_run(lab.out, best)
    assert (second.groups, second.unscored) == (2, 1)
    third = await regrade_run(lab.out, best)
    assert (third.graded, third.groups, third.unscored) == (0, 0, 1), "retried"


# Budgets and keys

JUDGED = """
uses = ("judge",)

async def compute_reward(self, task, trajectory, ctx):
    if not self.config.again:
        return 0.5
    for _ in range(2):
        verdict = await ctx.judge.verdict("Is it good?", {"text": trajectory.final_response})
    return float(verdict.choice == "yes")
"""
ASKS = 2
"""Calls of the judge per grade."""


class Critic:
    """A judge that may refuse its key after some answers."""

    def __init__(self) -> None:
        self.answers = 0
        self.refuses_after = 10**6
        self.hangs = False

    def __call__(self, request: Any) -> Any:
        if self.answers >= self.refuses_after:
            return {"fault": "auth"}
        if self.hangs:
            return {"text": "too late", "latency_s": 3600}
        self.answers += 1
        return '{"reason": "It is.", "verdict": "yes"}'


async def run_judged(lab: Lab, server: Any) -> None:
    """Run six rollouts without calls of the judge."""
    judge = {"judge": {"name": "critic", "max_tokens": 50}}
    dataset = {"repeats": 2, "limit": None}
    await lab.run(BARE + JUDGED, server, env=judge, dataset=dataset, run=KEPT["run"])


async def test_a_regrade_stays_within_the_budget_and_keeps_its_grades(
    lab: Lab,
) -> None:
    out, critic = lab.out, Critic()
    async with start_server(critic=critic, policy=lambda request: "something") as server:
        await run_judged(lab, server)
        used, groups = tokens(lab.rows()), lab.rows("groups")
        none = await regrade_run(out, [AGAIN, ("run.budget_tokens", used + 1)])
        assert (none.stopped, none.graded, lab.rows("grades")) == ("cost_limit", 0, [])
        assert critic.answers == 0
        one = await regrade_run(out, [AGAIN], concurrency=1)
        assert (one.stopped, one.graded, critic.answers) == (None, 6, 6 * ASKS)
        spent = tokens_spent(out)
        assert spent == used + tokens(lab.rows("grades")) > used
        # Another grader, and a budget that is exhausted before the last grade.
        tight = [AGAIN, ("env.config.group_size", 3), ("run.budget_tokens", spent + 900)]
        some = await regrade_run(out, tight, concurrency=1)
        assert some.stopped == "cost_limit"
        assert "budget" in some.why
        assert 0 < some.graded < 6
        grades = lab.rows("grades")[6:]
        assert sum(row["reward"] is not None for row in grades) == some.graded
        paid = critic.answers - 6 * ASKS
        assert sum(len(row["calls"]) for row in grades) == paid, "every paid call is in a row"
        assert tokens_spent(out) <= spent + 900
        budget = read_manifest(RunDir(out))["budgets"][RUN_TOKENS]
        assert budget == {"budget": spent + 900, "spent": tokens_spent(out)}
        assert len(lab.rows("groups")) == len(groups) + 3, "groups are written after the last grade"
        rest = await regrade_run(out, tight[:2], concurrency=4)
        assert (rest.stopped, rest.graded, rest.known) == (None, 6 - some.graded, some.graded)
        assert len(lab.rows("groups")) == len(groups) + 6


async def test_grades_before_a_refused_key_are_kept(lab: Lab) -> None:
    critic = Critic()
    async with start_server(critic=critic, policy=lambda request: "something") as server:
        await run_judged(lab, server)
        critic.refuses_after = 2 * ASKS + 1  # in the middle of the third grade
        first = await regrade_run(lab.out, [AGAIN], concurrency=1)
        assert (first.stopped, first.graded, first.groups) == ("auth", 2, 0)
        rows = lab.rows("grades")
        assert [row["reward"] for row in rows] == [1.0, 1.0, None]
        answered = [c for row in rows for c in row["calls"] if c["outcome"] == "ok"]
        assert len(answered) == critic.answers
        assert (rows[2]["error"] or "").startswith("AuthError")
        critic.refuses_after, critic.hangs = 10**6, True
        limit = ("env.reward_seconds", 0.2)
        hung = await regrade_run(lab.out, [AGAIN, limit], concurrency=6)
        assert (hung.stopped, hung.graded, hung.known) == (None, 0, 2)
        late = lab.rows("grades")[3:]
        reason = "compute_reward() ran for more than 0.2 s (env.reward_seconds)"
        assert [reason in row["error"] for row in late] == [True] * hung.failed == [True] * 4
        assert hung.lines()[0].startswith("0 graded (0 with another reward), 4 could not be judged")
        critic.hangs = False
        second = await regrade_run(lab.out, [AGAIN], concurrency=3)
        assert (second.stopped, second.graded, second.known) == (None, 4, 2)
        assert critic.answers == 2 * ASKS + 1 + 4 * ASKS
        assert [list(r) for r in load_run(lab.out).groups["rewards"]] == [[1.0, 1.0]] * 3


# Datasets, whose verifiers grade


async def run_dataset(lab: Lab, rows: list[dict[str, Any]], **run: Any) -> None:
    edit_dataset(lab, rows)
    how = {"workers": 0, "allow_unsandboxed": True, "keep_workspaces": True, **run}
    await arun_batch(
        {
            "dataset": {"path": str(lab.path / "tasks.jsonl"), "repeats": 2},
            "model": {"name": "oracle"},
            "sandbox": {"backend": "none"},
            "run": {"out": str(lab.out), **how},
        },
        progress=Silent(),
    )


def edit_dataset(lab: Lab, rows: list[dict[str, Any]]) -> None:
    (lab.path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


ROW = {"prompt": "write", "oracle": "echo 1 >out.txt", "verify": "true", "answer": 1}
EDITS: dict[str, tuple[dict[str, Any], float | None]] = {
    "same": ({}, 1.0),
    "verifier": ({"verify": "false"}, 0.0),
    "files": ({"files": {"a": "b"}}, 1.0),
    "prompt": ({"prompt": "write another"}, None),
    "answer": ({"answer": 2}, None),
}
"""Task -> its changed columns and its new reward; None if it is another task."""


async def test_a_task_with_another_verifier_is_graded_and_another_prompt_is_not(lab: Lab) -> None:
    await run_dataset(lab, [{**ROW, "id": name} for name in EDITS], max_attempts=7)
    before = RunDir(lab.out).epoch(1)
    edit_dataset(lab, [{**ROW, "id": name, **edit} for name, (edit, _) in EDITS.items()])
    done = await regrade_run(lab.out)
    assert (done.graded, done.edited_task, done.other_task) == (6, 4, 4)
    grades = {grade["task_id"]: grade["reward"] for grade in lab.rows("grades")}
    assert grades == {name: reward for name, (_, reward) in EDITS.items() if reward is not None}
    assert any("4 belong to a task whose verifier" in line for line in done.lines())
    assert any("4 belong to a task that has changed" in line for line in done.lines())
    after = RunDir(lab.out).epoch(2)
    assert after.max_attempts == before.max_attempts == 7
    assert after.meta["config_hash"] == before.meta["config_hash"]


async def test_another_verifier_timeout_is_another_grader(lab: Lab) -> None:
    verify = {"script": "sleep 2", "timeout_s": 0.5}
    row = {"id": "a", "prompt": "write", "oracle": "true", "verify": verify}
    await run_dataset(lab, [row])
    assert [row["reward"] for row in lab.rows()] == [0.0, 0.0]
    edit_dataset(lab, [{**row, "verify": {**verify, "timeout_s": 60}}])
    assert (await regrade_run(lab.out)).changed == 2
    edit_dataset(lab, [row])
    done = await regrade_run(lab.out)
    assert (done.graded, done.known, done.changed) == (2, 0, 0)


# Rollouts whose verifier failed

FLAKY = """
def tasks(self, split, seed):
    yield make_task("say it", id="one", toolsets=["none"], oracle='["yes"]')

async def start(self, task, ctx):
    ctx.state["left"] = ["a", "b"]

async def compute_reward(self, task, trajectory, ctx):
    seen = (ctx.rng.random(), ctx.state["left"].pop(), list(ctx.state["left"]))
    await ctx.grading.write_file("seen", "x")
    seen_by.setdefault(ctx.member, []).append(seen)
    if len(seen_by[ctx.member]) < 3:
        raise CannotJudge("not now")
    result = await ctx.grading.run('cat "$WORKSPACE/seen"')
    same = len(set(map(str, seen_by[ctx.member])))
    return Rewards([part("all", 0.25, detail=result.output)], {"same": same})
"""


async def test_cannot_judge_is_retried_twice_with_the_same_state(lab: Lab) -> None:
    report = await lab.run(lab.write(FLAKY, "seen_by = {}").path)
    assert (report.done, report.failed_attempts) == (4, 0)
    for row in lab.rows():
        assert (row["reward"], row["rewards"][0]["detail"]) == (0.25, "x")
        assert row["metrics"] == [{"name": "same", "value": 1.0}]


BROKEN = """
class Config(EnvConfig):
    sandboxed: bool = SANDBOXED
    repaired: bool = False

def tasks(self, split, seed):
    for n in range(2):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"])

async def start(self, task, ctx):
    ctx.state["noted"] = ctx.member
    if self.config.sandboxed:
        await ctx.sandbox.write_file("made", str(ctx.member).encode())

async def compute_reward(self, task, trajectory, ctx):
    assert ctx.state == {"noted": ctx.member}
    if self.config.sandboxed:
        assert await ctx.grading.read_file("made") == str(ctx.member).encode()
    if (task.id, ctx.member) == ("t1", 2) and not self.config.repaired:
        BREAK
    end = (trajectory.end_reason, trajectory.truncated, trajectory.final_response)
    assert end == ("output_truncated", True, "cut")
    return ctx.member / 4
"""
REVERSED = """
async def score_group(self, task, members, ctx):
    assert all((m.end_reason, m.final_response) == ("output_truncated", "cut") for m in members)
    return [1 - m.member / 4 for m in members]
"""


@pytest.mark.parametrize(
    ("sandboxed", "fault", "scored"),
    [
        (True, "raise CannotJudge('away')", ""),
        (True, "{}['key']", REVERSED),
        (False, "raise CannotJudge('away')", REVERSED),
    ],
)
async def test_ungraded_rollouts_are_kept_and_graded_later(
    lab: Lab, sandboxed: bool, fault: str, scored: str
) -> None:
    body = BROKEN.replace("BREAK", fault).replace("SANDBOXED", str(sandboxed)) + scored
    env, repaired = lab.write(body).path, [("env.config.repaired", True)]
    async with start_server(policy=lambda request: {"text": "cut", "finish": "length"}) as server:
        report = await lab.run(env, server, **KEPT)
        assert (report.done, report.given_up, report.causes) == (7, 1, {"verifier": 1})
        failed = lab.row("failures")
        assert (failed["reward"], failed["owner"], failed["member"]) == (None, "infrastructure", 2)
        assert len(server.entries) == 8, "no rollout is repeated"
        before = lab.groups()["t1"]
        assert (before["n_valid"], before["why_invalid"][2]) == (3, "verifier")

        done = await regrade_run(lab.out, repaired)
        assert (done.graded, done.failed, done.groups) == (8, 0, 2)
        grade = next(g for g in lab.rows("grades") if g["unit_id"] == failed["unit_id"])
        assert (grade["reward"], grade["trajectory_id"]) == (0.5, failed["trajectory_id"])
        group = lab.groups()["t1"]
        assert (group["n_valid"], group["why_invalid"]) == (4, [None] * 4)
        assert group["trajectory_ids"][2] == failed["trajectory_id"]
        wanted = [1.0, 0.75, 0.5, 0.25] if scored else [0.0, 0.25, 0.5, 0.75]
        assert group["rewards"] == wanted
        assert group["dr_grpo"] == [r - sum(wanted) / 4 for r in wanted]
        counted = group_report(load_run(lab.out))
        assert (counted.kept.count, counted.unjudged) == (8, 0)

        rows = len(lab.rows("groups"))
        again = await regrade_run(lab.out, repaired)
        assert (again.graded, again.known, again.groups) == (0, 8, 0)
        await lab.run(env, server, **KEPT)  # a later start changes nothing
        assert len(lab.rows("groups")) == rows
        assert len(server.entries) == 8


async def test_ungraded_rollouts_of_a_dataset_are_graded_with_a_fixed_verifier(lab: Lab) -> None:
    verify = {"script": "echo cannot-judge=away >&3", "score": True}
    row = {"id": "a", "prompt": "x", "oracle": "echo 7 >out.txt", "verify": verify}
    await run_dataset(lab, [row])
    assert {row["cause"] for row in lab.rows("failures")} == {"verifier"}
    edit_dataset(lab, [{**row, "verify": {"script": 'grep -q 7 "$WORKSPACE/out.txt"'}}])
    done = await regrade_run(lab.out)
    assert (done.graded, done.failed, done.groups) == (2, 0, 1)
    group = lab.groups()["a"]
    assert (group["rewards"], group["sendable"]) == ([1.0, 1.0], True)


# Mistakes and the command

UNSTORABLE = """
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
    ("run", "message"),
    [
        ({}, "kept no workspaces, so none of its rollouts can be graded again. Make the run"),
        ({"keep_workspaces": True}, "nothing could be graded (exit 2)"),
    ],
)
async def test_a_regrade_without_stored_rollouts_reports_the_reason(
    lab: Lab, capsys: pytest.CaptureFixture[str], run: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=r"not a run directory \(no run.yaml\)"):
        await regrade_run(lab.out)
    await lab.run(UNSTORABLE, run=run)
    assert not (lab.out / "workspaces").exists()
    code = await asyncio.to_thread(main, ["env", "regrade", str(lab.out)])
    printed = capsys.readouterr()
    assert (code, printed.err.count("\n")) == (2, 1)
    assert message in printed.err
    assert run == {} or "4 have no stored workspace (or a ctx.state that is no" in printed.out


async def test_the_command_finds_an_environment_in_the_working_directory(lab: Lab) -> None:
    head = "from pathlib import Path\nAWAY = Path('/nowhere')"
    lab.write(BARE + STATE + COMPARED, head, name="beside")
    flags = ["--model", "oracle", "--limit", "3", "--workers", "0", "--out", "run"]

    async def call(*arguments: str) -> tuple[int, str, str]:
        with chdir(lab.path):
            process = await forks.start(["env", *arguments], os.environ)
        out, errors = await process.communicate()
        return await process.wait(), out.decode(), errors.decode()

    code, _, errors = await call(
        "process", "beside:Made", *flags, "--set", "run.keep_workspaces=true"
    )
    assert code == 0, errors
    best = ("--set", "env.config.best=2", "--set", "env.config.again=true")
    code, printed, errors = await call("regrade", "run", *best)
    assert (code, errors) == (1, "")
    assert "12 graded" in printed
    assert "1 group could not be scored" in printed
    code, _, errors = await call("regrade", "run", "--set", "model.name=other")
    assert code == 2
    assert "below 'env' and 'endpoint', and budgets" in errors
