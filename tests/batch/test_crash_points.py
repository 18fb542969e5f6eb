"""A whole run in one process, killed at every named step of the commit protocol; then the same
command again, on the dataset in another order.

tests/store kills a made-up driver at each step twice and in each other's recovery. Here it is the
runner that people start, with sandboxes, and a server that keeps books of its own.
"""

import asyncio
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.store import CRASH_POINTS, CRASH_VARIABLE
from hermes_rl.testing import FakeServer

pytestmark = pytest.mark.slow

KILLED = -9
SAME = {**kit.task(1000, turns=1), "repeats": kit.REPEATS}
ROWS = [SAME, kit.task(1, turns=1), SAME, kit.task(4, turns=1), SAME]
UNITS = kit.IDENTICAL * kit.REPEATS + 2
HERE = ("--workers", "0", "--concurrency", "4", "--set", "run.publish_every_s=0.05")
RECOVERY = [point for point in CRASH_POINTS if point.startswith("recover")]


async def play(arguments: list[str], crash_at: str = "") -> dict[str, int]:
    """Run to the end, or to a crash; what was reported done."""
    run = await kit.finish(*arguments, env={CRASH_VARIABLE: crash_at})
    assert run.process.returncode == (KILLED if crash_at else 0), (crash_at, run.errors)
    return run.receipts()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    asyncio.run(run_undisturbed(folder))
    return kit.content(folder / "run")


async def run_undisturbed(folder: Path) -> None:
    dataset = kit.write(folder / "tasks.jsonl", ROWS)
    async with FakeServer() as server:
        arguments = kit.played(dataset, folder / "run", server.base_url, *HERE)
        assert len(await play(arguments)) == UNITS


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_killed_at(
    point: str, unbroken: dict[str, Any], server: FakeServer, tmp_path: Path
) -> None:
    dataset, out = kit.write(tmp_path / "tasks.jsonl", ROWS), tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *HERE)
    watcher = kit.Watcher(out)
    watcher.start()
    crashes = [f"{point}:{2 if point.startswith('attempt') else 1}"]
    if point in RECOVERY:  # at the second start, which finds something to recover
        crashes.insert(0, "attempt-5-receipt:5")
    receipts: dict[str, int] = {}
    for crash in crashes:
        receipts |= await play(arguments, crash)

    kit.write(dataset, reversed(ROWS))
    done = await play(arguments)
    watcher.check()
    assert kit.content(out) == unbroken
    assert len(unbroken) == UNITS
    kit.check_usage(out, server.entries)
    kit.check_not_asked_again(out, receipts)
    assert not set(done) & set(receipts)
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []
    await kit.check_nothing_left([], out)
