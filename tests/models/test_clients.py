"""What both transports do for a client, against the fake server; what all dialects do alike is in
`test_conformance`."""

import asyncio
import json
import socket
import time

import pytest

from hermes_rl import errors as e
from hermes_rl.models import Endpoint, Timeouts, connect
from hermes_rl.testing import FakeConfig, FakeServer

STREAMED = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(params=["http", "sdk"])
def transport(request):
    return request.param


@pytest.fixture
def ask(kit):
    """One attempt: `await ask(server, prompt)`."""

    async def once(server, prompt="hi", *, transport="http", stream=False, url=None, **options):
        client = connect(Endpoint(url or server.base_url, transport=transport, **options))
        try:
            return await client.complete(kit.request(prompt, stream=stream))
        finally:
            await client.aclose()

    return once


def script(*steps):
    return "Do this.\nSCRIPT: " + json.dumps(steps)


async def test_refused_connection_is_typed(ask, transport):
    with pytest.raises(e.ConnectionLost, match=r"cannot reach 127\.0\.0\.1") as caught:
        await ask(None, url="http://127.0.0.1:1/v1", transport=transport)
    assert caught.value.served is False


async def test_connect_timeout_is_typed(ask, transport):
    """A listener whose backlog is full: the connection is never made."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fill = [socket.socket() for _ in range(3)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        patience, url = Timeouts(connect_s=0.2, first_byte_s=20), f"http://127.0.0.1:{port}/v1"
        with pytest.raises(e.ModelTimeout, match="no connection") as caught:
            await ask(None, url=url, transport=transport, timeouts=patience)
        for one in fill:
            one.close()
    assert caught.value.served is False


@STREAMED
async def test_cancelled_request_closes_its_connection(kit, transport, stream):
    async with FakeServer(FakeConfig(latency_s=30)) as server:
        client, events = connect(Endpoint(server.base_url, transport=transport)), kit.Events()
        task = asyncio.create_task(kit.rollout(kit.caller(client, events), stream=stream))
        await kit.until(lambda: server.requests)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 10
        assert [end.outcome for end in events.ends] == ["cancelled"]
        await kit.until(lambda: server.entries)
        assert server.entries[0].outcome == "dropped"
        assert server.entries[0].call_id == events.starts[0].call_id
        await client.aclose()


async def test_large_request_arrives_complete(ask, transport):
    text = "é" * 3_000_000
    async with FakeServer() as server:
        answer = await ask(server, text, transport=transport)
    assert answer.usage.input_tokens == 4 + len(text) // 4


async def test_requests_in_flight_are_not_limited_by_the_client(kit, transport):
    agents = 400 if transport == "http" else 120
    async with FakeServer(FakeConfig(hold_at=1)) as server:
        client = connect(Endpoint(server.base_url, transport=transport))
        model_request = [client.complete(kit.request(stream=True)) for _ in range(agents)]
        waiting = asyncio.gather(*model_request, return_exceptions=True)
        await kit.until(lambda: server.in_flight == agents)
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.aclose()
    assert {entry.outcome for entry in server.entries} == {"dropped"}
