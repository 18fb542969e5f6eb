"""What an endpoint can do, found out by asking it: seven small calls, each listed with its usage.

Tools, streaming, usage in streams and cached tokens are looked for in every dialect; logprobs and
token ids in Chat Completions only, the one wire that has them.

What logprobs are of is told from two positions: see `models.tokens.logprobs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from hermes_rl.errors import ModelError, UserError
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import (
    Adaptation,
    Completion,
    Conversation,
    LogprobsKind,
    ModelRequest,
    Sampling,
)
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.providers.probe import probe
from hermes_rl.models.providers.raw import ask_raw
from hermes_rl.models.tokens.logprobs import TOP, kind_of
from hermes_rl.models.wire.usage import read_chat_usage
from hermes_rl.text import decode_json
from hermes_rl.usage import Usage

MAX_TOKENS = 64
"""Output of each call at most, so that a model that thinks first may still say a word."""

_T = TypeVar("_T")
_SECONDS = 60.0
_ABSURD = 1e9
"""No logprob is so far from 0."""
_WORD = "Answer with one random letter of the alphabet."
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_clock",
        "description": "The time now.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class ProbeCall:
    """One call, as the manifest lists it."""

    what: str
    usage: dict[str, int | float | None] | None
    cost_usd: float | None
    latency_s: float
    error: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What was found; None is not known."""

    listed: bool | None = None
    """The endpoint lists its models, and this is one of them."""
    answers: bool = False
    tools: bool | None = None
    streaming: bool | None = None
    usage: bool | None = None
    usage_in_streams: bool | None = None
    cached_tokens: bool | None = None
    """Usage says how many prompt tokens came from a cache."""
    logprobs: LogprobsKind | None = None
    """None: it gives none."""
    token_ids: str | None = None
    """`vllm` or `sglang`: whose spelling they come in; None: it gives none."""
    calls: tuple[ProbeCall, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the manifest."""
        return asdict(self)


async def explore(
    endpoint: Endpoint,
    model: str,
    prices: PriceTable | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Capabilities:
    """Find out what a model at an endpoint can do.

    Args:
        extra: further fields of each request's body.

    Raises: UserError when nobody answers there; AuthError for a key that is refused.
    """
    listed = (await probe(endpoint)).models
    tries = _Tries(endpoint, model, prices or PriceTable(), extra)
    found = Capabilities(listed=None if listed is None else model in listed)
    plain = await tries.ask("answer")
    if plain is None:
        return replace(found, calls=tuple(tries.calls))
    streamed = await tries.ask("stream", stream=True)
    called = await tries.ask("tools", tools=(_TOOL,), say="Call read_clock now.")
    chat = endpoint.api_mode == "chat_completions"
    return replace(
        found,
        answers=True,
        usage=plain.usage is not None,
        cached_tokens=plain.usage is not None and plain.usage.cache_read_tokens is not None,
        streaming=streamed is not None,
        usage_in_streams=None if streamed is None else streamed.usage is not None,
        tools=called is not None and bool(called.message.tool_calls),
        logprobs=await _logprobs(tries) if chat else None,
        token_ids=await _token_ids(tries) if chat else None,
        calls=tuple(tries.calls),
    )


async def _logprobs(tries: _Tries) -> LogprobsKind | None:
    for top in TOP:
        asked = {"logprobs": True, "top_logprobs": top}
        first = _likely(await tries.raw("logprobs", temperature=1.0, max_tokens=1, **asked))
        if first:
            break
    else:
        return None
    half = _likely(await tries.raw("logprobs, T 0.5", temperature=0.5, max_tokens=1, **asked))
    return kind_of(first, half or {})


async def _token_ids(tries: _Tries) -> str | None:
    form = await tries.raw("token ids", max_tokens=1, return_token_ids=True) or {}
    choice = _choice(form)
    if choice.get("response_token_ids"):
        return "sglang"
    return "vllm" if choice.get("token_ids") and form.get("prompt_token_ids") else None


def _likely(form: Mapping[str, Any] | None) -> dict[str, float]:
    """token -> logprob of the first position."""
    logprobs = _choice(form or {}).get("logprobs")
    first = _first(logprobs.get("content") if isinstance(logprobs, dict) else None)
    top = first.get("top_logprobs")
    listed = [one for one in top if isinstance(one, dict)] if isinstance(top, list) else []
    pairs = ((one.get("token"), one.get("logprob")) for one in listed)
    return {
        t: float(p)
        for t, p in pairs
        if isinstance(t, str) and isinstance(p, int | float) and abs(p) < _ABSURD
    }


def _choice(form: Mapping[str, Any]) -> dict[str, Any]:
    return _first(form.get("choices"))


def _first(listed: Any) -> dict[str, Any]:
    """The first of a list, if that is an object; else an empty one."""
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}


class _Tries:
    """The calls of one exploration."""

    def __init__(
        self, endpoint: Endpoint, model: str, prices: PriceTable, extra: Mapping[str, Any]
    ) -> None:
        self.calls: list[ProbeCall] = []
        self._endpoint, self._model, self._prices = endpoint, model, prices
        self._extra = dict(extra)
        self._adaptations: frozenset[Adaptation] = frozenset()

    async def ask(
        self,
        what: str,
        *,
        stream: bool = False,
        tools: tuple[dict[str, Any], ...] = (),
        say: str = _WORD,
    ) -> Completion | None:
        """A call through the client that a run would use; None when it failed."""
        request = ModelRequest(
            model=self._model,
            conversation=Conversation([UserMessage(content=say)]),
            call_id=f"probe-{len(self.calls)}",
            tools=tools,
            sampling=Sampling(max_tokens=MAX_TOKENS),
            stream=stream,
            extra=self._extra,
        )

        async def send() -> Completion:
            client = connect(self._endpoint)
            try:
                return await client.complete(replace(request, adaptations=self._adaptations))
            finally:
                await client.aclose()

        return await self._listed(what, send, lambda answer: answer.usage)

    async def raw(self, what: str, **fields: Any) -> dict[str, Any] | None:
        """A Chat Completions call whose whole answer is wanted; None when it failed."""
        messages = [{"role": "user", "content": _WORD}]
        body = {"model": self._model, **self._extra, "messages": messages, **fields}
        if self._adaptations:
            body["max_completion_tokens"] = body.pop("max_tokens")

        async def send() -> dict[str, Any]:
            form = decode_json(await ask_raw(self._endpoint, "/chat/completions", body))
            return form if isinstance(form, dict) else {}

        return await self._listed(what, send, lambda form: read_chat_usage(form.get("usage")))

    async def _listed(
        self, what: str, send: Callable[[], Awaitable[_T]], usage_of: Callable[[_T], Usage | None]
    ) -> _T | None:
        began = time.monotonic()
        answer, usage, error, renamed = None, None, None, False
        try:
            async with asyncio.timeout(_SECONDS):
                answer = await send()
            usage = usage_of(answer)
        except (ModelError, UserError, ValueError, TimeoutError) as failed:
            error = f"{type(failed).__name__}: {failed}"[:300]
            renamed = isinstance(failed, ModelError) and failed.facts.completion_cap
        cost = None if usage is None else self._prices.price(self._model, usage)
        counts = None if usage is None else {k: getattr(usage, k) for k in usage.__struct_fields__}
        seconds = round(time.monotonic() - began, 3)
        self.calls.append(ProbeCall(what, counts, cost, seconds, error))
        if renamed and not self._adaptations:
            self._adaptations = frozenset({"completion_cap"})
            return await self._listed(what, send, usage_of)
        return answer
