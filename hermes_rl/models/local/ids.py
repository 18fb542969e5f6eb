"""The local server's routes for token ids: llama.cpp's own `/completion` and `/tokenize`.

A prompt is a list of ids here, nothing else: texts go through Chat Completions.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from hermes_rl.models.local.engine import EngineClient
from hermes_rl.models.local.wire import BadChatRequest

_PASSED_ON = frozenset(
    (
        *("n_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
        *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
        *("xtc_probability", "dynatemp_range", "mirostat", "logit_bias", "ignore_eos"),
        *("n_probs", "post_sampling_probs", "return_tokens", "cache_prompt", "json_schema"),
        "grammar",
    )
)
"""Fields that concern one answer. Others (slots, adapters, files) are the server's own."""

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _Prompt(msgspec.Struct):
    """The part of a request that is looked at."""

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class _Text(msgspec.Struct):
    """A request of `/tokenize`."""

    content: str


class Ids:
    """The two routes."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def complete(self, request: web.Request) -> web.Response:
        """One answer in one body; its work stops when the caller hangs up."""
        data = await request.read()
        prompt = _read(data, _Prompt).prompt
        given: dict[str, Any] = msgspec.json.decode(data)
        body = {name: value for name, value in given.items() if name in _PASSED_ON}
        answer = await self._engine.complete({**body, "prompt": prompt})
        answer.pop("generation_settings", None)
        answer.pop("prompt", None)
        return web.json_response(answer)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The ids of a text; texts of control tokens become those, and none is added."""
        asked = _read(await request.read(), _Text)
        ids = await self._engine.tokenize(asked.content, rendered=False)
        return web.json_response({"tokens": ids})


def _read(data: bytes, kind: type[T]) -> T:
    """Raises: BadChatRequest."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadChatRequest(f"bad request: {error}") from error
