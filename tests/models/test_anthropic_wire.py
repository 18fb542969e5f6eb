"""The Messages wire: addresses, headers, and the usage of the cache."""

from itertools import pairwise

import pytest

from hermes_rl.messages import ToolMessage
from hermes_rl.models import Endpoint, connect
from hermes_rl.testing import FakeConfig, FakeServer


async def test_official_client_reads_cache_usage():
    import anthropic  # late: two seconds, which only this process needs

    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    model_request = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Count."}],
    }
    async with FakeServer() as server:
        root = server.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
            one = await client.messages.create(**model_request, system=marked)
            async with client.messages.stream(**model_request, system=marked) as stream:
                two = await stream.get_final_message()
    assert one.usage.cache_creation_input_tokens == server.entries[0].prompt_tokens
    assert (one.usage.input_tokens, one.usage.cache_read_input_tokens) == (0, 0)
    assert two.usage.cache_creation_input_tokens == one.usage.cache_creation_input_tokens


BASES = ["", "/v1", "/v1/", "/v1/messages"]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_base_url_may_end_at_any_part_of_the_route(kit, base, transport):
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


async def test_next_turn_reads_marked_prefix_from_cache(kit):
    """A turn writes what is new and reads what the last one wrote."""
    usages = []
    async with FakeServer(FakeConfig(script="echo-2")) as server:
        client = connect(Endpoint(server.base_url, api_mode="anthropic_messages"))
        model_request = kit.request("hi", "m", cache="5m")
        for _ in range(3):
            answer = await client.complete(model_request)
            usages.append(answer.usage)
            model_request.conversation.append(answer.message)
            for call in answer.message.tool_calls:
                model_request.conversation.append(
                    ToolMessage(tool_call_id=call.id, name=call.name, content="ok")
                )
        await client.aclose()
    assert usages[0].cache_read_tokens == 0
    for before, after in pairwise(usages):
        assert after.cache_read_tokens == before.input_tokens
        assert after.cache_write_tokens == after.input_tokens - before.input_tokens
    assert [u.cache_write_tokens for u in usages] == [x.cache_write_tokens for x in server.entries]
