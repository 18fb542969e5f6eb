"""Dialects, client side: the contract and what they share, providers' quirks, and the fields that a
dialect writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hermes_rl.errors import UserError
from hermes_rl.models.base import Completion, ModelRequest, Sampling
from hermes_rl.models.prepare import outgoing, without_grammar
from hermes_rl.models.wire.decoding import BodyDecoder, EventDecoder, Reading
from hermes_rl.models.wire.decoding import Decoder as Decoder
from hermes_rl.models.wire.decoding import ReplyHead as ReplyHead
from hermes_rl.text import encode_json

NO_LIMIT = (("top_k", -1), ("top_k", 0), ("min_p", 0.0))
"""Sampling parameters at values that cut nothing off."""

NO_FIELD: dict[str, tuple[str, ...]] = {
    "anthropic_messages": ("seed", "min_p"),
    "codex_responses": ("seed", "stop"),
}
"""Dialect -> sampling parameters that its wire has no field for."""

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


class Dialect(Protocol):
    """One wire format."""

    name: str
    path: str
    """Added to the endpoint's base URL."""

    def encode(self, request: ModelRequest) -> bytes:
        """The body of a request. Within a conversation, without its last bytes (`tail`), it is a
        prefix of every later body with the same parameters."""
        ...

    def bound(self, request: ModelRequest) -> int:
        """An upper bound on the prompt's tokens: about the body's bytes."""
        ...

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Headers of every request."""
        ...

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """A decoder for the answer to `request`."""
        ...


@dataclass(frozen=True)
class Quirks:
    """The peculiarities of one provider, for the dialects."""

    max_tokens_field: MaxTokensField = "max_tokens"
    """The field for the most output tokens in Chat Completions."""
    replay_reasoning: str | None = None
    """The field in which it wants the reasoning of earlier tool turns back; None: not at all."""
    needs_reasoning: bool = False
    """It refuses earlier tool calls without reasoning, also those of another model: a space stands
    for it (an empty text is refused too)."""
    stream_options: bool = True
    """It takes `stream_options.include_usage`."""
    top_k: bool = True
    """It takes `top_k` and `min_p`; else they are not sent where they mean nothing (-1, 0) and
    refused by the server where they do."""
    seed: bool = True
    """It takes `seed`."""
    cache_marks: bool = False
    """In Chat Completions it takes cache markers, for models whose name holds `claude`."""
    cache_key: bool = False
    """It takes `prompt_cache_key`: requests with one key go to one cache."""
    short_ids: bool = False
    """It takes ids of tool calls of at most 40 characters."""
    reports_cost: bool = False
    """Its answers say what they cost, in US dollars (`usage.cost`)."""


def sendable(sampling: Sampling, api_mode: str, quirks: Quirks) -> Sampling:
    """The sampling that is sent to a provider: without what its wire has no field for or the
    provider does not take, and without neutral values of engines' own parameters."""
    unset = list(NO_FIELD.get(api_mode, ()))
    if not quirks.seed:
        unset.append("seed")
    if not quirks.top_k:
        unset += [name for name, value in NO_LIMIT if getattr(sampling, name) == value]
    return sampling.without(unset) if unset else sampling


JSON_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
}
"""Of every request; answers may be a body or a stream."""


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """The headers of a request on OpenAI's wires."""
    return {**JSON_HEADERS, **({"authorization": f"Bearer {api_key}"} if api_key else {})}


class MessageDialect(ABC):
    """What the dialects that send messages share: a `Dialect`, one per client.

    Args:
        quirks: of the provider.
        secrets: texts that no error may show.
    """

    name: str
    path: str

    def __init__(self, quirks: Quirks = Quirks(), secrets: Iterable[str] = ()) -> None:
        self._quirks, self._secrets = quirks, secrets
        self._known_tools: tuple[Any, bool, bytes] = ((), False, b"")

    @abstractmethod
    def encode(self, request: ModelRequest) -> bytes:
        """See `Dialect.encode`. The messages come last; what stands before them does not change
        from turn to turn."""

    @abstractmethod
    def read_body(self, data: bytes, reading: Reading) -> Completion:
        """An answer in one body. Raises: ModelError when it is an error, or none."""

    @abstractmethod
    def stream(self, reading: Reading) -> EventDecoder:
        """A decoder for an answer in events."""

    @abstractmethod
    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        """All messages as they are sent, the system prompt included."""

    @abstractmethod
    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool in the wire's form, from OpenAI's schema."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        return bearer_headers(api_key)

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`: the bytes of messages and tools, and what images may cost. No
        tokeniser in use makes more than one token of a byte, and JSON costs more than a chat
        template's marks."""
        pieces = self._pieces(request)
        images = outgoing(request).image_tokens(request.model)
        return sum(map(len, pieces)) + len(pieces) + len(self._tools(request)) + images

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """See `Dialect.decoder`. What the answer is says its content type; where that says neither,
        what was requested counts."""
        salt = str(len(request.conversation))
        reading = Reading(head, self._secrets, salt, request.on_delta)
        kind = head.headers.get("content-type", "")
        if "event-stream" in kind or (self._is_streamed(request) and "json" not in kind):
            return self.stream(reading)
        return BodyDecoder(reading, self.read_body)

    def _is_streamed(self, request: ModelRequest) -> bool:
        """Whether the answer is requested as a stream."""
        return request.stream

    def _tools(self, request: ModelRequest) -> bytes:
        """The tools as a body field with the comma before it, empty without tools. Encoded once per
        tuple, since turns share theirs."""
        if not request.tools:
            return b""
        plain = "no_grammar" in request.adaptations
        known, was_plain, encoded = self._known_tools
        if known is not request.tools or was_plain is not plain:
            tools = without_grammar(request.tools) if plain else request.tools
            encoded = b',"tools":' + encode_json([self._tool(tool) for tool in tools])
            self._known_tools = (request.tools, plain, encoded)
        return encoded


_SAID_ELSEWHERE = {
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "top_k": "model.top_k",
    "stop": "model.stop",
    "stop_sequences": "model.stop",
    "seed": "agent.seed",
    "stream": "endpoint.stream",
    "reasoning_effort": "model.reasoning",
    "reasoning": "model.reasoning",
    "thinking": "model.reasoning",
    "output_config": "model.reasoning",
    "prompt_cache_key": "endpoint.prompt_cache",
}
"""Field -> the key of the configuration that sets it."""

_CAPS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"}
"""Bounds of an answer, in any spelling: budgets count on the one that they know."""
_SAMPLED = {"temperature", "top_p", "top_k", "min_p", "seed", "stop"}
_COMMON = frozenset({"model", "tools", "stream", "n"} | _CAPS | _SAMPLED)

OWN: dict[str, frozenset[str]] = {
    "chat_completions": _COMMON
    | {"messages", "stream_options", "reasoning_effort", "logprobs", "return_token_ids"}
    | {"prompt_cache_key"},
    "codex_responses": _COMMON
    | {"input", "instructions", "store", "include", "reasoning", "prompt_cache_key"},
    "anthropic_messages": _COMMON
    | {"messages", "system", "tool_choice", "stop_sequences", "thinking", "output_config"},
}
"""Dialect -> the fields that it writes, and those that would change what it reads (`n`)."""


def refuse_own(extra: Mapping[str, Any], api_mode: str) -> None:
    """Raises: UserError for fields of the user's that are the dialect's own."""
    for name in extra:
        if name not in OWN.get(api_mode, ()):
            continue
        key = "model.max_tokens" if name in _CAPS else _SAID_ELSEWHERE.get(name)
        hint = f"Use {key}" if key else "Take it out"
        raise UserError(f"extra_body holds {name!r}, which is not free in {api_mode}. {hint}")
