"""The bytes of the fake model server's answers."""

from __future__ import annotations

from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion
from hermes_rl.models.dialects.chat_server import WireRequest, encode_answer, encode_stream
from hermes_rl.testing.scripts import Step
from hermes_rl.usage import Usage


def answer_bytes(
    request: WireRequest, step: Step, usage: Usage, *, fault: str | None, answer_id: str
) -> bytes:
    """The body of an answer, or its events when the request asked for a stream."""
    answer, field = _completion(request, step, usage, fault), step.reasoning_field
    if not request.stream:
        return encode_answer(answer, answer_id=answer_id, reasoning_field=field)
    return b"".join(
        encode_stream(
            answer,
            answer_id=answer_id,
            reasoning_field=field,
            include_usage=request.include_usage,
        )
    )


def _completion(request: WireRequest, step: Step, usage: Usage, fault: str | None) -> Completion:
    """The step's answer, with what the fault changes in it."""
    raw, message, reason = None, step.message, step.finish_reason
    if fault == "no_usage":
        raw = "null"
    elif fault == "partial_usage":
        raw = f'{{"prompt_tokens":{usage.input_tokens}}}'
    elif fault == "filtered":
        message, reason = AssistantMessage(), "content_filter"
    elif fault == "abort":
        reason = "abort"
    return Completion(
        message=message,
        finish_reason=reason,
        usage=usage,
        usage_raw=raw,
        served_model=request.model,
    )
