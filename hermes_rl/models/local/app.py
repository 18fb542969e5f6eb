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
    plan_step,
    read_request,
)

_KEEP_ALIVE_S = 5.0
_BODY_BYTES = 32 << 20


def make_app(engine: EngineClient, model: str, description: str, key: str) -> web.Application:
    """Build the web application, which requires `key`."""
    routes = _Routes(engine, model, description)
    app = web.Application(middlewares=[_guard(key)], client_max_size=_BODY_BYTES)
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
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


class _Routes:
    """The handlers of all routes."""

    def __init__(self, engine: EngineClient, model: str, description: str) -> None:
        self._engine, self._model, self._description = engine, model, description

    async def health(self, _request: web.Request) -> web.Response:
        """Report whether the engine answers too."""
        if await self._engine.is_healthy():
            return web.json_response({"status": "ok"})
        return _failure("the engine does not answer", 503)

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model, with its description."""
        card = {"id": self._model, "object": "model", "owned_by": "hermes-rl", "created": 0}
        card["description"] = self._description
        return web.json_response({"object": "list", "data": [card]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve one completion; its work stops when the caller disconnects."""
        body = read_request(await request.read())
        step = plan_step(body, template_has_tools=self._engine.template_has_tools)
        generation = Generation()
        writer = Writer(body, step, self._model, generation)
        async with aclosing(self._pieces(body, step, generation)) as pieces:
            if body.stream:
                return await _stream(request, writer, pieces)
            async for _ in pieces:
                pass
            return web.json_response(writer.whole())

    async def completion(self, request: web.Request) -> web.Response:
        """Serve one answer for a prompt of ids; its work stops when the caller disconnects."""
        data = await request.read()
        _read(data, _Prompt)
        fields: dict[str, Any] = msgspec.json.decode(data)
        answer = await self._engine.complete({n: v for n, v in fields.items() if n in _FORWARDED})
        answer.pop("generation_settings", None)
        answer.pop("prompt", None)
        return web.json_response(answer)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the ids of a text. Control tokens in it are parsed, and none is added."""
        text = _read(await request.read(), _Text).content
        return web.json_response({"tokens": await self._engine.tokenize(text, rendered=False)})

    async def _pieces(
        self, request: ChatRequest, step: Step, generation: Generation
    ) -> AsyncGenerator[str, None]:
        """Collect the answer in `generation`, and yield its text as it comes."""
        prompt: str | list[int] = await self._engine.render(step.messages, step.tools)
        prompt = f"{prompt}{step.prefill}"
        if request.return_token_ids:
            prompt = generation.prompt_ids = await self._engine.tokenize(prompt)
        body = {**step.sampling, "prompt": prompt}
        if request.return_token_ids or request.logprobs:  # only a whole answer has all ids
            yield generation.take({**await self._engine.complete(body), "stop": True})
            return
        async with aclosing(self._engine.stream(body)) as chunks:
            async for chunk in chunks:
                yield generation.take(chunk)
        if not generation.last:
            raise BadChatRequest("the engine broke off", status=502)


async def _stream(
    request: web.Request, writer: Writer, pieces: AsyncIterator[str]
) -> web.StreamResponse:
    """Send the answer as server-sent events. A call is sent in one event: only whole JSON is
    one."""
    text = await anext(pieces, "")  # an error here still sets the HTTP status
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    await response.write(_event(writer.opening()))
    clock = asyncio.get_running_loop().time
    sent_at = clock()
    while True:
        if text and not writer.calls:
            await response.write(_event(writer.delta(text)))
            sent_at = clock()
        elif clock() - sent_at > _KEEP_ALIVE_S:
            await response.write(b": working\n\n")
            sent_at = clock()
        try:
            text = await anext(pieces)
        except StopAsyncIteration:
            break
    for chunk in writer.closing():
        await response.write(_event(chunk))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


_FORWARDED = frozenset(
    (
        *("prompt", "n_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
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

    def __init__(
        self, request: ChatRequest, step: Step, model: str, generation: Generation
    ) -> None:
        self._request, self._step, self._generation = request, step, generation
        self.calls = step.calls
        """Whether the answer is a call, of which no part is sent before its end."""
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        """Return the body of a completion that is not streamed."""
        message, finish_reason = self._outcome()
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        return {
            **self._head,
            "object": "chat.completion",
            "usage": self._generation.usage(),
            "choices": [choice | self._token_fields()],
            **self._prompt(),
        }

    def opening(self) -> dict[str, Any]:
        """Return the first chunk of a stream."""
        return self._chunk({"role": "assistant", "content": None if self.calls else ""})

    def delta(self, text: str) -> dict[str, Any]:
        """Return a chunk with plain text."""
        return self._chunk({"content": text})

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the last chunks: a call or answer that was held back, the end, the usage."""
        message, finish_reason = self._outcome()
        for index, call in enumerate(message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        if self.calls and message["content"]:
            yield self.delta(message["content"])
        end = self._chunk({}, finish_reason)
        end["choices"][0] |= self._token_fields()
        yield end | self._prompt()
        if self._request.include_usage:
            yield {**self._chunk({}), "choices": [], "usage": self._generation.usage()}

    def _outcome(self) -> tuple[dict[str, Any], str]:
        """Return the message (a call, the final answer, or a text that was cut), and the finish
        reason. The arguments of a call are the model's text, unchanged."""
        text = self._generation.text
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not self.calls:
            cut = self._generation.last.get("stop_type") == "limit"
            return message, "length" if cut else "stop"
        call = read_call(text)
        if call is None:
            return message, "length"
        name, arguments = call
        if name == self._step.finish:
            return {**message, "content": str(json.loads(arguments).get("answer", ""))}, "stop"
        function = {"name": name, "arguments": arguments}
        form = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        return {**message, "content": None, "tool_calls": [form]}, "tool_calls"

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _token_fields(self) -> dict[str, Any]:
        """Return token ids and logprobs, if the request asks for them.

        The logprobs are those of the model before temperature and grammar. `logprobs_kind` says
        whether a grammar constrained the answer, so that they are not those of the policy.
        """
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["token_ids"] = self._generation.tokens
        if self._request.logprobs:
            shown = self._request.top_logprobs or 0
            fields["logprobs"] = {
                "content": [
                    {**one, "top_logprobs": (one.get("top_logprobs") or [])[:shown]}
                    for one in self._generation.probabilities
                ]
            }
        if fields:
            fields["logprobs_kind"] = "constrained" if self._step.constrained else "raw"
        return fields

    def _prompt(self) -> dict[str, Any]:
        ids = self._generation.prompt_ids
        return {} if ids is None else {"prompt_token_ids": ids}
