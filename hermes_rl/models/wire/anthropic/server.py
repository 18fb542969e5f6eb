"""The other side of the Messages API: reading requests and writing answers.

For servers of ours: the fake one, and whatever stands between an agent and an engine.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion, Sampling
from hermes_rl.models.wire.anthropic.blocks import THINKING, Block, assistant_blocks, input_of
from hermes_rl.models.wire.anthropic.dialect import NAME
from hermes_rl.models.wire.anthropic.requests import Body, messages_of
from hermes_rl.models.wire.anthropic.rules import check
from hermes_rl.models.wire.anthropic.usage import write_usage
from hermes_rl.models.wire.lenient import decode_json, encode_json
from hermes_rl.models.wire.server import ServedRequest, bearer
from hermes_rl.models.wire.sse import event

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STOP["content_filter"] = "refusal"

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Status -> error type; others are `api_error` from 500 on, else `invalid_request_error`."""

_decode = msgspec.json.Decoder(Body).decode


class AnthropicServer:
    """The server's side of the Messages API; see `ServerDialect`.

    Args:
        piece_chars: length of a stream's pieces of text.
    """

    name = NAME
    path = "/messages"

    def __init__(self, piece_chars: int = 24) -> None:
        self._piece_chars = piece_chars

    def decode_request(self, body: bytes) -> ServedRequest:
        """See `ServerDialect.decode_request`. Refuses what the API refuses: see
        `rules`."""
        form = _decode(body)
        marks = check(form)
        return ServedRequest(
            model=form.model,
            messages=tuple(messages_of(form)),
            tools=tuple(map(_openai_tool, form.tools or ())),
            sampling=_sampling(form),
            stream=bool(form.stream),
            cache_marks=len(marks),
            cache=("1h" if "1h" in marks else "5m") if marks else None,
        )

    def key_of(self, headers: Mapping[str, str]) -> str:
        """See `ServerDialect.key_of`: of two keys, `x-api-key` counts."""
        return headers.get("x-api-key") or bearer(headers)

    def encode_answer(self, answer: Completion, *, answer_id: str, created: int = 0) -> bytes:
        """See `ServerDialect.encode_answer`. This wire has no place for `created`. Arguments that
        are no object are written as `{"_unparsed": text}`."""
        blocks = [_whole(block) for block in _blocks(answer.message)]
        form = _message(answer, answer_id)
        form.update(content=blocks, stop_reason=_stop_reason(answer))
        usage = _usage_form(answer)
        return encode_json({**form, "usage": usage} if usage is not None else form)

    def encode_stream(
        self, answer: Completion, *, answer_id: str, created: int = 0, include_usage: bool = True
    ) -> list[bytes]:
        """See `ServerDialect.encode_stream`: the message's start with the prompt's tokens, a ping,
        the blocks one after the other, the stop reason with the usage of all, and the end. This
        wire always says its usage."""
        usage = _usage_form(answer)
        start = _message(answer, answer_id)
        if usage is not None:
            start["usage"] = {**usage, **({"output_tokens": 1} if "output_tokens" in usage else {})}
        forms: list[dict[str, Any]] = [
            {"type": "message_start", "message": start},
            {"type": "ping"},
        ]
        for index, block in enumerate(_blocks(answer.message)):
            forms += self._block_events(index, block)
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        last: dict[str, Any] = {"type": "message_delta", "delta": end}
        if usage is not None and "output_tokens" in usage:
            last["usage"] = {k: v for k, v in usage.items() if k != "cache_creation"}
        forms += [last, {"type": "message_stop"}]
        return [event(encode_json(form), form["type"]) for form in forms]

    def encode_error(
        self, message: str, *, status: int, kind: str, code: str | int | None = None
    ) -> bytes:
        """See `ServerDialect.encode_error`. This wire has its own kinds, by status, and no codes;
        they are told in words."""
        other = "api_error" if status >= 500 else "invalid_request_error"
        error = {"type": _KINDS.get(status, other), "message": message}
        return encode_json({"type": "error", "error": error, "request_id": None})

    def _block_events(self, index: int, block: Block) -> list[dict[str, Any]]:
        start, deltas = self._deltas(block)
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": d} for d in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    def _deltas(self, block: Block) -> tuple[Block, list[dict[str, Any]]]:
        """A block as it begins, and what grows it."""
        kind, pieces = block["type"], self._pieces
        if kind == "text":
            grown = [{"type": "text_delta", "text": t} for t in pieces(block["text"])]
            return {**block, "text": ""}, grown
        if kind == "tool_use":
            text = block.pop("arguments")
            parts = ["", *pieces(text)]
            return {**block, "input": {}}, [
                {"type": "input_json_delta", "partial_json": part} for part in parts
            ]
        if kind == "thinking":
            grown = [
                {"type": "thinking_delta", "thinking": t} for t in pieces(block.get("thinking", ""))
            ]
            signed = {"type": "signature_delta", "signature": block.get("signature", "")}
            return {**block, "thinking": "", "signature": ""}, [*grown, signed]
        return block, []

    def _pieces(self, text: str) -> list[str]:
        size = self._piece_chars
        return [text[i : i + size] for i in range(0, len(text), size)]


def _sampling(form: Body) -> Sampling:
    thinking, effort = form.thinking or {}, (form.output_config or {}).get("effort")
    reasoning = effort if isinstance(effort, str) else None
    if thinking.get("type") == "disabled":
        reasoning = "none"
    elif thinking.get("type") == "enabled":
        reasoning = str(thinking.get("budget_tokens"))
    return Sampling(
        temperature=form.temperature,
        top_p=form.top_p,
        top_k=form.top_k,
        max_tokens=form.max_tokens,
        stop=tuple(form.stop_sequences or ()),
        reasoning=reasoning,
    )


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's schema; one without an input schema is the provider's own."""
    if "input_schema" not in tool:
        return tool
    function = {"name": tool.get("name", ""), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _message(answer: Completion, answer_id: str) -> dict[str, Any]:
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": answer.served_model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(message: AssistantMessage) -> list[Block]:
    """The blocks of an answer. Reasoning that comes without blocks of this wire gets one, signed by
    its hash."""
    blocks = assistant_blocks(message, _tool_use)
    reasoning = message.reasoning_content
    if reasoning and not any(block["type"] in THINKING for block in blocks):
        digest = hashlib.sha256(reasoning.encode("utf-8", "replace")).digest()
        signature = base64.b64encode(digest).decode()
        blocks.insert(0, {"type": "thinking", "thinking": reasoning, "signature": signature})
    return blocks


def _tool_use(call: ToolCall) -> Block:
    """A call whose arguments are still text: see `_whole`."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "arguments": call.arguments}


def _whole(block: Block) -> Block:
    if block["type"] != "tool_use":
        return block
    arguments = block.pop("arguments")
    return {**block, "input": input_of(arguments)}


def _stop_reason(answer: Completion) -> str | None:
    reason = answer.finish_reason
    return None if reason is None else _STOP.get(reason, reason)


def _usage_form(answer: Completion) -> dict[str, Any] | None:
    """The usage as it is to be sent: `usage_raw` where it is given, as an engine behind this server
    sent it; else what is known; else none."""
    if answer.usage_raw is not None:
        form = decode_json(answer.usage_raw.encode())
        return form if isinstance(form, dict) else None
    return None if answer.usage is None else write_usage(answer.usage)
