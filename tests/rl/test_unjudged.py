"""A rollout that nobody could judge: never a reward of 0, never rolled again. What it left is kept,
and a later regrade gives it its reward and its place in the group."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, ran, table

from batch_runner import arun_batch
from batch_runner.progress import Silent
from batch_runner.regrade import regrade
from hermes_rl.rl.groups import group_report
from hermes_rl.store.reader import load_run
from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

Write = Callable[..., Written]

FLAKY = """
def tasks(self, split, seed):
    yield make_task("say it", id="one", toolsets=["none"], oracle='["yes"]')

async def start(self, task, ctx):
    ctx.state["left"] = ["a", "b"]

async def compute_reward(self, task, trajectory, ctx):
    seen = (ctx.rng.random(), ctx.state["left"].pop(), list(ctx.state["left"]))
    await ctx.grading.write_file("seen", "x")
    asked.setdefault(ctx.member, []).append(seen)
    if len(asked[ctx.member]) < 3:
        raise CannotJudge("not now")
    box = await ctx.grading.run('cat "$WORKSPACE/seen"')
    same = len(set(map(str, asked[ctx.member])))
    return Rewards([part("all", 0.25, detail=box.output)], {"same": same})
"""


async def test_who_cannot_judge_is_asked_again_twice_with_all_as_it_was(
    tmp_path: Path, write_env: Write
) -> None:
    report = await ran(write_env(FLAKY, "asked = {}").path, tmp_path / "run")
    assert (report.done, report.failed_attempts) == (4, 0)
    for row in table(tmp_path / "run"):
        assert (row["reward"], row["rewards"][0]["detail"]) == (0.25, "x")
        assert row["metrics"] == [{"name": "same", "value": 1.0}]


KEPT = """
class Config(EnvConfig):
    sandboxed: bool = SANDBOXED
    mended: bool = False

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
    if (task.id, ctx.member) == ("t1", 2) and not self.config.mended:
        BREAK
    said = (trajectory.end_reason, trajectory.truncated, trajectory.final_response)
    assert said == ("output_truncated", True, "cut")
    return ctx.member / 4
"""
SCORED = """
async def score_group(self, task, members, ctx):
    assert all((m.end_reason, m.final_response) == ("output_truncated", "cut") for m in members)
    return [1 - m.member / 4 for m in members]
"""


def talker(request: ServedRequest) -> Any:
    return {"text": "cut", "finish": "length"}


@pytest.mark.parametrize(
    ("sandboxed", "fault", "scored"),
    [
        (True, "raise CannotJudge('away')", ""),
        (True, "{}['key']", SCORED),
        (False, "raise CannotJudge('away')", SCORED),
    ],
)
async def test_what_could_not_be_judged_is_kept_and_graded_later(
    tmp_path: Path, write_env: Write, sandboxed: bool, fault: str, scored: str
) -> None:
    body = KEPT.replace("BREAK", fault).replace("SANDBOXED", str(sandboxed)) + scored
    env, out = write_env(body).path, tmp_path / "run"
    sections: dict[str, Any] = {"run": {"keep_workspaces": True}, "dataset": {"limit": None}}
    async with FakeServer(FakeConfig(plays={"policy": talker})) as server:
        report = await ran(env, out, server, **sections)
        assert (report.done, report.given_up, report.causes) == (7, 1, {"verifier": 1})
        (failed,) = table(out, "failures")
        assert (failed["reward"], failed["owner"], failed["member"]) == (None, "infrastructure", 2)
        assert len(server.entries) == 8, "no rollout is rolled again"
        before = [r for r in table(out, "groups") if r["task_id"] == "t1"]
        assert [(r["n_valid"], r["why_invalid"][2]) for r in before] == [(3, "verifier")]

        done = await regrade(out, [("env.config.mended", True)])
        assert (done.graded, done.failed, done.groups) == (8, 0, 2)
        grade = next(g for g in table(out, "grades") if g["unit_id"] == failed["unit_id"])
        assert (grade["reward"], grade["trajectory_id"]) == (0.5, failed["trajectory_id"])
        newest = next(g for g in load_run(out).groups.to_dict("records") if g["task_id"] == "t1")
        assert (newest["n_valid"], list(newest["why_invalid"])) == (4, [None] * 4)
        assert newest["trajectory_ids"][2] == failed["trajectory_id"]
        wanted = [1.0, 0.75, 0.5, 0.25] if scored else [0.0, 0.25, 0.5, 0.75]
        assert list(newest["rewards"]) == wanted
        assert list(newest["dr_grpo"]) == [r - sum(wanted) / 4 for r in wanted]
        told = group_report(load_run(out))
        assert (told.kept.count, told.unjudged) == (8, 0)

        rows = len(table(out, "groups"))
        again = await regrade(out, [("env.config.mended", True)])
        assert (again.graded, again.known, again.groups) == (0, 8, 0)
        await ran(env, out, server, **sections)  # a start later changes none of it
        assert len(table(out, "groups")) == rows
        assert len(server.entries) == 8


async def test_a_verifier_of_a_dataset_that_could_not_judge_is_mended_later(tmp_path: Path) -> None:
    data, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    verify = {"script": "echo cannot-judge=away >&3", "score": True}
    row = {"id": "a", "prompt": "x", "oracle": "echo 7 >out.txt", "verify": verify}
    data.write_text(json.dumps(row) + "\n")
    run = {"out": str(out), "workers": 0, "allow_unsandboxed": True, "keep_workspaces": True}
    report = await arun_batch(
        {
            "dataset": {"path": str(data), "repeats": 2},
            "model": {"name": "oracle"},
            "sandbox": {"backend": "none"},
            "run": run,
        },
        progress=Silent(),
    )
    assert (report.done, report.causes) == (0, {"verifier": 2})
    mended = {"script": 'grep -q 7 "$WORKSPACE/out.txt"'}
    data.write_text(json.dumps({**row, "verify": mended}) + "\n")
    done = await regrade(out)
    assert (done.graded, done.failed, done.groups) == (2, 0, 1)
    (group,) = load_run(out).groups.to_dict("records")
    assert (list(group["rewards"]), group["sendable"]) == ([1.0, 1.0], True)


async def test_nothing_is_kept_where_the_run_keeps_nothing(
    tmp_path: Path, write_env: Write
) -> None:
    body = KEPT.replace("BREAK", "raise CannotJudge('away')").replace("SANDBOXED", "False")
    async with FakeServer(FakeConfig(plays={"policy": talker})) as server:
        await ran(write_env(body).path, tmp_path / "run", server, dataset={"limit": None})
    assert not (tmp_path / "run" / "workspaces").exists()
    (failed,) = table(tmp_path / "run", "failures")
    assert json.loads(failed["messages"][-1])["content"] == "cut"


AWAY = """
class Config(EnvConfig):
    sandboxed: bool = False
    second: bool = False

def tasks(self, split, seed):
    yield make_task("task", id="t", toolsets=["none"], oracle='["done"]')

async def compute_reward(self, task, trajectory, ctx):
    if self.config.second and ctx.member == 1 and AWAY.exists():
        raise CannotJudge("away")
    return Rewards([part("own", 0.5)], {"noted": 0.5 if self.config.second else 0.25})

async def score_group(self, task, members, ctx):
    assert all(m.metrics["noted"] == 0.5 for m in members) or not self.config.second
    return [member.member / 10 for member in members]
"""


async def test_members_that_a_regrade_cannot_judge_are_not_compared(
    tmp_path: Path, write_env: Write
) -> None:
    """As in a run: `score_group` gets those that have a grade, with what was noted for that; and
    the others once they have one."""
    head = f"from pathlib import Path\nAWAY = Path({str(tmp_path / 'away')!r})\n"
    env, out = write_env(AWAY, head).path, tmp_path / "run"
    await ran(env, out, run={"keep_workspaces": True}, dataset={"limit": None})
    (tmp_path / "away").touch()
    first = await regrade(out, [("env.config.second", True)])
    assert (first.graded, first.failed, first.groups) == (3, 1, 1)
    (group,) = load_run(out).groups.to_dict("records")
    assert list(group["valid"]) == [True, False, True, True]
    assert (group["n_valid"], group["why_invalid"][1]) == (3, "not graded")
    assert (group["scored_by"], group["rewards"][3]) == ("score_group", 0.3)

    (tmp_path / "away").unlink()
    again = await regrade(out, [("env.config.second", True)])
    assert (again.graded, again.known, again.groups) == (1, 3, 1)
    (group,) = load_run(out).groups.to_dict("records")
    assert list(group["rewards"]) == [0.0, 0.1, 0.2, 0.3]
    assert (await regrade(out, [("env.config.second", True)])).groups == 0
