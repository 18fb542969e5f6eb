"""A server that forks drivers, and the path of this folder for its modules and subprocesses."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def play() -> Iterator[Callable[..., int]]:
    """`play(path=..., units=..., crash_at=...)`: one driver process, its exit status."""
    server = subprocess.Popen(
        [sys.executable, f"{HERE}/scripted_driver.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdin
    assert server.stdout

    def order(**what: object) -> int:
        server.stdin.write(json.dumps(what, default=str) + "\n")
        return int(server.stdout.readline())

    yield order
    server.stdin.close()
    server.wait(60)


@pytest.fixture
def run_path(tmp_path: Path) -> Iterator[Path]:
    """A place for a run directory, in memory where that is possible: kills need no real disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "run"
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="hermes-rl-test-") as folder:
        yield Path(folder) / "run"
