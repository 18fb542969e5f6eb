"""Fixtures: a fake server, and the end of runs that a failed test left."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.testing import FakeServer

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import kit  # noqa: E402


@pytest.fixture(autouse=True)
def kill_leftover_runs() -> Iterator[None]:
    """A driver that a failed test leaves would slow all later tests down."""
    yield
    while kit.STARTED_RUNS:
        run = kit.STARTED_RUNS.pop()
        if run.process.returncode is None:
            kit.kill(run.pid)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A fake model server; prompts carry its answers."""
    async with FakeServer() as running:
        yield running
