"""Endpoints that are out, silent or refuse everything: a short outage costs nothing, a longer one
stops the run, which resumes; terminals and the exit code report it."""

import asyncio
import json
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import kit
import pytest

from batch_runner import troubles
from hermes_rl import wiring
from hermes_rl.cli import read_status
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.models.rate import LaneSummary, Summary, Unanswered
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

HERE = ("--workers", "0", "--concurrency", "8")
TWENTY = [kit.task(n) for n in range(20)]


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
        kit.check_usage(out, server.entries)
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
        assert report["hint"] == "Wait until the provider answers again"
        failures = kit.table(out, "failures")
        assert {row["cause"] for row in failures} == {"outage"}
        assert all(row["reward"] is None for row in failures)
        done = report["done"]
        go_out(server, 0.0)
        resumed = await asyncio.wait_for(kit.finish(*arguments), 120)
        assert resumed.process.returncode == 0, resumed.errors
        assert resumed.report()["done"] == kit.units_of(5) > done
        kit.check_not_asked_again(out, parked.receipts())
        kit.check_usage(out, server.entries)


async def test_a_last_unit_that_draws_500s_alone_does_not_park_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is being answered while it fails. It is given up with its cause, and what was
    asked to find that out is in its row and in the books."""
    steps = json.dumps([{"text": "never", "fault": "server_error"}])
    poison = kit.task(0) | {"id": "poison", "prompt": f"Fail.\nSCRIPT: {steps}"}
    monkeypatch.setattr(wiring, "RetryPolicy", partial(wiring.RetryPolicy, cap_s=0.2))
    out = tmp_path / "run"
    async with FakeServer(FakeConfig()) as server:
        config = kit.config(
            tmp_path,
            [*kit.rows(3), poison],
            endpoint={"base_url": server.base_url},
            run={"concurrency": 8, "max_attempts": 1},
        )
        report = await kit.run(config)
        kit.check_usage(out, server.entries)
    assert (report.exit_code, report.given_up, report.done) == (1, 1, kit.units_of(3))
    (failure,) = kit.table(out, "failures")
    assert failure["cause"] == "model_server"
    asked = [(call["purpose"], call["outcome"]) for call in failure["calls"]]
    assert asked[-2:] == [("probe", "ok"), ("agent", "refused")]
    assert set(asked[:-2]) == {("agent", "refused")}


def faulty(kind: str) -> FakeConfig:
    """A server that meets every request with one fault; `held` never answers."""
    return (
        FakeConfig(hold_at=1) if kind == "held" else FakeConfig(faults=FaultPlan(rates={kind: 1.0}))
    )


async def test_a_run_stops_when_nothing_was_ever_answered(tmp_path: Path) -> None:
    """`models/test_first_answer` has the other ways of not answering."""
    dataset, out = kit.write(tmp_path / "t.jsonl", TWENTY), tmp_path / "r"
    async with FakeServer(faulty("server_error")) as server:
        soon = ("--set", "endpoint.first_answer_seconds=1")
        arguments = kit.played(dataset, out, server.base_url, *HERE, *soon)
        run = await kit.finish(*arguments)
        assert run.process.returncode == 3, run.errors
        report = run.report()
        assert report["detail"].startswith("nothing was answered within 1 s, the last error: ")
        assert report["hint"] == "Look at the server, or raise endpoint.first_answer_seconds"
        assert (report["given_up"], report["seconds"] < 30) == (0, True)
        server.config = FakeConfig()
        again = await kit.finish(*arguments)
        assert (again.process.returncode, again.report()["done"]) == (0, 20), again.errors


async def test_the_same_refusal_of_every_call_stops_the_run(tmp_path: Path) -> None:
    rows, out = [kit.task(n) for n in range(90)], tmp_path / "r"
    dataset = kit.write(tmp_path / "t.jsonl", rows)
    async with FakeServer(faulty("bad_request")) as server:
        run = await kit.finish(*kit.played(dataset, out, server.base_url, *HERE))
        assert run.process.returncode == 3, run.errors
        assert 10 <= server.requests < 10 + 8
    report = run.report()
    assert (
        "in the same words, none was answered: 400: Invalid value for 'messages'"
        in report["detail"]
    )
    assert report["hint"] == "Correct what the server refuses"
    assert report["given_up"] == 0


def first_trouble(run: kit.Process) -> list[str]:
    lines = [e["trouble"] for e in run.events if e["event"] == "progress" and e["trouble"]]
    return lines[0] if lines else []


SAID = {"server_error": "answers 500 'Internal server error.'", "held": "does not answer"}


@pytest.mark.parametrize("kind", SAID)
async def test_trouble_is_reported_within_seconds_and_ctrl_c_ends_it(
    tmp_path: Path, kind: str
) -> None:
    """By the run's events, by `status`, and by nobody any more when Ctrl-C has ended it at once."""
    dataset, out = kit.write(tmp_path / "t.jsonl", TWENTY), tmp_path / "r"
    async with FakeServer(faulty(kind)) as server:
        run = await kit.launch(*kit.played(dataset, out, server.base_url, *HERE))
        await kit.asked(server, 1, run)
        began = time.monotonic()
        await kit.wait_for(run, lambda: first_trouble(run))
        assert time.monotonic() - began < 8  # 5 where the machine has time for it
        (line,) = first_trouble(run)
        said, host = SAID[kind], f"127.0.0.1:{server.port}"
        found = rf"{host} {re.escape(said)}; \d calls? waiting; gives up in \d+ s"
        assert re.fullmatch(found, line)
        # It is stored just after.
        while said not in (await asyncio.to_thread(read_status, out)).line():
            assert time.monotonic() - began < 8
            await asyncio.sleep(0.02)
        run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert await run.wait(20) == 130, run.errors
        assert time.monotonic() - began < 10
    (note,) = [e["text"] for e in run.events if e["event"] == "note"]
    assert re.fullmatch(r"stopping: \d rollouts without any answer are cancelled", note)
    assert {row["cause"] for row in kit.table(out, "failures")} == {"interrupted"}
    assert (await asyncio.to_thread(read_status, out)).trouble == ()


@pytest.mark.parametrize(
    ("endpoint", "seconds", "reported"),
    [
        (
            "127.0.0.1:8000",
            10.0,
            "127.0.0.1:8000 does not answer; 4 calls waiting; gives up in 50 s",
        ),
        ("embedded:local", 10.0, None),
        ("embedded:local", 70.0, "embedded:local does not answer; 4 calls waiting"),
    ],
)
def test_a_slow_embedded_model_is_not_reported_as_silent(
    endpoint: str, seconds: float, reported: str | None
) -> None:
    """Its first answer can take a minute on a slow CPU, and the run never gives up for that."""
    calls = Unanswered(waiting=4, since_s=seconds, never=True, alive=False)
    lane = LaneSummary(
        endpoint, "", "m", 4, (), per_s=None, paces=(), clean=0, throttled=0, trouble=0,
        unanswered=calls,
    )  # fmt: skip
    found = troubles(Summary(lanes=(lane,)), EndpointSection(), time.time())
    assert [trouble.line for trouble in found] == ([] if reported is None else [reported])
