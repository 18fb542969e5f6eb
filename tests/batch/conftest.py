"""The path of this folder, and fake servers."""

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
def no_run_outlives_its_test() -> Iterator[None]:
    """A test that failed would leave a driver that asks on, and slow all after it down."""
    yield
    while kit.STARTED:
        run = kit.STARTED.pop()
        if run.process.returncode is None:
            kit.kill(run.pid)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A fake model server; prompts carry their scripts."""
    async with FakeServer() as running:
        yield running
