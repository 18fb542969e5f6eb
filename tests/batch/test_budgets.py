"""Budgets that bind a run and its resumption, and the pilot that forecasts what it will cost."""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import kit
import pytest
from aiohttp import web

from batch_runner.budgets import Prices, asked_name, budgets_of, spent_before
from batch_runner.dryrun import pilot_run, predict, student_t
from batch_runner.plan import Pilot
from batch_runner.progress import JsonEvents
from batch_runner.report import Report
from batch_runner.runner import arun_batch
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.errors import UserError
from hermes_rl.models.rate.budgets import NANO
from hermes_rl.store.rundir import RunDir
from hermes_rl.testing.fake_server import FakeServer

PRICE = {"input": 10.0, "output": 50.0, "cache_read": 10.0}
"""US dollars per million tokens."""


@dataclass
class Bench:
    """Tasks of one call without a command, for runs in this process."""

    folder: Path
    server: FakeServer

    def config(
        self, count: int, *, priced: bool = True, limit: int | None = None, **run: Any
    ) -> RunConfig:
        rows = [
            {"id": f"t{n:03}", "prompt": f'Say {n:03}.\nSCRIPT: ["ok {n:03}"]'}
            for n in range(count)
        ]
        endpoint = {"base_url": self.server.base_url}
        return parse_config(
            {
                "dataset": {"path": str(kit.write(self.folder / "t.jsonl", rows)), "limit": limit},
                "model": {"name": "fake", "max_tokens": 50},
                "agent": {"toolsets": ["terminal"]},
                "sandbox": {"backend": "none"},
                "endpoint": {**endpoint, "prices": {"fake": PRICE}} if priced else endpoint,
                "run": {
                    "out": str(self.out), "workers": 0, "concurrency": 200,
                    "allow_unsandboxed": True, **run,
                },
            }
        )  # fmt: skip

    @property
    def out(self) -> Path:
        return self.folder / "run"

    async def run(self, count: int, **settings: Any) -> Report:
        return await arun_batch(self.config(count, **settings), progress=quiet())

    @property
    def billed(self) -> float:
        """What the server's answers cost, in US dollars."""
        served = [e for e in self.server.entries if e.outcome == "served"]
        given = sum(e.prompt_tokens for e in served) * PRICE["input"]
        return (given + sum(e.completion_tokens for e in served) * PRICE["output"]) / 1e6


def quiet() -> JsonEvents:
    return JsonEvents(io.StringIO())


@pytest.fixture
def bench(tmp_path: Path, server: FakeServer) -> Bench:
    return Bench(tmp_path, server)


async def test_a_budget_binds_two_hundred_agents_and_the_resumed_run(bench: Bench) -> None:
    assert (await bench.run(200, limit=5)).exit_code == 0
    each = bench.billed / 5
    budget = 100 * each
    for _ in range(2):  # the second start knows what the first has spent
        report = await bench.run(200, budget_usd=budget)
        assert report.exit_code == 3
        assert "budget is used up" in str(report.detail)
        assert bench.billed <= budget
    done = len(kit.final_rows(bench.out))
    assert 80 <= done <= 100
    spent = json.loads((bench.out / "manifest.json").read_bytes())["budgets"]["run:usd"]["spent"]
    assert spent == pytest.approx(bench.billed, abs=1e-6)
    last = await bench.run(200, budget_usd=1000 * each)
    assert last.exit_code == 0
    assert len(kit.final_rows(bench.out)) == 200
    assert last.cost_usd == pytest.approx(bench.billed, abs=1e-6)
    assert any(line.startswith("budget: $") for line in last.lines())


async def test_a_budget_in_tokens(bench: Bench) -> None:
    report = await bench.run(10, budget_tokens=1, priced=False)
    assert report.exit_code == 3
    assert "1 tokens left" in str(report.detail)
    assert bench.server.requests == 0


async def test_a_budget_of_one_model(bench: Bench) -> None:
    report = await bench.run(10, model_budgets={"fake": 1e-6})
    assert report.exit_code == 3
    assert "the budget of fake is used up" in str(report.detail)
    report = await bench.run(10, model_token_budgets={"fake": 1}, priced=False)
    assert report.exit_code == 3
    assert "the budget of fake is used up: 1 tokens left" in str(report.detail)
    assert bench.server.requests == 0


@pytest.mark.parametrize("name", ["unit_budget_usd", "unit_budget_tokens"])
async def test_a_unit_that_would_cost_too_much_is_given_up(bench: Bench, name: str) -> None:
    low, high = (1, 100_000) if name == "unit_budget_tokens" else (1e-6, 1.0)
    report = await bench.run(4, **{name: low})
    assert report.exit_code == 1
    assert report.causes == {"unit_budget": 4}
    assert bench.server.requests == 0
    again = await bench.run(4, retry_failed=True, **{name: high})
    assert again.exit_code == 0


async def test_dollars_need_a_price(bench: Bench) -> None:
    with pytest.raises(UserError, match="fake has no price here"):
        await bench.run(1, budget_usd=1.0, priced=False)
    assert not bench.out.exists()
    report = await bench.run(1, budget_usd=1.0, priced=False, allow_unpriced=True)
    assert report.exit_code == 0


async def test_a_pilot_forecasts_and_its_units_count(bench: Bench) -> None:
    plan, report, costs = await asyncio.to_thread(pilot_run, bench.config(30), quiet())
    assert (plan.open, report.exit_code, bench.server.requests) == (30, 0, 5)
    indices = sorted(row["row_index"] for row in kit.final_rows(bench.out).values())
    assert [index // 6 for index in indices] == [0, 1, 2, 3, 4]
    assert (costs.ended, costs.open) == (5, 25)
    assert costs.spent_usd == pytest.approx(bench.billed, abs=1e-6)
    assert "25 still to run: $" in costs.lines()[0]
    await bench.run(30)
    assert bench.server.requests == 30
    assert costs.usd is not None
    assert costs.usd.low - 1e-6 <= bench.billed <= costs.usd.high + 1e-6


def test_how_many_units_a_pilot_has() -> None:
    assert Pilot.of(3, 0) == Pilot(every=1, units=3)
    assert Pilot.of(30, 2) == Pilot(every=9, units=3)
    assert Pilot.of(100_000, 0) == Pilot(every=100, units=1000)
    assert Pilot.of(1000, 50).units == 0


def test_a_pilot_is_not_caught_in_the_rhythm_of_a_dataset() -> None:
    pilot = Pilot.of(4000, 0)
    picked = [place for place in range(4000) if pilot.picks(place)]
    assert len(picked) == 40
    kinds = [sum(place % 4 == kind for place in picked) for kind in range(4)]
    assert min(kinds) >= 3


def test_a_prediction_is_as_wide_as_what_is_known_scatters() -> None:
    assert predict([1.0], 10) is None
    same = predict([2.0] * 5, 95)
    assert same is not None
    assert (same.expected, same.low, same.high) == (200.0, 200.0, 200.0)
    wide = predict([1.0, 2.0, 3.0, 2.0, 2.0], 95)
    assert wide is not None
    assert wide.expected == 200.0
    half = 2.776 * 0.7071 * (95 + 95 * 95 / 5) ** 0.5
    assert wide.high == pytest.approx(200 + half, rel=0.002)
    assert student_t(1) == pytest.approx(12.706, rel=1e-3)
    assert student_t(2) == pytest.approx(4.303, rel=1e-3)
    assert student_t(9) == pytest.approx(2.262, rel=1e-3)


async def test_the_books_say_what_the_budget_said(bench: Bench) -> None:
    """Calls whose answers were cut off count with their worst case, now and after a resumption."""
    scripts = [
        json.dumps([[{"text": "", "fault": "reset"}, {"text": f"ok {n}"}]]) for n in range(8)
    ]
    of_model: dict[str, Any] = {
        "model_budgets": {"fake": 5.0},
        "model_token_budgets": {"fake": 10**6},
    }
    config = bench.config(8, budget_usd=5.0, budget_tokens=10**6, **of_model)
    rows = [{"id": f"u{n}", "prompt": f"Try {n}.\nSCRIPT: {s}"} for n, s in enumerate(scripts)]
    kit.write(Path(config.dataset.path), rows)
    report = await arun_batch(config, progress=quiet())
    assert (report.exit_code, report.unknown_calls) == (0, 8)
    pots = budgets_of(config)
    before = spent_before(RunDir(bench.out), pots, Prices(config).worst)
    said = json.loads((bench.out / "manifest.json").read_bytes())["budgets"]
    tokens = said["run:tokens"]["spent"]
    assert before["run:tokens"] == before["model:fake:tokens"] == tokens
    assert said["model:fake:tokens"] == {"budget": 10**6, "spent": tokens}
    assert f"budget of fake: {tokens:,} of 1,000,000 tokens spent" in report.lines()
    assert before["run:usd"] == before["model:fake:usd"]
    assert before["run:usd"] / NANO == pytest.approx(said["run:usd"]["spent"], abs=1e-8)
    assert said["run:usd"]["spent"] > bench.billed + 8 * 50 * PRICE["output"] / 1e6


@pytest.mark.parametrize("output_max", [None, 1000])
async def test_calls_without_a_bound_count_with_what_their_model_can_make(
    bench: Bench, output_max: int | None
) -> None:
    """Set aside when they are made, and known again after a resumption."""
    config = bench.config(1, budget_usd=50.0, budget_tokens=10**6).model_dump()
    config["model"]["max_tokens"] = None
    config["endpoint"]["prices"]["fake"]["output_max"] = output_max
    steps = json.dumps([[{"text": "", "fault": "reset"}, "done"]])
    kit.write(Path(config["dataset"]["path"]), [{"id": "u", "prompt": f"Say.\nSCRIPT: {steps}"}])
    parsed = parse_config(config)
    assert (await arun_batch(parsed, progress=quiet())).unknown_calls == 1
    prices = Prices(parsed)
    known = (prices.worst, prices.models, prices.output_max)
    before = spent_before(RunDir(bench.out), budgets_of(parsed), *known)
    said = json.loads((bench.out / "manifest.json").read_bytes())["budgets"]
    assert before["run:tokens"] == said["run:tokens"]["spent"]
    assert before["run:usd"] / NANO == pytest.approx(said["run:usd"]["spent"], abs=1e-8)
    most = output_max or 32_000
    assert most < before["run:tokens"] < most + 10_000


@asynccontextmanager
async def dated(server: FakeServer) -> AsyncIterator[str]:
    """The address of a server that calls its models by longer names than they are asked for."""

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        async with session.request(
            request.method, f"http://127.0.0.1:{server.port}{request.path}", data=body
        ) as reply:
            said = re.sub(rb'"model":"([a-z]+)"', rb'"model":"\1-2025-08-07"', await reply.read())
            return web.Response(status=reply.status, body=said, content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with aiohttp.ClientSession() as session:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await runner.cleanup()


async def test_a_fallbacks_longer_name_counts_for_its_own_budget_when_resumed(bench: Bench) -> None:
    refused = {"text": "", "fault": "content_filter"}
    config = bench.config(1).model_dump()
    config["run"]["model_budgets"] = {"fake": 5.0, "spare": 5.0}
    config["run"]["model_token_budgets"] = {"spare": 100_000}
    kit.write(
        Path(config["dataset"]["path"]),
        [{"id": "u", "prompt": f"Say.\nSCRIPT: {json.dumps([[refused, 'done']])}"}],
    )
    async with dated(bench.server) as url:
        config["endpoint"] |= {
            "base_url": url,
            "prices": {"fake": PRICE, "spare": PRICE},
            "fallbacks": [{"model": "spare"}],
        }
        parsed = parse_config(config)
        report = await arun_batch(parsed, progress=quiet())
    assert report.exit_code == 0
    (row,) = kit.final_rows(bench.out).values()
    assert row["served_models"] == ["spare-2025-08-07"]
    prices = Prices(parsed)
    before = spent_before(RunDir(bench.out), budgets_of(parsed), prices.worst, prices.models)
    said = json.loads((bench.out / "manifest.json").read_bytes())["budgets"]
    assert before["model:spare:usd"] > 0
    for pot in ("model:spare:usd", "model:fake:usd"):
        assert before[pot] / NANO == pytest.approx(said[pot]["spent"], abs=1e-8)
    assert before["model:spare:tokens"] == said["model:spare:tokens"]["spent"] > 0


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("gpt-5", "gpt-5"),
        ("gpt-5-2025-08-07", "gpt-5"),
        ("gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("gpt-5-nano", "gpt-5"),
        ("openai/gpt-5-2025-08-07", "gpt-5"),
        ("claude-haiku-4-5@20251001", "anthropic/claude-haiku-4-5"),
        ("something else", "gpt-5-mini"),
        ("gpt-51", "gpt-5-mini"),
        ("", "gpt-5-mini"),
    ],
)
def test_the_name_that_was_asked_for(served: str, asked: str) -> None:
    models = ("gpt-5", "gpt-5-mini", "anthropic/claude-haiku-4-5")
    assert asked_name(served, "gpt-5-mini", models) == asked
