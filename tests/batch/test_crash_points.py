"""A whole run in one process, killed at every named step of the commit protocol; then the same
command again, on the dataset in another order.

tests/store kills a made-up driver at each step twice and in each other's recovery. Here it is the
runner that people start, with sandboxes, and a server that keeps books of its own.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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

Play = Callable[..., tuple[int, dict[str, int]]]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The server that forks runs."""
    program = Path(__file__).with_name("forked_runs.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(program)], text=True, bufsize=1, **pipes) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


@pytest.fixture(scope="module")
def play(forks: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Play:
    """`play(arguments, crash_at)`: exit status, and what was reported done."""
    said = tmp_path_factory.mktemp("said") / "lines"

    def order(arguments: list[str], crash_at: str = "") -> tuple[int, dict[str, int]]:
        assert forks.stdin is not None
        assert forks.stdout is not None
        said.unlink(missing_ok=True)
        what = {"arguments": arguments, "env": {CRASH_VARIABLE: crash_at}, "said": str(said)}
        forks.stdin.write(json.dumps(what) + "\n")
        status = int(forks.stdout.readline())
        lines = said.read_text().splitlines()
        assert status in (0, KILLED), lines
        events = [json.loads(line) for line in lines if line.endswith("}")]
        done = [e for e in events if e["event"] == "attempt" and e["status"] == "ok"]
        return status, {e["unit_id"]: e["attempt"] for e in done}

    return order


@pytest.fixture(scope="module")
def unbroken(play: Play, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    asyncio.run(run_undisturbed(play, folder))
    return kit.content(folder / "run")


async def run_undisturbed(play: Play, folder: Path) -> None:
    dataset = kit.write(folder / "tasks.jsonl", ROWS)
    async with FakeServer() as server:
        arguments = kit.played(dataset, folder / "run", server.base_url, *HERE)
        status, receipts = await asyncio.to_thread(play, arguments)
    assert (status, len(receipts)) == (0, UNITS)


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_killed_at(
    point: str, play: Play, unbroken: dict[str, Any], server: FakeServer, tmp_path: Path
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
        status, told = await asyncio.to_thread(play, arguments, crash)
        assert status == KILLED, crash
        receipts |= told

    kit.write(dataset, reversed(ROWS))
    status, told = await asyncio.to_thread(play, arguments)
    assert status == 0
    watcher.check()
    assert kit.content(out) == unbroken
    assert len(unbroken) == UNITS
    kit.check_books(out, server.entries)
    kit.check_not_asked_again(out, receipts)
    assert not set(told) & set(receipts)
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []
    await kit.check_nothing_left([], out)
