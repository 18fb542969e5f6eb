"""`hermes-rl sandboxes`: sandboxes are listed by worker, and dead workers' are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.cli import main

WORKER = Path(__file__).with_name("worker.py")


def start_worker(state: Path, count: int, kind: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(state), str(count), kind],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout
    assert [worker.stdout.readline() for _ in range(2)] == ["starting\n", "ready\n"]
    return worker


def end_with_its_watchdog(worker: subprocess.Popen[str]) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes() if path.exists() else b""
        if b"watchdog.py" in line and f"\0{worker.pid}-".encode() in line:
            os.kill(int(path.parent.name), signal.SIGKILL)
    worker.kill()
    worker.wait()


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_dead_workers_sandboxes_are_listed_and_removed(
    state: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> list[str]:
        assert main(["sandboxes", "list", "--state", str(state)]) == 0
        return capsys.readouterr().out.splitlines()

    assert listed()[-1].startswith("0 sandboxes, 0 workers")
    dies, lives = start_worker(state, 3, kind), start_worker(state, 2, kind)
    try:
        before = listed()
        assert before[-1].startswith("5 sandboxes, 2 workers, 0 of them dead")
        assert sum("  doomed-" in line for line in before) == 5
        end_with_its_watchdog(dies)
        assert f"worker {dies.pid}: dead, to be reaped" in listed()
        assert main(["sandboxes", "reap", "--state", str(state)]) == 0
        assert "3 sandboxes of 1 dead workers removed" in capsys.readouterr().out
        after = listed()
        assert after[0] == f"worker {lives.pid}: running"
        assert after[-1].startswith("2 sandboxes, 1 workers, 0 of them dead")
    finally:
        end_with_its_watchdog(lives)
        assert main(["sandboxes", "reap", "--state", str(state)]) == 0
