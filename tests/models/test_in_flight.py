"""Thousands of calls at once: no queue of ours, and no descriptor that stays."""

import asyncio
import os
import resource
import time

import pytest

from hermes_rl.models import DIALECTS, Endpoint, connect
from hermes_rl.models.rate import Coordinator, Share
from hermes_rl.testing import FakeConfig, FakeServer

AT_ONCE = 2_000
ROUNDS = 2


@pytest.fixture
def descriptors():
    """Raise the limit for both ends of all connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * AT_ONCE + 500
    assert hard == resource.RLIM_INFINITY or hard >= wanted, f"ulimit -Hn is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield lambda: len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(limiter, client, request):
    """(seconds of waiting for a slot, the answer's text)."""
    async with limiter.slot() as slot:
        answer = await client.complete(request)
        slot.report(None, answer.usage, answer.rate_limit)
    return slot.waited_s, answer.message.content


@pytest.mark.slow
async def test_two_thousand_calls_in_flight(kit, descriptors):
    """The server answers once all requests have arrived; a pool that queues some would hang."""
    coordinator = Coordinator(AT_ONCE, {}, {}, clock=time.monotonic, unix=time.time, start=AT_ONCE)
    share = Share("1")
    async with (
        FakeServer(FakeConfig(gather=AT_ONCE, keep=False)) as server,
        share.coordinated(coordinator.handle),
    ):
        limiter = share.limiter("h", "K", "m")
        clients = [connect(Endpoint(server.base_url, api_mode=mode)) for mode in DIALECTS]
        before, open_after = descriptors(), []
        for _ in range(ROUNDS):
            async with asyncio.timeout(300), asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(ask(limiter, clients[i % 3], kit.request(model="noop")))
                    for i in range(AT_ONCE)
                ]
            assert {call.result() for call in calls} == {(0.0, "done")}
            open_after.append(descriptors() - before)
        for client in clients:
            await client.aclose()
        assert server.peak_in_flight == AT_ONCE
    assert max(open_after) <= 2 * AT_ONCE + 20
    await kit.until(lambda: descriptors() <= before)
