"""A run's budget and a model that makes more than anybody said: it is never passed."""

import io
import json
from pathlib import Path
from typing import Any

import kit
import pytest

from batch_runner.budgets import Prices, budgets_of, spent_before
from batch_runner.progress import JsonEvents
from batch_runner.runner import arun_batch
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.models.rate.budgets import OUTPUT_MAX
from hermes_rl.store.rundir import RunDir
from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

MAKES = 40_000
"""Output tokens of each answer, unless the request allows fewer."""
BUDGET = 200_000


def windy(request: ServedRequest) -> dict[str, Any]:
    """An answer that goes on until it is cut."""
    most = min(MAKES, request.sampling.max_tokens or MAKES)
    text = "x" * (4 * (most - 1))  # as this server counts
    return {"text": text, "finish": "length" if most < MAKES else "stop"}


def config_of(folder: Path, server: FakeServer, mode: str, **run: Any) -> RunConfig:
    rows = [{"id": f"t{n}", "prompt": f"Say {n}."} for n in range(12)]
    return parse_config(
        {
            "dataset": {"path": str(kit.write(folder / "t.jsonl", rows))},
            "model": {"name": "windy"},
            "agent": {"toolsets": ["terminal"]},
            "sandbox": {"backend": "none"},
            "endpoint": {
                "base_url": server.base_url, "api_mode": mode,
                "prices": {"windy": {"input": 1.0, "output": 2.0}},
            },
            "run": {
                "out": str(folder / "run"), "workers": 0, "concurrency": 12,
                "allow_unsandboxed": True, **run,
            },
        }
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["chat_completions", "codex_responses"])
@pytest.mark.parametrize(
    "budget", [{"budget_tokens": BUDGET}, {"budget_usd": 2e-6 * BUDGET}], ids=["tokens", "usd"]
)
async def test_a_model_that_makes_more_than_is_set_aside_cannot_pass_the_budget(
    tmp_path: Path, mode: str, budget: dict[str, float]
) -> None:
    """Its answers are cut and gone on from, with more room each time: all of it is set aside."""
    async with FakeServer(FakeConfig(plays={"windy": windy})) as server:
        config = config_of(tmp_path, server, mode, **budget)
        report = await arun_batch(config, progress=JsonEvents(io.StringIO()))
    assert report.exit_code == 3
    assert "budget is used up" in str(report.detail)
    served = [entry for entry in server.entries if entry.outcome == "served"]
    given, made = (sum(getattr(e, f"{x}_tokens") for e in served) for x in ("prompt", "completion"))
    spent = given + made if "budget_tokens" in budget else given / 2 + made
    assert 2 * OUTPUT_MAX < spent <= BUDGET
    assert OUTPUT_MAX in {entry.max_tokens for entry in served}
    assert None not in {entry.max_tokens for entry in served}
    assert all(e.completion_tokens <= (e.max_tokens or 0) < MAKES for e in served)
    prices = Prices(config)
    books = spent_before(RunDir(tmp_path / "run"), budgets_of(config), prices.worst, prices.models)
    if "budget_tokens" in budget:
        assert books["run:tokens"] == spent
    else:  # answers of cached tokens, without their price: the most that they can have cost
        assert books["run:usd"] == pytest.approx(2000 * spent, rel=0.01)


@pytest.mark.parametrize("budget", [{}, {"unit_budget_tokens": 500_000}], ids=["none", "unit"])
async def test_rows_say_the_bound_that_was_sent(tmp_path: Path, budget: dict[str, int]) -> None:
    async with FakeServer(FakeConfig(plays={"windy": lambda request: "done"})) as server:
        config = config_of(tmp_path, server, "chat_completions", **budget)
        report = await arun_batch(config, progress=JsonEvents(io.StringIO()))
    assert report.exit_code == 0
    bound = OUTPUT_MAX if budget else None
    assert {entry.max_tokens for entry in server.entries} == {bound}
    rows = kit.final_rows(tmp_path / "run").values()
    assert {json.loads(row["sampling"]).get("max_tokens") for row in rows} == {bound}
