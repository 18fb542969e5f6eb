"""The path of this folder, fake servers, and one Ray cluster for all tests."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.testing import FakeServer

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import kit  # noqa: E402

CLUSTER = """
import sys, ray
from batch_runner.pool import connected
with connected(2):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


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


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """A Ray that is already there: the environment that leads drivers to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdin
    address = process.stdout.readline().strip()
    assert address, "the cluster did not start"
    yield {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    process.stdin.close()
    process.wait(timeout=60)
    process.stdout.close()
