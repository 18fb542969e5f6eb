"""Ctrl-C: once lets the running rollouts end, twice ends the run at once; both can be resumed."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import kit
import pytest

from hermes_rl.testing import FakeServer

ROWS = [kit.task(n, latency_s=0.25) for n in range(12)]
FOUR = ("--workers", "0", "--concurrency", "4")


def ended_in_order(run: kit.Process) -> int:
    """Units that had ended at the first Ctrl-C or ran then: those are finished, no others begin.

    How many they are depends on the machine: workers do not start side by side.
    """
    (at, note), *_ = (
        (n, e) for n, e in enumerate(run.events) if e["event"] == "note" and "stopping" in e["text"]
    )
    before = sum(e["event"] == "attempt" for e in run.events[:at])
    running = int(re.findall(r"stopping: (\d+) running", note["text"])[0])
    assert running > 0, "nothing ran at the signal"
    assert sum(e["event"] == "attempt" for e in run.events) == before + running
    return before + running


async def test_once(tmp_path: Path, server: FakeServer) -> None:
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *FOUR)
    run = await kit.launch(*arguments)
    await kit.asked(server, 6, run)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert await run.wait() == 130, run.errors
    report = run.report()
    assert report["stopped"] == "interrupted"
    assert report["done"] == ended_in_order(run)
    assert f"{out}/run.yaml" in report["resume"]
    assert len(kit.final_rows(out)) == report["done"] < 12
    assert kit.table(out, "failures") == []
    assert list((out / "journal").iterdir()) == []
    await kit.check_nothing_left([run.mark], out)

    again = await kit.finish("--config", out / "run.yaml")
    assert again.process.returncode == 0, again.errors
    assert len(kit.final_rows(out)) == 12
    kit.check_usage(out, server.entries)
    kit.check_not_asked_again(out, run.receipts())


async def test_twice(tmp_path: Path, server: FakeServer) -> None:
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *FOUR)
    run = await kit.launch(*arguments)
    await kit.until_done(run, 3)
    run.process.send_signal(signal.SIGINT)
    await run.until("note")  # it says that it stops
    run.process.send_signal(signal.SIGINT)
    assert await run.wait(20) == 130, run.errors
    cut = kit.table(out, "failures")
    assert {(row["status"], row["cause"], row["owner"]) for row in cut} == {
        ("cancelled", "interrupted", "operator")
    }
    assert all(row["reward"] is None for row in cut)
    assert len(kit.final_rows(out)) == len(run.receipts()) >= 3
    await kit.check_nothing_left([run.mark], out)

    again = await kit.finish(*arguments)
    assert again.process.returncode == 0, again.errors
    assert len(kit.final_rows(out)) == 12
    kit.check_usage(out, server.entries)
    kit.check_not_asked_again(out, run.receipts())


@pytest.mark.slow
async def test_once_with_ray_on_a_terminal(tmp_path: Path, server: FakeServer) -> None:
    """A terminal sends Ctrl-C to Ray's processes, the workers and the sandboxes as well."""
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    ray = ("--workers", "2", "--concurrency", "4")
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *ray))
    await kit.asked(server, 6, run)
    os.killpg(run.pid, signal.SIGINT)
    assert await run.wait() == 130, run.errors
    failed = len(kit.table(out, "failures"))
    assert len(kit.final_rows(out)) == run.report()["done"] == ended_in_order(run) - failed
    # What a signal that reached workers or sandboxes would leave; a sandbox that could not start
    # on an overloaded machine before it is none of this test's business.
    causes = {(row["cause"], row["error"]) for row in kit.table(out, "failures")}
    assert {cause for cause, _ in causes} <= {"sandbox_start"}, causes
    await kit.check_nothing_left([run.mark], out)


async def test_sigterm_is_a_first_ctrl_c(tmp_path: Path, server: FakeServer) -> None:
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS[:6]), tmp_path / "run"
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *FOUR))
    await kit.asked(server, 2, run)
    run.process.send_signal(signal.SIGTERM)
    assert await run.wait() == 130, run.errors
    assert len(kit.final_rows(out)) == ended_in_order(run)


@pytest.mark.slow
async def test_once_while_ray_starts(tmp_path: Path, server: FakeServer) -> None:
    """Nothing runs yet: the run is acknowledged at once and ends, and leaves nothing."""
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    ray = ("--workers", "2", "--concurrency", "4")
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *ray))
    await run.until("note")  # it starts the workers
    await asyncio.sleep(1.0)  # in the middle of that
    os.killpg(run.pid, signal.SIGINT)
    began = time.monotonic()
    await run.until("note", 2)
    assert time.monotonic() - began < 4  # half a second where the machine has time for it
    assert await run.wait(30) == 130, run.errors
    assert [e["text"] for e in run.events if e["event"] == "note"][1:] == ["stopping"]
    assert "Traceback" not in run.errors
    assert server.requests == 0
    await kit.check_nothing_left([run.mark], out)
