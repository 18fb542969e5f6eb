"""`score_group`: rewards, faults, budgets and keys."""

from typing import Any

import pytest
from runs import Lab, make_config, start_server, tokens, tokens_spent

from batch_runner import arun_batch, read_manifest
from hermes_rl.models.rate import RUN_TOKENS
from hermes_rl.rl import group_report
from hermes_rl.store import RunDir, load_run
from hermes_rl.testing import FakeConfig, FakeServer

TASKS = """
class Config(EnvConfig):
    sandboxed: bool = False

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"], oracle='["done"]')
"""
REWARD = """
async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
"""
ALL: dict[str, Any] = {"limit": None}

RANKED = """
async def compute_reward(self, task, trajectory, ctx):
    if task.id == "t1" and ctx.member == 1:
        raise CannotJudge("this one")
    return float(ctx.member == 0)

async def score_group(self, task, members, ctx):
    assert task.id == members[0].task_id
    assert {m.messages[-1]["content"] for m in members} == {"done"}
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


async def test_score_group_sets_rewards_components_and_metrics_of_the_group(
    lab: Lab,
) -> None:
    await lab.run(TASKS + RANKED, dataset=ALL, run={"max_attempts": 1})
    groups = {g["task_id"]: g for g in load_run(lab.out).groups.to_dict("records")}
    for task_id, invalid in (("t0", None), ("t1", 1)):
        group = groups[task_id]
        assert group["scored_by"] == "score_group"
        for n, parts in enumerate(group["reward_parts"]):
            if n == invalid:
                assert (len(parts), group["reward_metrics"][n]) == (0, {})
                continue
            rank = {"name": "rank", "score": n / 4, "weight": 0.5, "turn": None}
            pace = {"name": "pace", "score": 0.25, "weight": 1.0, "turn": 1, "detail": None}
            assert list(parts) == [{**rank, "detail": "by length"}, pace]
            assert group["reward_metrics"][n] == {"seconds": 1.5 + n}
            assert group["rewards"][n] == 0.25 + n / 8
    assert list(groups["t0"]["dr_grpo"]) == pytest.approx([-3 / 16, -1 / 16, 1 / 16, 3 / 16])
    kept = groups["t2"]  # by compute_reward: the members' rows have the components
    assert (kept["scored_by"], list(kept["rewards"])) == ("compute_reward", [1.0, 0.0, 0.0, 0.0])
    assert [len(parts) for parts in kept["reward_parts"]] == [0] * 4
    assert sorted(row["reward"] for row in lab.rows()) == [0.0] * 8 + [1.0] * 3


async def test_a_group_with_a_scoring_error_is_scored_at_the_next_start(
    lab: Lab,
) -> None:
    flag = lab.path / "ready"
    body = f"""
    if task.id != "t1" and not Path({str(flag)!r}).exists():
        raise ValueError("the judge is away") if task.id == "t0" else CannotJudge("not now")
    return None
"""
    env = lab.write(TASKS + REWARD + body, "from pathlib import Path").path
    await lab.run(env, dataset=ALL)
    errors = {task: group["error"] for task, group in lab.groups().items()}
    assert errors["t0"].startswith("VerifierFault: environment ")
    assert "score_group() raised ValueError: the judge is away (" in errors["t0"]
    assert errors["t2"] == "CannotJudge: not now"
    assert {task: g["n_valid"] for task, g in lab.groups().items()} == {"t0": 0, "t1": 4, "t2": 0}
    assert lab.groups()["t0"]["why_invalid"] == ["not scored"] * 4
    flag.touch()
    await lab.run(env, dataset=ALL)
    assert [(g["error"], g["n_valid"]) for g in lab.groups().values()] == [(None, 4)] * 3


async def test_ctrl_c_while_groups_are_scored_ends_with_a_report(lab: Lab) -> None:
    flag = lab.path / "ready"
    body = f"""
    if not Path({str(flag)!r}).exists():
        if task.id != "t0":
            await asyncio.Event().wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.2)
    return None
"""
    env = lab.write(
        TASKS + REWARD + body, "import asyncio, os, signal\nfrom pathlib import Path"
    ).path
    report = await lab.run(env, dataset=ALL)
    assert (report.stopped, report.done, len(lab.rows())) == ("interrupted", 12, 12)
    flag.touch()
    report = await lab.run(env, dataset=ALL)
    assert (report.stopped, [g["n_valid"] for g in lab.groups().values()]) == (None, [4] * 3)


@pytest.mark.parametrize(
    ("returned", "why"),
    [("[1.0]", "returned 1 rewards for 4 members"), ("1.0", "returned float; return a list")],
)
async def test_invalid_scores_are_reported_with_file_and_line(
    lab: Lab, capfd: pytest.CaptureFixture[str], returned: str, why: str
) -> None:
    env = lab.write(TASKS + REWARD + f"    return {returned}").path
    await arun_batch(make_config(env, lab.out, None, dataset=ALL))
    printed = capfd.readouterr().err
    assert "3 groups could not be scored" in printed
    assert "score_group" in printed
    errors = [group["error"] for group in lab.rows("groups")]
    assert len(errors) == 3
    assert all(why in error and "made_up.py:" in error and why in printed for error in errors)


ASKS = """
    verdict = await ctx.judge.verdict("Which is best?", choices=("0", "1"))
    if task.id == "t2":
        return None
    if task.id == "t1" and not READY.exists():
        raise CannotJudge("the second look is not ready")
    return [float(str(m.member) == verdict.choice) for m in members]
"""


def judged_environment(lab: Lab) -> Any:
    head = f"from pathlib import Path\nREADY = Path({str(lab.path / 'ready')!r})"
    return lab.write("uses = ('judge',)\n" + TASKS + REWARD + ASKS, head).path


def run_sections(budget: int | None = None, max_tokens: int = 50) -> dict[str, Any]:
    return {
        "env": {"judge": {"name": "critic", "max_tokens": max_tokens}},
        "dataset": {"repeats": 2, "limit": None},
        "model": {"max_tokens": 50},
        "run": {} if budget is None else {"budget_tokens": budget},
    }


def policy(request: Any) -> str:
    return "something"


def critic(request: Any) -> str:
    return '{"reason": "It is.", "verdict": "1"}'


async def test_calls_of_score_group_count_in_the_budget(
    lab: Lab,
) -> None:
    env = judged_environment(lab)
    async with start_server(policy=policy, critic=critic) as server:
        await lab.run(env, server, **run_sections(1_000_000))
        groups = lab.groups()
        assert (groups["t0"]["rewards"], groups["t0"]["scored_by"]) == ([0.0, 1.0], "score_group")
        failed = groups["t1"]
        assert (failed["n_valid"], failed["sendable"], len(failed["calls"])) == (0, False, 1)
        kept = groups["t2"]
        assert (kept["rewards"], kept["scored_by"]) == ([0.5, 0.5], "compute_reward")
        assert len(kept["calls"]) == 1
        used = tokens_spent(lab.out)
        assert used == tokens(lab.rows()) + tokens(lab.rows("groups"))
        assert read_manifest(RunDir(lab.out))["budgets"][RUN_TOKENS]["spent"] == used
        report = group_report(load_run(lab.out))
        assert (report.sendable, report.unscored) == (2, 1)
        assert any("unscored: 1" in line for line in report.lines())
        (lab.path / "ready").touch()
        requests = len(server.entries)
        await lab.run(env, server, **run_sections(used + 1))
        assert len(server.entries) == requests
        await lab.run(env, server, **run_sections(used + 1_000_000))
    rows = lab.rows("groups")
    assert (len(rows), lab.groups()["t1"]["rewards"]) == (4, [0.0, 1.0])
    assert tokens_spent(lab.out) == tokens(lab.rows()) + tokens(rows) > used
    assert sorted(load_run(lab.out).groups["n_valid"]) == [2, 2, 2]


async def test_unknown_usage_of_a_judge_counts_with_its_upper_bound(lab: Lab) -> None:
    (lab.path / "ready").touch()
    silent = {"text": '{"verdict": "1"}', "fault": "no_usage"}
    async with start_server(policy=policy, critic=lambda request: silent) as server:
        await lab.run(judged_environment(lab), server, **run_sections())
    groups = lab.rows("groups")
    bounds = [{m["name"]: m["value"] for m in row["metrics"]} for row in groups]
    assert [row["usage"]["unknown_calls"] for row in groups] == [1, 1, 1]
    assert [bound["unknown_output_tokens_max"] for bound in bounds] == [50, 50, 50]
    assert tokens_spent(lab.out) == tokens(lab.rows()) + sum(sum(b.values()) for b in bounds)


async def test_a_budget_that_runs_out_during_scoring_stops_the_run(lab: Lab) -> None:
    async with start_server(policy=policy, critic=critic) as server:
        report = await lab.run(
            judged_environment(lab), server, **run_sections(4_000, max_tokens=5_000)
        )
    assert (report.stopped, report.done, lab.rows("groups")) == ("cost_limit", 6, [])


async def test_score_group_uses_the_key_of_the_start_of_the_run(lab: Lab) -> None:
    (lab.path / "ready").touch()
    (lab.path / "key").write_text("key-123456")
    once = f"mkdir {lab.path}/login && cat {lab.path}/key"  # fails a second time
    endpoint = {"api_key_env": "MY_KEY", "key_commands": {"MY_KEY": once}}
    plays: Any = {"critic": critic, "policy": policy}
    async with FakeServer(FakeConfig(key="key-123456", plays=plays)) as server:
        await lab.run(judged_environment(lab), server, **run_sections(), endpoint=endpoint)
    assert lab.groups()["t0"]["rewards"] == [0.0, 1.0]
