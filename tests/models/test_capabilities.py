"""What `doctor models` finds out, against servers that answer as the engines do."""

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hermes_rl.errors import AuthError
from hermes_rl.models import Endpoint
from hermes_rl.models.providers import MAX_TOKENS, ModelPrice, PriceTable, Probe, Rates
from hermes_rl.testing import FakeConfig, FakeServer

LOGITS = {"A": 1.0, "B": 0.4, "C": -0.3, "D": -2.0, "E": -2.5}
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def softmax(temperature: float) -> dict[str, float]:
    scaled = {t: v / temperature for t, v in LOGITS.items()}
    total = math.log(sum(math.exp(v) for v in scaled.values()))
    return {t: v - total for t, v in scaled.items()}


def answer(body: dict[str, Any], *, raw: bool = False, ids: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "A"},
        "finish_reason": "stop",
    }
    form: dict[str, Any] = {"id": "x", "object": "chat.completion", "choices": [choice]}
    if body.get("tools"):
        call = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
        choice["message"]["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
    if body.get("logprobs"):
        shown = softmax(1.0 if raw else body["temperature"])
        top = sorted(shown.items(), key=lambda pair: -pair[1])[: body["top_logprobs"]]
        likely = [{"token": t, "logprob": p, "bytes": None} for t, p in top]
        choice["logprobs"] = {"content": [{**likely[0], "top_logprobs": likely}]}
    if body.get("return_token_ids") and ids == "vllm":
        form["prompt_token_ids"], choice["token_ids"] = [1, 2], [3]
    if body.get("return_token_ids") and ids == "sglang":
        choice["prompt_token_ids"], choice["response_token_ids"] = [1, 2], [3]
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    return {**form, "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}}


@asynccontextmanager
async def serving(reply: Answer, most_top: int = 20) -> AsyncIterator[str]:
    async def post(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("top_logprobs", 0) > most_top:
            return web.json_response({"error": {"message": "top_logprobs too high"}}, status=400)
        form = reply(body)
        if not body.get("stream"):
            return web.json_response(form)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = form["choices"][0]
        chunk = {**form, "usage": None}
        delta = {"index": 0, "delta": choice["message"], "finish_reason": "stop"}
        for event in ({**chunk, "choices": [delta]}, {**form, "choices": []}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", post)
    app.router.add_get("/v1/models", listed)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


@pytest.mark.parametrize(
    ("raw", "ids", "most"), [(False, "vllm", 20), (True, "sglang", 5), (False, None, 0)]
)
async def test_capabilities_of_an_engine_are_detected(
    raw: bool, ids: str | None, most: int
) -> None:
    prices = PriceTable({"m": ModelPrice(Rates(input=Decimal(1), output=Decimal(1)))})
    model_request: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        model_request.append(body)
        return answer(body, raw=raw, ids=ids)

    async with serving(reply, most) as base_url:
        found = await Probe(Endpoint(base_url), "m", prices=prices).capabilities()
    assert found.listed
    assert (found.answers, found.tools, found.streaming) == (True, True, True)
    assert (found.usage, found.usage_in_streams, found.cached_tokens) == (True, True, True)
    assert found.logprobs == (None if not most else "raw" if raw else "sampling")
    assert found.token_ids == ids
    refused = [call for call in found.calls if call.error]
    assert len(found.calls) - len(refused) == len(model_request) <= 7
    served = [call for call in found.calls if not call.error]
    assert all(call.usage and call.cost_usd == pytest.approx(11e-6) for call in served)
    assert all(0 < (body.get("max_tokens") or 0) <= MAX_TOKENS for body in model_request)
    assert json.dumps(found.as_dict())


async def test_capabilities_in_all_dialects() -> None:
    async with FakeServer(FakeConfig(key="sk-right-key")) as server:
        for mode, base in (
            ("chat_completions", server.base_url),
            ("codex_responses", server.base_url),
            ("anthropic_messages", server.base_url.removesuffix("/v1")),
        ):
            where = Endpoint(base_url=base, api_mode=mode, api_key="sk-right-key")
            found = await Probe(where, "echo").capabilities()
            assert found.answers, (mode, found.calls)
            assert found.streaming, (mode, found.calls)
            assert found.usage_in_streams, (mode, found.calls)
            assert len(found.calls) <= 7
        with pytest.raises(AuthError):
            await Probe(Endpoint(server.base_url, api_key="sk-wrong-key"), "echo").capabilities()


@pytest.mark.parametrize(
    "logprobs",
    [
        [1],
        {"content": 5},
        {"content": {"0": 1}},
        {"content": [{"top_logprobs": 5}]},
        {"content": [{"top_logprobs": [{"token": "A", "logprob": 10**400}]}]},
    ],
)
async def test_invalid_logprobs_are_ignored(logprobs: Any) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        form = answer({k: v for k, v in body.items() if k != "logprobs"})
        form["choices"][0]["logprobs"] = logprobs
        return form

    async with serving(reply) as url:
        found = await Probe(Endpoint(url), "m").capabilities()
    assert (found.answers, found.logprobs) == (True, None)


async def test_failing_model_is_probed_once() -> None:
    async with FakeServer(FakeConfig(models=("other",))) as server:
        found = await Probe(Endpoint(server.base_url), "m").capabilities()
    assert not found.answers
    assert len(found.calls) == 1
    assert found.calls[0].error is not None


async def test_renamed_output_limit_can_be_probed() -> None:
    async with FakeServer() as server:
        found = await Probe(Endpoint(server.base_url), "fault-old_cap").capabilities()
    assert found.answers
    assert found.streaming
    assert [call.error is None for call in found.calls[:3]] == [False, True, True]
    assert sum(call.error is not None for call in found.calls) == 1


async def test_probes_send_extra_body_fields() -> None:
    model_request: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        model_request.append(body)
        return answer(body)

    pinned = {"provider": {"order": ["one"]}}
    async with serving(reply) as address:
        await Probe(Endpoint(address), "m", extra=pinned).capabilities()
    assert len(model_request) > 5
    assert all(body["provider"] == {"order": ["one"]} for body in model_request)
