"""The bytes of the fake model server's answers."""

from __future__ import annotations

from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion
from hermes_rl.testing.dialects.base import ServedRequest, ServerDialect
from hermes_rl.testing.dialects.chat import ChatServer
from hermes_rl.testing.scripts import Step
from hermes_rl.usage import Usage


def answer_bytes(
    dialect: ServerDialect,
    request: ServedRequest,
    answer: Completion,
    *,
    answer_id: str,
) -> bytes:
    """The body of an answer, or its events when the request asked for a stream."""
    if not request.stream:
        return dialect.encode_answer(answer, answer_id=answer_id)
    return b"".join(
        dialect.encode_stream(answer, answer_id=answer_id, include_usage=request.include_usage)
    )


def spoken(dialect: ServerDialect, step: Step) -> ServerDialect:
    """The dialect as a step wants it: Chat Completions has several spellings of reasoning."""
    return ChatServer(step.reasoning_field) if isinstance(dialect, ChatServer) else dialect


def completion_of(
    request: ServedRequest, step: Step, usage: Usage, fault: str | None
) -> Completion:
    """The step's answer, with what the fault changes in it."""
    message, reason = step.message, step.finish_reason
    told: Usage | None = usage
    if fault == "no_usage":
        told = None
    elif fault == "partial_usage":
        told = Usage(input_tokens=usage.input_tokens)
    elif fault == "filtered":
        message, reason = AssistantMessage(), "content_filter"
    elif fault == "abort":
        reason = "abort"
    return Completion(message=message, finish_reason=reason, usage=told, served_model=request.model)
