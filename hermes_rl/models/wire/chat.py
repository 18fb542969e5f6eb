"""Chat Completions, client side: request bodies and decoders for OpenAI's API and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, Message, ToolCall, UserMessage, to_openai
from hermes_rl.models.base import (
    CacheTime,
    Completion,
    LogprobsKind,
    ModelRequest,
    TokenCapture,
)
from hermes_rl.models.prepare import cache_marks, outgoing
from hermes_rl.models.wire.base import (
    MessageDialect,
    Quirks,
    sendable,
)
from hermes_rl.models.wire.decoding import (
    DONE,
    Envelope,
    EventDecoder,
    Reading,
    fitting_id,
    flatten,
    merge_details,
    part_of,
    read_call,
    read_chat_usage,
    reasoning_of,
    split_think,
)
from hermes_rl.text import encode_json

CHAT_COMPLETIONS = "chat_completions"
TAIL = b"]}"
"""The last bytes of every body. A turn's body without them begins the next turn's."""

MOST_ID = 40
"""Characters of a call's id, where a provider counts them; vLLM's own have 46."""

_FOREIGN = ("thinking", "redacted_thinking", "reasoning", "message", "function_call")
"""Blocks of the other dialects: they are not replayed."""

_IDS = 1 << 63
"""Token ids are stored in 64 bits at most; a larger one is a server's error."""


class ChatCompletions(MessageDialect):
    """`request.cache` is honoured where the provider takes markers in this wire (`cache_marks`),
    for models whose name holds `claude`. Elsewhere caching is the server's own affair, helped by a
    key where it takes one (`cache_key`)."""

    name = CHAT_COMPLETIONS
    path = "/chat/completions"

    def encode(self, request: ModelRequest) -> bytes:
        return b"".join((self._head(request), b",".join(self._pieces(request)), TAIL))

    def read_body(self, data: bytes, reading: Reading) -> Completion:
        envelope = _open_envelope(data, reading)
        choice = _first_choice(envelope.choices)
        if choice is None:
            raise reading.unreadable("no choices")
        message = choice.get("message")
        form = message if isinstance(message, Mapping) else {"content": choice.get("text")}
        return _completion(reading, envelope, form, choice.get("finish_reason"), choice)

    def stream(self, reading: Reading) -> EventDecoder:
        return _StreamDecoder(reading)

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        return tool

    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        ready = outgoing(request)
        encoded = ready.encoded(self._wire_name, self._encode)
        if request.cache is None or not self._quirks.cache_marks or "claude" not in request.model:
            return encoded
        # The markers move on with each turn; what they mark is the same text, so it is still one
        # prefix to the provider's cache.
        marked = list(encoded)
        for place in cache_marks(ready.messages, tools=False):
            marked[place] = _encode_marked(ready.messages[place], request.cache, self._quirks)
        return marked

    def _encode(self, message: Message) -> bytes:
        return encode_json(_form(message, self._quirks))

    @cached_property
    def _wire_name(self) -> str:
        """Names the encoding of messages; it depends on the provider."""
        quirks = self._quirks
        replayed = f"{quirks.replay_reasoning} {quirks.needs_reasoning} {quirks.short_ids}"
        return f"{CHAT_COMPLETIONS} {replayed}"

    def _head(self, request: ModelRequest) -> bytes:
        fields: dict[str, Any] = {"model": request.model}
        if request.stream:
            fields["stream"] = True
            if self._quirks.stream_options:
                fields["stream_options"] = {"include_usage": True}
        for name, value in (
            sendable(request.sampling, CHAT_COMPLETIONS, self._quirks).as_dict().items()
        ):
            fields[self._field(name, request)] = value
        if request.logprobs:
            fields["logprobs"] = True
        if request.token_ids:
            fields["return_token_ids"] = True
        if request.cache is not None and self._quirks.cache_key:
            fields["prompt_cache_key"] = outgoing(request).cache_key
        fields.update(request.extra)
        tools = self._tools(request)
        return encode_json(fields)[:-1] + tools + b',"messages":['

    def _field(self, name: str, request: ModelRequest) -> str:
        if name == "max_tokens":
            learned = "completion_cap" in request.adaptations
            return "max_completion_tokens" if learned else self._quirks.max_tokens_field
        return "reasoning_effort" if name == "reasoning" else name


def _form(message: Message, quirks: Quirks) -> dict[str, Any]:
    """One message as the wire has it: arguments as they are, signed reasoning blocks as received,
    reasoning text only where it is wanted."""
    form = to_openai(message)
    if quirks.short_ids:
        _shorten_ids(form)
    if isinstance(message, AssistantMessage):
        reasoning = form.pop("reasoning_content", None)
        if not reasoning and message.tool_calls and quirks.needs_reasoning:
            reasoning = " "
        if quirks.replay_reasoning and reasoning:
            form[quirks.replay_reasoning] = reasoning
        details = _replayable_blocks(message.reasoning_details)
        if details is not None:
            form["reasoning_details"] = details
    return form


def _shorten_ids(form: dict[str, Any]) -> None:
    for call in form.get("tool_calls", ()):
        call["id"] = fitting_id(call["id"], MOST_ID)
    if "tool_call_id" in form:
        form["tool_call_id"] = fitting_id(form["tool_call_id"], MOST_ID)


def _replayable_blocks(details: Any) -> Any:
    """Reasoning blocks without those of other dialects; None when there are none."""
    if not isinstance(details, list):
        return details
    kept = [b for b in details if not (isinstance(b, dict) and b.get("type") in _FOREIGN)]
    return kept or None


def _encode_marked(message: Message, kept: CacheTime, quirks: Quirks) -> bytes:
    """A message whose last part carries a cache marker."""
    form = _form(message, quirks)
    marker = {"type": "ephemeral", **({"ttl": kept} if kept != "5m" else {})}
    parts = form["content"]
    if not isinstance(message, UserMessage) or isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    return encode_json({**form, "content": [*parts[:-1], {**parts[-1], "cache_control": marker}]})


class _Envelope(Envelope):
    choices: Any = None
    prompt_token_ids: Any = None


_decode = msgspec.json.Decoder(_Envelope).decode


def _end_of(form: Mapping[str, Any], finish_reason: Any) -> Any:
    """The finish reason; `refusal` where the message's only text is its refusal field."""
    refused = isinstance(form.get("refusal"), str) and not form.get("content")
    return "refusal" if refused and not form.get("tool_calls") else finish_reason


def _open_envelope(data: bytes, reading: Reading) -> _Envelope:
    """The top level of one JSON text. Raises: ProtocolError, or what its error object means."""
    envelope = reading.parse(_decode, data)
    if envelope.error:
        raise reading.fault(envelope.error)
    return envelope


def _first_choice(choices: Any) -> Mapping[str, Any] | None:
    """The first choice, if there is one."""
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0]
    return None


def _message_of(form: Mapping[str, Any], salt: str) -> AssistantMessage:
    """The message of an answer.

    Args:
        form: the wire's message.
        salt: makes ids of calls that came without one differ between turns.
    """
    text, thought = flatten(form.get("content"))
    reasoning = reasoning_of(form) or thought
    if not text and isinstance(form.get("refusal"), str):
        text = form["refusal"]
    raw = None
    if reasoning is None:
        text, reasoning, raw = split_think(text)
    given = form.get("tool_calls")
    listed = [c for c in given if isinstance(c, Mapping)] if isinstance(given, list) else []
    if not listed and isinstance(form.get("function_call"), Mapping):
        listed = [{"function": form["function_call"]}]
    calls: list[ToolCall] = []
    for call in listed:
        fields = call["function"] if isinstance(call.get("function"), Mapping) else call
        name, arguments = fields.get("name"), fields.get("arguments")
        calls.append(read_call(name, arguments, [call.get("id")], calls, salt))
    return AssistantMessage(
        content=text,
        reasoning_content=reasoning,
        tool_calls=tuple(calls),
        raw_content=raw,
        reasoning_details=form.get("reasoning_details") or None,
    )


def _capture_of(envelope: _Envelope, choice: Mapping[str, Any]) -> TokenCapture | None:
    """Token ids and logprobs, in the places where vLLM, SGLang and the embedded server put them."""
    prompt = envelope.prompt_token_ids or choice.get("prompt_token_ids")
    sampled = choice.get("token_ids")
    sampled = choice.get("response_token_ids") if sampled is None else sampled
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    values = None
    if isinstance(content, list):
        values = [t.get("logprob") if isinstance(t, Mapping) else None for t in content]
    capture = TokenCapture(
        prompt_ids=_integers(prompt),
        completion_ids=_integers(sampled),
        logprobs=_floats(values),
        logprobs_kind=_kind(choice.get("logprobs_kind")),
    )
    empty = capture.prompt_ids is capture.completion_ids is capture.logprobs is None
    return None if empty else capture


def _integers(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    return tuple(values) if all(type(v) is int and 0 <= v < _IDS for v in values) else None


def _floats(values: Any) -> tuple[float, ...] | None:
    if values is None or not all(type(v) in (int, float) for v in values):
        return None
    try:
        return tuple(map(float, values))
    except OverflowError:
        return None


def _kind(value: Any) -> LogprobsKind:
    kinds: tuple[LogprobsKind, ...] = ("sampling", "raw", "constrained")
    return next((k for k in kinds if k == value), "unknown")


def _completion(
    reading: Reading,
    envelope: _Envelope,
    form: Mapping[str, Any],
    finish_reason: Any,
    choice: Mapping[str, Any],
) -> Completion:
    """The answer in the internal form.

    Args:
        form: the wire's message.
        choice: has its token ids and logprobs.
    """
    message, reason = _message_of(form, reading.salt), _end_of(form, finish_reason)
    tokens = _capture_of(envelope, choice)
    return reading.completion(envelope, message, reason, read_chat_usage, tokens)


class _StreamDecoder(EventDecoder):
    """A stream is complete when it says so: by `[DONE]` or a finish reason."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._all = _Envelope()
        self._gathered = _Gathered()

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return self._gathered.in_call

    def _answer(self) -> Completion:
        gathered = self._gathered
        if not self.done and gathered.finish_reason is None:
            raise self._reading.unfinished()
        form, choice = gathered.message(), gathered.choice()
        return _completion(self._reading, self._all, form, gathered.finish_reason, choice)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:
            self.done = True
            return
        chunk = _open_envelope(data, self._reading)
        whole = self._all
        whole.id = whole.id or chunk.id
        whole.model = whole.model or chunk.model
        whole.prompt_token_ids = whole.prompt_token_ids or chunk.prompt_token_ids
        whole.policy_version = chunk.policy_version or whole.policy_version
        if bytes(chunk.usage) not in (b"null", b"{}"):
            # Some servers send running totals: the last object is the one that counts. The copy
            # lets the chunk's buffer go.
            whole.usage = msgspec.Raw(bytes(chunk.usage))
        choice = _first_choice(chunk.choices)
        if choice is not None:
            self._reading.tell(self._gathered.add(choice))


class _Gathered:
    """The first choice of a stream, delta by delta."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._details: list[Any] = []
        self._calls: list[_Call] = []
        self._choice: dict[str, Any] = {}
        self._token_ids: list[Any] | None = None
        self._logprobs: list[Any] | None = None

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._calls)

    def add(self, choice: Mapping[str, Any]) -> str:
        """Take one delta; returns its visible text."""
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        self._add_tokens(choice)
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            delta = choice.get("message")  # a whole message where a delta was due
        if not isinstance(delta, Mapping):
            return ""
        text, thought = flatten(delta.get("content"))
        self._content.append(text)
        self._reasoning.append(reasoning_of(delta) or thought or "")
        if isinstance(delta.get("refusal"), str):
            self._refusal.append(delta["refusal"])
        merge_details(self._details, delta.get("reasoning_details"))
        self._add_calls(delta)
        return text

    def message(self) -> dict[str, Any]:
        """The message as a body would hold it."""
        return {
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning) or None,
            "refusal": "".join(self._refusal) or None,
            "reasoning_details": self._details or None,
            "tool_calls": [call.form() for call in self._calls],
        }

    def choice(self) -> dict[str, Any]:
        """The choice's token fields as a body would hold them."""
        return {
            **self._choice,
            "token_ids": self._token_ids,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
        }

    def _add_tokens(self, choice: Mapping[str, Any]) -> None:
        for name in ("prompt_token_ids", "logprobs_kind"):
            if choice.get(name) is not None:
                self._choice[name] = choice[name]
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._token_ids = (self._token_ids or []) + ids
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if isinstance(content, list):
            self._logprobs = (self._logprobs or []) + content

    def _add_calls(self, delta: Mapping[str, Any]) -> None:
        pieces = delta.get("tool_calls")
        if isinstance(delta.get("function_call"), Mapping):  # the form before tool calls
            pieces = [{"index": 0, "function": delta["function_call"]}]
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, Mapping):
                self._call_for(piece).add(piece)

    def _call_for(self, piece: Mapping[str, Any]) -> _Call:
        """The call that a piece continues, or a new one.

        By index; where servers leave it out, or give every call the same, a new id with a name
        begins a new call, and a piece without either goes on with the last one.
        """
        index, given = piece.get("index"), piece.get("id")
        named = bool(part_of(piece, "function").get("name"))
        known: _Call | None = None
        if isinstance(index, int):
            known = next((c for c in reversed(self._calls) if c.index == index), None)
        elif given:
            known = next((c for c in self._calls if c.id == given), None)
        elif self._calls and not named:
            known = self._calls[-1]
        if known is not None and not (named and given and known.id and known.id != given):
            return known
        call = _Call(index if isinstance(index, int) else None)
        self._calls.append(call)
        return call


class _Call:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id: str | None = None
        self._name = ""
        self._arguments: list[str] = []

    def add(self, piece: Mapping[str, Any]) -> None:
        given = piece.get("id")
        if isinstance(given, str) and given:
            self.id = given
        function = part_of(piece, "function")
        name = function.get("name")
        if isinstance(name, str) and name != self._name:  # some repeat it in every piece
            self._name += name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self._arguments.append(arguments)
        elif arguments is not None:
            self._arguments.append(encode_json(arguments).decode())

    def form(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self.id, "function": function}
