"""The local server's HTTP side: an ordinary Chat Completions endpoint on loopback, and llama.cpp's
own route for prompts of token ids.

A key is required on every route, no CORS header is ever sent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hermes_rl.models.local.answer import Generation, Writer
from hermes_rl.models.local.engine import EngineClient
from hermes_rl.models.local.ids import Ids
from hermes_rl.models.local.prompt import Step, plan_step
from hermes_rl.models.local.wire import BadChatRequest, ChatRequest, error_body, read_request

_KEEP_ALIVE_S = 5.0
_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class Served:
    """What the server serves, and the key that it asks for."""

    model: str
    description: str
    key: str = field(repr=False)


def make_app(engine: EngineClient, served: Served) -> web.Application:
    """The application."""
    chat = _Chat(engine, served)
    app = web.Application(middlewares=[_guard(served.key)], client_max_size=_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", chat.complete)
    ids = Ids(engine)
    app.router.add_post("/completion", ids.complete)
    app.router.add_post("/tokenize", ids.tokenize)
    app.router.add_get("/v1/models", chat.models)
    app.router.add_get("/health", chat.health)
    return app


def _guard(key: str) -> Middleware:
    """Asks for the key and gives every failure the OpenAI form."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
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


class _Chat:
    """The three routes."""

    def __init__(self, engine: EngineClient, served: Served) -> None:
        self._engine = engine
        self._served = served

    async def health(self, _request: web.Request) -> web.Response:
        """Says whether the engine behind answers too."""
        if await self._engine.is_healthy():
            return web.json_response({"status": "ok"})
        return _failure("the engine does not answer", 503)

    async def models(self, _request: web.Request) -> web.Response:
        """Names the one model honestly."""
        card = {"id": self._served.model, "object": "model", "owned_by": "hermes-rl", "created": 0}
        card["description"] = self._served.description
        return web.json_response({"object": "list", "data": [card]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One completion; its work stops when the caller hangs up."""
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

    async def _pieces(
        self, asked: ChatRequest, step: Step, generation: Generation
    ) -> AsyncGenerator[str, None]:
        """Gathers the answer in `generation`; yields its text as it comes."""
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
    """The answer as server-sent events. A call is sent in one piece: only whole JSON is a call."""
    first = await anext(pieces, "")  # a refusal still gets its own status
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
