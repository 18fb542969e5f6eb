"""Answers of Anthropic's Messages API: bodies and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion
from hermes_rl.models.wire.decoding import (
    DONE,
    AnswerContext,
    Envelope,
    EventDecoder,
    object_field,
    read_anthropic_usage,
    read_tool_call,
)
from hermes_rl.text import decode_json, encode_json, repair_json

POSITION = "_at"
"""Internal key of a thinking block that was not first in its answer: [characters of text, tool
calls] before it. It is never sent."""

THINKING = ("thinking", "redacted_thinking")
"""Types of thinking blocks."""

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
"""Stop reason -> finish reason; others keep their name."""

_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Error type -> its status if it had come before the answer."""


class _Envelope(Envelope):
    content: Any = None
    stop_reason: Any = None
    stop_details: Any = None


class _Block(msgspec.Struct):
    """A content block of a body. The input of a call stays text."""

    type: Any = None
    text: Any = None
    id: Any = None
    name: Any = None
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Body(_Envelope):
    content: list[msgspec.Raw] | str | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_block = msgspec.json.Decoder(_Block).decode


class Call(msgspec.Struct, frozen=True):
    """A `tool_use` block."""

    id: Any
    name: Any
    arguments: str


Content = str | Call | dict[str, Any] | None
"""The content of a block: text, a call, or a thinking block as received; None for others."""


def read_body(data: bytes, context: AnswerContext) -> Completion:
    """Read an answer in one body. Raises: ModelError if it is an error or unreadable."""
    envelope = context.parse(_decode, data, "message")
    if envelope.error:
        raise _typed_error(envelope.error, context)
    content = envelope.content
    if content is None:
        raise context.unreadable_error("no content")
    contents = [content] if isinstance(content, str) else map(_read_block, content)
    return _completion(envelope, contents, context)


def _typed_error(error: Any, context: AnswerContext) -> ModelError:
    """Return the typed error of an error object in an answer with status 200."""
    if isinstance(error, Mapping) and not isinstance(error.get("code"), int):
        error = {**error, "code": _STATUSES.get(str(error.get("type")), 500)}
    return context.error_in_answer(error)


def _completion(
    envelope: _Envelope, contents: Iterable[Content], context: AnswerContext
) -> Completion:
    """Build the answer in the internal form."""
    message = anthropic_message(contents, context.salt)
    if not message.content and not message.tool_calls:
        message = msgspec.structs.replace(message, content=_refusal_explanation(envelope))
    reason = envelope.stop_reason
    reason = _FINISH_REASONS.get(reason, reason) if isinstance(reason, str) else None
    return context.completion(envelope, message, reason, read_anthropic_usage)


def anthropic_message(contents: Iterable[Content], salt: str) -> AssistantMessage:
    """Build the message from an answer's blocks. Thinking that is not first keeps its position."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    blocks: list[dict[str, Any]] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, Call):
            fields = content.name, content.arguments, [content.id]
            calls.append(read_tool_call(*fields, calls, salt, "toolu_"))
        elif content is not None:
            place = [sum(map(len, texts)), len(calls)]
            blocks.append({**content, POSITION: place} if any(place) else content)
    thoughts = [t for b in blocks if isinstance(t := b.get("thinking"), str) and t]
    return AssistantMessage(
        content="".join(texts),
        reasoning_content="\n\n".join(thoughts) or None,
        tool_calls=tuple(calls),
        reasoning_details=blocks or None,
    )


def _read_block(raw: msgspec.Raw) -> Content:
    """Read a block of a body."""
    try:
        raw = msgspec.Raw(_repaired_utf8(bytes(raw)))
        block = _decode_block(raw)
    except ValueError:
        return None
    if block.type == "text" and isinstance(block.text, str):
        return block.text
    if block.type == "tool_use":
        arguments = bytes(block.input)
        return Call(block.id, block.name, "{}" if arguments == b"null" else arguments.decode())
    return _opaque(decode_json(bytes(raw))) if block.type in THINKING else None


def _opaque(form: Any) -> dict[str, Any] | None:
    """Return a thinking block; None if it has no text, signature or data."""
    kept = isinstance(form, dict) and any(
        form.get(name) for name in ("thinking", "signature", "data")
    )
    return form if kept else None


def _refusal_explanation(envelope: _Envelope) -> str:
    """Return the explanation of a refusal without text."""
    details = envelope.stop_details
    reason = details.get("explanation") if isinstance(details, Mapping) else None
    return reason if isinstance(reason, str) and envelope.stop_reason == "refusal" else ""


def _repaired_utf8(data: bytes) -> bytes:
    """Repair JSON that is not valid UTF-8, as parts that were not decoded yet may be."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return repair_json(data)
    return data


class StreamDecoder(EventDecoder):
    """A stream is complete after `message_stop` or a stop reason. Unknown events are ignored."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._all = _Envelope()
        self._usage: dict[str, Any] = {}
        self._counted = False
        self._blocks: dict[int, _Draft] = {}
        self._takers: dict[Any, Callable[[Mapping[str, Any]], None]] = {
            "message_start": self._start,
            "content_block_start": self._open_block,
            "content_block_delta": self._append_delta,
            "message_delta": self._update_message,
            "message_stop": self._stop,
            "error": self._fail,
        }

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return any(block.is_call for block in self._blocks.values())

    def _answer(self) -> Completion:
        whole = self._all
        if whole.stop_reason is None:
            raise self._context.truncated_error()
        if not self._counted:  # the first count is of one token only
            self._usage.pop("output_tokens", None)
        if self._usage:
            whole.usage = msgspec.Raw(encode_json(self._usage))
        contents = (self._blocks[index].content() for index in sorted(self._blocks))
        return _completion(whole, contents, self._context)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:  # some servers end every stream as OpenAI does
            return
        form = self._context.parse(decode_json, data)
        if not isinstance(form, Mapping):
            return
        kind = "error" if form.get("error") else form.get("type")
        take = self._takers.get(kind) if isinstance(kind, str) else None
        if take is not None:
            take(form)

    def _start(self, form: Mapping[str, Any]) -> None:
        message = object_field(form, "message")
        self._all.id, self._all.model = message.get("id"), message.get("model")
        self._usage.update(_reported_counts(object_field(message, "usage")))

    def _open_block(self, form: Mapping[str, Any]) -> None:
        block = _Draft(object_field(form, "content_block"))
        self._blocks[_index(form)] = block
        self._context.emit(block.opening)

    def _append_delta(self, form: Mapping[str, Any]) -> None:
        block = self._blocks.get(_index(form))
        if block is None:  # some servers omit the start of a block
            block = self._blocks[_index(form)] = _Draft({})
        delta = object_field(form, "delta")
        self._context.emit(block.add(delta))
        self._context.emit_reasoning(delta.get("thinking"))

    def _update_message(self, form: Mapping[str, Any]) -> None:
        """Usage here covers the complete answer so far: it replaces earlier counts."""
        delta = object_field(form, "delta")
        if delta.get("stop_reason") is not None:
            self._all.stop_reason = delta["stop_reason"]
            self._all.stop_details = delta.get("stop_details")
        counts = _reported_counts(object_field(form, "usage"))
        for name, value in counts.items():
            # Input counts never decrease: a 0 after a count is meaningless.
            if value != 0 or name == "output_tokens" or not self._usage.get(name):
                self._usage[name] = value
        self._counted = self._counted or "output_tokens" in counts

    def _stop(self, form: Mapping[str, Any]) -> None:
        self.done = True
        self._all.stop_reason = self._all.stop_reason or "end_turn"

    def _fail(self, form: Mapping[str, Any]) -> None:
        raise _typed_error(form.get("error"), self._context)


class _Draft:
    """Accumulates the deltas of one content block."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = dict(form)
        self._pieces: dict[str, list[str]] = {}
        text = form.get("text")
        self.opening = text if isinstance(text, str) and form.get("type") == "text" else ""

    def add(self, delta: Mapping[str, Any]) -> str:
        """Add one delta and return its visible text."""
        for name, kind in (
            ("text", "text"),
            ("thinking", "thinking"),
            ("signature", "thinking"),
            ("partial_json", "tool_use"),
        ):
            piece = delta.get(name)
            if isinstance(piece, str):
                self._form.setdefault("type", kind)
                self._pieces.setdefault(name, []).append(piece)
        text = delta.get("text")
        return text if isinstance(text, str) else ""

    @property
    def is_call(self) -> bool:
        """Whether it is a tool call."""
        return self._form.get("type") == "tool_use"

    def content(self) -> Content:
        """Return the content of the block."""
        form = self._form
        kind = form.get("type")
        if kind == "text":
            return self.opening + self._joined("text")
        if kind == "tool_use":
            text = self._joined("partial_json") or encode_json(form.get("input") or {}).decode()
            return Call(form.get("id"), form.get("name"), text)
        if kind not in THINKING:
            return None
        opening = form.get("thinking")
        out = dict(form)
        if "thinking" in self._pieces:
            out["thinking"] = (opening if isinstance(opening, str) else "") + self._joined(
                "thinking"
            )
        if "signature" in self._pieces:
            out["signature"] = self._pieces["signature"][-1]  # it is never split
        return _opaque(out)

    def _joined(self, name: str) -> str:
        return "".join(self._pieces.get(name, ()))


def _index(form: Mapping[str, Any]) -> int:
    index = form.get("index")
    return index if isinstance(index, int) else 0


def _reported_counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {k: v for k, v in usage.items() if v is not None}
