"""The folder of these tests is on the path of its own modules and of their subprocesses."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest

Play = Callable[..., int]


@pytest.fixture(scope="session")
def play() -> Iterator[Play]:
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
    server.wait(30)
