"""Groups that are scored as a whole, and stored rollouts that are graded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written

from batch_runner import run_batch
from batch_runner.regrade import regrade
from hermes_rl.aio import run_sync
from hermes_rl.errors import UserError
from hermes_rl.store.reader import load_run

TASKS = """
    def tasks(self, split, seed):
        for n in range(3):
            yield make_task(f"task {n}", id=f"t{n}", oracle="echo $RANDOM >out.txt; exit 0")
"""
RANKED = """
    async def compute_reward(self, task, trajectory, ctx):
        return 0.0 if ctx.member else 1.0

    async def score_group(self, task, members, ctx):
        said = [m.messages[-1]["content"] for m in members]
        assert task.id == members[0].task_id and len(set(said)) == 1
        return [m.member / 10 for m in members]
"""


def settings(env: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "env": {"name": str(env), **more.pop("env", {})},
        "model": {"name": "oracle"},
        "sandbox": {"backend": "none"},
        "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True, **more},
    }


def test_score_group_has_the_last_word(tmp_path: Path, write_env: Callable[..., Written]) -> None:
    env = write_env(TASKS + RANKED).path
    run_batch(settings(env, tmp_path / "run"))
    run = load_run(tmp_path / "run")
    assert len(run.groups) == 3
    for group in run.groups.to_dict("records"):
        assert list(group["rewards"]) == [0.0, 0.1, 0.2, 0.3]
        assert group["scored_by"] == "score_group"
        assert list(group["dr_grpo"]) == pytest.approx([-0.15, -0.05, 0.05, 0.15])
    assert sorted(run.trajectories["reward"]) == [0.0] * 9 + [1.0] * 3  # rows keep their own


IN_PARTS = """
    async def compute_reward(self, task, trajectory, ctx):
        if task.id == "t1" and ctx.member == 1:
            raise CannotJudge("this one")
        return 1.0

    async def score_group(self, task, members, ctx):
        if task.id == "t2":
            return None
        return [
            Rewards(
                [
                    part("rank", m.member / 4, weight=0.5, detail="by length"),
                    part("pace", 0.25, turn=1),
                ],
                {"seconds": 1.5 + m.member},
            )
            for m in members
        ]
"""


def test_parts_and_metrics_that_score_group_gives_stand_in_the_groups_row(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    run_batch(settings(write_env(TASKS + IN_PARTS).path, tmp_path / "run", max_attempts=1))
    groups = {g["task_id"]: g for g in load_run(tmp_path / "run").groups.to_dict("records")}
    for task_id, out in (("t0", None), ("t1", 1)):
        group = groups[task_id]
        for n, parts in enumerate(group["reward_parts"]):
            if n == out:
                assert (len(parts), group["reward_metrics"][n]) == (0, {})
                continue
            rank = {"name": "rank", "score": n / 4, "weight": 0.5, "turn": None}
            pace = {"name": "pace", "score": 0.25, "weight": 1.0, "turn": 1, "detail": None}
            assert list(parts) == [{**rank, "detail": "by length"}, pace]
            assert group["reward_metrics"][n] == {"seconds": 1.5 + n}
            assert group["rewards"][n] == sum(p["score"] * p["weight"] for p in parts)
    kept = groups["t2"]  # by compute_reward: the members' own rows have the components
    assert [len(parts) for parts in kept["reward_parts"]] == [0] * 4
    assert kept["scored_by"] == "compute_reward"


def test_a_group_that_cannot_be_scored_says_why_and_waits_for_the_next_start(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    flag = tmp_path / "mended"
    body = (
        TASKS
        + f"""
    async def compute_reward(self, task, trajectory, ctx):
        return 1.0

    async def score_group(self, task, members, ctx):
        if task.id != "t1" and not Path({str(flag)!r}).exists():
            raise ValueError("the judge is away") if task.id == "t0" else CannotJudge("not now")
        return None
"""
    )
    env = write_env(body, head="from pathlib import Path").path
    run_batch(settings(env, tmp_path / "run"))
    groups = load_run(tmp_path / "run").groups.set_index("task_id")
    assert groups["error"]["t0"].startswith("VerifierFault: environment ")
    assert "score_group() raised ValueError: the judge is away (" in groups["error"]["t0"]
    assert groups["error"]["t2"] == "CannotJudge: not now"
    assert dict(groups["n_valid"]) == {"t0": 0, "t1": 4, "t2": 0}
    flag.touch()
    run_batch(settings(env, tmp_path / "run"))
    groups = load_run(tmp_path / "run").groups.set_index("task_id")
    assert list(groups["error"].dropna()) == []
    assert dict(groups["n_valid"]) == {"t0": 4, "t1": 4, "t2": 4}


@pytest.mark.parametrize(
    ("returned", "why"),
    [("[1.0]", "returned 1 rewards for 4 members"), ("1.0", "returned float; return a list")],
)
def test_wrong_scores_are_said_with_their_place(
    tmp_path: Path,
    write_env: Callable[..., Written],
    capfd: pytest.CaptureFixture[str],
    returned: str,
    why: str,
) -> None:
    body = (
        TASKS
        + f"""
    async def compute_reward(self, task, trajectory, ctx):
        return 1.0

    async def score_group(self, task, members, ctx):
        return {returned}
"""
    )
    run_batch(settings(write_env(body).path, tmp_path / "run"))
    said = capfd.readouterr().err
    assert "3 groups could not be scored" in said
    assert why in said
    assert "score_group" in said
    groups = load_run(tmp_path / "run").groups
    assert len(groups) == 3
    assert all(why in error for error in groups["error"])


REGRADED = """
    class Config(EnvConfig):
        strict: bool = False

    async def start(self, task, ctx):
        ctx.state["noted"] = ctx.member

    async def compute_reward(self, task, trajectory, ctx):
        drawn = int((await ctx.grading.read_file("out.txt")).decode())
        box = await ctx.grading.run('test -s "$WORKSPACE/out.txt"')
        assert box.ok and ctx.state["noted"] == ctx.member
        return 1.0 if drawn % 2 == 0 and not self.config.strict else 0.0
"""


def test_stored_rollouts_are_graded_again_without_the_model(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out = write_env(TASKS + REGRADED).path, tmp_path / "run"
    run_batch(settings(env, out, keep_workspaces=True))
    before = load_run(out)
    kept = sorted(p.name for p in (out / "workspaces").iterdir())
    assert len(kept) == 24

    same = run_sync(regrade(out))
    assert (same.graded, same.changed, same.failed, same.not_kept) == (12, 0, 0, 0)
    again = run_sync(regrade(out))
    assert (again.graded, again.known, again.groups) == (0, 12, 0)

    strict = run_sync(regrade(out, [("env.config.strict", True)]))
    solved = int((before.trajectories["reward"] == 1.0).sum())
    assert (strict.graded, strict.changed, strict.groups) == (12, solved, 3)
    after = load_run(out)
    assert after.trajectories["reward"].tolist() == before.trajectories["reward"].tolist()
    assert len(after.grades) == 24
    assert (after.groups["scored_by"] == "regrade").all()
    assert [list(r) for r in after.groups["rewards"]] == [[0.0] * 4] * 3
    assert len(after.calls) == len(before.calls)
    assert run_batch(settings(env, out, keep_workspaces=True)).done == 12  # the run still opens


def test_groups_show_the_grader_of_the_last_regrade_also_when_it_graded_before(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out = write_env(TASKS + REGRADED).path, tmp_path / "run"
    run_batch(settings(env, out, keep_workspaces=True))
    own = [list(r) for r in load_run(out).groups["rewards"]]
    run_sync(regrade(out))
    run_sync(regrade(out, [("env.config.strict", True)]))
    back = run_sync(regrade(out))
    assert (back.graded, back.known, back.groups) == (0, 12, 3)
    assert [list(r) for r in load_run(out).groups["rewards"]] == own


def test_what_could_not_be_judged_is_tried_again_and_its_group_follows(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    away = tmp_path / "away"
    body = (
        TASKS
        + f"""
    async def compute_reward(self, task, trajectory, ctx):
        if Path({str(away)!r}).exists() and task.id == "t1" and ctx.member == 2:
            raise CannotJudge("the judge is away")
        return 1.0
"""
    )
    env, out = write_env(body, head="from pathlib import Path").path, tmp_path / "run"
    run_batch(settings(env, out, keep_workspaces=True))
    away.touch()
    first = run_sync(regrade(out))
    assert (first.graded, first.failed, first.groups) == (11, 1, 3)
    assert sorted(load_run(out).groups["n_valid"]) == [3, 4, 4]
    away.unlink()
    second = run_sync(regrade(out))
    assert (second.graded, second.failed, second.known, second.groups) == (1, 0, 11, 1)
    run = load_run(out)
    assert list(run.groups["n_valid"]) == [4, 4, 4]
    assert len(run.grades) == 12


def test_rollouts_of_an_environment_without_sandboxes_are_graded_again(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    body = """
    class Config(EnvConfig):
        sandboxed: bool = False
        wanted: str = "yes"

    def tasks(self, split, seed):
        yield make_task("say it", toolsets=["none"], oracle='["yes"]')

    async def start(self, task, ctx):
        ctx.state["noted"] = ctx.member

    async def compute_reward(self, task, trajectory, ctx):
        assert ctx.state["noted"] == ctx.member
        return float(trajectory.final_response == self.config.wanted)
"""
    env, out = write_env(body).path, tmp_path / "run"
    run_batch(settings(env, out, keep_workspaces=True))
    assert load_run(out).trajectories["reward"].tolist() == [1.0] * 4
    done = run_sync(regrade(out, [("env.config.wanted", "no")]))
    assert (done.graded, done.changed, done.failed, done.not_kept) == (4, 4, 0, 0)


def test_a_verifier_of_a_dataset_is_run_again(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "tasks.jsonl"
    row = {"id": "a", "prompt": "write", "oracle": "echo 1 >out.txt", "verify": "false"}
    data.write_text(json.dumps(row) + "\n")
    run_batch(
        {
            "dataset": {"path": str(data), "repeats": 2},
            "model": {"name": "oracle"},
            "sandbox": {"backend": "none"},
            "run": {
                "out": str(out),
                "workers": 0,
                "allow_unsandboxed": True,
                "keep_workspaces": True,
            },
        }
    )
    assert load_run(out).trajectories["reward"].tolist() == [0.0, 0.0]
    mended = {**row, "verify": 'grep -q 1 "$WORKSPACE/out.txt"'}
    data.write_text(json.dumps(mended) + "\n")
    done = run_sync(regrade(out))
    assert (done.graded, done.changed, done.groups) == (2, 2, 1)
    assert load_run(out).grades["reward"].tolist() == [1.0, 1.0]


def test_mistakes_of_a_regrade(tmp_path: Path, write_env: Callable[..., Written]) -> None:
    with pytest.raises(UserError, match=r"no run directory \(no run.yaml\)"):
        run_sync(regrade(tmp_path / "nothing"))
    out = tmp_path / "run"
    run_batch(settings(write_env(TASKS + REGRADED).path, out))
    with pytest.raises(UserError, match="below 'env' and 'endpoint', and budgets"):
        run_sync(regrade(out, [("model.name", "other")]))
    with pytest.raises(UserError, match=r"run kept no workspaces.*run\.keep_workspaces=true"):
        run_sync(regrade(out))
