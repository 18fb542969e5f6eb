"""The Responses API of OpenAI, client side, without its state on the server.

Nothing is stored there (`store: false`): each request holds the whole conversation as input items,
with the encrypted reasoning items of earlier answers before the calls that followed them. The
system prompt is `instructions`; it comes before the input, so a conversation's body is a prefix of
the next turn's. The wire has no field for token ids and returns no prompt logprobs; caching is
automatic, helped by a key if the provider accepts one (`cache_key`).

A response is a list of items: reasoning, messages and function calls. The internal form is one
message with text, calls and `reasoning_details`. Any order of items other than reasoning, one
message, calls, and a message's `phase`, is noted in `reasoning_details` beside the reasoning items,
so that a replay sends the items in their original order:

    {"type": "message", "phase": "commentary", "chars": 12}     text of so many characters
    {"type": "function_call", "call_id": "call_1"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.base import Completion, ModelRequest, TokenCapture
from hermes_rl.models.prepare import blocks_of, has_text_or_calls, prepare_request
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
    read_responses_usage,
    read_tool_call,
    shorten_call_id,
    split_reasoning,
    text_or_none,
)
from hermes_rl.text import encode_json

CODEX_RESPONSES = "codex_responses"
TAIL = b"]}"
"""The last bytes of every body. Without them, a turn's body is a prefix of the next turn's."""
MAX_ID_CHARS = 64
"""Maximum length of call IDs; other providers have longer ones."""

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"
SEPARATOR = "\n\n"
"""Joins the texts of several messages."""


class Responses(MessageDialect):
    """The dialect of the Responses API. One per client."""

    name = CODEX_RESPONSES
    path = "/responses"

    def encode(self, request: ModelRequest) -> bytes:
        prepared = prepare_request(request)
        items = [
            items
            for items in prepared.encoded(CODEX_RESPONSES, encode_message)[prepared.lead :]
            if items
        ]
        head = encode_json(_fields(request, prepared.system, self._quirks))[:-1]
        return b"".join((head, self._tools(request), b',"input":[', b",".join(items), TAIL))

    def read_body(self, data: bytes, context: AnswerContext) -> Completion:
        response = context.parse(_decode, data)
        if not isinstance(response.output, list):
            raise _failure(response, context) or context.unreadable_error("no output")
        return _completion(response, response.output, context)

    def stream(self, context: AnswerContext) -> EventDecoder:
        return _StreamDecoder(context)

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """See `MessageDialect._tool`. By default the API would make functions strict."""
        function = tool.get("function")
        if not isinstance(function, dict):
            return tool
        return {"type": "function", "strict": False, **function}

    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        return prepare_request(request).encoded(CODEX_RESPONSES, encode_message)


def encode_message(message: Message) -> bytes:
    """Encode one message as input items, separated by commas."""
    return b",".join(encode_json(item) for item in _items(message))


def _fields(request: ModelRequest, system: str | None, quirks: Quirks) -> dict[str, Any]:
    """Return the fields of a body except tools and input."""
    include = [] if "no_encrypted_reasoning" in request.adaptations else [ENCRYPTED]
    if request.logprobs:
        include.append(LOGPROBS)
    fields: dict[str, Any] = {"model": request.model, "store": False}
    if include:
        fields["include"] = include
    if request.stream:
        fields["stream"] = True
    for name, value in (
        supported_sampling(request.sampling, CODEX_RESPONSES, quirks).as_dict().items()
    ):
        if name == "max_tokens":
            fields["max_output_tokens"] = value
        elif name == "reasoning":
            fields["reasoning"] = {"effort": value, "summary": "auto"}
        else:
            fields[name] = value
    if request.cache is not None and quirks.cache_key:
        fields["prompt_cache_key"] = prepare_request(request).cache_key
    fields.update(request.extra)
    if system is not None:
        fields["instructions"] = system
    return fields


def _items(message: Message) -> list[dict[str, Any]]:
    if isinstance(message, AssistantMessage):
        return [item for p in pieces_of(message) if (item := _item(p)) is not None]
    if isinstance(message, ToolMessage):
        call_id = shorten_call_id(message.tool_call_id, MAX_ID_CHARS)
        output = {"call_id": call_id, "output": message.content}
        return [{"type": "function_call_output", **output}]
    role = "developer" if isinstance(message, SystemMessage) else "user"
    return [{"type": "message", "role": role, "content": _parts(message)}]


def _item(piece: Piece) -> dict[str, Any] | None:
    if piece.kind == REASONING:
        return _replayed(piece.block) if is_replayable(piece.block) else None
    if piece.call is not None:
        call = piece.call
        named = {
            "call_id": shorten_call_id(call.id, MAX_ID_CHARS),
            "name": call.name,
            "arguments": call.arguments,
        }
        return {"type": "function_call", **named}
    item = {"type": "message", "role": "assistant", "content": piece.text}
    return {**item, "phase": piece.phase} if piece.phase else item


def _replayed(block: Any) -> dict[str, Any]:
    """Return a reasoning item for replay, without fields that only answers have."""
    item = {k: v for k, v in block.items() if v is not None and k != "status"}
    return {**item, "summary": item.get("summary", [])}


def _parts(message: SystemMessage | UserMessage) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"type": "input_text", "text": message.content}]
    return [_part(part) for part in message.content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a content part of Chat Completions to this wire's form; others stay unchanged."""
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, dict) else {"url": image}
        detail = image.get("detail") or "auto"
        return {"type": "input_image", "image_url": image.get("url"), "detail": detail}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


class Piece(NamedTuple):
    """One item of a message."""

    kind: str
    block: Mapping[str, Any] = {}
    """The reasoning item as it came."""
    text: str = ""
    phase: str | None = None
    call: ToolCall | None = None


def pieces_of(message: AssistantMessage) -> list[Piece]:
    """Return the items of a message, in the noted order if the notes still match."""
    blocks = [b for b in blocks_of(message) if b.get("type") in (REASONING, MESSAGE, CALL)]
    reasoning = [Piece(REASONING, block=b) for b in blocks if b["type"] == REASONING]
    notes = [b for b in blocks if b["type"] != REASONING]
    if notes:
        noted = _as_noted(message, blocks)
        if noted is not None:
            return noted
    text = [Piece(MESSAGE, text=message.content)] if message.content else []
    return [*reasoning, *text, *(Piece(CALL, call=call) for call in message.tool_calls)]


def details_of(pieces: Iterable[Piece]) -> list[dict[str, Any]] | None:
    """Return the `reasoning_details` of a message that arrived as these items; None if there is
    nothing to replay and nothing to note."""
    listed = list(pieces)
    kinds = [(REASONING, MESSAGE, CALL).index(p.kind) for p in listed]
    usual = kinds == sorted(kinds) and kinds.count(1) <= 1 and not any(p.phase for p in listed)
    if usual:
        return [
            dict(p.block) for p in listed if p.kind == REASONING and is_replayable(p.block)
        ] or None
    return [note for p in listed if (note := _note(p)) is not None] or None


def is_replayable(item: Mapping[str, Any]) -> bool:
    """Return whether a reasoning item is useful to a server that stores nothing."""
    return bool(item.get("encrypted_content") or item.get("content"))


def reasoning_text(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or else its summary."""
    for name in ("content", "summary"):
        listed = item.get(name)
        if isinstance(listed, list):
            texts = [p["text"] for p in listed if isinstance(p, Mapping) and _has_text(p)]
            if texts:
                return SEPARATOR.join(texts)
    return ""


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str) and bool(part["text"])


def _note(piece: Piece) -> dict[str, Any] | None:
    if piece.kind == REASONING:
        return dict(piece.block) if is_replayable(piece.block) else None
    if piece.call is not None:
        return {"type": CALL, "call_id": piece.call.id}
    note: dict[str, Any] = {"type": MESSAGE, "chars": len(piece.text)}
    return {**note, "phase": piece.phase} if piece.phase else note


def _as_noted(message: AssistantMessage, blocks: list[dict[str, Any]]) -> list[Piece] | None:
    """Return the items in noted order; None if the notes no longer match the message."""
    if not has_text_or_calls(message):
        return None
    calls = {call.id: call for call in message.tool_calls}
    out: list[Piece] = []
    at = 0
    for block in blocks:
        if block["type"] == REASONING:
            out.append(Piece(REASONING, block=block))
        elif block["type"] == CALL:
            call = calls.pop(str(block.get("call_id")), None)
            if call is None:
                return None
            out.append(Piece(CALL, call=call))
        else:
            chars, phase = block.get("chars"), block.get("phase")
            if not isinstance(chars, int) or chars <= 0:
                return None
            text = message.content[at : at + chars]
            out.append(Piece(MESSAGE, text=text, phase=phase if isinstance(phase, str) else None))
            at += chars + len(SEPARATOR)
    texts = SEPARATOR.join(p.text for p in out if p.kind == MESSAGE)
    whole = texts == message.content and not calls and len(message.tool_calls) == _calls(out)
    return out if whole else None


def _calls(pieces: list[Piece]) -> int:
    return sum(piece.kind == CALL for piece in pieces)


_REASONS = {"max_output_tokens": "length", "max_tokens": "length"}
"""Why a response is incomplete -> finish reason; others keep their name."""

_MAX_LOGPROB = 1e9
"""A logprob beyond this is a server's error."""

_ENDED = ("completed", "incomplete", "cancelled", None)
"""Valid statuses of a finished response; some servers omit it."""


class _Response(Envelope):
    status: Any = None
    output: Any = None
    incomplete_details: Any = None


_decode = msgspec.json.Decoder(_Response).decode


def _failure(response: _Response, context: AnswerContext) -> ModelError | None:
    """Return the error of a failed response, if it failed."""
    if response.error or response.status == "failed":
        return context.error_in_answer(
            response.error or {"message": "the response failed without an error"}
        )
    if response.status not in _ENDED:
        return context.unreadable_error(f"a response that is {response.status!r}")
    return None


def _completion(response: _Response, output: Sequence[Any], context: AnswerContext) -> Completion:
    """Build the answer in the internal form.

    Args:
        output: its items, from `response` or from a stream.

    Raises: ModelError if the response failed.
    """
    fault = _failure(response, context)
    if fault is not None:
        raise fault
    items = [item for item in output if isinstance(item, Mapping)]
    message, refused = responses_message(items, context.salt)
    reason = _finish(response, message, refused)
    return context.completion(response, message, reason, read_responses_usage, _logprobs(items))


def responses_message(
    items: Sequence[Mapping[str, Any]], salt: str
) -> tuple[AssistantMessage, bool]:
    """Build the message from output items, and return whether all of its text is a refusal. Items
    of unknown types are ignored."""
    pieces: list[Piece] = []
    calls: list[ToolCall] = []
    refusals = 0
    for item in items:
        kind = item.get("type")
        if kind == REASONING:
            pieces.append(Piece(REASONING, block=item))
        elif kind == CALL:
            fields = item.get("name"), item.get("arguments")
            calls.append(
                read_tool_call(*fields, (item.get("call_id"), item.get("id")), calls, salt)
            )
            pieces.append(Piece(CALL, call=calls[-1]))
        elif kind == MESSAGE:
            text, refused = _read_text(item)
            refusals += refused
            if text:
                pieces.append(Piece(MESSAGE, text=text, phase=text_or_none(item.get("phase"))))
    texts = [p.text for p in pieces if p.kind == MESSAGE]
    thoughts = [reasoning_text(p.block) for p in pieces if p.kind == REASONING]
    reasoning: str | None = SEPARATOR.join(t for t in thoughts if t) or None
    content, raw = SEPARATOR.join(texts), None
    if reasoning is None:
        content, reasoning, raw = split_reasoning(content)
    message = AssistantMessage(
        content=content,
        reasoning_content=reasoning,
        tool_calls=tuple(calls),
        raw_content=raw,
        reasoning_details=details_of(pieces),
    )
    return message, 0 < refusals == len(texts)


def _read_text(item: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text of a message item, and whether it is a refusal."""
    content = item.get("content")
    if isinstance(content, str):
        return content, False
    parts = [p for p in content if isinstance(p, Mapping)] if isinstance(content, list) else []
    texts = [p["text"] for p in parts if isinstance(p.get("text"), str)]
    refused = [p["refusal"] for p in parts if isinstance(p.get("refusal"), str)]
    text = "".join(texts)
    return (text, False) if text else ("".join(refused), bool(refused))


def _finish(response: _Response, message: AssistantMessage, refused: bool) -> str:
    if response.status == "cancelled":
        return "abort"
    if response.status == "incomplete":
        details = response.incomplete_details
        reason = details.get("reason") if isinstance(details, Mapping) else None
        return _REASONS.get(str(reason), text_or_none(reason) or "length")
    if message.tool_calls:
        return "tool_calls"
    return "refusal" if refused else "stop"


def _logprobs(items: Sequence[Mapping[str, Any]]) -> TokenCapture | None:
    """Read the logprobs of the text's tokens, if there are any."""
    found: list[float] = []
    for item in items:
        content = item.get("content") if item.get("type") == MESSAGE else None
        for part in content if isinstance(content, list) else ():
            listed = part.get("logprobs") if isinstance(part, Mapping) else None
            for token in listed if isinstance(listed, list) else ():
                value = token.get("logprob") if isinstance(token, Mapping) else None
                if not isinstance(value, int | float) or abs(value) > _MAX_LOGPROB:
                    return None
                found.append(float(value))
    return TokenCapture(logprobs=tuple(found)) if found else None


_ENDS = {
    "response.completed": "completed",
    "response.done": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
    "response.cancelled": "cancelled",
}
"""Last event of a stream -> status of the response, if that does not state it."""

_REASONING_DELTAS = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")
_DELTA_FIELDS = {
    "response.output_text": (MESSAGE, "text"),
    "response.refusal": (MESSAGE, "refusal"),
    "response.function_call_arguments": (CALL, "arguments"),
    "response.reasoning_summary_text": (REASONING, "summary"),
    "response.reasoning_text": (REASONING, "content"),
}
"""Events `….delta` -> type of their item, and the field that they extend."""


class _Event(msgspec.Struct):
    """The fields of an event that are read."""

    type: Any = None
    response: msgspec.Raw = msgspec.Raw(b"null")
    item: Any = None
    output_index: Any = None
    delta: Any = None
    error: Any = None
    code: Any = None
    message: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _StreamDecoder(EventDecoder):
    """A stream is complete after one of the events in `_ENDS`; later ones are ignored."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._drafts: dict[int, _Draft] = {}
        self._response: _Response | None = None
        """The response of the last event; None before it."""
        self._status = ""

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun."""
        return any(draft.is_call for draft in self._drafts.values())

    def _answer(self) -> Completion:
        response = self._response
        if response is None:
            raise self._context.truncated_error()
        response.status = response.status or self._status
        return _completion(response, self._output(response), self._context)

    def _take(self, data: bytes) -> None:
        if self.done or data.strip() == DONE:
            return
        event = self._context.parse(_decode_event, data, "JSON object in the stream")
        kind = event.type if isinstance(event.type, str) else ""
        if kind == "error" or (event.error and not kind.startswith("response.")):
            error = event.error or {"code": event.code, "message": event.message}
            raise self._context.error_in_answer(error)
        if kind in _ENDS:
            # The copy releases the event's buffer.
            self._response = self._context.parse(_decode, bytes(event.response))
            self._response.usage = msgspec.Raw(bytes(self._response.usage))
            self._status = _ENDS[kind]
            self.done = True
        elif isinstance(event.output_index, int):
            self._add_to_item(kind, event)
        elif kind == "response.output_item.done" and isinstance(event.item, Mapping):
            self._drafts.setdefault(max(self._drafts, default=-1) + 1, _Draft()).item = event.item

    def _add_to_item(self, kind: str, event: _Event) -> None:
        draft = self._drafts.setdefault(event.output_index, _Draft())
        item = event.item if isinstance(event.item, Mapping) else None
        if kind == "response.output_item.done" and item is not None:
            draft.item = item
        elif kind == "response.output_item.added" and item is not None:
            draft.begun = item
        elif kind.endswith(".delta") and isinstance(event.delta, str):
            target = _DELTA_FIELDS.get(kind.removesuffix(".delta"))
            if target is not None:
                draft.add(*target, event.delta)
            if kind == "response.output_text.delta":
                self._context.emit(event.delta)
            elif kind in _REASONING_DELTAS:
                self._context.emit_reasoning(event.delta)

    def _output(self, response: _Response) -> list[Any]:
        listed = response.output if isinstance(response.output, list) else []
        complete = all(draft.item is not None for draft in self._drafts.values())
        if not self._drafts or (listed and not complete):
            return listed
        return [self._drafts[index].form() for index in sorted(self._drafts)]


class _Draft:
    """An item of a stream."""

    def __init__(self) -> None:
        self.item: Mapping[str, Any] | None = None
        """The complete item, if it has arrived."""
        self.begun: Mapping[str, Any] = {}
        self._kind = ""
        self._fields: dict[str, list[str]] = {}

    def add(self, kind: str, field: str, delta: str) -> None:
        """Append a delta to a field."""
        self._kind = kind
        self._fields.setdefault(field, []).append(delta)

    @property
    def is_call(self) -> bool:
        """Whether it is a tool call."""
        return CALL in (self._kind, self.begun.get("type"))

    def form(self) -> Mapping[str, Any]:
        """Return the item, built from its deltas if it never completed."""
        if self.item is not None:
            return self.item
        fields = {field: "".join(pieces) for field, pieces in self._fields.items()}
        form = {"type": self._kind, **self.begun}
        # The encrypted content of an `added` event may be incomplete.
        form.pop("encrypted_content", None)
        if "arguments" in fields:
            form["arguments"] = fields["arguments"]
        if "text" in fields or "refusal" in fields:
            form["content"] = [
                {name: fields[name]} for name in ("text", "refusal") if name in fields
            ]
        if "summary" in fields:
            form["summary"] = [{"text": fields["summary"]}]
        return form
