"""Decoding answers of the Responses API: one body, or what a stream has gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hermes_rl.errors import ModelError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion, TokenCapture
from hermes_rl.models.wire.decoding import Reading, made_id, text_or_none
from hermes_rl.models.wire.lenient import encode_json
from hermes_rl.models.wire.reasoning import split_think
from hermes_rl.models.wire.responses.items import (
    CALL,
    MESSAGE,
    REASONING,
    SEPARATOR,
    Piece,
    details_of,
    reasoning_text,
)
from hermes_rl.models.wire.responses.usage import read_usage

_REASONS = {"max_output_tokens": "length", "max_tokens": "length"}
"""Why a response is incomplete -> our finish reason; others are named as they are."""

_LEAST_LIKELY = 1e9
"""A logprob beyond this is a server's error."""

_ENDED = ("completed", "incomplete", "cancelled", None)
"""What a finished response's status may be (lenient servers leave it out)."""


class Response(msgspec.Struct):
    """The response object. Usage stays as it came: it is evidence."""

    id: Any = None
    model: Any = None
    status: Any = None
    output: Any = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    incomplete_details: Any = None
    policy_version: Any = None


_decode = msgspec.json.Decoder(Response).decode


def read_body(data: bytes, reading: Reading) -> Completion:
    """An answer in one body. Raises: ModelError when it is an error, or none."""
    response = open_response(data, reading)
    if not isinstance(response.output, list):
        raise failure(response, reading) or reading.unreadable("no output")
    return completion(response, response.output, reading)


def open_response(data: bytes, reading: Reading) -> Response:
    """A response object. Raises: ProtocolError when it is none."""
    return reading.parse(_decode, data)


def failure(response: Response, reading: Reading) -> ModelError | None:
    """What a response that failed means; None when it did not."""
    if response.error or response.status == "failed":
        return reading.fault(response.error or {"message": "the response failed without an error"})
    if response.status not in _ENDED:
        return reading.unreadable(f"a response that is {response.status!r}")
    return None


def completion(response: Response, output: Sequence[Any], reading: Reading) -> Completion:
    """The answer in the internal form.

    Args:
        output: its items; those of `response`, or those that a stream gathered.

    Raises: ModelError when the response failed.
    """
    fault = failure(response, reading)
    if fault is not None:
        raise fault
    items = [item for item in output if isinstance(item, Mapping)]
    message, refused = message_of(items, reading.salt)
    return reading.completion(
        message,
        finish_reason=_finish(response, message, refused),
        usage=response.usage,
        read_usage=read_usage,
        answer_id=response.id,
        model=response.model,
        tokens=_logprobs(items),
        policy_version=response.policy_version,
    )


def message_of(items: Sequence[Mapping[str, Any]], salt: str) -> tuple[AssistantMessage, bool]:
    """The message that output items make, and whether all of its text is a refusal. Items of
    unknown kinds are left out."""
    pieces: list[Piece] = []
    refusals = 0
    for item in items:
        kind = item.get("type")
        if kind == REASONING:
            pieces.append(Piece(REASONING, block=item))
        elif kind == CALL:
            pieces.append(Piece(CALL, call=_call(item, salt, pieces)))
        elif kind == MESSAGE:
            text, refused = _text(item)
            refusals += refused
            if text:
                pieces.append(Piece(MESSAGE, text=text, phase=text_or_none(item.get("phase"))))
    texts = [p.text for p in pieces if p.kind == MESSAGE]
    thoughts = [reasoning_text(p.block) for p in pieces if p.kind == REASONING]
    reasoning: str | None = SEPARATOR.join(t for t in thoughts if t) or None
    content, raw = SEPARATOR.join(texts), None
    if reasoning is None:
        content, reasoning, raw = split_think(content)
    message = AssistantMessage(
        content=content,
        reasoning_content=reasoning,
        tool_calls=tuple(p.call for p in pieces if p.call is not None),
        raw_content=raw,
        reasoning_details=details_of(pieces),
    )
    return message, 0 < refusals == len(texts)


def _text(item: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of a message item, and whether it is a refusal."""
    content = item.get("content")
    if isinstance(content, str):
        return content, False
    parts = [p for p in content if isinstance(p, Mapping)] if isinstance(content, list) else []
    said = [p["text"] for p in parts if isinstance(p.get("text"), str)]
    refused = [p["refusal"] for p in parts if isinstance(p.get("refusal"), str)]
    text = "".join(said)
    return (text, False) if text else ("".join(refused), bool(refused))


def _call(item: Mapping[str, Any], salt: str, before: list[Piece]) -> ToolCall:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else encode_json(arguments).decode()
    text = name if isinstance(name, str) else ""
    known = {p.call.id for p in before if p.call is not None}
    given = next((item[k] for k in ("call_id", "id") if text_or_none(item.get(k))), None)
    if given is None or given in known:
        given = made_id(f"{salt}\0{len(known)}\0{text}\0{arguments}")
    return ToolCall(id=given, name=text, arguments=arguments)


def _finish(response: Response, message: AssistantMessage, refused: bool) -> str:
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
    """Logprobs of the text's tokens, where they were asked for."""
    found: list[float] = []
    for item in items:
        content = item.get("content") if item.get("type") == MESSAGE else None
        for part in content if isinstance(content, list) else ():
            listed = part.get("logprobs") if isinstance(part, Mapping) else None
            for token in listed if isinstance(listed, list) else ():
                value = token.get("logprob") if isinstance(token, Mapping) else None
                if not isinstance(value, int | float) or abs(value) > _LEAST_LIKELY:
                    return None
                found.append(float(value))
    return TokenCapture(logprobs=tuple(found)) if found else None
