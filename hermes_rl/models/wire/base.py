"""The client side of dialects: contract, shared code, provider quirks and reserved fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hermes_rl.errors import UserError
from hermes_rl.models.base import Completion, ModelRequest, Sampling
from hermes_rl.models.prepare import prepare_request, without_grammar
from hermes_rl.models.wire.decoding import AnswerContext, BodyDecoder, EventDecoder
from hermes_rl.models.wire.decoding import Decoder as Decoder
from hermes_rl.models.wire.decoding import ReplyHead as ReplyHead
from hermes_rl.text import encode_json

NEUTRAL_FILTERS = (("top_k", -1), ("top_k", 0), ("min_p", 0.0))
"""Sampling filters at values that exclude no token."""

UNSUPPORTED_SAMPLING: dict[str, tuple[str, ...]] = {
    "anthropic_messages": ("seed", "min_p"),
    "codex_responses": ("seed", "stop"),
}
"""Dialect -> sampling parameters for which its wire has no field."""

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


class Dialect(Protocol):
    """One wire format."""

    name: str
    path: str
    """Added to the endpoint's base URL."""

    def encode(self, request: ModelRequest) -> bytes:
        """Return the body of a request. Without its last bytes (`TAIL`) it is a prefix of every
        later body of the conversation with the same parameters."""
        ...

    def bound(self, request: ModelRequest) -> int:
        """Return an upper bound on the prompt's tokens: about the bytes of the body."""
        ...

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers of every request."""
        ...

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """Return a decoder for the answer to `request`."""
        ...


@dataclass(frozen=True)
class Quirks:
    """How one provider deviates from its dialect."""

    max_tokens_field: MaxTokensField = "max_tokens"
    """The field of the output limit in Chat Completions."""
    replay_reasoning: str | None = None
    """The field for the reasoning of earlier tool turns; None sends none."""
    needs_reasoning: bool = False
    """It refuses earlier tool calls without reasoning, even those of another model. A space is sent
    then, because an empty text is refused too."""
    stream_options: bool = True
    """It accepts `stream_options.include_usage`."""
    top_k: bool = True
    """It accepts `top_k` and `min_p`. Otherwise neutral values (-1, 0) are not sent, and the server
    refuses others."""
    seed: bool = True
    """It accepts `seed`."""
    cache_marks: bool = False
    """In Chat Completions it accepts cache markers for models with `claude` in their name."""
    cache_key: bool = False
    """It accepts `prompt_cache_key`: requests with one key use one cache."""
    short_ids: bool = False
    """It accepts tool call IDs of at most 40 characters."""
    reports_cost: bool = False
    """Its answers report their cost in US dollars (`usage.cost`)."""


def supported_sampling(sampling: Sampling, api_mode: str, quirks: Quirks) -> Sampling:
    """Return the sampling parameters that a provider supports: without those that its wire has no
    field for, and without neutral values of parameters that only engines accept."""
    unset = list(UNSUPPORTED_SAMPLING.get(api_mode, ()))
    if not quirks.seed:
        unset.append("seed")
    if not quirks.top_k:
        unset += [name for name, value in NEUTRAL_FILTERS if getattr(sampling, name) == value]
    return sampling.without(unset) if unset else sampling


JSON_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
}
"""Headers of every request; an answer may be a body or a stream."""


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of a request on OpenAI's wires."""
    return {**JSON_HEADERS, **({"authorization": f"Bearer {api_key}"} if api_key else {})}


class MessageDialect(ABC):
    """Base of the dialects that send messages. One per client.

    Args:
        secrets: texts that no error may show.
    """

    name: str
    path: str

    def __init__(self, quirks: Quirks = Quirks(), secrets: Iterable[str] = ()) -> None:
        self._quirks, self._secrets = quirks, secrets
        self._known_tools: tuple[Any, bool, bytes] = ((), False, b"")

    @abstractmethod
    def encode(self, request: ModelRequest) -> bytes:
        """See `Dialect.encode`. The messages come last; the fields before them stay the same from
        turn to turn."""

    @abstractmethod
    def read_body(self, data: bytes, context: AnswerContext) -> Completion:
        """Read an answer in one body. Raises: ModelError if it is an error or unreadable."""

    @abstractmethod
    def stream(self, context: AnswerContext) -> EventDecoder:
        """Return a decoder for a streamed answer."""

    @abstractmethod
    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        """Return all encoded messages, including the system prompt."""

    @abstractmethod
    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool from OpenAI's schema to the wire's form."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        return bearer_headers(api_key)

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`: the bytes of messages and tools, plus the maximum cost of images.
        No common tokenizer makes more than one token of a byte, and JSON needs more bytes than
        the control tokens of a chat template."""
        pieces = self._pieces(request)
        images = prepare_request(request).image_tokens(request.model)
        return sum(map(len, pieces)) + len(pieces) + len(self._tools(request)) + images

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """See `Dialect.decoder`. The content type decides between body and stream; if it names
        neither, the request does."""
        salt = str(len(request.conversation))
        context = AnswerContext(head, self._secrets, salt, request.on_delta, request.on_reasoning)
        kind = head.headers.get("content-type", "")
        if "event-stream" in kind or (self._is_streamed(request) and "json" not in kind):
            return self.stream(context)
        return BodyDecoder(context, self.read_body)

    def _is_streamed(self, request: ModelRequest) -> bool:
        """Return whether a stream is requested."""
        return request.stream

    def _tools(self, request: ModelRequest) -> bytes:
        """Return the tools as a body field after a comma, or nothing. Encoded once per tuple,
        which all turns share."""
        if not request.tools:
            return b""
        plain = "no_grammar" in request.adaptations
        known, was_plain, encoded = self._known_tools
        if known is not request.tools or was_plain is not plain:
            tools = without_grammar(request.tools) if plain else request.tools
            encoded = b',"tools":' + encode_json([self._tool(tool) for tool in tools])
            self._known_tools = (request.tools, plain, encoded)
        return encoded


_CONFIG_KEYS = {
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
"""Field -> the configuration key that sets it."""

_OUTPUT_LIMITS = {
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
}
"""Output limits in any spelling: budgets rely on the one that they set."""
_SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "seed", "stop"}
_COMMON = frozenset({"model", "tools", "stream", "n"} | _OUTPUT_LIMITS | _SAMPLING_FIELDS)

RESERVED_FIELDS: dict[str, frozenset[str]] = {
    "chat_completions": _COMMON
    | {"messages", "stream_options", "reasoning_effort", "logprobs", "return_token_ids"}
    | {"prompt_cache_key"},
    "codex_responses": _COMMON
    | {"input", "instructions", "store", "include", "reasoning", "prompt_cache_key"},
    "anthropic_messages": _COMMON
    | {"messages", "system", "tool_choice", "stop_sequences", "thinking", "output_config"},
}
"""Dialect -> the fields that it sets, and those that would change the form of answers (`n`)."""


def refuse_reserved_fields(extra: Mapping[str, Any], api_mode: str) -> None:
    """Refuse extra body fields that the dialect sets itself. Raises: UserError."""
    for name in extra:
        if name not in RESERVED_FIELDS.get(api_mode, ()):
            continue
        key = "model.max_tokens" if name in _OUTPUT_LIMITS else _CONFIG_KEYS.get(name)
        hint = f"Use {key}" if key else "Remove it"
        raise UserError(f"extra_body has {name!r}, which is reserved in {api_mode}. {hint}")
