"""Calls that `score_group` makes are bound by the run's budgets, also those of earlier starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_kit import Written, ran, table

from batch_runner.spent import spent_before
from hermes_rl.models.limits.spending import RUN_TOKENS
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


def tokens(rows: list[dict[str, Any]]) -> int:
    calls = [call for row in rows for call in row["calls"]]
    return sum((c["input_tokens"] or 0) + (c["output_tokens"] or 0) for c in calls)


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
        assert (len(table(out)), table(out, "groups")) == (6, [])
        ready.touch()
        await start(used + 1)
        assert (judged, table(out, "groups")) == ([], [])
        await start(used + 1_000_000)
        groups = table(out, "groups")
        assert [row["rewards"] for row in groups] == [[0.0, 1.0]] * 3
        assert len(judged) == 3
    spent = spent_before(RunDir(out), [RUN_TOKENS], lambda *_: None)
    assert spent[RUN_TOKENS] == used + tokens(groups)
    assert tokens(groups) > 0
