"""Kill -9 of a run at every crash point of the commit protocol, and of Ray drivers and workers at
the server's k-th request; then the same command again, on the dataset in another order.

tests/store kills a scripted driver at each crash point twice, also during recovery. Here it is the
real runner with sandboxes, and the server records what it served.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.cli import main
from hermes_rl.store import COMPACTION_POINTS, CRASH_POINTS, CRASH_VARIABLE, ONCE_VARIABLE
from hermes_rl.testing import FakeServer

pytestmark = pytest.mark.slow

KILLED = -9
IN_PROCESS = ("--workers", "0", "--concurrency", "4", "--set", "run.publish_every_s=0.05")
RAY = ("--workers", "2", "--concurrency", "6", "--set", "run.publish_every_s=0.5")
SAME = {**kit.make_task(1000, turns=1), "repeats": 2}
FEW = [SAME, kit.make_task(1, turns=1), SAME, kit.make_task(4, turns=1), SAME]
MANY = kit.make_rows(12, latency_s=0.03)
RECOVERY = [point for point in CRASH_POINTS if point.startswith("recover")]
WRITTEN = RECOVERY.index("recover-4-written") + 1
RECOVERIES = [RECOVERY[:WRITTEN], RECOVERY[WRITTEN:]]
"""Rows of lost attempts are written once: a start after that has other steps."""
EVERY = "EVERY_CRASH_POINT" in os.environ
"""Of `make crash-points`."""
Rows = dict[str, dict[str, Any]]


def workers_env(out: Path, relayed: bool, **env_vars: str) -> list[str]:
    """Options for workers with these variables.

    Args:
        relayed: they see no run directory.
    """
    python = {"py_executable": str(kit.make_blind_python(out.parent))} if relayed else {}
    return ["--set", "run.runtime_env=" + json.dumps({"env_vars": env_vars, **python})]


async def run_undisturbed(folder: Path, rows: list[dict[str, Any]]) -> Rows:
    """The rows of a run that is not killed."""
    async with FakeServer() as server:
        await kit.finish_run(*kit.run_arguments(folder, rows, server, "--workers", "0"))
    return kit.comparable_rows(folder / "run")


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return asyncio.run(run_undisturbed(tmp_path_factory.mktemp("few"), FEW))


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return asyncio.run(run_undisturbed(tmp_path_factory.mktemp("many"), MANY))


@pytest.fixture
def out(tmp_path: Path) -> Any:
    """The run directory; all its Parquet files are read again and again during the test."""
    folder = tmp_path / "hidden"  # from some workers
    folder.mkdir()
    reader = kit.ParquetReader(folder / "run", growing=True)
    reader.start()
    yield folder / "run"
    reader.check()


def check_result(
    out: Path, server: FakeServer, receipts: dict[str, int], expected: Rows, *, lost: bool = False
) -> None:
    assert kit.comparable_rows(out) == expected
    kit.check_usage(out, server.entries, lost=lost)
    kit.check_no_unit_ran_again(out, receipts)
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "points", [*([p] for p in CRASH_POINTS if p not in RECOVERY), *RECOVERIES], ids=lambda p: p[0]
)
async def test_killed_at(points: list[str], few_rows: Rows, server: FakeServer, out: Path) -> None:
    """One start after the other is killed at steps of recovery: what is left has the next ones."""
    arguments = kit.run_arguments(out.parent, FEW, server, *IN_PROCESS)
    crashes = [f"{point}:{2 if point.startswith('attempt') else 1}" for point in points]
    if points in RECOVERIES:
        crashes.insert(0, "attempt-5-receipt:5")
    receipts: dict[str, int] = {}
    for crash in crashes:
        run = await kit.finish_run(*arguments, env={CRASH_VARIABLE: crash}, code=KILLED)
        assert not (run.receipts() and crash.startswith("recover")), "units ran before the kill"
        receipts |= run.receipts()

    arguments = kit.run_arguments(out.parent, reversed(FEW), server, *IN_PROCESS)
    resumed = await kit.finish_run(*arguments, env={CRASH_VARIABLE: ""})
    assert len(few_rows) == 3 * 2 + 2
    check_result(out, server, receipts, few_rows)
    assert not set(resumed.receipts()) & set(receipts)
    await kit.check_no_processes([], out)


MERGES = [(p, how) for p in COMPACTION_POINTS[:-1] for how in ("in process", "ray", "relayed")]
"""The last point comes after ten minutes."""


@pytest.mark.parametrize(
    ("point", "how"), MERGES if EVERY else [("compact-3-recorded", "in process")]
)
async def test_killed_while_merging(
    point: str, how: str, server: FakeServer, out: Path, cluster: dict[str, str]
) -> None:
    """Small files are merged while workers run."""
    rows = [kit.make_task(n, turns=1) for n in range(60)]
    more = ["--concurrency", "1", "--set", "run.publish_every_s=0.01", "--workers", "0"]
    workers = ["--workers", "1", *workers_env(out, how == "relayed")]
    async with kit.OneByOne(out, merges_after=55) as first:
        arguments = kit.run_arguments(out.parent, rows, first, *more)
        arguments += workers if how != "in process" else []
        env = {**cluster, CRASH_VARIABLE: point}
        run = await kit.finish_run(*arguments, env=env, code=KILLED)
        await kit.check_processes_ended(kit.worker_pids(out), kit.WAIT_S)
    receipts = run.receipts()
    assert len(receipts) < 60
    arguments = kit.run_arguments(out.parent, rows, server, *more)
    resumed = await kit.finish_run(*arguments, env={CRASH_VARIABLE: ""})
    assert len(kit.final_rows(out)) == 60
    kit.check_usage(out, [*first.entries, *server.entries], lost=how == "relayed")
    kit.check_no_unit_ran_again(out, receipts)
    assert not set(resumed.receipts()) & set(receipts)
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []


async def test_driver_killed(out: Path, server: FakeServer, many_rows: Rows) -> None:
    """With a Ray of its own, whose agents would otherwise stay for a minute."""
    run = await kit.start_ray_run(out, *kit.run_arguments(out.parent, MANY, server, *RAY))
    await kit.wait_for_workers(out, 2, run)
    await kit.wait_for_requests(server, 17, run)
    assert len(kit.leftover_processes([run.mark], out)) > 3
    kit.kill(run.pid)
    await run.wait()
    await kit.check_no_processes([run.mark], out)

    arguments = kit.run_arguments(out.parent, reversed(MANY), server, "--workers", "0")
    await kit.finish_run(*arguments)
    check_result(out, server, run.receipts(), many_rows)
    lost = kit.read_table(out, "failures")
    assert lost, "nothing was in flight when the driver was killed"
    assert {row["cause"] for row in lost} == {"driver_lost"}
    assert len({row["unit_id"] for row in lost}) == len(lost) <= 6


OF_WORKERS = ("attempt-2", "attempt-3", "attempt-4", "publish-6")
OF_WORKERS += ("publish-7-half", "publish-7-prepared", "publish-9-live")
RAY_POINTS = [("", p, False) if p.startswith(OF_WORKERS) else (p, "", False) for p in CRASH_POINTS]
"""Where the driver dies, where one of the workers does, and whether workers see no run directory:
their driver does the steps that they would do."""
RAY_POINTS += [(p, "", True) for p in CRASH_POINTS if not p.startswith("recover")]
RAY_POINTS += [("", p, True) for p in ("attempt-2-live", "attempt-3-done")]
OF_DRIVER = [p for p in CRASH_POINTS if p.startswith("recover-4")]  # recovers a dead worker
RAY_POINTS += [("recover-3-batch", "attempt-3-done", False)]
RAY_POINTS += [(p, "attempt-2-live", False) for p in OF_DRIVER]
RAY_POINTS += [(p, "attempt-3-done:4", True) for p in ("recover-3-batch", *OF_DRIVER)]
if not EVERY:
    RAY_POINTS = [("publish-7-renamed", "", False), ("recover-4-written", "attempt-3-done:4", True)]


@pytest.mark.parametrize(("driver", "worker", "relayed"), RAY_POINTS)
async def test_killed_at_with_ray_workers(
    driver: str,
    worker: str,
    relayed: bool,
    out: Path,
    server: FakeServer,
    cluster: dict[str, str],
    many_rows: Rows,
) -> None:
    """A dead worker is replaced. Workers of a dead driver end with their lease or with Ray."""
    arguments = kit.run_arguments(out.parent, MANY, server, *RAY)
    once, env_vars = out.parent.with_name("once"), dict[str, str]()
    if worker:
        once.touch()
        env_vars = {CRASH_VARIABLE: worker, ONCE_VARIABLE: str(once)}
    arguments += workers_env(out, relayed, **env_vars)
    if relayed and worker:  # the driver keeps files of the worker
        arguments += ["--set", "run.publish_every_s=60"]
    crashes = [driver + (":2" if driver.startswith("attempt") else "")]
    if driver.startswith("recover") and not worker:  # at the second start
        crashes.insert(0, "attempt-5-receipt:5")
    receipts: dict[str, int] = {}
    for crash in crashes:
        env = {**cluster, CRASH_VARIABLE: crash}
        run = await kit.finish_run(*arguments, env=env, code=KILLED if driver else 0)
        await kit.check_processes_ended(kit.worker_pids(out), kit.WAIT_S)
        receipts |= run.receipts()

    arguments = kit.run_arguments(out.parent, reversed(MANY), server, "--workers", "0")
    resumed = await kit.finish_run(*arguments, env={CRASH_VARIABLE: ""})
    assert not set(resumed.receipts()) & set(receipts)
    check_result(out, server, receipts, many_rows, lost=relayed)
    assert not once.exists(), "no worker died"
    lost = {row["cause"] for row in kit.read_table(out, "failures")}
    assert lost <= ({"driver_lost", "worker_lost"} if worker else {"driver_lost"})
    assert await asyncio.to_thread(main, ["check", str(out)]) == 0


async def test_worker_killed(
    out: Path, server: FakeServer, cluster: dict[str, str], many_rows: Rows
) -> None:
    run = await kit.start_run(*kit.run_arguments(out.parent, MANY, server, *RAY), env=cluster)
    await kit.wait_for_requests(server, 20, run)
    kit.kill(kit.worker_pids(out)[0])
    assert await run.wait() == 0, run.errors
    check_result(out, server, run.receipts(), many_rows)
    await kit.check_no_processes([run.mark], out)
    lost = kit.read_table(out, "failures")
    assert {row["cause"] for row in lost} == {"worker_lost"}
    assert 1 <= len(lost) <= 3, "only the rollouts of the killed worker are lost"
    notes = [e["text"] for e in run.events if e["event"] == "note"]
    # Ray prints to the same stream and may break the line of the note's event.
    assert any("was lost" in text for text in [*notes, run.errors]), (notes, run.errors[-3000:])


async def test_workers_of_a_suspended_driver_end_after_the_lease(
    out: Path, server: FakeServer, cluster: dict[str, str], many_rows: Rows
) -> None:
    """They publish nothing, and the attempts that they lose never count as failures."""
    more = ("--workers", "1", "--set", "run.lease_s=10")
    arguments = kit.run_arguments(out.parent, MANY, server, *RAY, *more)
    run = await kit.start_run(*arguments, env=cluster)
    await kit.wait_for_requests(server, 12, run)
    workers = kit.worker_pids(out)
    os.kill(run.pid, signal.SIGSTOP)
    try:
        await kit.check_processes_ended(workers, kit.WAIT_S)
        parts = sorted(out.glob("*/part-*.parquet"))
    finally:
        os.kill(run.pid, signal.SIGCONT)
    assert await run.wait() == 0, run.errors
    assert set(parts) <= set(out.glob("*/part-*.parquet"))
    check_result(out, server, run.receipts(), many_rows)
    assert {row["cause"] for row in kit.read_table(out, "failures")} <= {"driver_lost"}
