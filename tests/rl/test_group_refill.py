"""One member of a group failed and is rolled out again: its slot stays, its attempt rises, and
nothing of its siblings' changes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_kit import Written, ran, table

from hermes_rl.messages import text_of
from hermes_rl.rl.advantages import dr_grpo
from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

GROUPS, SIZE = 3, 4
FAILING = ("1", "2")
"""Task and member."""
TALK = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"Number {n}.", id=f"n{n}", n=n)

async def reply(self, task, trajectory, ctx):
    if len(trajectory.answers) == 1:
        return f"Task {task.metadata['n']}, member {ctx.member}."

async def compute_reward(self, task, trajectory, ctx):
    return (ctx.member + 1) / 4
"""
REWARDS = [(member + 1) / SIZE for member in range(SIZE)]


class Policy:
    """Answers, but fails one member so many times in its second turn."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.asked: Counter[tuple[str, str]] = Counter()

    def __call__(self, request: ServedRequest) -> Any:
        who = re.search(r"^Task (\d), member (\d)", text_of(request.messages[-1]))
        if who is None:
            return "Who is it?"
        place = (who[1], who[2])
        self.asked[place] += 1
        if place == FAILING and self.left:
            self.left -= 1
            return {"text": "", "fault": "content_filter"}
        return f"Welcome, {who[2]}."


def newest(out: Path) -> dict[str, dict[str, Any]]:
    rows = sorted(table(out, "groups"), key=lambda row: row["created_at"])
    return {row["task_id"]: row for row in rows}


def member(out: Path, name: str = "trajectories") -> list[dict[str, Any]]:
    """The rows of the member that fails, by attempt."""
    rows = [r for r in table(out, name) if (r["task_id"][1:], str(r["member"])) == FAILING]
    return sorted(rows, key=lambda row: row["attempt"])


async def test_a_failed_member_is_tried_again_in_its_slot(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    policy, out = Policy(failures=2), tmp_path / "run"
    async with FakeServer(FakeConfig(plays={"policy": policy})) as server:
        how = {"dataset": {"limit": GROUPS}, "run": {"max_attempts": 3}}
        report = await ran(write_env(TALK).path, out, server, **how)
    assert (report.done, report.given_up) == (GROUPS * SIZE, 0)
    lost, (done,) = member(out, "failures"), member(out)
    assert [(row["attempt"], row["cause"]) for row in lost] == [
        (0, "content_filter"),
        (1, "content_filter"),
    ]
    assert done["attempt"] == 2
    assert {row["unit_id"] for row in lost} == {done["unit_id"]}
    assert len({row["trajectory_id"] for row in (*lost, done)}) == 3
    others = [row for row in table(out) if row["unit_id"] != done["unit_id"]]
    assert {row["attempt"] for row in others} == {0}
    assert policy.asked == {
        (str(n), str(m)): 3 if (str(n), str(m)) == FAILING else 1
        for n in range(GROUPS)
        for m in range(SIZE)
    }
    groups = newest(out)
    assert [(g["n_valid"], g["rewards"]) for g in groups.values()] == [(SIZE, REWARDS)] * GROUPS
    assert groups["n1"]["unit_ids"][2] == done["unit_id"]
    assert groups["n1"]["trajectory_ids"][2] == done["trajectory_id"]


async def test_a_member_that_comes_back_later_changes_nothing_of_the_others(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, policy, out = write_env(TALK).path, Policy(failures=1), tmp_path / "run"
    run: dict[str, Any] = {"max_attempts": 1}
    async with FakeServer(FakeConfig(plays={"policy": policy})) as server:
        first = await ran(env, out, server, dataset={"limit": GROUPS}, run=run)
        assert (first.done, first.given_up) == (GROUPS * SIZE - 1, 1)
        files = {p: p.read_bytes() for p in out.glob("*/*.parquet")}
        rows, before, asked = table(out), newest(out), server.requests
        run["retry_failed"] = True
        second = await ran(env, out, server, dataset={"limit": GROUPS}, run=run)
        assert (second.done, second.given_up) == (GROUPS * SIZE, 0)
        assert server.requests - asked == 2, "nobody else is asked again"
    assert {path: path.read_bytes() for path in files} == files
    assert [row for row in table(out) if row in rows] == rows
    (lost,), (done,) = member(out, "failures"), member(out)
    assert (lost["attempt"], done["attempt"]) == (0, 1)
    assert lost["unit_id"] == done["unit_id"]

    after = newest(out)
    assert {t: g for t, g in after.items() if t != "n1"} == {
        t: g for t, g in before.items() if t != "n1"
    }
    assert len(table(out, "groups")) == GROUPS + 1, "the older row stays"
    old, new = before["n1"], after["n1"]
    for column in ("group_id", "members", "unit_ids", "size"):
        assert old[column] == new[column], column
    for slot in (0, 1, 3):
        assert old["trajectory_ids"][slot] == new["trajectory_ids"][slot]
        assert old["rewards"][slot] == new["rewards"][slot] == REWARDS[slot]
    assert (old["trajectory_ids"][2], old["rewards"][2]) == (None, None)
    assert (old["why_invalid"][2], old["n_valid"]) == ("content_filter", 3)
    assert old["dr_grpo"] == dr_grpo([*REWARDS[:2], None, REWARDS[3]])
    assert (new["trajectory_ids"][2], new["rewards"]) == (done["trajectory_id"], REWARDS)
    assert new["dr_grpo"] == dr_grpo(REWARDS)
