"""The dialect `chat_completions`: OpenAI's Chat Completions and the engines that speak it.

Client side: a request's body and a decoder for its answer. The server side is `server`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hermes_rl.messages import AssistantMessage, Message, UserMessage, to_openai
from hermes_rl.models.base import CacheTime, ModelRequest
from hermes_rl.models.prepare import cache_marks, outgoing
from hermes_rl.models.providers.quirks import Quirks, sendable
from hermes_rl.models.providers.table import quirks_at
from hermes_rl.models.wire.base import Decoder, ReplyHead
from hermes_rl.models.wire.chat.answer import read_body
from hermes_rl.models.wire.chat.stream import StreamDecoder
from hermes_rl.models.wire.decoding import decoder_for, fitting_id
from hermes_rl.models.wire.heads import ToolField, bearer_headers
from hermes_rl.models.wire.lenient import encode_json

NAME = "chat_completions"
TAIL = b"]}"
"""The last bytes of every body. A turn's body without them begins the next turn's."""

MOST_ID = 40
"""Characters of a call's id, where a provider counts them; vLLM's own have 46."""

_FOREIGN = ("thinking", "redacted_thinking", "reasoning", "message", "function_call")
"""Blocks of the other dialects: they are not replayed."""


class _Ways(NamedTuple):
    """How a provider wants messages."""

    replay: str | None = None
    """The field for reasoning; None: not at all."""
    blank: str = ""
    """Stands there for the reasoning of tool calls that have none."""
    short_ids: bool = False


class ChatCompletions:
    """One per client.

    `request.cache` is honoured where the provider takes markers in this wire (`cache_marks`), for
    models whose name holds `claude`. Elsewhere caching is the server's own affair, helped by a key
    where it takes one (`cache_key`).

    Args:
        host: of the endpoint.
        secrets: texts that no error may show.
        quirks: the provider's own ways; None takes those that the host is known for.
    """

    name = NAME
    path = "/chat/completions"

    def __init__(
        self, host: str = "", secrets: Iterable[str] = (), quirks: Quirks | None = None
    ) -> None:
        self._quirks = quirks or quirks_at(host)
        blank = " " if self._quirks.needs_reasoning else ""
        self._ways = _Ways(self._quirks.replay_reasoning, blank, self._quirks.short_ids)
        self._wire_name = f"{NAME} {self._ways}"
        self._secrets = secrets
        self._tools = ToolField(dict)

    def encode(self, request: ModelRequest) -> bytes:
        """See `Dialect.encode`. The messages come last; what stands before them does not change
        from turn to turn."""
        return b"".join((self._head(request), b",".join(self._messages(request)), TAIL))

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`: the bytes of messages and tools, and what images may cost. No
        tokeniser in use makes more than one token of a byte, and JSON costs more than a chat
        template's marks."""
        messages = self._messages(request)
        images = outgoing(request).image_tokens(request.model)
        return sum(map(len, messages)) + len(messages) + len(self._tools.encoded(request)) + images

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        return bearer_headers(api_key)

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """See `Dialect.decoder`."""
        return decoder_for(
            request,
            head,
            body=read_body,
            stream=StreamDecoder,
            streamed=request.stream,
            secrets=self._secrets,
        )

    def _messages(self, request: ModelRequest) -> Sequence[bytes]:
        ready = outgoing(request)
        ways = self._ways
        encoded = ready.encoded(self._wire_name, lambda message: _encode(message, ways))
        if request.cache is None or not self._quirks.cache_marks or "claude" not in request.model:
            return encoded
        # The markers move on with each turn; what they mark is the same text, so it is still one
        # prefix to the provider's cache.
        marked = list(encoded)
        for place in cache_marks(ready.messages, tools=False):
            marked[place] = _encode_marked(ready.messages[place], request.cache, ways)
        return marked

    def _head(self, request: ModelRequest) -> bytes:
        fields: dict[str, Any] = {"model": request.model}
        if request.stream:
            fields["stream"] = True
            if self._quirks.stream_options:
                fields["stream_options"] = {"include_usage": True}
        for name, value in sendable(request.sampling, NAME, self._quirks).as_dict().items():
            fields[self._field(name, request)] = value
        if request.logprobs:
            fields["logprobs"] = True
        if request.token_ids:
            fields["return_token_ids"] = True
        if request.cache is not None and self._quirks.cache_key:
            fields["prompt_cache_key"] = outgoing(request).cache_key
        fields.update(request.extra)
        tools = self._tools.encoded(request)
        return encode_json(fields)[:-1] + tools + b',"messages":['

    def _field(self, name: str, request: ModelRequest) -> str:
        if name == "max_tokens":
            learned = "completion_cap" in request.adaptations
            return "max_completion_tokens" if learned else self._quirks.max_tokens_field
        return "reasoning_effort" if name == "reasoning" else name


def _encode(message: Message, ways: _Ways) -> bytes:
    """One message as the wire has it: arguments as they are, signed reasoning blocks as received,
    reasoning text only where it is wanted."""
    return encode_json(_form(message, ways))


def _form(message: Message, ways: _Ways) -> dict[str, Any]:
    form = to_openai(message)
    if ways.short_ids:
        _shorten_ids(form)
    if isinstance(message, AssistantMessage):
        reasoning = form.pop("reasoning_content", None) or (message.tool_calls and ways.blank)
        if ways.replay and reasoning:
            form[ways.replay] = reasoning
        details = _own_blocks(message.reasoning_details)
        if details is not None:
            form["reasoning_details"] = details
    return form


def _shorten_ids(form: dict[str, Any]) -> None:
    for call in form.get("tool_calls", ()):
        call["id"] = fitting_id(call["id"], MOST_ID)
    if "tool_call_id" in form:
        form["tool_call_id"] = fitting_id(form["tool_call_id"], MOST_ID)


def _own_blocks(details: Any) -> Any:
    """Reasoning blocks without those of other dialects; None when there are none."""
    if not isinstance(details, list):
        return details
    own = [b for b in details if not (isinstance(b, dict) and b.get("type") in _FOREIGN)]
    return own or None


def _encode_marked(message: Message, kept: CacheTime, ways: _Ways) -> bytes:
    """A message whose last part carries a cache marker."""
    form = _form(message, ways)
    marker = {"type": "ephemeral", **({"ttl": kept} if kept != "5m" else {})}
    parts = form["content"]
    if not isinstance(message, UserMessage) or isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    return encode_json({**form, "content": [*parts[:-1], {**parts[-1], "cache_control": marker}]})
