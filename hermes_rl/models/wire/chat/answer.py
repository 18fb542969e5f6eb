"""Decoding answers of Chat Completions: a body, or a stream of deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion, LogprobsKind, TokenCapture
from hermes_rl.models.wire.chat.usage import read_usage
from hermes_rl.models.wire.decoding import Reading, made_id
from hermes_rl.models.wire.lenient import encode_json
from hermes_rl.models.wire.reasoning import flatten, reasoning_of, split_think

_IDS = 1 << 63
"""Token ids are stored in 64 bits at most; a larger one is a server's error."""


class Envelope(msgspec.Struct):
    """The top level of an answer or chunk. Usage stays as it came: it is evidence."""

    id: Any = None
    model: Any = None
    choices: Any = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    prompt_token_ids: Any = None
    policy_version: Any = None


_decode = msgspec.json.Decoder(Envelope).decode


def read_body(data: bytes, reading: Reading) -> Completion:
    """An answer in one body. Raises: ModelError when it is an error, or none."""
    envelope = open_envelope(data, reading)
    choice = first_choice(envelope.choices)
    if choice is None:
        raise reading.unreadable("no choices")
    message = choice.get("message")
    form = message if isinstance(message, Mapping) else {"content": choice.get("text")}
    built = message_of(form, reading.salt)
    reason = end_of(form, choice.get("finish_reason"))
    return completion(reading, envelope, built, reason, capture_of(envelope, choice))


def end_of(form: Mapping[str, Any], finish_reason: Any) -> Any:
    """The finish reason; `refusal` where the message's only text is its refusal field."""
    refused = isinstance(form.get("refusal"), str) and not form.get("content")
    return "refusal" if refused and not form.get("tool_calls") else finish_reason


def open_envelope(data: bytes, reading: Reading) -> Envelope:
    """The top level of one JSON text. Raises: ProtocolError, or what its error object means."""
    envelope = reading.parse(_decode, data)
    if envelope.error:
        raise reading.fault(envelope.error)
    return envelope


def first_choice(choices: Any) -> Mapping[str, Any] | None:
    """The first choice, if there is one."""
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0]
    return None


def message_of(form: Mapping[str, Any], salt: str) -> AssistantMessage:
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
    calls = form.get("tool_calls")
    listed = [c for c in calls if isinstance(c, Mapping)] if isinstance(calls, list) else []
    if not listed and isinstance(form.get("function_call"), Mapping):
        listed = [{"function": form["function_call"]}]
    return AssistantMessage(
        content=text,
        reasoning_content=reasoning,
        tool_calls=_calls_of(listed, salt),
        raw_content=raw,
        reasoning_details=form.get("reasoning_details") or None,
    )


def _calls_of(listed: list[Mapping[str, Any]], salt: str) -> tuple[ToolCall, ...]:
    out: list[ToolCall] = []
    for index, call in enumerate(listed):
        function = call.get("function")
        fields = function if isinstance(function, Mapping) else call
        name = fields.get("name")
        arguments = fields.get("arguments")
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else encode_json(arguments).decode()
        text = name if isinstance(name, str) else ""
        given = call.get("id")
        if not isinstance(given, str) or not given or any(c.id == given for c in out):
            given = made_id(f"{salt}\0{index}\0{text}\0{arguments}")
        out.append(ToolCall(id=given, name=text, arguments=arguments))
    return tuple(out)


def capture_of(envelope: Envelope, choice: Mapping[str, Any]) -> TokenCapture | None:
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


def completion(
    reading: Reading,
    envelope: Envelope,
    message: AssistantMessage,
    finish_reason: Any,
    tokens: TokenCapture | None,
) -> Completion:
    """The answer in the internal form."""
    return reading.completion(
        message,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        usage=envelope.usage,
        read_usage=read_usage,
        answer_id=envelope.id,
        model=envelope.model,
        tokens=tokens,
        policy_version=envelope.policy_version,
    )
