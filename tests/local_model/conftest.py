"""The tiny model's server, held by a process of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from hermes_rl.models.local import LocalServer, local_server

HOLD = """
import asyncio, sys
from hermes_rl.models.local import local_server

async def main():
    async with local_server("local-tiny") as server:
        print((await server.endpoint()).base_url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.contextmanager
def holder(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds a server of the tiny model; it prints the address."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of one server for the tests of a module."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("held"))}
    with holder(env) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield env


@pytest.fixture
def start_holder() -> Callable[[dict[str, str]], contextlib.AbstractContextManager]:
    """Starts a process that holds a server."""
    return holder


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], float], bool]:
    """Waits for a condition, at most so many seconds; returns whether it came true."""

    def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    return wait


@pytest.fixture
async def server(held: dict[str, str]) -> AsyncIterator[LocalServer]:
    async with local_server("local-tiny", env=held) as server:
        yield server
