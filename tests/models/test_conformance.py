"""The same episodes through every dialect and transport, streaming and not, are the same."""

import contextlib
import json
from dataclasses import replace

import msgspec
import pytest

from hermes_rl import errors as e
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import DIALECTS, Endpoint, Sampling, Timeouts, connect
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan, wire_of

KEY = "sk-canary-0123456789abcdef"
WIRES = [(d, t, s) for d in DIALECTS for t in ("http", "sdk") for s in (False, True)]

SHORT = Sampling(max_tokens=4_000)
"""Anthropic's dialect streams what may become long."""


@pytest.fixture(params=WIRES, ids=lambda w: f"{w[0]}-{w[1]}{'-stream' if w[2] else ''}")
def wire(request):
    return request.param


def client_of(server, wire, key=KEY, **options):
    return connect(
        Endpoint(server.base_url, api_key=key, api_mode=wire[0], transport=wire[1], **options)
    )


def script(*steps):
    return "Do this.\nSCRIPT: " + json.dumps(steps)


EPISODE = script(
    {
        "text": "Let me see. ünïcode 🚀",
        "reasoning": "First look, then think…",
        "calls": [
            {"name": "terminal", "arguments": {"command": "ls", "lines": [1, 2.5, None]}},
            {"name": "terminal", "arguments": {}},
        ],
    },
    {"run": "echo two"},
    {"text": "", "reasoning": "Only a thought and a call.", "run": "echo three"},
    {"text": "All is well.\n\nBye.", "finish": "stop"},
)

COUNTS = ("input_tokens", "output_tokens", "reasoning_tokens", "total_tokens")


async def play(kit, client, model_request):
    """Calls until the answer asks for no tool; each tool result is its call's arguments."""
    answers = []
    for turn in range(20):
        bound = client.bound(model_request)
        answer = await client.complete(replace(model_request, call_id=f"call-{turn}"))
        assert bound >= answer.usage.input_tokens
        answers.append(answer)
        model_request.conversation.append(answer.message)
        for call in answer.message.tool_calls:
            model_request.conversation.append(
                ToolMessage(tool_call_id=call.id, name=call.name, content=call.arguments)
            )
        if not answer.message.tool_calls:
            break
    return answers


async def episode(kit, wire):
    """What an agent learns from each answer of the episode, ids and times apart."""
    async with FakeServer(FakeConfig(key=KEY)) as server:
        client = client_of(server, wire)
        sampling = replace(SHORT, temperature=1.0, seed=7)
        model_request = kit.request(
            EPISODE, "m", stream=wire[2], sampling=sampling, tools=kit.TERMINAL
        )
        answers = await play(kit, client, model_request)
        await client.aclose()
    calls = []
    for answer, entry in zip(answers, server.entries, strict=True):
        assert (answer.request_id, wire[0]) == (entry.request_id, entry.api_mode)
        assert answer.usage.input_tokens == entry.prompt_tokens
        assert answer.usage.output_tokens == entry.completion_tokens
        assert answer.usage.reasoning_tokens == entry.reasoning_tokens
        assert answer.usage.cache_read_tokens == entry.cached_tokens
        assert json.loads(answer.usage_raw)
        counts = [getattr(answer.usage, name) for name in COUNTS]
        calls.append((answer.finish_reason, answer.served_model, *counts))
    return calls, [reported(message) for message in model_request.conversation]


def reported(message):
    """A message without opaque blocks, which each provider has its own of, and without ids."""
    if isinstance(message, AssistantMessage):
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        return message.content, message.reasoning_content, calls
    if isinstance(message, ToolMessage):
        return message.name, message.content
    return message


CALLS = [
    ("tool_calls", "m", 103, 25, 5, 128),
    ("tool_calls", "m", 139, 8, 0, 147),
    ("tool_calls", "m", 157, 15, 6, 172),
    ("stop", "m", 177, 5, 0, 182),
]
LOOK = '{"command":"ls","lines":[1,2.5,null]}'
MESSAGES = [
    (
        "Let me see. ünïcode 🚀",
        "First look, then think…",
        [("terminal", LOOK), ("terminal", "{}")],
    ),
    ("terminal", LOOK),
    ("terminal", "{}"),
    ("", None, [("terminal", '{"command":"echo two"}')]),
    ("terminal", '{"command":"echo two"}'),
    ("", "Only a thought and a call.", [("terminal", '{"command":"echo three"}')]),
    ("terminal", '{"command":"echo three"}'),
    ("All is well.\n\nBye.", None, []),
]


async def test_episode_is_identical_on_every_wire(kit, wire):
    calls, messages = await episode(kit, wire)
    assert calls == CALLS
    assert messages == [UserMessage(content=EPISODE), *MESSAGES]


@contextlib.asynccontextmanager
async def asking(server, wire, kit, key=KEY, **options):
    """Makes attempts: `await ask(prompt, model)`."""
    client = client_of(server, wire, key, **options)

    async def ask(prompt="hi", model="echo"):
        model_request = kit.request(prompt, model, stream=wire[2], sampling=SHORT)
        return await client.complete(model_request)

    try:
        yield ask
    finally:
        await client.aclose()


REFUSED = {
    "auth": (e.AuthError, 401),
    "forbidden": (e.AuthError, 403),
    "billing": (e.BillingError, 402),
    "not_found": (e.ModelNotFound, 404),
    "too_large": (e.PayloadTooLarge, 413),
    "bad_request": (e.BadRequest, 400),
    "context_overflow": (e.ContextOverflow, 400),
    "content_filter": (e.ContentFiltered, 400),
    "rate_limit": (e.RateLimited, 429),
    "timeout": (e.ServerError, 408),
    "server_error": (e.ServerError, 500),
    "unavailable": (e.Overloaded, 503),
    "overloaded": (e.Overloaded, 529),
}


async def test_refusals_are_typed(kit, wire):
    async with FakeServer() as server, asking(server, wire, kit) as ask:
        for fault, (kind, status) in REFUSED.items():
            with pytest.raises(e.ModelError) as caught:
                await ask(model=f"fault-{fault}")
            error, entry = caught.value, server.entries[-1]
            assert (fault, type(error), error.status) == (fault, kind, status)
            assert (error.request_id, error.served) == (entry.request_id, False)
        with pytest.raises(e.BillingError):
            await ask(model="fault-quota")
    assert {entry.outcome for entry in server.entries} == {"refused"}
    assert server.requests == len(REFUSED) + 1, "the packages' own retries are off"


async def test_wrong_key_is_final_and_never_shown(kit, wire):
    async with FakeServer(FakeConfig(key="another-key")) as server:
        client, events = client_of(server, wire), kit.Events()
        with pytest.raises(e.AuthError) as caught:
            await kit.rollout(kit.caller(client, events), stream=wire[2], sampling=SHORT)
        await client.aclose()
    assert server.requests == 1
    assert events.ends[0].outcome == "refused"
    seen = [str(caught.value), repr(caught.value), repr(events.all), repr(client)]
    assert not any(KEY in text or KEY[4:] in text for text in seen)


async def test_retry_hints_are_read(kit, wire):
    config = FakeConfig(faults=FaultPlan(retry_after_s=60.5))
    async with FakeServer(config) as server, asking(server, wire, kit) as ask:
        hints = []
        for fault in ("rate_limit_after", "rate_limit_date", "rate_limit"):
            with pytest.raises(e.RateLimited) as caught:
                await ask(model=f"fault-{fault}")
            hints.append(caught.value.retry_after_s)
    seconds, date, none = hints
    assert (seconds, none) == (60.5, None)
    assert 30 < date <= 61.5


BROKEN = {"reset": e.ConnectionLost, "cut": e.ProtocolError, "garbage": e.ServerError}


async def test_lost_answers_count_as_possibly_served(kit, wire):
    begins, goes_on = Timeouts(first_byte_s=0.15), Timeouts(idle_s=0.15)
    async with (
        FakeServer() as server,
        asking(server, wire, kit) as ask,
        asking(server, wire, kit, timeouts=begins) as ask_first,
        asking(server, wire, kit, timeouts=goes_on) as ask_shortly,
    ):
        for fault, kind in BROKEN.items():
            with pytest.raises(e.ModelError) as caught:
                await ask(model=f"fault-{fault}")
            assert (fault, type(caught.value)) == (fault, kind)
            assert (caught.value.served, caught.value.transient) == (True, True)
        with pytest.raises(e.ModelTimeout, match="stalled") as caught:
            await ask_shortly(model="fault-stall_mid")
        assert caught.value.served is True
        with pytest.raises(e.ModelTimeout, match="within") as caught:
            await ask_first(model="fault-stall_first")
        assert caught.value.served is True
    # Of the last one the client hung up first.
    assert {entry.outcome for entry in server.entries} - {"dropped"} == {"cut"}


async def test_usage_is_read_only_from_complete_objects(kit, wire):
    async with FakeServer() as server, asking(server, wire, kit) as ask:
        for fault in ("no_usage", "partial_usage"):
            answer = await ask(model=f"fault-{fault}")
            assert (answer.message.content, answer.usage) == ("done", None)
            if wire[0] == "chat_completions":
                raw = None if fault == "no_usage" else '{"prompt_tokens":4}'
                assert answer.usage_raw == raw


async def test_early_finish_reasons_are_kept(kit, wire):
    async with FakeServer() as server, asking(server, wire, kit) as ask:
        empty = await ask(script(""))
        cut = await ask(script({"text": "The answ", "finish": "length"}))
        filtered = await ask(model="fault-filtered")
        aborted = await ask(model="fault-abort")
    assert filtered.finish_reason == ("refusal" if "anthropic" in wire[0] else "content_filter")
    assert aborted.finish_reason == "abort"
    assert (empty.message, empty.finish_reason) == (AssistantMessage(), "stop")
    assert (cut.message.content, cut.finish_reason) == ("The answ", "length")


async def test_streamed_text_arrives_in_chunks(kit, wire):
    pieces, text = [], "word " * 40
    async with FakeServer() as server:
        client = client_of(server, wire)
        model_request = kit.request(script(text), stream=wire[2], sampling=SHORT)
        await client.complete(replace(model_request, on_delta=pieces.append))
        await client.aclose()
    assert "".join(pieces) == text
    assert len(pieces) > 5 if wire[2] else len(pieces) == 1


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
FAR = {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}
HISTORY = (
    SystemMessage(content="Be brief."),
    UserMessage(content=[{"type": "text", "text": "What is this?"}, PICTURE, FAR]),
    AssistantMessage(
        content="I look.",
        tool_calls=(
            ToolCall(id="call_1", name="terminal", arguments='{"command":"ls"}'),
            ToolCall(id="call_2", name="terminal", arguments="{}"),
        ),
    ),
    ToolMessage(tool_call_id="call_1", name="terminal", content="a.png"),
    ToolMessage(tool_call_id="call_2", name="terminal", content="nothing ünïcode"),
    UserMessage(content="Continue."),
)


async def test_server_decodes_what_client_sends(kit, wire):
    """Images, parallel calls and their results, tools, sampling: the other side reads the same."""
    seen = []

    class Spy(FakeServer):
        def handle(self, connection, request):
            seen.append(wire_of(request.path).dialect.decode_request(request.body))
            super().handle(connection, request)

    async with Spy() as server:
        client = client_of(server, wire)
        sampling = replace(SHORT, temperature=0.5, stop=() if "responses" in wire[0] else ("END",))
        model_request = kit.request(
            HISTORY, "m", stream=wire[2], tools=kit.TERMINAL, sampling=sampling
        )
        await client.complete(model_request)
        await client.aclose()
    (read,) = seen
    # Two of the three wires name no tool in a result.
    assert [nameless(m) for m in read.messages] == [nameless(m) for m in HISTORY]
    assert read.tools == kit.TERMINAL
    assert (read.model, read.stream, read.sampling) == ("m", wire[2], sampling)


def nameless(message):
    if isinstance(message, ToolMessage):
        return msgspec.structs.replace(message, name="")
    return message


async def test_connections_are_reused(kit, wire, monkeypatch):
    monkeypatch.setattr("hermes_rl.models.transports.http._IDLE_S", {"plain": 60.0})
    async with FakeServer() as server:
        client = client_of(server, wire)
        model_request = kit.request("hi", "echo-6", stream=wire[2], tools=kit.TERMINAL)
        answers = await play(kit, client, model_request)
        await client.aclose()
    assert (len(answers), server.connections_made) == (7, 1)
