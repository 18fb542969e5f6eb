"""The official anthropic package is the oracle of the Messages wire: it is satisfied by the fake
server, and our client reads what it reads."""

import json
from itertools import pairwise

import anthropic
import pytest

from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage
from hermes_rl.models.base import Sampling
from hermes_rl.models.client import Endpoint, connect
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

STEPS = [
    {
        "text": "Let me see.",
        "reasoning": "A long thought about files.",
        "calls": [
            {"name": "terminal", "arguments": {"command": "ls"}},
            {"name": "read_file", "arguments": {"path": "a"}},
        ],
    },
    "There are two files.",
]
PROMPT = "Count.\nSCRIPT: " + json.dumps(STEPS)
ASKED = {
    "model": "m",
    "max_tokens": 64_000,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": PROMPT}],
    "tools": [{"name": "terminal", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 2_000},
}


def official(server, **options):
    return anthropic.AsyncAnthropic(
        base_url=server.base_url.removesuffix("/v1"),
        **{"api_key": "k", "max_retries": 0, "timeout": 30, **options},
    )


def forms(message):
    return [block.to_dict() for block in message.content]


async def whole(client, **fields):
    return await client.messages.create(**{**ASKED, **fields})


async def streamed(client, **fields):
    async with client.messages.stream(**{**ASKED, **fields}) as stream:
        kinds = {event.type async for event in stream}
        message = await stream.get_final_message()
    assert {"message_start", "content_block_start", "message_delta", "message_stop"} <= kinds
    return message


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_the_official_client_plays_an_episode(ask):
    async with FakeServer() as server, official(server) as client:
        first = await ask(client)
        assert first.stop_reason == "tool_use"
        thinking, text, one, two = first.content
        assert (thinking.type, thinking.thinking) == ("thinking", "A long thought about files.")
        assert thinking.signature
        assert text.text == "Let me see."
        assert (one.id, one.name, one.input) == ("call_0_0", "terminal", {"command": "ls"})
        assert (two.name, two.input) == ("read_file", {"path": "a"})
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "ok"} for use in (one, two)
        ]
        history = [
            *ASKED["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        last = await ask(client, messages=history)
        assert (last.stop_reason, forms(last)) == (
            "end_turn",
            [{"type": "text", "text": "There are two files."}],
        )
        entries = server.entries
    for message, entry in zip((first, last), entries, strict=True):
        assert message.usage.input_tokens == entry.prompt_tokens
        assert message.usage.output_tokens == entry.completion_tokens
        assert message.usage.output_tokens_details.thinking_tokens == entry.reasoning_tokens
        assert entry.outcome == "served"
    if ask is whole:
        assert first._request_id == entries[0].request_id


async def test_the_official_client_hears_the_usage_of_the_cache():
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with FakeServer() as server, official(server) as client:
        one = await whole(client, system=marked)
        two = await streamed(client, system=marked)
    assert one.usage.cache_creation_input_tokens == server.entries[0].prompt_tokens
    assert (one.usage.input_tokens, one.usage.cache_read_input_tokens) == (0, 0)
    assert two.usage.cache_creation_input_tokens == one.usage.cache_creation_input_tokens


async def test_the_official_client_knows_our_refusals():
    config = FakeConfig(key="right", models=("m",))
    async with FakeServer(config) as server:
        async with official(server) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await whole(client)
        async with official(server, api_key="right") as client:
            with pytest.raises(anthropic.NotFoundError) as caught:
                await whole(client, model="other")
            assert caught.value.type == "not_found_error"
            assert caught.value.request_id == server.entries[-1].request_id
            with pytest.raises(anthropic.BadRequestError, match="non-empty"):
                await whole(client, messages=[{"role": "user", "content": " "}])
            assert [m.id async for m in client.models.list()] == ["m"]


KINDS = {
    "rate_limit": (anthropic.RateLimitError, "rate_limit_error"),
    "overloaded": (anthropic.OverloadedError, "overloaded_error"),
    "server_error": (anthropic.InternalServerError, "api_error"),
    "too_large": (anthropic.APIStatusError, "request_too_large"),
}


@pytest.mark.parametrize("fault", KINDS)
async def test_each_refusal_is_one_of_the_official_clients(fault):
    kind, name = KINDS[fault]
    said = [{"role": "user", "content": "hi"}]
    async with FakeServer() as server, official(server) as client:
        with pytest.raises(kind) as caught:
            await whole(client, model=f"fault-{fault}", messages=said)
    assert caught.value.type == name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_our_clients_read_what_the_official_one_reads(kit, transport, stream):
    async with FakeServer() as server, official(server) as client:
        theirs = await whole(client)
        endpoint = Endpoint(
            server.base_url, api_key="k", api_mode="anthropic_messages", transport=transport
        )
        ours = connect(endpoint)
        asked = kit.request(PROMPT, "m", stream=stream, sampling=Sampling(max_tokens=64_000))
        answer = await ours.complete(asked)
        await ours.aclose()
    thinking, text, *uses = theirs.content
    assert answer.message == AssistantMessage(
        content=text.text,
        reasoning_content=thinking.thinking,
        tool_calls=tuple(
            ToolCall(id=u.id, name=u.name, arguments=json.dumps(u.input, separators=(",", ":")))
            for u in uses
        ),
        reasoning_details=[thinking.to_dict()],
    )
    assert answer.served_model == theirs.model


BASES = ["", "/v1", "/v1/", "/v1/messages"]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_a_base_url_may_end_anywhere(kit, base, transport):
    """And the headers are the dialect's, whatever the package would send."""
    seen = []

    class Spy(FakeServer):
        def handle(self, connection, request):
            seen.append(request)
            super().handle(connection, request)

    async with Spy() as server:
        root = server.base_url.removesuffix("/v1")
        for key in ("k-1", None):
            client = connect(
                Endpoint(
                    root + base, api_key=key, api_mode="anthropic_messages", transport=transport
                )
            )
            await client.complete(kit.request())
            await client.aclose()
    assert {request.path for request in seen} == {"/v1/messages"}
    assert {request.headers["anthropic-version"] for request in seen} == {"2023-06-01"}
    keys = [(r.headers.get("x-api-key"), r.headers.get("authorization")) for r in seen]
    assert keys == [("k-1", "Bearer k-1"), (None, None)]


async def test_what_the_next_turn_reads_from_the_cache(kit):
    """A turn writes what is new and reads what the last one wrote."""
    usages = []
    async with FakeServer(FakeConfig(script="echo-2")) as server:
        client = connect(Endpoint(server.base_url, api_mode="anthropic_messages"))
        asked = kit.request("hi", "m", cache="5m")
        for _ in range(3):
            answer = await client.complete(asked)
            usages.append(answer.usage)
            asked.conversation.append(answer.message)
            for call in answer.message.tool_calls:
                asked.conversation.append(
                    ToolMessage(tool_call_id=call.id, name=call.name, content="ok")
                )
        await client.aclose()
    assert usages[0].cache_read_tokens == 0
    for before, after in pairwise(usages):
        assert after.cache_read_tokens == before.input_tokens
        assert after.cache_write_tokens == after.input_tokens - before.input_tokens
    assert [u.cache_write_tokens for u in usages] == [x.cache_write_tokens for x in server.entries]
