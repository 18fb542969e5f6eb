"""Endpoints in an outage, without answers, or with refusals only: a short outage costs nothing, a
longer one stops the run, which resumes; progress, `status` and the exit code report it."""

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

IN_PROCESS = ("--workers", "0", "--concurrency", "8")
TWENTY = [kit.make_task(n) for n in range(20)]


def start_outage(server: FakeServer, seconds: float, kind: str = "unavailable") -> None:
    """Fail all requests from now on, for some seconds."""
    outages = ((server.now, server.now + seconds),)
    conditions = replace(server.config.conditions, outages=outages, outage=kind)
    server.config = replace(server.config, conditions=conditions)


async def test_a_short_outage_costs_no_unit_and_no_agent_time(tmp_path: Path) -> None:
    """For six seconds the server answers 500 to all calls; agents have five seconds each."""
    out = tmp_path / "run"

    def on_request(request: int) -> None:
        if request == 20:
            start_outage(server, 6.0, "server_error")

    async with FakeServer(FakeConfig(), on_request) as server:
        await kit.finish_run(
            *kit.run_arguments(
                tmp_path, kit.make_rows(5), server, *IN_PROCESS, "--max-seconds", "5"
            )
        )
        kit.check_usage(out, server.entries)
        assert any(entry.fault == "server_error" for entry in server.entries)
    rows = kit.final_rows(out).values()
    assert len(rows) == kit.count_units(5)
    assert {row["end_reason"] for row in rows} == {"answered"}
    assert kit.read_table(out, "failures") == []
    assert sum(row["timing"]["waiting_s"] for row in rows) > 5


async def test_a_long_outage_stops_the_run_which_resumes(tmp_path: Path) -> None:
    """Exit code 3. No unit is given up, although one failure is the limit; the command resumes."""
    out = tmp_path / "run"

    def on_request(request: int) -> None:
        if request == 20:
            start_outage(server, 1e9)

    async with FakeServer(FakeConfig(), on_request) as server:
        patience = ("--set", "endpoint.outage_seconds=1", "--max-attempts", "1")
        arguments = kit.run_arguments(tmp_path, kit.make_rows(5), server, *IN_PROCESS, *patience)
        stopped = await kit.finish_run(*arguments, code=3)
        report = stopped.report()
        assert (report["stopped"], report["given_up"]) == ("outage", 0)
        assert report["detail"].startswith("no answer for ")
        assert "503" in report["detail"]
        assert report["hint"] == "Wait until the provider answers again"
        failures = kit.read_table(out, "failures")
        assert {row["cause"] for row in failures} == {"outage"}
        assert all(row["reward"] is None for row in failures)
        done = report["done"]
        start_outage(server, 0.0)
        resumed = await kit.finish_run(*arguments)
        assert resumed.report()["done"] == kit.count_units(5) > done
        kit.check_no_unit_ran_again(out, stopped.receipts())
        kit.check_usage(out, server.entries)


async def test_a_single_unit_that_causes_500s_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other call is answered while it fails. It is given up with its cause, and the probe call
    is in its row and in its usage."""
    steps = json.dumps([{"text": "never", "fault": "server_error"}])
    failing = kit.make_task(0) | {"id": "failing", "prompt": f"Fail.\nSCRIPT: {steps}"}
    monkeypatch.setattr(wiring, "RetryPolicy", partial(wiring.RetryPolicy, cap_s=0.2))
    out = tmp_path / "run"
    async with FakeServer(FakeConfig()) as server:
        config = kit.make_config(
            tmp_path,
            [*kit.make_rows(3), failing],
            endpoint={"base_url": server.base_url},
            run={"concurrency": 8, "max_attempts": 1},
        )
        report = await kit.run_config(config)
        kit.check_usage(out, server.entries)
    assert (report.exit_code, report.given_up, report.done) == (1, 1, kit.count_units(3))
    (failure,) = kit.read_table(out, "failures")
    assert failure["cause"] == "model_server"
    outcomes = [(call["purpose"], call["outcome"]) for call in failure["calls"]]
    assert outcomes[-2:] == [("probe", "ok"), ("agent", "refused")]
    assert set(outcomes[:-2]) == {("agent", "refused")}


def faulty(kind: str) -> FakeConfig:
    """A server with one fault for every request; `held` never answers."""
    return (
        FakeConfig(hold_at=1) if kind == "held" else FakeConfig(faults=FaultPlan(rates={kind: 1.0}))
    )


async def test_a_run_stops_when_no_call_is_ever_answered(tmp_path: Path) -> None:
    """`models/test_first_answer` tests the other ways of not answering."""
    async with FakeServer(faulty("server_error")) as server:
        arguments = kit.run_arguments(tmp_path, TWENTY, server, *IN_PROCESS)
        soon = ("--set", "endpoint.first_answer_seconds=1")
        run = await kit.finish_run(*arguments, *soon, code=3)
        report = run.report()
        assert report["detail"].startswith("nothing was answered within 1 s, the last error: ")
        assert report["hint"] == "Look at the server, or raise endpoint.first_answer_seconds"
        assert report["given_up"] == 0
        server.config = FakeConfig()
        again = await kit.finish_run(*arguments)
        assert again.report()["done"] == 20


async def test_identical_refusals_of_all_calls_stop_the_run(tmp_path: Path) -> None:
    rows = [kit.make_task(n) for n in range(90)]
    async with FakeServer(faulty("bad_request")) as server:
        run = await kit.finish_run(*kit.run_arguments(tmp_path, rows, server, *IN_PROCESS), code=3)
        assert 10 <= server.requests < 10 + 8
    report = run.report()
    assert (
        "in the same words, none was answered: 400: Invalid value for 'messages'"
        in report["detail"]
    )
    assert report["hint"] == "Correct what the server refuses"
    assert report["given_up"] == 0


def first_trouble(run: kit.RunProcess) -> list[str]:
    lines = [e["trouble"] for e in run.events if e["event"] == "progress" and e["trouble"]]
    return lines[0] if lines else []


TROUBLE = {"server_error": "answers 500 'Internal server error.'", "held": "does not answer"}


@pytest.mark.parametrize("kind", TROUBLE)
async def test_unanswered_calls_are_reported_within_seconds_and_cancelled_by_ctrl_c(
    tmp_path: Path, kind: str
) -> None:
    """In the events and by `status`, until Ctrl-C ends the run at once."""
    out = tmp_path / "run"
    async with FakeServer(faulty(kind)) as server:
        run = await kit.start_run(*kit.run_arguments(tmp_path, TWENTY, server, *IN_PROCESS))
        await kit.wait_for_requests(server, 1, run)
        await kit.wait_for(run, lambda: first_trouble(run))
        (line,) = first_trouble(run)
        trouble, host = TROUBLE[kind], f"127.0.0.1:{server.port}"
        wanted = rf"{host} {re.escape(trouble)}; \d calls? waiting; gives up in (\d+) s"
        found = re.fullmatch(wanted, line)
        assert found
        assert int(found[1]) > 20, "of 60: five of them have passed on an idle machine"
        await kit.wait_for(run, lambda: trouble in read_status(out).line())
        run.process.send_signal(signal.SIGINT)
        assert await run.wait() == 130, run.errors
    (note,) = [e["text"] for e in run.events if e["event"] == "note"]
    assert re.fullmatch(r"stopping: \d rollouts without any answer are cancelled", note)
    assert {row["cause"] for row in kit.read_table(out, "failures")} == {"interrupted"}
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
def test_a_slow_embedded_model_is_not_reported_early(
    endpoint: str, seconds: float, reported: str | None
) -> None:
    """Its first answer can take a minute on a slow CPU, for which the run never gives up."""
    calls = Unanswered(waiting=4, since_s=seconds, never=True, alive=False)
    lane = LaneSummary(
        endpoint, "", "m", 4, (), per_s=None, paces=(), clean=0, throttled=0, trouble=0,
        unanswered=calls,
    )  # fmt: skip
    found = troubles(Summary(lanes=(lane,)), EndpointSection(), time.time())
    assert [trouble.line for trouble in found] == ([] if reported is None else [reported])
