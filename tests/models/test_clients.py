"""One suite over both transports, streaming and not, against the fake server."""

import asyncio
import json
import time

import pytest

from hermes_rl import errors as e
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, UserMessage
from hermes_rl.models.base import Sampling
from hermes_rl.models.client import Endpoint, Timeouts, connect
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.faults import FaultPlan
from hermes_rl.usage import Usage

KEY = "sk-canary-0123456789abcdef"
WIRES = [(t, s) for t in ("http", "sdk") for s in (False, True)]


@pytest.fixture(params=WIRES, ids=lambda w: f"{w[0]}{'-stream' if w[1] else ''}")
def wire(request):
    return request.param


def client_of(server, wire, key=KEY, **options):
    return connect(Endpoint(server.base_url, api_key=key, transport=wire[0], **options))


async def ask(server, wire, kit, prompt="hi", model="echo", **options):
    """One attempt."""
    client = client_of(server, wire, **options)
    try:
        return await client.complete(kit.request(prompt, model, stream=wire[1]))
    finally:
        await client.aclose()


def script(*steps):
    return "Do this.\nSCRIPT: " + json.dumps(steps)


async def test_a_rollout_is_the_same_on_every_wire(kit, wire):
    async with FakeServer(FakeConfig(key=KEY, script="echo-3")) as server:
        client, events = client_of(server, wire), kit.Events()
        conversation = await kit.rollout(kit.caller(client, events), stream=wire[1], model="m")
        await client.aclose()
    commands = [
        json.loads(c.arguments)["command"]
        for m in conversation
        if isinstance(m, AssistantMessage)
        for c in m.tool_calls
    ]
    assert commands == ["echo step-1", "echo step-2", "echo step-3"]
    assert conversation[-1] == AssistantMessage(content="All 3 steps are done.")
    assert [end.outcome for end in events.ends] == ["ok"] * 4
    served = {s.call_id: s for s in server.entries}
    for start, end in zip(events.starts, events.ends, strict=True):
        entry = served[end.call_id]
        assert end.usage == Usage(
            input_tokens=entry.prompt_tokens,
            cache_read_tokens=entry.cached_tokens,
            output_tokens=entry.completion_tokens,
            reasoning_tokens=entry.reasoning_tokens,
        )
        assert end.request_id == entry.request_id
        assert end.served_model == "m"
        assert start.max_input_tokens >= entry.prompt_tokens
        assert json.loads(end.usage_raw)["prompt_tokens"] == entry.prompt_tokens


async def test_all_that_a_step_can_hold(kit, wire):
    step = {
        "text": "Both at once. ünïcode 🚀",
        "reasoning": "think…",
        "calls": [
            {"name": "terminal", "arguments": {"command": "ls"}},
            {"name": "terminal", "arguments": "{not json"},
            {"name": "no_such_tool", "arguments": ""},
        ],
        "details": [{"type": "reasoning.encrypted", "data": "opaque", "index": 0}],
    }
    async with FakeServer() as server:
        answer = await ask(server, wire, kit, script(step))
    assert answer.message == AssistantMessage(
        content="Both at once. ünïcode 🚀",
        reasoning_content="think…",
        tool_calls=(
            ToolCall(id="call_0_0", name="terminal", arguments='{"command":"ls"}'),
            ToolCall(id="call_0_1", name="terminal", arguments="{not json"),
            ToolCall(id="call_0_2", name="no_such_tool", arguments=""),
        ),
        reasoning_details=[{"type": "reasoning.encrypted", "data": "opaque", "index": 0}],
    )
    assert answer.finish_reason == "tool_calls"
    assert answer.usage.reasoning_tokens == 1
    assert answer.first_byte_s > 0


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
async def test_reasoning_fields(kit, wire, field):
    async with FakeServer() as server:
        prompt = script({"text": "4", "reasoning": "2 and 2", "field": field})
        answer = await ask(server, wire, kit, prompt)
    assert answer.message == AssistantMessage(content="4", reasoning_content="2 and 2")


async def test_reasoning_as_text(kit, wire):
    async with FakeServer() as server:
        prompt = script({"text": "4", "reasoning": "2 and 2", "field": "think"})
        answer = await ask(server, wire, kit, prompt)
    assert answer.message.content == "4"
    assert answer.message.reasoning_content == "2 and 2"
    assert answer.message.raw_content == "<think>\n2 and 2\n</think>\n\n4"


async def test_empty_and_cut_by_length(kit, wire):
    async with FakeServer() as server:
        empty = await ask(server, wire, kit, script(""))
        cut = await ask(server, wire, kit, script({"text": "The answ", "finish": "length"}))
    assert (empty.message, empty.finish_reason) == (AssistantMessage(), "stop")
    assert (cut.message.content, cut.finish_reason) == ("The answ", "length")


REFUSED = {
    "auth": (e.AuthError, 401),
    "forbidden": (e.AuthError, 403),
    "billing": (e.BillingError, 402),
    "quota": (e.BillingError, 429),
    "not_found": (e.ModelNotFound, 404),
    "timeout": (e.ServerError, 408),
    "too_large": (e.PayloadTooLarge, 413),
    "bad_request": (e.BadRequest, 400),
    "context_overflow": (e.ContextOverflow, 400),
    "content_filter": (e.ContentFiltered, 400),
    "rate_limit": (e.RateLimited, 429),
    "server_error": (e.ServerError, 500),
    "unavailable": (e.Overloaded, 503),
    "overloaded": (e.Overloaded, 529),
}


@pytest.mark.parametrize("fault", REFUSED)
async def test_refusals_are_typed(kit, wire, fault):
    kind, status = REFUSED[fault]
    async with FakeServer() as server:
        with pytest.raises(e.ModelError) as caught:
            await ask(server, wire, kit, model=f"fault-{fault}")
        (entry,) = server.entries
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert caught.value.request_id == entry.request_id
    assert caught.value.served is False
    assert entry.outcome == "refused"


async def test_a_hint_to_wait_in_seconds_and_as_date(kit, wire):
    async with FakeServer(FakeConfig(faults=FaultPlan(retry_after_s=7.5))) as server:
        with pytest.raises(e.RateLimited) as seconds:
            await ask(server, wire, kit, model="fault-rate_limit_after")
        with pytest.raises(e.RateLimited) as date:
            await ask(server, wire, kit, model="fault-rate_limit_date")
        with pytest.raises(e.RateLimited) as none:
            await ask(server, wire, kit, model="fault-rate_limit")
    assert seconds.value.retry_after_s == 7.5
    assert 6 < date.value.retry_after_s <= 8.5
    assert none.value.retry_after_s is None


BROKEN = {"reset": e.ConnectionLost, "cut": e.ProtocolError, "garbage": e.ServerError}


@pytest.mark.parametrize("fault", BROKEN)
async def test_lost_answers_may_be_served(kit, wire, fault):
    async with FakeServer() as server:
        with pytest.raises(e.ModelError) as caught:
            await ask(server, wire, kit, model=f"fault-{fault}")
        (entry,) = server.entries
    assert type(caught.value) is BROKEN[fault]
    assert caught.value.served is True
    assert caught.value.transient is True
    assert entry.outcome == "cut"


@pytest.mark.parametrize(
    ("fault", "patience"),
    [
        ("stall_first", Timeouts(first_byte_s=0.15, idle_s=30)),
        ("stall_mid", Timeouts(first_byte_s=30, idle_s=0.15)),
    ],
)
async def test_patience_by_phase(kit, wire, fault, patience):
    async with FakeServer() as server:
        began = time.monotonic()
        with pytest.raises(e.ModelTimeout, match=r"within|stood still") as caught:
            await ask(server, wire, kit, model=f"fault-{fault}", timeouts=patience)
        assert time.monotonic() - began < 8
    assert caught.value.served is True


async def test_nobody_listens(kit, wire):
    async with FakeServer() as server:
        pass_by = server.base_url
    client = connect(Endpoint(pass_by, transport=wire[0]))
    with pytest.raises(e.ConnectionLost, match=r"cannot reach 127\.0\.0\.1") as caught:
        await client.complete(kit.request(stream=wire[1]))
    await client.aclose()
    assert caught.value.served is False


async def test_no_connection_in_time(kit, wire):
    """A listener whose backlog is full: the connection is never made."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fill = [socket.socket() for _ in range(3)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        patience = Timeouts(connect_s=0.2, first_byte_s=20)
        client = connect(
            Endpoint(f"http://127.0.0.1:{port}/v1", transport=wire[0], timeouts=patience)
        )
        with pytest.raises(e.ModelTimeout, match="no connection") as caught:
            await client.complete(kit.request(stream=wire[1]))
        await client.aclose()
        for one in fill:
            one.close()
    assert caught.value.served is False


async def test_a_wrong_key_is_final_and_shown_nowhere(kit, wire):
    async with FakeServer(FakeConfig(key="another-key")) as server:
        client, events = client_of(server, wire), kit.Events()
        with pytest.raises(e.AuthError) as caught:
            await kit.rollout(kit.caller(client, events), stream=wire[1])
        await client.aclose()
    assert server.requests == 1
    assert events.ends[0].outcome == "refused"
    seen = [str(caught.value), repr(caught.value), repr(events.all), repr(client)]
    assert not any(KEY in text or KEY[4:] in text for text in seen)


async def test_usage_only_from_a_complete_object(kit, wire):
    async with FakeServer() as server:
        without = await ask(server, wire, kit, model="fault-no_usage")
        partial = await ask(server, wire, kit, model="fault-partial_usage")
    assert (without.usage, without.usage_raw) == (None, None)
    assert (partial.usage, partial.usage_raw) == (None, '{"prompt_tokens":4}')


async def test_cancelled_in_flight(kit, wire):
    async with FakeServer(FakeConfig(latency_s=30)) as server:
        client, events = client_of(server, wire), kit.Events()
        task = asyncio.create_task(kit.rollout(kit.caller(client, events), stream=wire[1]))
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


async def test_sampling_and_extra_fields_reach_the_wire(kit, wire):
    bodies = []

    class Spy(FakeServer):
        def handle(self, connection, request):
            bodies.append(json.loads(request.body))
            super().handle(connection, request)

    sampling = Sampling(
        temperature=0.0, top_p=1.0, top_k=-1, max_tokens=64, seed=7, stop=("END",), reasoning="low"
    )
    async with Spy() as server:
        client = client_of(server, wire)
        asked = kit.request(
            [SystemMessage(content="s"), UserMessage(content="u")],
            stream=wire[1],
            tools=kit.TERMINAL,
            sampling=sampling,
            logprobs=True,
            token_ids=True,
            extra={"service_tier": "flex"},
        )
        await client.complete(asked)
        await client.aclose()
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if wire[1] else {}
    assert bodies == [
        {
            "model": "echo",
            **streaming,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 64,
            "seed": 7,
            "stop": ["END"],
            "reasoning_effort": "low",
            "logprobs": True,
            "return_token_ids": True,
            "service_tier": "flex",
            "tools": list(kit.TERMINAL),
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        }
    ]


async def test_streamed_text_comes_in_pieces(kit, wire):
    pieces = []
    async with FakeServer() as server:
        client = client_of(server, wire)
        text = "word " * 40
        await client.complete(kit.request(script(text), stream=wire[1], on_delta=pieces.append))
        await client.aclose()
    assert "".join(pieces) == text
    assert len(pieces) > 5 if wire[1] else len(pieces) == 1


async def test_a_large_request_arrives_whole(kit, wire):
    text = "é" * 3_000_000
    async with FakeServer() as server:
        answer = await ask(server, wire, kit, text)
    assert answer.usage.input_tokens == 4 + len(text) // 4


async def test_nothing_caps_the_requests_in_flight(kit, wire):
    agents = 400 if wire[0] == "http" else 120
    async with FakeServer(FakeConfig(hold_at=1)) as server:
        client = client_of(server, wire)
        asked = [client.complete(kit.request(stream=wire[1])) for _ in range(agents)]
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await kit.until(lambda: server.in_flight == agents)
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.aclose()
    assert {entry.outcome for entry in server.entries} == {"dropped"}


async def test_connections_are_reused(kit, wire):
    async with FakeServer() as server:
        client, events = client_of(server, wire), kit.Events()
        calling = kit.caller(client, events)
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(kit.rollout(calling, model="echo-4", stream=wire[1]))
        assert len(events.ends) == 50
        assert server.connections_made <= 10
        await client.aclose()
