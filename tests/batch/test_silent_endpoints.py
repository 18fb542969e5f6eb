"""Endpoints in trouble, as a run's terminal, its other terminals and its exit code tell of them."""

from pathlib import Path

import kit
import pytest

from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.faults import FaultPlan

HERE = ("--workers", "0", "--concurrency", "8", "--sandbox", "none", "--allow-unsandboxed")
SOON = ("--set", "endpoint.first_answer_seconds=3")


def faulty(kind: str) -> FakeConfig:
    return FakeConfig(faults=FaultPlan(rates={kind: 1.0}))


@pytest.mark.parametrize("kind", ["server_error", "garbage", "held"])
async def test_a_run_stops_when_nothing_was_ever_answered(tmp_path: Path, kind: str) -> None:
    dataset, out = kit.write(tmp_path / "t.jsonl", [kit.task(n) for n in range(20)]), tmp_path / "r"
    async with FakeServer(FakeConfig(hold_at=1) if kind == "held" else faulty(kind)) as server:
        arguments = kit.played(dataset, out, server.base_url, *HERE, *SOON)
        run = await kit.finish(*arguments)
        assert run.process.returncode == 3, run.errors
        report = run.report()
        assert report["detail"].startswith("nothing was answered within 3 s, the last error: ")
        assert report["mend"] == "Look at the server, or raise endpoint.first_answer_seconds"
        assert (report["given_up"], report["seconds"] < 30) == (0, True)
        if kind != "server_error":
            return
        server.config = FakeConfig()
        again = await kit.finish(*arguments)
        assert (again.process.returncode, again.report()["done"]) == (0, 20), again.errors


async def test_the_same_refusal_of_every_call_stops_the_run(tmp_path: Path) -> None:
    dataset, out = kit.write(tmp_path / "t.jsonl", [kit.task(n) for n in range(90)]), tmp_path / "r"
    async with FakeServer(faulty("bad_request")) as server:
        run = await kit.finish(*kit.played(dataset, out, server.base_url, *HERE))
        assert run.process.returncode == 3, run.errors
        assert 10 <= server.requests < 10 + 8
    report = run.report()
    assert (
        "in the same words, none was answered: 400: Invalid value for 'messages'"
        in report["detail"]
    )
    assert report["mend"] == "Correct what the server refuses"
    assert report["given_up"] == 0
