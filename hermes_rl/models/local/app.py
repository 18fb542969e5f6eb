"""The HTTP side of the local server, on loopback: Chat Completions and routes for token ids.

The routes for ids are llama.cpp's own `/completion` and `/tokenize`; there a prompt is a list of
ids. Every route requires the key, and no CORS header is ever sent. An answer as a whole and as a
stream is made from the same parts, so the chunks of a stream add up to the whole answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hermes_rl.models.local.engine import EngineClient
from hermes_rl.models.local.requests import (
    BadChatRequest,
    ChatRequest,
    Step,
    error_body,
    plan_step,
    read_request,
)

_KEEP_ALIVE_S = 5.0
_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class Served:
    """What the server serves, and the key that it requires."""

    model: str
    description: str
    key: str = field(repr=False)


def make_app(engine: EngineClient, served: Served) -> web.Application:
    """Build the web application."""
    routes = _Routes(engine, served)
    app = web.Application(middlewares=[_guard(served.key)], client_max_size=_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/completion", routes.completion)
    app.router.add_post("/tokenize", routes.tokenize)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    return app


def _guard(required: str) -> Middleware:
    """Require the key, and give every failure OpenAI's error format."""
    expected = f"Bearer {required}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(key, expected):
            return _failure("no or wrong API key", 401, "invalid_api_key")
        try:
            return await handler(request)
        except BadChatRequest as error:
            return _failure(str(error), error.status, error.code)
        except web.HTTPException as error:
            return _failure(f"{request.method} {request.path}: {error.reason}", error.status)
        except aiohttp.ClientError as error:
            return _failure(f"the engine failed: {error}", 502)

    return guard


def _failure(message: str, status: int, code: str | None = None) -> web.Response:
    return web.json_response(error_body(message, status=status, code=code), status=status)


class _Routes:
    """The handlers of all routes."""

    def __init__(self, engine: EngineClient, served: Served) -> None:
        self._engine = engine
        self._served = served

    async def health(self, _request: web.Request) -> web.Response:
        """Report whether the engine answers too."""
        if await self._engine.is_healthy():
            return web.json_response({"status": "ok"})
        return _failure("the engine does not answer", 503)

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model, with its description."""
        card = {"id": self._served.model, "object": "model", "owned_by": "hermes-rl", "created": 0}
        card["description"] = self._served.description
        return web.json_response({"object": "list", "data": [card]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve one completion; its work stops when the caller disconnects."""
        asked = read_request(await request.read())
        step = plan_step(asked, template_has_tools=self._engine.template_has_tools)
        writer = Writer(asked, step, self._served.model)
        generation = Generation()
        pieces = self._pieces(asked, step, generation)
        async with aclosing(pieces):
            if asked.stream:
                return await _stream(request, writer, step, generation, pieces)
            async for _ in pieces:
                pass
            return web.json_response(writer.whole(generation))

    async def completion(self, request: web.Request) -> web.Response:
        """Serve one answer for a prompt of ids; its work stops when the caller disconnects."""
        data = await request.read()
        prompt = _read(data, _Prompt).prompt
        fields: dict[str, Any] = msgspec.json.decode(data)
        body = {name: value for name, value in fields.items() if name in _FORWARDED}
        answer = await self._engine.complete({**body, "prompt": prompt})
        answer.pop("generation_settings", None)
        answer.pop("prompt", None)
        return web.json_response(answer)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the ids of a text. Control tokens in it are parsed, and none is added."""
        asked = _read(await request.read(), _Text)
        ids = await self._engine.tokenize(asked.content, rendered=False)
        return web.json_response({"tokens": ids})

    async def _pieces(
        self, asked: ChatRequest, step: Step, generation: Generation
    ) -> AsyncGenerator[str, None]:
        """Collect the answer in `generation`, and yield its text as it comes."""
        prompt: str | list[int] = await self._engine.render(step.messages, step.tools)
        prompt = f"{prompt}{step.prefill}"
        if asked.return_token_ids:
            prompt = generation.prompt_ids = await self._engine.tokenize(prompt)
        exact = asked.return_token_ids or asked.logprobs
        generate = self._engine.whole if exact else self._engine.generate
        async with aclosing(generate(prompt, step.sampling)) as pieces:
            async for piece in pieces:
                yield generation.take(piece)
        if not generation.last:
            raise BadChatRequest("the engine broke off", status=502)


async def _stream(
    request: web.Request,
    writer: Writer,
    step: Step,
    generation: Generation,
    pieces: AsyncIterator[str],
) -> web.StreamResponse:
    """Send the answer as server-sent events. A call is sent in one event: only whole JSON is
    one."""
    first = await anext(pieces, "")  # an error here still sets the HTTP status
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    await response.write(_event(writer.opening()))
    clock = asyncio.get_running_loop().time
    sent_at = clock()
    async for text in _chain(first, pieces):
        if text and not step.calls:
            await response.write(_event(writer.delta(text)))
            sent_at = clock()
        elif clock() - sent_at > _KEEP_ALIVE_S:
            await response.write(b": working\n\n")
            sent_at = clock()
    for chunk in writer.closing(generation):
        await response.write(_event(chunk))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for text in rest:
        yield text


def _event(chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


_FORWARDED = frozenset(
    (
        *("n_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
        *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
        *("xtc_probability", "dynatemp_range", "mirostat", "logit_bias", "ignore_eos"),
        *("n_probs", "post_sampling_probs", "return_tokens", "cache_prompt", "json_schema"),
        "grammar",
    )
)
"""Fields that concern one answer. Others (slots, adapters, files) concern the server."""

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _Prompt(msgspec.Struct):
    """The part of a `/completion` request that is validated."""

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class _Text(msgspec.Struct):
    """A request of `/tokenize`."""

    content: str


def _read(data: bytes, kind: type[T]) -> T:
    """Raises: BadChatRequest."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadChatRequest(f"bad request: {error}") from error


_HEAD = re.compile(r'\{"name": "(?:[^"\\]|\\.)*", "arguments": ')


@dataclass
class Generation:
    """What the engine has generated for one step, collected chunk by chunk."""

    prompt_ids: list[int] | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The engine's last chunk, which holds its counts."""

    def take(self, piece: dict[str, Any]) -> str:
        """Add one chunk and return its text."""
        text = str(piece.get("content") or "")
        self.text += text
        self.tokens += piece.get("tokens") or []
        self.probabilities += piece.get("completion_probabilities") or []
        if piece.get("stop"):
            self.last = piece
        return text

    def usage(self) -> dict[str, Any]:
        """Return token counts in OpenAI's format: the prompt includes what came from the cache."""
        prompt = int(self.last.get("tokens_evaluated", 0))
        completion = int(self.last.get("tokens_predicted", 0))
        cached = int((self.last.get("timings") or {}).get("cache_n", 0))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(frozen=True)
class Outcome:
    """The result of a finished step."""

    finish_reason: str
    content: str | None
    call: tuple[str, str] | None = None
    """Name and arguments; the arguments are the model's text, unchanged."""


def read_outcome(step: Step, generation: Generation) -> Outcome:
    """Return what the model decided: a call, the final answer, or a text that was cut."""
    text = generation.text
    cut = "length" if generation.last.get("stop_type") == "limit" else "stop"
    if not step.calls:
        return Outcome(cut, text)
    call = read_call(text)
    if call is None:
        return Outcome("length", text)
    name, arguments = call
    if name == step.finish:
        return Outcome("stop", str(json.loads(arguments).get("answer", "")))
    return Outcome("tool_calls", None, call)


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments' text of a call; None if the JSON was cut."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    head = _HEAD.match(text.strip())
    if head is None:
        return name, json.dumps(arguments, ensure_ascii=False)
    return name, text.strip()[head.end() : -1]


class Writer:
    """Writes one completion, as a whole or in chunks."""

    def __init__(self, request: ChatRequest, step: Step, model: str) -> None:
        self._request = request
        self._step = step
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the body of a completion that is not streamed."""
        outcome = read_outcome(self._step, generation)
        message: dict[str, Any] = {"role": "assistant", "content": outcome.content}
        if outcome.call is not None:
            message["tool_calls"] = [_call(outcome.call)]
        choice = {"index": 0, "message": message, "finish_reason": outcome.finish_reason}
        body = {**self._head, "object": "chat.completion", "usage": generation.usage()}
        return (
            body | {"choices": [choice | self._token_fields(generation)]} | self._prompt(generation)
        )

    def opening(self) -> dict[str, Any]:
        """Return the first chunk of a stream."""
        return self._chunk({"role": "assistant", "content": "" if not self._step.calls else None})

    def delta(self, text: str) -> dict[str, Any]:
        """Return a chunk with plain text."""
        return self._chunk({"content": text})

    def closing(self, generation: Generation) -> Iterator[dict[str, Any]]:
        """Yield the last chunks: a call or answer that was held back, the end, the usage."""
        outcome = read_outcome(self._step, generation)
        if outcome.call is not None:
            yield self._chunk({"tool_calls": [{"index": 0, **_call(outcome.call)}]})
        elif self._step.calls and outcome.content:
            yield self.delta(outcome.content)
        end = self._chunk({}, outcome.finish_reason)
        end["choices"][0] |= self._token_fields(generation)
        yield end | self._prompt(generation)
        if self._request.include_usage:
            yield {**self._chunk({}), "choices": [], "usage": generation.usage()}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _token_fields(self, generation: Generation) -> dict[str, Any]:
        """Return token ids and logprobs, if the request asks for them.

        The logprobs are those of the model before temperature and grammar. `logprobs_kind` says
        whether a grammar constrained the answer, so that they are not those of the policy.
        """
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["token_ids"] = generation.tokens
        if self._request.logprobs:
            shown = self._request.top_logprobs or 0
            fields["logprobs"] = {
                "content": [
                    {**one, "top_logprobs": (one.get("top_logprobs") or [])[:shown]}
                    for one in generation.probabilities
                ]
            }
        if fields:
            fields["logprobs_kind"] = "constrained" if self._step.constrained else "raw"
        return fields

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        if generation.prompt_ids is None:
            return {}
        return {"prompt_token_ids": generation.prompt_ids}


def _call(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
