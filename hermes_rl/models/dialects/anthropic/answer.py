"""Decoding answers of the Messages API: a body, or what a stream gathered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion
from hermes_rl.models.dialects.anthropic.blocks import AT, THINKING
from hermes_rl.models.dialects.anthropic.usage import read_usage
from hermes_rl.models.dialects.base import ReplyHead
from hermes_rl.models.dialects.chat.answer import OnDelta, unreadable
from hermes_rl.models.dialects.lenient import decode_json, encode_json, repaired
from hermes_rl.models.failures.classify import classify_in_answer, rate_headers, request_id

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


class BodyDecoder:
    """An answer in one JSON body."""

    in_call = False
    """Of a broken body nothing is read."""

    def __init__(
        self, head: ReplyHead, *, secrets: tuple[str, ...], salt: str, on_delta: OnDelta
    ) -> None:
        self.done = False
        self._head, self._secrets, self._salt, self._on_delta = head, secrets, salt, on_delta
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """See `Decoder.feed`."""
        self._pieces.append(piece)

    def finish(self) -> Completion:
        """See `Decoder.finish`."""
        envelope = self._envelope(b"".join(self._pieces))
        if envelope.error:
            raise error_in(envelope.error, self._head, self._secrets)
        if envelope.content is None:
            raise unreadable(self._head, "no content", self._secrets)
        given = envelope.content
        told = [given] if isinstance(given, str) else map(_content, given)
        contents = [content for content in told if content is not None]
        answer = completion(self._head, envelope, contents, self._salt)
        if self._on_delta and answer.message.content:
            self._on_delta(answer.message.content)
        return answer

    def _envelope(self, data: bytes) -> _Body:
        try:
            return _decode(data)
        except (ValueError, RecursionError):
            try:
                return _decode(repaired(data))
            except (ValueError, RecursionError):
                shown = data[:80].decode("utf-8", "replace")
                raise unreadable(self._head, f"no message: {shown!r}", self._secrets) from None


def error_in(error: Any, head: ReplyHead, secrets: tuple[str, ...]) -> ModelError:
    """The typed error of an error object inside an answer with status 200."""
    if isinstance(error, Mapping) and not isinstance(error.get("code"), int):
        error = {**error, "code": _STATUS.get(str(error.get("type")), 500)}
    return classify_in_answer(error, head.headers, secrets=secrets)


def completion(
    head: ReplyHead, envelope: Envelope, contents: Iterable[Content], salt: str
) -> Completion:
    """What an answer says.

    Args:
        salt: makes ids of calls that came without one differ between turns.
    """
    message = message_of(contents, salt)
    if not message.content and not message.tool_calls:
        message = msgspec.structs.replace(message, content=_explained(envelope))
    usage = read_usage(_loose(envelope.usage))
    reason, model, given = envelope.stop_reason, envelope.model, envelope.id
    raw = bytes(envelope.usage)
    return Completion(
        message=message,
        finish_reason=FINISH.get(reason, reason) if isinstance(reason, str) else None,
        usage=usage,
        usage_raw=None if raw == b"null" else raw.decode("utf-8", "replace"),
        request_id=request_id(head.headers) or (given if isinstance(given, str) else None),
        served_model=model if isinstance(model, str) else None,
        first_byte_s=head.first_byte_s,
        rate_limit=rate_headers(head.headers),
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
        text = f"{salt}\0{len(before)}\0{name}\0{call.arguments}"
        given = "toolu_" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]
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


def _loose(raw: msgspec.Raw) -> Any:
    try:
        return decode_json(bytes(raw))
    except ValueError:
        return None


def arguments_of(value: Any) -> str:
    """The input of a call that came as an object."""
    return encode_json(value).decode()
