"""Thousands of calls at once: no queue of ours, and no descriptor that stays."""

import asyncio
import os
import resource
from dataclasses import replace

import pytest

from hermes_rl.models.client import DIALECTS, Endpoint, connect
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

AT_ONCE = 2_000
ROUNDS = (AT_ONCE, *(400,) * 8, AT_ONCE)


@pytest.fixture
def descriptors():
    """Room for both ends of all connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * AT_ONCE + 500
    assert hard == resource.RLIM_INFINITY or hard >= wanted, f"ulimit -Hn is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield lambda: len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_two_thousand_calls_in_flight(kit, descriptors):
    """The server answers nobody before all have asked: a pool that held some back would hang."""
    async with FakeServer(FakeConfig(gather=AT_ONCE, keep=False)) as server:
        clients = [connect(Endpoint(server.base_url, api_mode=mode)) for mode in DIALECTS]
        before, open_after = descriptors(), []
        for at_once in ROUNDS:
            server.config = replace(server.config, gather=at_once)
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(clients[i % 3].complete(kit.request(model="noop")))
                    for i in range(at_once)
                ]
            assert {call.result().message.content for call in calls} == {"done"}
            open_after.append(descriptors() - before)
        for client in clients:
            await client.aclose()
        assert server.peak_in_flight == AT_ONCE
    assert max(open_after) <= 2 * AT_ONCE + 20
    await kit.until(lambda: descriptors() <= before)
