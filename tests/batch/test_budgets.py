"""Budgets limit a run and its resumes, whatever its model returns; the pilot forecasts its cost."""

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
from aiohttp.test_utils import TestServer

from batch_runner import (
    JsonEvents,
    Pilot,
    Prices,
    Report,
    budgets_of,
    pilot_run,
    predict,
    requested_name,
    sum_earlier_spending,
)
from hermes_rl.config import RunConfig, parse_config, to_yaml
from hermes_rl.errors import UserError
from hermes_rl.models.rate import NANO, OUTPUT_MAX
from hermes_rl.store import RunDir
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

PRICE = {"input": 10.0, "output": 50.0, "cache_read": 10.0}
"""US dollars per million tokens."""


def cut_once(answer: str) -> str:
    """A script whose first answer is cut off, so that its usage is unknown."""
    return json.dumps([[{"text": "", "fault": "reset"}, {"text": answer}]])


def row(number: int, script: str = "") -> dict[str, Any]:
    """A task of one call without a command."""
    script = script or f'["ok {number:03}"]'
    return {"id": f"t{number:03}", "prompt": f"Say {number:03}.\nSCRIPT: {script}"}


@dataclass
class Bench:
    """Runs in this process against one server."""

    folder: Path
    server: FakeServer

    def config(
        self, rows: int | list[dict[str, Any]], *, priced: bool = True, limit: int | None = None,
        **run: Any,
    ) -> RunConfig:  # fmt: skip
        made = list(map(row, range(rows))) if isinstance(rows, int) else rows
        endpoint: dict[str, Any] = {"base_url": self.server.base_url}
        return kit.make_config(
            self.folder,
            made,
            dataset={"limit": limit},
            model={"max_tokens": 50 if isinstance(rows, int) else 200},
            endpoint={**endpoint, "prices": {"fake": PRICE}} if priced else endpoint,
            run={"concurrency": 200, **run},
        )

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def spent(self) -> dict[str, Any]:
        """Budget -> the amount spent, as the driver recorded it."""
        budgets = json.loads((self.out / "manifest.json").read_bytes())["budgets"]
        return {name: budget["spent"] for name, budget in budgets.items()}

    def sum_earlier_spending(self, config: RunConfig) -> dict[str, int]:
        """Budget -> the amount spent, as a later start reads it from the rows."""
        prices = Prices(config)
        known = (prices.worst, prices.models, prices.output_max)
        return sum_earlier_spending(RunDir(self.out), budgets_of(config), *known)

    async def run(self, rows: int | list[dict[str, Any]], **settings: Any) -> Report:
        return await kit.run_config(self.config(rows, **settings))

    @property
    def billed(self) -> float:
        """The cost of the server's answers, in US dollars."""
        read, made = tokens(self.server)
        return (read * PRICE["input"] + made * PRICE["output"]) / 1e6


def tokens(server: FakeServer) -> tuple[int, int]:
    """Input and output tokens of what a server has served."""
    served = [entry for entry in server.entries if entry.outcome == "served"]
    return sum(e.prompt_tokens for e in served), sum(e.completion_tokens for e in served)


@pytest.fixture
def bench(tmp_path: Path, server: FakeServer) -> Bench:
    return Bench(tmp_path, server)


async def test_a_budget_limits_200_agents_and_the_resumed_run(bench: Bench) -> None:
    assert (await bench.run(200, limit=5)).exit_code == 0
    each = bench.billed / 5
    budget = 100 * each
    for _ in range(2):
        report = await bench.run(200, budget_usd=budget)
        assert report.exit_code == 3
        assert "budget is used up" in str(report.detail)
        assert bench.billed <= budget
    done = len(kit.final_rows(bench.out))
    assert 80 <= done <= 100
    assert bench.spent["run:usd"] == pytest.approx(bench.billed, abs=1e-6)
    last = await bench.run(200, budget_usd=1000 * each)
    assert last.exit_code == 0
    assert len(kit.final_rows(bench.out)) == 200
    assert last.cost_usd == pytest.approx(bench.billed, abs=1e-6)
    assert any(line.startswith("budget: $") for line in last.lines())


@pytest.mark.parametrize(
    ("run", "priced", "reason"),
    [
        ({"budget_tokens": 1}, False, "1 tokens left"),
        ({"model_budgets": {"fake": 1e-6}}, True, "the budget of fake is used up"),
        (
            {"model_token_budgets": {"fake": 1}},
            False,
            "the budget of fake is used up: 1 tokens left",
        ),
    ],
)
async def test_a_budget_below_one_call_sends_none(
    bench: Bench, run: dict[str, Any], priced: bool, reason: str
) -> None:
    report = await bench.run(10, priced=priced, **run)
    assert report.exit_code == 3
    assert reason in str(report.detail)
    assert bench.server.requests == 0


@pytest.mark.parametrize("name", ["unit_budget_usd", "unit_budget_tokens"])
async def test_a_unit_above_its_budget_is_given_up(bench: Bench, name: str) -> None:
    low, high = (1, 100_000) if name == "unit_budget_tokens" else (1e-6, 1.0)
    report = await bench.run(4, **{name: low})
    assert report.exit_code == 1
    assert report.causes == {"unit_budget": 4}
    assert bench.server.requests == 0
    again = await bench.run(4, retry_failed=True, **{name: high})
    assert again.exit_code == 0


async def test_a_dollar_budget_requires_prices(bench: Bench) -> None:
    with pytest.raises(UserError, match="fake has no price here"):
        await bench.run(1, budget_usd=1.0, priced=False)
    assert not bench.out.exists()
    report = await bench.run(1, budget_usd=1.0, priced=False, allow_unpriced=True)
    assert report.exit_code == 0


async def test_a_pilot_forecasts_and_its_units_count(bench: Bench) -> None:
    quiet = JsonEvents(io.StringIO())
    plan, report, costs = await asyncio.to_thread(pilot_run, bench.config(30), quiet)
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


def test_size_of_a_pilot() -> None:
    assert Pilot.for_run(3, 0) == Pilot(every=1, units=3)
    assert Pilot.for_run(30, 2) == Pilot(every=9, units=3)
    assert Pilot.for_run(100_000, 0) == Pilot(every=100, units=1000)
    assert Pilot.for_run(1000, 50).units == 0


def test_pilot_sampling_is_not_periodic() -> None:
    pilot = Pilot.for_run(4000, 0)
    picked = [place for place in range(4000) if pilot.selects(place)]
    assert len(picked) == 40
    kinds = [sum(place % 4 == kind for place in picked) for kind in range(4)]
    assert min(kinds) >= 3


def test_prediction_interval_follows_the_variance() -> None:
    assert predict([1.0], 10) is None
    same = predict([2.0] * 5, 95)
    assert same is not None
    assert (same.expected, same.low, same.high) == (200.0, 200.0, 200.0)
    wide = predict([1.0, 2.0, 3.0, 2.0, 2.0], 95)
    assert wide is not None
    assert wide.expected == 200.0
    half = 2.776 * 0.7071 * (95 + 95 * 95 / 5) ** 0.5
    assert wide.high == pytest.approx(200 + half, rel=0.002)


async def test_unknown_calls_count_with_their_upper_bound_after_a_resume(
    bench: Bench,
) -> None:
    config = bench.config(
        [row(n, cut_once(f"ok {n}")) for n in range(8)],
        budget_usd=5.0,
        budget_tokens=10**6,
        model_budgets={"fake": 5.0},
        model_token_budgets={"fake": 10**6},
    )
    report = await kit.run_config(config)
    assert (report.exit_code, report.unknown_calls) == (0, 8)
    before, spent = bench.sum_earlier_spending(config), bench.spent
    used = spent["run:tokens"]
    assert before["run:tokens"] == before["model:fake:tokens"] == spent["model:fake:tokens"] == used
    assert f"budget of fake: {used:,} of 1,000,000 tokens spent" in report.lines()
    assert before["run:usd"] == before["model:fake:usd"]
    assert before["run:usd"] / NANO == pytest.approx(spent["run:usd"], abs=1e-8)
    assert spent["run:usd"] > bench.billed + 8 * 200 * PRICE["output"] / 1e6


@pytest.mark.parametrize("output_max", [None, 1000])
async def test_unknown_calls_without_max_tokens_count_with_the_model_limit(
    bench: Bench, output_max: int | None
) -> None:
    data = bench.config([row(0, cut_once("done"))], budget_usd=50.0, budget_tokens=10**6)
    config = data.model_dump()
    config["model"]["max_tokens"] = None
    config["endpoint"]["prices"]["fake"]["output_max"] = output_max
    parsed = parse_config(config)
    assert (await kit.run_config(parsed)).unknown_calls == 1
    before, spent = bench.sum_earlier_spending(parsed), bench.spent
    assert before["run:tokens"] == spent["run:tokens"]
    assert before["run:usd"] / NANO == pytest.approx(spent["run:usd"], abs=1e-8)
    most = output_max or 32_000
    assert most < before["run:tokens"] < most + 10_000


@asynccontextmanager
async def rename_models(server: FakeServer) -> AsyncIterator[str]:
    """The address of a server that answers with longer model names than were requested."""

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        async with session.request(
            request.method, f"http://127.0.0.1:{server.port}{request.path}", data=body
        ) as reply:
            renamed = re.sub(
                rb'"model":"([a-z]+)"', rb'"model":"\1-2025-08-07"', await reply.read()
            )
            return web.Response(status=reply.status, body=renamed, content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with aiohttp.ClientSession() as session, TestServer(app) as renaming:
        yield str(renaming.make_url("/v1"))


async def test_dated_model_names_count_for_the_requested_model_after_a_resume(bench: Bench) -> None:
    refused = json.dumps([[{"text": "", "fault": "content_filter"}, "done"]])
    config = bench.config([row(0, refused)]).model_dump()
    config["run"]["model_budgets"] = {"fake": 5.0, "spare": 5.0}
    config["run"]["model_token_budgets"] = {"spare": 100_000}
    async with rename_models(bench.server) as url:
        config["endpoint"] |= {
            "base_url": url,
            "prices": {"fake": PRICE, "spare": PRICE},
            "fallbacks": [{"model": "spare"}],
        }
        parsed = parse_config(config)
        assert (await kit.run_config(parsed)).exit_code == 0
    (final,) = kit.final_rows(bench.out).values()
    assert final["served_models"] == ["spare-2025-08-07"]
    before, spent = bench.sum_earlier_spending(parsed), bench.spent
    assert before["model:spare:usd"] > 0
    for name in ("model:spare:usd", "model:fake:usd"):
        assert before[name] / NANO == pytest.approx(spent[name], abs=1e-8)
    assert before["model:spare:tokens"] == spent["model:spare:tokens"] > 0


@pytest.mark.parametrize(
    ("served", "requested"),
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
def test_requested_name_of_a_served_model(served: str, requested: str) -> None:
    models = ("gpt-5", "gpt-5-mini", "anthropic/claude-haiku-4-5")
    assert requested_name(served, "gpt-5-mini", models) == requested


UNITS = 60
"""In flight together, with four to six calls each."""


def units(count: int = UNITS, *, latency_s: float = 0.0) -> list[dict[str, Any]]:
    return [kit.make_task(n, turns=3 + n % 3, latency_s=latency_s) for n in range(count)]


@pytest.fixture
async def unit_costs(tmp_path_factory: pytest.TempPathFactory, server: FakeServer) -> float:
    """The mean cost of a unit, in US dollars."""
    bench = Bench(tmp_path_factory.mktemp("known"), server)
    await bench.run(units(6))
    cost = bench.billed / 6
    server.entries.clear()
    return cost


@pytest.mark.parametrize(("worth", "latency_s"), [(4, 0.2), (10, 0.0), (30, 0.0)])
async def test_started_units_are_finished_before_the_budget_ends(
    bench: Bench, unit_costs: float, worth: int, latency_s: float
) -> None:
    """With the latency all units wait for the budget before the first answer shows how many tokens
    the head of their prompts has."""
    budget = worth * unit_costs
    report = await bench.run(units(latency_s=latency_s), budget_usd=budget, concurrency=UNITS)
    assert report.exit_code == 3
    assert "budget is used up" in str(report.detail)
    assert bench.billed <= budget
    assert 0.6 * worth - 1 <= report.done <= worth + 1
    assert report.causes.keys() == {"cost_limit"}


@pytest.mark.slow
async def test_ray_workers_share_a_budget_and_the_limits(
    bench: Bench, unit_costs: float, cluster: dict[str, str]
) -> None:
    budget, file, before = 12 * unit_costs, bench.folder / "run.yaml", bench.server.requests
    config = bench.config(units(), budget_usd=budget, concurrency=UNITS, workers=2)
    file.write_text(to_yaml(config))
    run = await kit.finish_run("--config", file, env=cluster, code=3)
    assert bench.billed <= budget
    assert 6 <= run.report()["done"] <= 13
    assert bench.spent["run:usd"] == pytest.approx(bench.billed, abs=1e-6)
    (lane,) = json.loads((bench.out / "manifest.json").read_bytes())["rate_limits"]
    requests = bench.server.requests - before
    assert lane["requests"] == {"clean": requests, "throttled": 0, "server_trouble": 0}
    assert lane["limits"][0] == [0.0, 32, "start"]


ANSWER_TOKENS = 40_000
"""Output tokens of an answer of the model `endless`, unless the request allows fewer."""
LIMIT = 200_000


def endless(request: ServedRequest) -> dict[str, Any]:
    """An answer that is as long as the request allows."""
    most = min(ANSWER_TOKENS, request.sampling.max_tokens or ANSWER_TOKENS)
    text = "x" * (4 * (most - 1))  # as this server counts
    return {"text": text, "finish": "length" if most < ANSWER_TOKENS else "stop"}


def endless_config(folder: Path, server: FakeServer, mode: str, **run: Any) -> RunConfig:
    prices = {"endless": {"input": 1.0, "output": 2.0}}
    return kit.make_config(
        folder,
        [{"id": f"t{n}", "prompt": f"Say {n}."} for n in range(12)],
        model={"name": "endless"},
        endpoint={"base_url": server.base_url, "api_mode": mode, "prices": prices},
        run={"concurrency": 12, **run},
    )


@pytest.mark.parametrize("mode", ["chat_completions", "codex_responses"])
@pytest.mark.parametrize(
    "budget", [{"budget_tokens": LIMIT}, {"budget_usd": 2e-6 * LIMIT}], ids=["tokens", "usd"]
)
async def test_long_answers_cannot_exceed_the_budget(
    tmp_path: Path, mode: str, budget: dict[str, float]
) -> None:
    """Answers are cut and continued with a higher bound each time, and each bound is reserved."""
    async with FakeServer(FakeConfig(plays={"endless": endless})) as server:
        config = endless_config(tmp_path, server, mode, **budget)
        report = await kit.run_config(config)
    assert report.exit_code == 3
    assert "budget is used up" in str(report.detail)
    read, made = tokens(server)
    spent = read + made if "budget_tokens" in budget else read / 2 + made
    assert 2 * OUTPUT_MAX < spent <= LIMIT
    served = [entry for entry in server.entries if entry.outcome == "served"]
    assert OUTPUT_MAX in {entry.max_tokens for entry in served}
    assert all(e.completion_tokens <= (e.max_tokens or 0) < ANSWER_TOKENS for e in served)
    before = Bench(tmp_path, server).sum_earlier_spending(config)
    if "budget_tokens" in budget:
        assert before["run:tokens"] == spent
    else:  # cached tokens without a price count with their upper bound
        assert before["run:usd"] == pytest.approx(2000 * spent, rel=0.01)


@pytest.mark.parametrize("budget", [{}, {"unit_budget_tokens": 500_000}], ids=["none", "unit"])
async def test_rows_record_the_max_tokens_that_was_sent(
    tmp_path: Path, budget: dict[str, int]
) -> None:
    async with FakeServer(FakeConfig(plays={"endless": lambda request: "done"})) as server:
        config = endless_config(tmp_path, server, "chat_completions", **budget)
        assert (await kit.run_config(config)).exit_code == 0
    bound = OUTPUT_MAX if budget else None
    assert {entry.max_tokens for entry in server.entries} == {bound}
    rows = kit.final_rows(tmp_path / "run").values()
    assert {json.loads(final["sampling"]).get("max_tokens") for final in rows} == {bound}
