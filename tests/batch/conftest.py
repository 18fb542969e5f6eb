"""The path of this folder, fake servers, and one Ray cluster for all tests."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.testing.fake_server import FakeServer

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

CLUSTER = """
import logging, sys, ray
from batch_runner.warden import Warden
warden = Warden()
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20,
         logging_level=logging.ERROR)
warden.watch_children()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
warden.close()
"""


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
