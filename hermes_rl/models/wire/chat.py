"""Chat Completions, client side: request bodies and decoders for OpenAI's API and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from hermes_rl.models.prepare import cache_marks, prepare_request
from hermes_rl.models.wire.base import (
    MessageDialect,
    Quirks,
    supported_sampling,
)
from hermes_rl.models.wire.decoding import (
    DONE,
    AnswerContext,
    Envelope,
    EventDecoder,
    merge_details,
    object_field,
    read_chat_usage,
    read_tool_call,
    read_versions,
    reasoning_of,
    shorten_call_id,
    split_content_parts,
    split_reasoning,
    text_or_none,
)
from hermes_rl.text import encode_json

CHAT_COMPLETIONS = "chat_completions"
TAIL = b"]}"
"""The last bytes of every body. Without them, a turn's body is a prefix of the next turn's."""

MAX_ID_CHARS = 40
"""Maximum length of call IDs at providers that limit it; those of vLLM have 46 characters."""

_BLOCKS_OF_OTHER_DIALECTS = (
    "thinking",
    "redacted_thinking",
    "reasoning",
    "message",
    "function_call",
)
"""Types of reasoning blocks that are not replayed here."""

_FIRST_INVALID_ID = 1 << 63
"""Token ids are stored in 64 bits; a larger one is a server's error."""


class ChatCompletions(MessageDialect):
    """The dialect of Chat Completions.

    `request.cache` adds cache markers if the provider accepts them in this wire (`cache_marks`),
    for models with `claude` in their name. Other servers cache automatically; some take a key
    (`cache_key`)."""

    name = CHAT_COMPLETIONS
    path = "/chat/completions"

    def encode(self, request: ModelRequest) -> bytes:
        return b"".join((self._head(request), b",".join(self._pieces(request)), TAIL))

    def read_body(self, data: bytes, context: AnswerContext) -> Completion:
        envelope = _open_envelope(data, context)
        choice = _first_choice(envelope.choices)
        if choice is None:
            raise context.unreadable_error("no choices")
        message = choice.get("message")
        form = message if isinstance(message, Mapping) else {"content": choice.get("text")}
        return _completion(context, envelope, form, choice.get("finish_reason"), choice)

    def stream(self, context: AnswerContext) -> EventDecoder:
        return _StreamDecoder(context)

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        return tool

    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        prepared = prepare_request(request)
        encoded = prepared.encoded(self._wire_name, self._encode)
        if request.cache is None or not self._quirks.cache_marks or "claude" not in request.model:
            return encoded
        # The markers move with each turn, but they are not part of the prefix that is cached.
        marked = list(encoded)
        for index in cache_marks(prepared.messages, tools=False):
            marked[index] = _encode_marked(prepared.messages[index], request.cache, self._quirks)
        return marked

    def _encode(self, message: Message) -> bytes:
        return encode_json(_message_form(message, self._quirks))

    @cached_property
    def _wire_name(self) -> str:
        """Identifies the encoding of messages, which depends on the provider."""
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
            supported_sampling(request.sampling, CHAT_COMPLETIONS, self._quirks).as_dict().items()
        ):
            fields[self._field(name, request)] = value
        if request.logprobs:
            fields["logprobs"] = True
        if request.token_ids:
            fields["return_token_ids"] = True
        if request.cache is not None and self._quirks.cache_key:
            fields["prompt_cache_key"] = prepare_request(request).cache_key
        fields.update(request.extra)
        tools = self._tools(request)
        return encode_json(fields)[:-1] + tools + b',"messages":['

    def _field(self, name: str, request: ModelRequest) -> str:
        if name == "max_tokens":
            learned = "completion_cap" in request.adaptations
            return "max_completion_tokens" if learned else self._quirks.max_tokens_field
        return "reasoning_effort" if name == "reasoning" else name


def _message_form(message: Message, quirks: Quirks) -> dict[str, Any]:
    """Convert one message to the wire's form: arguments unchanged, signed reasoning blocks as
    received, reasoning text only for providers that want it."""
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
        call["id"] = shorten_call_id(call["id"], MAX_ID_CHARS)
    if "tool_call_id" in form:
        form["tool_call_id"] = shorten_call_id(form["tool_call_id"], MAX_ID_CHARS)


def _replayable_blocks(details: Any) -> Any:
    """Return reasoning blocks without those of other dialects; None if none is left."""
    if not isinstance(details, list):
        return details
    kept = [
        b
        for b in details
        if not (isinstance(b, dict) and b.get("type") in _BLOCKS_OF_OTHER_DIALECTS)
    ]
    return kept or None


def _encode_marked(message: Message, kept: CacheTime, quirks: Quirks) -> bytes:
    """Encode a message with a cache marker on its last part."""
    form = _message_form(message, quirks)
    marker = {"type": "ephemeral", **({"ttl": kept} if kept != "5m" else {})}
    parts = form["content"]
    if not isinstance(message, UserMessage) or isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    return encode_json({**form, "content": [*parts[:-1], {**parts[-1], "cache_control": marker}]})


class _Envelope(Envelope):
    choices: Any = None
    prompt_token_ids: Any = None
    metadata: Any = None
    """SGLang's versions of the weights."""

    def version(self, name: str) -> Any:
        """Return `weight_version` or `weight_versions` of the metadata."""
        return self.metadata.get(name) if isinstance(self.metadata, dict) else None


_decode = msgspec.json.Decoder(_Envelope).decode


def _finish_reason(form: Mapping[str, Any], finish_reason: Any) -> Any:
    """Return the finish reason, or `refusal` if the message has only a refusal field."""
    refused = isinstance(form.get("refusal"), str) and not form.get("content")
    return "refusal" if refused and not form.get("tool_calls") else finish_reason


def _open_envelope(data: bytes, context: AnswerContext) -> _Envelope:
    """Decode the top level of one JSON text. Raises: ModelError."""
    envelope = context.parse(_decode, data)
    if envelope.error:
        raise context.error_in_answer(envelope.error)
    return envelope


def _first_choice(choices: Any) -> Mapping[str, Any] | None:
    """Return the first choice, if there is one."""
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0]
    return None


def _read_message(form: Mapping[str, Any], salt: str) -> AssistantMessage:
    """Read the message of an answer.

    Args:
        form: the wire's message.
        salt: makes derived call IDs differ between turns.
    """
    text, thought = split_content_parts(form.get("content"))
    reasoning = reasoning_of(form) or thought
    if not text and isinstance(form.get("refusal"), str):
        text = form["refusal"]
    raw = None
    if reasoning is None:
        text, reasoning, raw = split_reasoning(text)
    listed = form.get("tool_calls")
    listed = [c for c in listed if isinstance(c, Mapping)] if isinstance(listed, list) else []
    if not listed and isinstance(form.get("function_call"), Mapping):
        listed = [{"function": form["function_call"]}]
    calls: list[ToolCall] = []
    for call in listed:
        fields = call["function"] if isinstance(call.get("function"), Mapping) else call
        name, arguments = fields.get("name"), fields.get("arguments")
        calls.append(read_tool_call(name, arguments, [call.get("id")], calls, salt))
    return AssistantMessage(
        content=text,
        reasoning_content=reasoning,
        tool_calls=tuple(calls),
        raw_content=raw,
        reasoning_details=form.get("reasoning_details") or None,
    )


def _read_tokens(envelope: _Envelope, choice: Mapping[str, Any]) -> TokenCapture | None:
    """Read token ids and logprobs from the fields of vLLM, SGLang and the embedded server."""
    prompt = envelope.prompt_token_ids or choice.get("prompt_token_ids")
    sampled = choice.get("token_ids")
    sampled = choice.get("response_token_ids") if sampled is None else sampled
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    values = None
    if isinstance(content, list):
        values = [t.get("logprob") if isinstance(t, Mapping) else None for t in content]
    ids = _integers(sampled)
    versions = choice.get("weight_versions") or envelope.version("weight_versions")
    capture = TokenCapture(
        prompt_ids=_integers(prompt),
        completion_ids=ids,
        logprobs=_floats(values),
        versions=read_versions(versions, len(ids or ())),
        logprobs_kind=_read_logprobs_kind(choice.get("logprobs_kind")),
    )
    empty = capture.prompt_ids is capture.completion_ids is capture.logprobs is None
    return None if empty else capture


def _integers(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    return (
        tuple(values)
        if all(type(v) is int and 0 <= v < _FIRST_INVALID_ID for v in values)
        else None
    )


def _floats(values: Any) -> tuple[float, ...] | None:
    if values is None or not all(type(v) in (int, float) for v in values):
        return None
    try:
        return tuple(map(float, values))
    except OverflowError:
        return None


def _read_logprobs_kind(value: Any) -> LogprobsKind:
    kinds: tuple[LogprobsKind, ...] = ("sampling", "raw", "constrained")
    return next((k for k in kinds if k == value), "unknown")


def _completion(
    context: AnswerContext,
    envelope: _Envelope,
    form: Mapping[str, Any],
    finish_reason: Any,
    choice: Mapping[str, Any],
) -> Completion:
    """Build the answer in the internal form.

    Args:
        form: the wire's message.
        choice: has its token ids and logprobs.
    """
    message, reason = _read_message(form, context.salt), _finish_reason(form, finish_reason)
    tokens = _read_tokens(envelope, choice)
    if envelope.policy_version is None:
        envelope.policy_version = envelope.version("weight_version")
    return context.completion(envelope, message, reason, read_chat_usage, tokens)


class _StreamDecoder(EventDecoder):
    """A stream is complete after `[DONE]` or a finish reason."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._envelope = _Envelope()
        self._streamed_choice = _StreamedChoice()
        self._versions: set[str] = set()

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return self._streamed_choice.in_call

    def _answer(self) -> Completion:
        choice_so_far = self._streamed_choice
        if not self.done and choice_so_far.finish_reason is None:
            raise self._context.truncated_error()
        form, choice = choice_so_far.message(), choice_so_far.choice()
        finish_reason = choice_so_far.finish_reason
        answer = _completion(self._context, self._envelope, form, finish_reason, choice)
        known, tokens = len(self._versions) == 1, answer.tokens
        if not known and (self._versions or (tokens is not None and not tokens.versions)):
            # Several versions, or that of the headers, which came before the tokens.
            return replace(answer, policy_version=None)
        return answer

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:
            self.done = True
            return
        chunk = _open_envelope(data, self._context)
        envelope = self._envelope
        envelope.id = envelope.id or chunk.id
        envelope.model = envelope.model or chunk.model
        envelope.prompt_token_ids = envelope.prompt_token_ids or chunk.prompt_token_ids
        if chunk.policy_version is None:
            chunk.policy_version = chunk.version("weight_version")
        if chunk.policy_version is not None:
            envelope.policy_version = chunk.policy_version
            self._versions.add(str(chunk.policy_version))
        envelope.metadata = chunk.metadata or envelope.metadata
        if bytes(chunk.usage) not in (b"null", b"{}"):
            # Some servers send running totals: the last object counts. The copy releases the
            # chunk's buffer.
            envelope.usage = msgspec.Raw(bytes(chunk.usage))
        choice = _first_choice(chunk.choices)
        if choice is not None:
            self._context.emit(self._streamed_choice.add(choice))
            self._context.emit_reasoning(self._streamed_choice.thought)


class _StreamedChoice:
    """Accumulates the deltas of a stream's first choice."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.thought = ""
        """Reasoning in the last delta."""
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
        """Add one delta and return its visible text."""
        self.thought = ""
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        self._add_tokens(choice)
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            delta = choice.get("message")  # a complete message in place of a delta
        if not isinstance(delta, Mapping):
            return ""
        text, thought = split_content_parts(delta.get("content"))
        self._content.append(text)
        self.thought = reasoning_of(delta) or thought or ""
        self._reasoning.append(self.thought)
        if isinstance(delta.get("refusal"), str):
            self._refusal.append(delta["refusal"])
        merge_details(self._details, delta.get("reasoning_details"))
        self._add_calls(delta)
        return text

    def message(self) -> dict[str, Any]:
        """Return the message as it would be in a body."""
        return {
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning) or None,
            "refusal": "".join(self._refusal) or None,
            "reasoning_details": self._details or None,
            "tool_calls": [call.form() for call in self._calls],
        }

    def choice(self) -> dict[str, Any]:
        """Return the choice's token fields as they would be in a body."""
        return {
            **self._choice,
            "token_ids": self._token_ids,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
        }

    def _add_tokens(self, choice: Mapping[str, Any]) -> None:
        for name in ("prompt_token_ids", "logprobs_kind", "weight_versions"):
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
        if isinstance(delta.get("function_call"), Mapping):  # the predecessor of tool calls
            pieces = [{"index": 0, "function": delta["function_call"]}]
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, Mapping):
                self._call_for(piece).add(piece)

    def _call_for(self, piece: Mapping[str, Any]) -> _Call:
        """Return the call that a fragment continues, or a new one.

        Calls are matched by index. For servers that omit it or repeat one index, a new ID with a
        name begins a new call, and a fragment with neither continues the last one.
        """
        index, call_id = piece.get("index"), piece.get("id")
        named = bool(object_field(piece, "function").get("name"))
        known: _Call | None = None
        if isinstance(index, int):
            known = next((c for c in reversed(self._calls) if c.index == index), None)
        elif call_id:
            known = next((c for c in self._calls if c.id == call_id), None)
        elif self._calls and not named:
            known = self._calls[-1]
        if known is not None and not (named and call_id and known.id and known.id != call_id):
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
        if call_id := text_or_none(piece.get("id")):
            self.id = call_id
        function = object_field(piece, "function")
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
