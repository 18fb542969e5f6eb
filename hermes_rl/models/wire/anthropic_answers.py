"""Anthropic's Messages API, answers: one body, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion
from hermes_rl.models.wire.decoding import (
    DONE,
    Envelope,
    EventDecoder,
    Reading,
    part_of,
    read_anthropic_usage,
    read_call,
)
from hermes_rl.text import decode_json, encode_json, repair_json

AT = "_at"
"""Key of a thinking block that did not stand first in its answer: [characters of text, tool calls]
before it. It is ours and never sent."""

THINKING = ("thinking", "redacted_thinking")
"""Types of the opaque blocks of this wire."""

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
"""Stop reason -> finish reason; all others keep their name. `refusal` is the model's; `pause_turn`
only comes from tools that run at the provider, which this client never requests."""

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


class _Envelope(Envelope):
    content: Any = None
    stop_reason: Any = None
    stop_details: Any = None


class _Block(msgspec.Struct):
    """A content block of a body: the input of a call keeps its text."""

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
"""What a block holds: text, a call, or an opaque block as it came; None for blocks that only tools
of the provider make."""


def read_body(data: bytes, reading: Reading) -> Completion:
    """An answer in one body. Raises: ModelError when it is an error, or none."""
    envelope = reading.parse(_decode, data, "message")
    if envelope.error:
        raise _error_in(envelope.error, reading)
    given = envelope.content
    if given is None:
        raise reading.unreadable("no content")
    contents = [given] if isinstance(given, str) else map(_content, given)
    return _completion(envelope, contents, reading)


def _error_in(error: Any, reading: Reading) -> ModelError:
    """The typed error of an error object inside an answer with status 200."""
    if isinstance(error, Mapping) and not isinstance(error.get("code"), int):
        error = {**error, "code": _STATUS.get(str(error.get("type")), 500)}
    return reading.fault(error)


def _completion(envelope: _Envelope, contents: Iterable[Content], reading: Reading) -> Completion:
    """The answer in the internal form."""
    message = anthropic_message(contents, reading.salt)
    if not message.content and not message.tool_calls:
        message = msgspec.structs.replace(message, content=_explained(envelope))
    reason = envelope.stop_reason
    reason = _FINISH.get(reason, reason) if isinstance(reason, str) else None
    return reading.completion(envelope, message, reason, read_anthropic_usage)


def anthropic_message(contents: Iterable[Content], salt: str) -> AssistantMessage:
    """The message that an answer's blocks make. Thinking that does not stand first remembers its
    place."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    blocks: list[dict[str, Any]] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, Call):
            fields = content.name, content.arguments, [content.id]
            calls.append(read_call(*fields, calls, salt, "toolu_"))
        elif content is not None:
            place = [sum(map(len, texts)), len(calls)]
            blocks.append({**content, AT: place} if any(place) else content)
    thoughts = [t for b in blocks if isinstance(t := b.get("thinking"), str) and t]
    return AssistantMessage(
        content="".join(texts),
        reasoning_content="\n\n".join(thoughts) or None,
        tool_calls=tuple(calls),
        reasoning_details=blocks or None,
    )


def _content(raw: msgspec.Raw) -> Content:
    """What a block of a body holds."""
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
    return _opaque(decode_json(bytes(raw))) if block.type in THINKING else None


def _opaque(form: Any) -> dict[str, Any] | None:
    """A thinking block, unless it holds nothing: no text, no signature, no data."""
    kept = isinstance(form, dict) and any(
        form.get(name) for name in ("thinking", "signature", "data")
    )
    return form if kept else None


def _explained(envelope: _Envelope) -> str:
    """Why the model refused, where it says nothing itself."""
    details = envelope.stop_details
    reason = details.get("explanation") if isinstance(details, Mapping) else None
    return reason if isinstance(reason, str) and envelope.stop_reason == "refusal" else ""


def _utf8(data: bytes) -> bytes:
    """JSON in UTF-8: an undecoded part of an answer may still hold other bytes."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return repair_json(data)
    return data


class StreamDecoder(EventDecoder):
    """A stream is complete when it says so: by `message_stop` or a stop reason. Unknown events,
    pings among them, are of no interest."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._all = _Envelope()
        self._usage: dict[str, Any] = {}
        self._counted = False
        self._blocks: dict[int, _Draft] = {}
        self._takers: dict[Any, Callable[[Mapping[str, Any]], None]] = {
            "message_start": self._start,
            "content_block_start": self._open,
            "content_block_delta": self._grow,
            "message_delta": self._change,
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
            raise self._reading.unfinished()
        if not self._counted:  # the count at the start was of the first token only
            self._usage.pop("output_tokens", None)
        if self._usage:
            whole.usage = msgspec.Raw(encode_json(self._usage))
        contents = (self._blocks[index].content() for index in sorted(self._blocks))
        return _completion(whole, contents, self._reading)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:  # some servers end every stream in OpenAI's way
            return
        form = self._reading.parse(decode_json, data)
        if not isinstance(form, Mapping):
            return
        kind = "error" if form.get("error") else form.get("type")
        take = self._takers.get(kind) if isinstance(kind, str) else None
        if take is not None:
            take(form)

    def _start(self, form: Mapping[str, Any]) -> None:
        message = part_of(form, "message")
        self._all.id, self._all.model = message.get("id"), message.get("model")
        self._usage.update(_known(part_of(message, "usage")))

    def _open(self, form: Mapping[str, Any]) -> None:
        block = _Draft(part_of(form, "content_block"))
        self._blocks[_index(form)] = block
        self._reading.tell(block.opening)

    def _grow(self, form: Mapping[str, Any]) -> None:
        block = self._blocks.get(_index(form))
        if block is None:  # some servers leave the start of a block out
            block = self._blocks[_index(form)] = _Draft({})
        self._reading.tell(block.add(part_of(form, "delta")))

    def _change(self, form: Mapping[str, Any]) -> None:
        """Usage here is of the whole answer so far: it replaces what was said before."""
        delta = part_of(form, "delta")
        if delta.get("stop_reason") is not None:
            self._all.stop_reason = delta["stop_reason"]
            self._all.stop_details = delta.get("stop_details")
        counts = _known(part_of(form, "usage"))
        for name, value in counts.items():
            # What came in never gets less: a 0 behind a count says nothing.
            if value != 0 or name == "output_tokens" or not self._usage.get(name):
                self._usage[name] = value
        self._counted = self._counted or "output_tokens" in counts

    def _stop(self, form: Mapping[str, Any]) -> None:
        self.done = True
        self._all.stop_reason = self._all.stop_reason or "end_turn"

    def _fail(self, form: Mapping[str, Any]) -> None:
        raise _error_in(form.get("error"), self._reading)


class _Draft:
    """One content block, delta by delta."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = dict(form)
        self._pieces: dict[str, list[str]] = {}
        text = form.get("text")
        self.opening = text if isinstance(text, str) and form.get("type") == "text" else ""

    def add(self, delta: Mapping[str, Any]) -> str:
        """Take one delta; returns its visible text."""
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
        """Whether it is a tool call, as far as it has come."""
        return self._form.get("type") == "tool_use"

    def content(self) -> Content:
        """What the block holds."""
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
            out["signature"] = self._pieces["signature"][-1]  # it comes whole
        return _opaque(out)

    def _joined(self, name: str) -> str:
        return "".join(self._pieces.get(name, ()))


def _index(form: Mapping[str, Any]) -> int:
    index = form.get("index")
    return index if isinstance(index, int) else 0


def _known(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are null say nothing: what stood before them stays."""
    return {k: v for k, v in usage.items() if v is not None}
