"""Decoding answers of the Messages API: a body, or what a stream gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion
from hermes_rl.models.wire.anthropic.blocks import AT, THINKING
from hermes_rl.models.wire.anthropic.usage import read_usage
from hermes_rl.models.wire.decoding import Reading, made_id
from hermes_rl.models.wire.lenient import decode_json, encode_json, repaired

FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
"""Stop reason -> finish reason; all others keep their name. `refusal` is the model's; `pause_turn`
only comes of tools that run at the provider, which nobody asks for here."""

_STATUS = {
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
"""Error type -> the status that it would have had before the answer began."""


class Envelope(msgspec.Struct):
    """The top level of an answer. Usage stays as it came: it is evidence."""

    id: Any = None
    model: Any = None
    content: Any = None
    stop_reason: Any = None
    stop_details: Any = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None


class _Block(msgspec.Struct):
    """A content block of a body: the input of a call keeps its text."""

    type: Any = None
    text: Any = None
    id: Any = None
    name: Any = None
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Body(Envelope):
    content: list[msgspec.Raw] | str | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_block = msgspec.json.Decoder(_Block).decode


class Call(msgspec.Struct, frozen=True):
    """A `tool_use` block."""

    id: Any
    name: Any
    arguments: str


Content = str | Call | dict[str, Any]
"""What a block holds: text, a call, or an opaque block as it came."""


def read_body(data: bytes, reading: Reading) -> Completion:
    """An answer in one body. Raises: ModelError when it is an error, or none."""
    envelope = reading.parse(_decode, data, "message")
    if envelope.error:
        raise error_in(envelope.error, reading)
    given = envelope.content
    if given is None:
        raise reading.unreadable("no content")
    told = [given] if isinstance(given, str) else map(_content, given)
    return completion(envelope, [content for content in told if content is not None], reading)


def error_in(error: Any, reading: Reading) -> ModelError:
    """The typed error of an error object inside an answer with status 200."""
    if isinstance(error, Mapping) and not isinstance(error.get("code"), int):
        error = {**error, "code": _STATUS.get(str(error.get("type")), 500)}
    return reading.fault(error)


def completion(envelope: Envelope, contents: Iterable[Content], reading: Reading) -> Completion:
    """The answer in the internal form."""
    message = message_of(contents, reading.salt)
    if not message.content and not message.tool_calls:
        message = msgspec.structs.replace(message, content=_explained(envelope))
    reason = envelope.stop_reason
    return reading.completion(
        message,
        finish_reason=FINISH.get(reason, reason) if isinstance(reason, str) else None,
        usage=envelope.usage,
        read_usage=read_usage,
        answer_id=envelope.id,
        model=envelope.model,
    )


def message_of(contents: Iterable[Content], salt: str) -> AssistantMessage:
    """The message that an answer's blocks make. Thinking that does not stand first remembers its
    place."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    blocks: list[dict[str, Any]] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, Call):
            calls.append(_call(content, calls, salt))
        else:
            place = [sum(map(len, texts)), len(calls)]
            blocks.append({**content, AT: place} if any(place) else content)
    thoughts = [t for b in blocks if isinstance(t := b.get("thinking"), str) and t]
    return AssistantMessage(
        content="".join(texts),
        reasoning_content="\n\n".join(thoughts) or None,
        tool_calls=tuple(calls),
        reasoning_details=blocks or None,
    )


def _content(raw: msgspec.Raw) -> Content | None:
    """What a block of a body holds; None for blocks that only tools of the provider make."""
    try:
        raw = msgspec.Raw(_utf8(bytes(raw)))
        block = _decode_block(raw)
    except ValueError:
        return None
    if block.type == "text" and isinstance(block.text, str):
        return block.text
    if block.type == "tool_use":
        given = bytes(block.input)
        return Call(block.id, block.name, "{}" if given == b"null" else given.decode())
    return opaque(decode_json(bytes(raw))) if block.type in THINKING else None


def opaque(form: Any) -> dict[str, Any] | None:
    """A thinking block, unless it holds nothing: no text, no signature, no data."""
    kept = isinstance(form, dict) and any(
        form.get(name) for name in ("thinking", "signature", "data")
    )
    return form if kept else None


def _call(call: Call, before: list[ToolCall], salt: str) -> ToolCall:
    name = call.name if isinstance(call.name, str) else ""
    given = call.id
    if not isinstance(given, str) or not given or any(c.id == given for c in before):
        given = made_id(f"{salt}\0{len(before)}\0{name}\0{call.arguments}", "toolu_")
    return ToolCall(id=given, name=name, arguments=call.arguments)


def _explained(envelope: Envelope) -> str:
    """Why the model refused, where it says nothing itself."""
    details = envelope.stop_details
    reason = details.get("explanation") if isinstance(details, Mapping) else None
    return reason if isinstance(reason, str) and envelope.stop_reason == "refusal" else ""


def _utf8(data: bytes) -> bytes:
    """JSON in UTF-8: an undecoded part of an answer may still hold other bytes."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return repaired(data)
    return data


def arguments_of(value: Any) -> str:
    """The input of a call that came as an object."""
    return encode_json(value).decode()
