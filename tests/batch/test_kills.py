"""Kill -9 of driver, worker and both at the server's k-th request; then the same command again.

One dataset: three identical rows with four repeats each among distinct ones, in another order at
the resume. One Ray cluster serves all drivers, but for the last test, which has its own.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.testing import FakeServer

pytestmark = pytest.mark.slow

DISTINCT = 12
ROWS = kit.rows(DISTINCT, latency_s=0.03)
RAY = ("--workers", "2", "--concurrency", "6", "--set", "run.publish_every_s=0.5")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows of a run that nobody disturbed, in one process."""
    folder = tmp_path_factory.mktemp("unbroken")
    asyncio.run(run_undisturbed(folder))
    return kit.content(folder / "run")


async def run_undisturbed(folder: Path) -> None:
    dataset = kit.write(folder / "tasks.jsonl", ROWS)
    async with FakeServer() as server:
        arguments = kit.played(dataset, folder / "run", server.base_url, "--workers", "0")
        run = await kit.finish(*arguments)
    assert run.process.returncode == 0, run.errors


async def check_end(
    out: Path, server: FakeServer, receipts: dict[str, int], unbroken: dict[str, Any]
) -> None:
    """What must hold once the run is whole."""
    assert kit.content(out) == unbroken
    assert len(unbroken) == kit.units_of(DISTINCT)
    kit.check_usage(out, server.entries)
    kit.check_not_asked_again(out, receipts)
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("who", "at"),
    [("driver", 17), ("both", 51)],
)
async def test_driver_killed(
    who: str,
    at: int,
    tmp_path: Path,
    server: FakeServer,
    cluster: dict[str, str],
    unbroken: dict[str, Any],
) -> None:
    """Alone, or together with both workers."""
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    watcher = kit.Watcher(out)
    watcher.start()
    first = await kit.launch(*kit.played(dataset, out, server.base_url, *RAY), env=cluster)
    await kit.asked(server, at, first)
    workers = kit.alive_pids(out)
    assert len(workers) == 2
    for pid in (first.pid, *(workers if who == "both" else ())):
        kit.kill(pid)
    await first.wait()
    await kit.check_gone(workers)

    kit.write(dataset, reversed(ROWS))
    second = await kit.finish(*kit.played(dataset, out, server.base_url, "--workers", "0"))
    assert second.process.returncode == 0, second.errors
    watcher.check()
    await check_end(out, server, first.receipts(), unbroken)
    lost = kit.table(out, "failures")
    assert lost, "nothing was in flight when the driver was killed"
    assert {row["cause"] for row in lost} == {"driver_lost"}
    assert len({row["unit_id"] for row in lost}) == len(lost) <= 6


async def test_worker_killed(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str], unbroken: dict[str, Any]
) -> None:
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    watcher = kit.Watcher(out)
    watcher.start()
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *RAY), env=cluster)
    await kit.asked(server, 20, run)
    victim = kit.alive_pids(out)[0]
    kit.kill(victim)
    assert await run.wait() == 0, run.errors
    watcher.check()
    await check_end(out, server, run.receipts(), unbroken)
    lost = kit.table(out, "failures")
    assert {row["cause"] for row in lost} == {"worker_lost"}
    assert 1 <= len(lost) <= 3, "only the dead worker's rollouts are lost"
    notes = [e["text"] for e in run.events if e["event"] == "note"]
    # Ray prints to the same stream: in the midst of the note's line it is no event any more.
    assert any("was lost" in text for text in [*notes, run.errors]), (notes, run.errors[-3000:])


async def test_a_killed_driver_leaves_no_process(tmp_path: Path, server: FakeServer) -> None:
    """With a Ray of its own, whose agents would stay for a minute."""
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *RAY))
    await kit.asked(server, 10, run)
    assert len(kit.left_behind([run.mark], out)) > 3
    kit.kill(run.pid)
    await run.wait()
    await kit.check_nothing_left([run.mark], out)


async def test_a_driver_that_is_stopped_loses_its_workers(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str], unbroken: dict[str, Any]
) -> None:
    """The lease: workers that do not hear their driver end and publish nothing. That is nothing
    that their units did: it never counts, however often it happens."""
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *RAY, "--set", "run.lease_s=3")
    run = await kit.launch(*arguments, env=cluster)
    await kit.asked(server, 12, run)
    workers = kit.alive_pids(out)
    os.kill(run.pid, signal.SIGSTOP)
    try:
        await kit.check_gone(workers, 20.0)
        parts = sorted(out.glob("*/part-*.parquet"))
    finally:
        os.kill(run.pid, signal.SIGCONT)
    assert await run.wait() == 0, run.errors
    assert set(parts) <= set(out.glob("*/part-*.parquet"))
    await check_end(out, server, run.receipts(), unbroken)
    assert {row["cause"] for row in kit.table(out, "failures")} <= {"driver_lost"}
