"""The official packages are the oracles of the wires: the fake server satisfies them, they send
what we send, and our clients read what they read."""

import json

import msgspec
import pytest
from wire_kit import SERVERS, decode, encode

from hermes_rl.messages import ToolCall, ToolMessage, UserMessage
from hermes_rl.models import Endpoint, Sampling, connect
from hermes_rl.testing import FakeConfig, FakeServer

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
MOST = Sampling(max_tokens=64_000)
each_dialect = pytest.mark.parametrize("mode", SERVERS)


def package_of(mode):
    if mode == "anthropic_messages":
        import anthropic  # late: two seconds, which only this process needs

        return anthropic
    import openai

    return openai


def official(mode, server, **options):
    options = {"api_key": "k", "max_retries": 0, "timeout": 30, **options}
    if mode == "anthropic_messages":
        address = server.base_url.removesuffix("/v1")
        return package_of(mode).AsyncAnthropic(base_url=address, **options)
    return package_of(mode).AsyncOpenAI(base_url=server.base_url, **options)


async def ask(client, mode, messages, *, model="m", stream=False):
    """The answer to our request as the official client sends it and reads the answer."""
    body = json.loads(encode(messages, mode=mode, model=model, sampling=MOST))
    body.pop("stream", None)  # the package has its own ways
    if mode == "anthropic_messages":
        place, final = client.messages, "get_final_message"
    elif mode == "codex_responses":
        place, final = client.responses, "get_final_response"
    else:
        place, final = client.chat.completions, "get_final_completion"
        body |= {"stream_options": {"include_usage": True}} if stream else {}
    if not stream:
        return await place.create(**body)
    async with place.stream(**body) as events:
        assert len({event.type async for event in events}) >= 3
        return await getattr(events, final)()


def read(answer, mode):
    return decode(msgspec.json.encode(answer.to_dict()), mode=mode)


def parts(message):
    return message.content, message.reasoning_content, message.tool_calls


@each_dialect
@pytest.mark.parametrize("stream", [False, True])
async def test_official_clients_complete_an_episode(mode, stream):
    history = [UserMessage(content=PROMPT)]
    async with FakeServer() as server, official(mode, server) as client:
        answers = [await ask(client, mode, history, stream=stream)]
        first = read(answers[0], mode)
        calls = first.message.tool_calls
        results = [ToolMessage(tool_call_id=c.id, name=c.name, content="ok") for c in calls]
        answers.append(await ask(client, mode, [*history, first.message, *results], stream=stream))
        last = read(answers[1], mode)
        entries = server.entries
    assert parts(first.message) == (
        "Let me see.",
        "A long thought about files.",
        (
            ToolCall(id="call_0_0", name="terminal", arguments='{"command":"ls"}'),
            ToolCall(id="call_0_1", name="read_file", arguments='{"path":"a"}'),
        ),
    )
    assert parts(last.message) == ("There are two files.", None, ())
    assert (first.finish_reason, last.finish_reason) == ("tool_calls", "stop")
    for answer, got, entry in zip(answers, (first, last), entries, strict=True):
        usage = got.usage
        assert (usage.input_tokens, usage.output_tokens, usage.reasoning_tokens) == (
            entry.prompt_tokens,
            entry.completion_tokens,
            entry.reasoning_tokens,
        )
        assert entry.outcome == "served"
        assert entry.reported
        assert stream or answer._request_id == entry.request_id


@each_dialect
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_clients_decode_the_same_as_official_ones(kit, mode, transport, stream):
    async with FakeServer() as server, official(mode, server) as client:
        external = await ask(client, mode, [UserMessage(content=PROMPT)])
        local = connect(Endpoint(server.base_url, api_key="k", api_mode=mode, transport=transport))
        answer = await local.complete(kit.request(PROMPT, "m", stream=stream, sampling=MOST))
        await local.aclose()
    assert answer.message == read(external, mode).message
    assert answer.served_model == external.model


@each_dialect
async def test_official_clients_recognize_refusals(mode):
    package, request = package_of(mode), [UserMessage(content="hi")]
    async with FakeServer(FakeConfig(key="right", models=("m",))) as server:
        async with official(mode, server) as client:
            with pytest.raises(package.AuthenticationError):
                await ask(client, mode, request)
        async with official(mode, server, api_key="right") as client:
            with pytest.raises(package.NotFoundError) as caught:
                await ask(client, mode, request, model="other")
            assert caught.value.request_id == server.entries[-1].request_id
            with pytest.raises(package.BadRequestError):
                await ask(client, mode, [UserMessage(content="SCRIPT: [oops]")])
            assert [m.id async for m in client.models.list()] == ["m"]
    assert [entry.outcome for entry in server.entries[:2]] == ["refused", "refused"]


KINDS = {
    "rate_limit": ("RateLimitError", "rate_limit_error"),
    "overloaded": ("OverloadedError", "overloaded_error"),
    "server_error": ("InternalServerError", "api_error"),
    "too_large": ("APIStatusError", "request_too_large"),
}


@each_dialect
@pytest.mark.parametrize("fault", KINDS)
async def test_each_refusal_maps_to_an_official_exception(mode, fault):
    name, kind = KINDS[fault]
    package = package_of(mode)
    raised = getattr(package, name, package.InternalServerError)
    async with FakeServer() as server, official(mode, server) as client:
        with pytest.raises(raised) as caught:
            await ask(client, mode, [UserMessage(content="hi")], model=f"fault-{fault}")
    if mode == "anthropic_messages":
        assert caught.value.type == kind
