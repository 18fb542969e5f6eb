"""Chat Completions, server side: reads requests and writes answers."""

from __future__ import annotations

from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage, from_openai
from hermes_rl.models import Completion, TokenCapture
from hermes_rl.models.wire import CHAT_COMPLETIONS, DONE, ChatCompletions, split_content_parts
from hermes_rl.testing.dialects.base import (
    OpenAIBody,
    ServedRequest,
    ServerDialect,
    encode_event,
    openai_usage,
    pieces,
    usage_form,
)
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage


class _Body(OpenAIBody, kw_only=True):
    messages: list[dict[str, Any]]
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


_decode = msgspec.json.Decoder(_Body).decode


class ChatServer(ServerDialect):
    """The server's side of Chat Completions; see `ServerDialect`.

    Args:
        reasoning_field: the spelling of reasoning; `think` writes it into the content.
        piece_chars: length of a stream's pieces of text.
    """

    name = CHAT_COMPLETIONS
    path = ChatCompletions.path

    def __init__(self, reasoning_field: str = "reasoning_content", piece_chars: int = 24) -> None:
        super().__init__(piece_chars)
        self._reasoning_field = reasoning_field

    def decode_request(self, body: bytes) -> ServedRequest:
        """See `ServerDialect.decode_request`."""
        form = _decode(body)
        stream = bool(form.stream)
        return ServedRequest(
            model=form.model,
            messages=tuple(map(decode_message, form.messages)),
            tools=tuple(form.tools or ()),
            sampling=form.sampling(
                form.max_completion_tokens or form.max_tokens, form.reasoning_effort
            ),
            stream=stream,
            include_usage=not stream or bool((form.stream_options or {}).get("include_usage")),
            logprobs=bool(form.logprobs),
            token_ids=bool(form.return_token_ids),
        )

    def encode_answer(self, answer: Completion, *, answer_id: str) -> bytes:
        """See `ServerDialect.encode_answer`."""
        choice: dict[str, Any] = {
            "index": 0,
            "message": _message_form(answer.message, self._reasoning_field),
            "finish_reason": answer.finish_reason,
        }
        form = _envelope(answer, answer_id, "chat.completion")
        form["choices"] = [choice]
        _add_tokens(form, choice, answer.tokens)
        form["usage"] = usage_form(answer, _write_usage)
        return encode_json(form)

    def encode_stream(
        self, answer: Completion, *, answer_id: str, include_usage: bool = True
    ) -> list[bytes]:
        """See `ServerDialect.encode_stream`: a role, pieces of reasoning, text and calls, the
        finish reason, usage, and the end mark."""
        size = self._piece_chars
        base = _envelope(answer, answer_id, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        form = _message_form(answer.message, self._reasoning_field)
        for name in ("reasoning_content", "reasoning", "thinking", "content"):
            deltas += [{name: text} for text in pieces(form.get(name) or "", size)]
        if form.get("reasoning_details") is not None:
            deltas.append({"reasoning_details": form["reasoning_details"]})
        for index, call in enumerate(answer.message.tool_calls):
            deltas += _call_deltas(index, call, size)
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": answer.finish_reason})
        forms = [{**base, "choices": [choice]} for choice in choices]
        _add_tokens(forms[0], choices[0], answer.tokens)
        if include_usage:
            forms.append({**base, "choices": [], "usage": usage_form(answer, _write_usage)})
        return [encode_event(encode_json(form)) for form in forms] + [encode_event(DONE)]


def decode_message(form: dict[str, Any]) -> Message:
    """One message of a request, with what `from_openai` leaves out. Raises: UserError."""
    message = from_openai(form)
    if isinstance(message, ToolMessage) and isinstance(form.get("content"), list):
        return msgspec.structs.replace(message, content=split_content_parts(form["content"])[0])
    return message


def _envelope(answer: Completion, answer_id: str, kind: str) -> dict[str, Any]:
    form = {"id": answer_id, "object": kind, "created": 0, "model": answer.served_model}
    if answer.policy_version is not None:
        form["policy_version"] = answer.policy_version
    return form


def _message_form(message: AssistantMessage, reasoning_field: str) -> dict[str, Any]:
    content, reasoning = message.content, message.reasoning_content
    form: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None and reasoning_field == "think":
        form["content"] = message.raw_content or f"<think>\n{reasoning}\n</think>\n\n{content}"
    elif reasoning is not None:
        form[reasoning_field] = reasoning
    if message.tool_calls:
        form["content"] = form["content"] or None
        form["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.reasoning_details is not None:
        form["reasoning_details"] = message.reasoning_details
    return form


def _add_tokens(form: dict[str, Any], choice: dict[str, Any], tokens: TokenCapture | None) -> None:
    if tokens is None:
        return
    if tokens.prompt_ids is not None:
        form["prompt_token_ids"] = tokens.prompt_ids
    if tokens.completion_ids is not None:
        choice["token_ids"] = tokens.completion_ids
    if tokens.logprobs is not None:
        choice["logprobs"] = {"content": [{"token": "", "logprob": p} for p in tokens.logprobs]}
        choice["logprobs_kind"] = tokens.logprobs_kind


def _call_deltas(index: int, call: ToolCall, size: int) -> list[dict[str, Any]]:
    """The first delta of a call names it, the others carry its arguments."""
    head = {
        "index": index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }
    rest = [
        {"index": index, "function": {"arguments": text}} for text in pieces(call.arguments, size)
    ]
    return [{"tool_calls": [piece]} for piece in (head, *rest)]


def _write_usage(usage: Usage) -> dict[str, Any]:
    return openai_usage(usage, "prompt_tokens", "completion_tokens")
