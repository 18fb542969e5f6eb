"""`hermes-rl ctl` steers a running run from another process."""

import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_runner import clean_environment, run_cli, scripted_task, write_rows
from forks import Forked

LONG = "a-folder-whose-name-is-much-longer-than-an-address-of-a-socket-may-be/" * 2
RUN = f"{LONG}run"
BUDGET = ("--budget-usd", "50", "--set", "endpoint.prices.m.input=1")
BUDGET += ("--set", "endpoint.prices.m.output=1")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def driver(tmp_path: Path, base_url: str) -> Iterator[Forked]:
    """A run of 600 slow units and one that is given up until a file exists."""
    (tmp_path / LONG).mkdir(parents=True)
    slow = [{"run": "true", "latency_s": 0.2}] * 2
    rows = [scripted_task(f"t{n}", *slow, "done") for n in range(600)]
    write_rows(
        tmp_path / "slow.jsonl",
        {**scripted_task("late", "done"), "setup": f"test -e {tmp_path}/here"},
        *rows,
    )
    arguments = ["slow.jsonl", "--model", "m", "--base-url", base_url, "--workers", "0", *BUDGET]
    arguments += ["--toolsets", "terminal", "--sandbox", "none", "--allow-unsandboxed"]
    command = ["run", *arguments, "--out", RUN, "--concurrency", "4"]
    running = Forked(command, clean_environment(), tmp_path)
    with running.stdout:
        try:
            until(lambda: ctl(tmp_path).get("running", 0) > 0)
            yield running
        finally:
            running.kill()
            running.wait()


def ctl(folder: Path, *order: str) -> dict[str, Any]:
    """The state of the run, or the refusal."""
    result = run_cli("ctl", RUN, *order, "--json", cwd=folder)
    return json.loads(result.out) if result.code == 0 else {"refused": result.error}


def test_a_run_is_paused_resumed_changed_and_drained(tmp_path: Path, driver: Forked) -> None:
    run = tmp_path / RUN
    assert stat.S_IMODE((run / "tmp/ctl.sock").stat().st_mode) == 0o600
    assert ctl(tmp_path, "pause")["state"] == "paused"
    until(lambda: ctl(tmp_path)["running"] == 0)
    before = done(tmp_path)
    assert before < 600
    time.sleep(1)  # two rollouts would have ended
    assert (done(tmp_path), ctl(tmp_path)["running"]) == (before, 0)

    assert ctl(tmp_path, "concurrency", "1")["concurrency"] == 1
    assert ctl(tmp_path, "resume")["state"] == "running"
    until(lambda: done(tmp_path) > before)
    assert ctl(tmp_path)["running"] <= 1
    assert ctl(tmp_path, "concurrency", "4")["concurrency"] == 4
    assert ctl(tmp_path, "budget", "75.5")["budget_usd"] == 75.5

    until(lambda: status(tmp_path)["given_up"] == 1)
    (tmp_path / "here").touch()
    assert ctl(tmp_path, "requeue", "model_timeout")["requeued"] == 0
    assert ctl(tmp_path, "requeue", "task")["requeued"] == 1
    until(lambda: status(tmp_path)["given_up"] == 0)

    assert ctl(tmp_path, "drain")["state"] == "draining"
    assert driver.wait(240) == 130, driver.stdout.read()
    assert not (run / "tmp/ctl.sock").exists()
    assert "late" in set(pd.read_parquet(run / "trajectories")["task_id"])


REFUSED = {
    "concurrency 9": "concurrency needs a number from 1 to 4",
    "concurrency": "concurrency needs a number from 1 to 4",
    "budget nan": "budget needs an amount in US dollars, such as 25",
    "requeue weather": "requeue needs a cause of failures: auth",
    "stop": "no command 'stop'; choose one of state, pause",
}


def test_orders_that_make_no_sense_are_refused(tmp_path: Path, driver: Forked) -> None:
    for order, message in REFUSED.items():
        assert message in ctl(tmp_path, *order.split())["refused"]
    assert ctl(tmp_path)["state"] == "running"


def test_a_killed_driver_leaves_a_socket_that_harms_nobody(tmp_path: Path, driver: Forked) -> None:
    driver.kill()
    driver.wait()
    assert (tmp_path / RUN / "tmp/ctl.sock").exists()
    assert "no driver on this machine takes commands" in ctl(tmp_path, "pause")["refused"]
    assert run_cli("check", RUN, cwd=tmp_path).code == 0
    assert run_cli("compact", RUN, cwd=tmp_path).code == 0
    assert not (tmp_path / RUN / "tmp/ctl.sock").exists()


def status(folder: Path) -> dict[str, Any]:
    return run_cli("status", RUN, "--json", cwd=folder).json()


def done(folder: Path) -> int:
    return int(status(folder)["done"])
