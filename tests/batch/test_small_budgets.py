"""A budget that is too small for all units finishes as many as it can."""

import io
from pathlib import Path
from typing import Any

import kit
import pytest

from batch_runner.progress import JsonEvents
from batch_runner.report import Report
from batch_runner.runner import arun_batch
from hermes_rl.config import RunConfig, parse_config, to_yaml
from hermes_rl.testing.fake_server import FakeServer

UNITS = 60
PRICE = {"input": 10.0, "output": 50.0, "cache_read": 10.0}
"""US dollars per million tokens."""


def config_of(folder: Path, server: FakeServer, units: int = UNITS, **run: Any) -> RunConfig:
    """Units of four to six calls, all in flight together."""
    rows = [kit.task(n, turns=3 + n % 3) for n in range(units)]
    return parse_config(
        {
            "dataset": {"path": str(kit.write(folder / "t.jsonl", rows))},
            "model": {"name": "fake", "max_tokens": 200},
            "agent": {"toolsets": ["terminal"]},
            "sandbox": {"backend": "none"},
            "endpoint": {"base_url": server.base_url, "prices": {"fake": PRICE}},
            "run": {
                "out": str(folder / "run"), "workers": 0, "concurrency": UNITS,
                "allow_unsandboxed": True, **run,
            },
        }
    )  # fmt: skip


def billed(server: FakeServer) -> float:
    served = [e for e in server.entries if e.outcome == "served"]
    given, made = (sum(getattr(e, f"{x}_tokens") for e in served) for x in ("prompt", "completion"))
    return float((given * PRICE["input"] + made * PRICE["output"]) / 1e6)


async def run_of(config: RunConfig) -> Report:
    return await arun_batch(config, progress=JsonEvents(io.StringIO()))


@pytest.fixture
async def unit_costs(tmp_path: Path, server: FakeServer) -> float:
    """What a unit costs on average, in dollars."""
    folder = tmp_path / "known"
    folder.mkdir()
    await run_of(config_of(folder, server, 6))
    cost = billed(server) / 6
    server.entries.clear()
    return cost


@pytest.mark.parametrize("worth", [4, 10, 30])
async def test_begun_units_are_finished_first(
    tmp_path: Path, server: FakeServer, unit_costs: float, worth: int
) -> None:
    """60 units, all able to begin at once, on a budget of a few of them."""
    budget = worth * unit_costs
    report = await run_of(config_of(tmp_path, server, budget_usd=budget))
    assert report.exit_code == 3
    assert "budget is used up" in str(report.detail)
    assert billed(server) <= budget
    assert 0.6 * worth - 1 <= report.done <= worth + 1
    assert report.causes.keys() == {"cost_limit"}


@pytest.mark.slow
async def test_over_ray_workers_too(tmp_path: Path, server: FakeServer, unit_costs: float) -> None:
    budget = 12 * unit_costs
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config_of(tmp_path, server, budget_usd=budget, workers=2)))
    run = await kit.finish("--config", file)
    assert run.process.returncode == 3, run.errors
    assert billed(server) <= budget
    assert 6 <= run.report()["done"] <= 13
