"""A fake model server for agents with sessions."""

from collections.abc import Iterator

import pytest

from hermes_rl.aio import LoopThread
from hermes_rl.testing import FakeConfig, FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with LoopThread() as home:
        server = FakeServer(FakeConfig(key="right"))
        home.run(server.__aenter__())
        yield server
        home.run(server.aclose())
