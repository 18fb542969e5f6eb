"""Each step of recovery against the fake server, over a real socket."""

import asyncio
import base64
import io
import random

import pytest
from PIL import Image

from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import Sampling
from hermes_rl.models.calls import ModelCaller, Route
from hermes_rl.models.rate import Limiter

DOT = "data:image/png;base64,iVBORw0KGgo="
PICTURE = UserMessage(
    content=[
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": DOT}},
    ]
)
PATTERNED = (
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find.",
            "parameters": {
                "type": "object",
                "properties": {"day": {"type": "string", "pattern": "\\d+", "format": "date"}},
            },
        },
    },
)
CALLED = ToolCall(id="call_1", name="find", arguments="{}")
RESULT = ToolMessage(tool_call_id="call_1", name="find", content="nothing")


def thought(*blocks):
    """A history whose answer holds reasoning blocks."""
    answer = AssistantMessage(tool_calls=(CALLED,), reasoning_details=list(blocks))
    return [UserMessage(content="hi"), answer, RESULT]


SIGNED = thought({"type": "thinking", "thinking": "hm", "signature": "c2ln"})
ENCRYPTED = thought({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"})
ROUTED = thought({"type": "reasoning.text", "text": "hm", "index": 0})


@pytest.mark.parametrize(
    ("fault", "mode", "text", "fields"),
    [
        ("images", "chat_completions", [PICTURE], {}),
        ("large_images", "chat_completions", [PICTURE], {}),
        ("images", "anthropic_messages", [PICTURE], {}),
        ("images", "codex_responses", [PICTURE], {}),
        ("parts", "chat_completions", [PICTURE], {}),
        ("signatures", "anthropic_messages", SIGNED, {"tools": PATTERNED}),
        ("encrypted", "codex_responses", ENCRYPTED, {"tools": PATTERNED}),
        ("details", "chat_completions", ROUTED, {"tools": PATTERNED}),
        ("grammar", "chat_completions", "hi", {"tools": PATTERNED}),
        ("grammar", "anthropic_messages", "hi", {"tools": PATTERNED}),
        ("grammar", "codex_responses", "hi", {"tools": PATTERNED}),
        ("old_cap", "chat_completions", "hi", {}),
    ],
)
async def test_refused_features_are_left_out(kit, stage, fault, mode, text, fields):
    """One refused request, then the answer; the next turn is right at once."""
    async with stage() as s:
        server = await s.server()
        calling = s.caller(s.route(server, api_mode=mode))
        model_request = kit.request(
            text, f"fault-{fault}", sampling=Sampling(max_tokens=50), **fields
        )
        answer = await calling.call(model_request, turn=1)
        assert answer.message.content == "done"
        model_request.conversation.append(answer.message)
        model_request.conversation.append(UserMessage(content="and now?"))
        await calling.call(model_request, turn=2)
        assert s.outcomes == ["refused", "ok", "ok"]
        assert [entry.outcome for entry in server.entries] == ["refused", "served", "served"]
        assert s.events.waited == []
        other = s.caller(s.route(server, api_mode=mode))  # another rollout learns for itself
        again = kit.request(text, f"fault-{fault}", sampling=Sampling(max_tokens=50), **fields)
        await other.call(again, turn=1)
        assert s.outcomes[3:] == ["refused", "ok"]


def noise(width, height):
    """A picture that no format makes much smaller."""
    pixels = random.Random(1).randbytes(3 * width * height)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def seen_in(request):
    """Width and height of each image of a request, as a server reads it."""
    parts = [p for m in request.messages if isinstance(m.content, list) for p in m.content]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    files = [base64.b64decode(url.partition(",")[2]) for url in urls]
    return [Image.open(io.BytesIO(file)).size for file in files]


@pytest.mark.parametrize("mode", ["chat_completions", "anthropic_messages", "codex_responses"])
@pytest.mark.parametrize("fault", ["heavy_images", "large_images"])
async def test_large_images_are_shrunk_over_the_wire_before_removal(kit, stage, fault, mode):
    """`heavy_images` takes them then; `large_images` takes none."""
    seen = []

    def play(request):
        seen.append(seen_in(request))
        return {"text": "done", "fault": fault}

    async with stage() as s:
        calling = s.caller(s.route(await s.server(plays={"eyes": play}), api_mode=mode))
        picture = {"type": "image_url", "image_url": {"url": noise(4000, 40)}}
        text = UserMessage(content=[{"type": "text", "text": "What is this?"}, picture])
        model_request = kit.request([text], "eyes")
        for turn in (1, 2):
            answer = await calling.call(model_request, turn=turn)
            model_request.conversation.append(answer.message)
            model_request.conversation.append(UserMessage(content="and now?"))
    if fault == "heavy_images":
        assert s.outcomes == ["refused", "ok", "ok"]
        assert seen == [[(4000, 40)], [(2000, 20)], [(2000, 20)]]
    else:
        assert s.outcomes == ["refused", "refused", "ok", "ok"]
        assert seen == [[(4000, 40)], [(2000, 20)], [], []]


async def test_thinking_budget_is_off_after_calls_without_thinking(kit, stage):
    """So it is after a fallback: Claude with a budget wants its last calls to follow a thought."""
    async with stage() as s:
        server = await s.server(script="noop")
        model_request = kit.request(thought(), sampling=Sampling(max_tokens=8_000, reasoning="low"))
        for model in ("claude-haiku-4-5", "claude-sonnet-5-5"):
            calling = s.caller(s.route(server, model, api_mode="anthropic_messages"))
            for turn in (1, 2):
                await calling.call(model_request, turn=turn)
        assert s.outcomes == ["refused", "ok", "ok", "ok", "ok"]


@pytest.mark.parametrize("mode", ["chat_completions", "anthropic_messages", "codex_responses"])
async def test_lone_surrogates_never_reach_a_server(kit, stage, mode):
    async with stage() as s:
        calling = s.caller(s.route(await s.server(), api_mode=mode))
        text = [UserMessage(content="a \ud83d b"), AssistantMessage(content="\udc00"), RESULT]
        text.append(UserMessage(content="\udfff"))
        await calling.call(kit.request(text, "noop"), turn=1)
        assert s.outcomes == ["ok"]


@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_renewed_connections_do_not_affect_requests_in_flight(kit, stage, transport):
    async with stage() as s:
        server = await s.server(latency_s=0.2)
        client = s.client(server, transport=transport)
        calling = ModelCaller([Route.single("noop", client, Limiter(8))], s.events, s.quick)
        slow = asyncio.create_task(calling.call(kit.request(), turn=1))
        await kit.until(lambda: server.in_flight)
        await client.renew()
        assert server.connections_made == 1, "too young to be renewed"
        await client.renew(min_age_s=0.0)
        await calling.call(kit.request(), turn=2)
        await slow
        assert s.outcomes == ["ok", "ok"]
        assert server.connections_made == 2
        await kit.until(lambda: len(server.connections) == 1)
