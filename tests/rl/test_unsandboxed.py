"""Environments whose rollouts need no sandbox."""

from collections.abc import Callable
from pathlib import Path

from rl_kit import Written, ran, table

BARE = """
    class Config(EnvConfig):
        sandboxed: bool = False

    def tasks(self, split, seed):
        yield make_task("say it", id="a")

    async def compute_reward(self, task, trajectory, ctx):
        return 1.0
"""


async def test_no_sandbox_is_started(tmp_path: Path, write_env: Callable[..., Written]) -> None:
    env = write_env(BARE).path
    report = await ran(env, tmp_path / "run", model={"name": "noop"})
    assert (report.done, report.given_up) == (4, 0)
    rows = table(tmp_path / "run")
    assert [row["reward"] for row in rows] == [1.0] * 4
    assert {row["sandbox"] for row in rows} == {None}
    assert {tuple(row["toolsets"]) for row in rows} == {()}


async def test_what_needs_one_is_said(tmp_path: Path, write_env: Callable[..., Written]) -> None:
    env = write_env(BARE).path
    tools = {"toolsets": ["terminal"]}
    await ran(env, tmp_path / "run", model={"name": "noop"}, agent=tools)
    rows = table(tmp_path / "run", "failures")
    assert {row["cause"] for row in rows} == {"task"}
    assert "terminal needs a sandbox, and this environment has none" in rows[0]["error"]


async def test_grading_without_a_workspace_is_a_mistake(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    body = BARE.replace("return 1.0", 'return float((await ctx.grading.run("true")).ok)')
    await ran(write_env(body).path, tmp_path / "run", model={"name": "noop"})
    rows = table(tmp_path / "run", "failures")
    assert {row["cause"] for row in rows} == {"verifier"}
    assert "with `sandboxed`" in rows[0]["error"]
