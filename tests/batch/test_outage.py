"""A provider that is out: a short outage costs nothing, a long one parks the run, which resumes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import kit
import pytest

from hermes_rl.testing.fake_server import FakeConfig, FakeServer

HERE = ("--workers", "0", "--concurrency", "8")


def go_out(server: FakeServer, seconds: float, kind: str = "unavailable") -> None:
    """From now on, for so many seconds."""
    outages = ((server.now, server.now + seconds),)
    conditions = replace(server.config.conditions, outages=outages, outage=kind)
    server.config = replace(server.config, conditions=conditions)


async def test_an_outage_in_the_middle_costs_no_unit_and_no_time_of_agents(tmp_path: Path) -> None:
    """For over a second the server answers 500 to everybody; agents have a second each."""
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(5))
    out = tmp_path / "run"

    def ring(request: int) -> None:
        if request == 20:
            go_out(server, 1.2, "server_error")

    async with FakeServer(FakeConfig(), ring) as server:
        run = await kit.finish(
            *kit.played(dataset, out, server.base_url, *HERE, "--max-seconds", "1")
        )
        assert run.process.returncode == 0, run.errors
        kit.check_books(out, server.entries)
        assert any(entry.fault == "server_error" for entry in server.entries)
    rows = kit.final_rows(out).values()
    assert len(rows) == kit.units_of(5)
    assert {row["end_reason"] for row in rows} == {"answered"}
    assert kit.table(out, "failures") == []
    assert sum(row["timing"]["waiting_s"] for row in rows) > 1


async def test_an_outage_beyond_patience_parks_the_run(tmp_path: Path) -> None:
    """Exit 3, no unit given up though each may fail once only; the same command goes on."""
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(5))
    out = tmp_path / "run"

    def ring(request: int) -> None:
        if request == 20:
            go_out(server, 1e9)

    async with FakeServer(FakeConfig(), ring) as server:
        patience = ("--set", "endpoint.outage_seconds=1", "--max-attempts", "1")
        arguments = kit.played(dataset, out, server.base_url, *HERE, *patience)
        parked = await kit.finish(*arguments)
        assert parked.process.returncode == 3, parked.errors
        report = parked.report()
        assert (report["stopped"], report["given_up"]) == ("outage", 0)
        assert report["detail"].startswith("no answer for ")
        assert "503" in report["detail"]
        assert report["mend"] == "Wait until the provider answers again"
        failures = kit.table(out, "failures")
        assert {row["cause"] for row in failures} == {"outage"}
        assert all(row["reward"] is None for row in failures)
        done = report["done"]
        go_out(server, 0.0)
        resumed = await asyncio.wait_for(kit.finish(*arguments), 120)
        assert resumed.process.returncode == 0, resumed.errors
        assert resumed.report()["done"] == kit.units_of(5) > done
        kit.check_not_asked_again(out, parked.receipts())
        kit.check_books(out, server.entries)


@pytest.mark.slow
async def test_a_last_unit_that_draws_500s_alone_does_not_park_the_run(tmp_path: Path) -> None:
    """Nobody else is being answered while it fails. It is given up with its cause, and what was
    asked to find that out is in its row and in the books."""
    steps = json.dumps([{"text": "never", "fault": "server_error"}])
    poison = kit.task(0) | {"id": "poison", "prompt": f"Fail.\nSCRIPT: {steps}"}
    dataset, out = kit.write(tmp_path / "tasks.jsonl", [*kit.rows(3), poison]), tmp_path / "run"
    async with FakeServer(FakeConfig()) as server:
        run = await kit.finish(
            *kit.played(dataset, out, server.base_url, *HERE, "--max-attempts", "1")
        )
        assert run.process.returncode == 1, run.errors
        kit.check_books(out, server.entries)
    report = run.report()
    assert (report["given_up"], report["done"]) == (1, kit.units_of(3))
    (failure,) = kit.table(out, "failures")
    assert failure["cause"] == "model_server"
    asked = [(call["purpose"], call["outcome"]) for call in failure["calls"]]
    assert asked[-2:] == [("probe", "ok"), ("agent", "refused")]
    assert set(asked[:-2]) == {("agent", "refused")}
