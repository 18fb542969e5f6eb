"""Groups are scored at the end of a run, when the login behind a key's command may be gone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_kit import Written, ran, table

from hermes_rl.testing.fake_server import FakeConfig, FakeServer

ENV = """
uses = ("judge",)

def tasks(self, split, seed):
    yield make_task("Write.", id="t", toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    return 0.5

async def score_group(self, task, members, ctx):
    verdict = await ctx.judge.verdict("Which is best?", choices=("0", "1"))
    return [float(str(m.member) == verdict.choice) for m in members]
"""


async def test_the_key_that_the_run_has_is_used_while_it_is_good(
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
            write_env(ENV).path,
            out,
            server,
            env={"judge": {"name": "critic"}},
            endpoint={"api_key_env": "MY_KEY", "key_commands": {"MY_KEY": once}},
            dataset={"repeats": 2},
        )
    assert [group["rewards"] for group in table(out, "groups")] == [[0.0, 1.0]]
