"""Anthropic's Messages API, server side: reads requests and writes answers.

It refuses with status 400 what the API refuses, as far as an agent's requests can contain it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Completion, Sampling
from hermes_rl.models.wire import (
    ANTHROPIC_MESSAGES,
    THINKING,
    Block,
    Call,
    Content,
    anthropic_message,
    assistant_blocks,
    input_of,
)
from hermes_rl.testing.dialects.base import (
    RequestBody,
    ServedRequest,
    ServerDialect,
    encode_event,
    known,
    pieces,
    usage_form,
)
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage

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

_MARKS = 4
_LEAST_BUDGET = 1_024


class _Turn(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[dict[str, Any]]


class _Body(RequestBody, kw_only=True):
    max_tokens: int
    messages: list[_Turn]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Body).decode


class AnthropicServer(ServerDialect):
    """The server's side of the Messages API; see `ServerDialect`."""

    name = ANTHROPIC_MESSAGES
    path = "/messages"

    def decode_request(self, body: bytes) -> ServedRequest:
        """See `ServerDialect.decode_request`. Refuses what the API refuses."""
        form = _decode(body)
        marks = _check(form)
        return ServedRequest(
            model=form.model,
            messages=tuple(_messages_of(form)),
            tools=tuple(map(_openai_tool, form.tools or ())),
            sampling=_sampling(form),
            stream=bool(form.stream),
            cache_marks=len(marks),
            cache=("1h" if "1h" in marks else "5m") if marks else None,
        )

    def key_of(self, headers: Mapping[str, str]) -> str:
        """See `ServerDialect.key_of`: of two keys, `x-api-key` counts."""
        return headers.get("x-api-key") or super().key_of(headers)

    def encode_answer(self, answer: Completion, *, answer_id: str) -> bytes:
        """See `ServerDialect.encode_answer`. Arguments that
        are not an object are written as `{"_unparsed": text}`."""
        blocks = [_whole(block) for block in _blocks(answer.message)]
        form = _message(answer, answer_id)
        form.update(content=blocks, stop_reason=_stop_reason(answer))
        usage = usage_form(answer, _write_usage)
        return encode_json({**form, "usage": usage} if usage is not None else form)

    def encode_stream(
        self, answer: Completion, *, answer_id: str, include_usage: bool = True
    ) -> list[bytes]:
        """See `ServerDialect.encode_stream`: the message's start with the prompt's tokens, a ping,
        the blocks one after the other, the stop reason with the usage of all, and the end. This
        wire always says its usage."""
        usage = usage_form(answer, _write_usage)
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
        return [encode_event(encode_json(form), form["type"]) for form in forms]

    def encode_error(
        self, message: str, *, status: int, kind: str, code: str | int | None = None
    ) -> bytes:
        """See `ServerDialect.encode_error`. This wire has its own kinds, by status, and no codes;
        the message has them."""
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
        """The start of a block, and its deltas."""
        kind, size = block["type"], self._piece_chars
        if kind == "text":
            deltas = [{"type": "text_delta", "text": t} for t in pieces(block["text"], size)]
            return {**block, "text": ""}, deltas
        if kind == "tool_use":
            text = block.pop("arguments")
            parts = ["", *pieces(text, size)]
            return {**block, "input": {}}, [
                {"type": "input_json_delta", "partial_json": part} for part in parts
            ]
        if kind == "thinking":
            thought = pieces(block.get("thinking", ""), size)
            deltas = [{"type": "thinking_delta", "thinking": t} for t in thought]
            signed = {"type": "signature_delta", "signature": block.get("signature", "")}
            return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
        return block, []


def _sampling(form: _Body) -> Sampling:
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


def _write_usage(usage: Usage) -> dict[str, Any]:
    """The usage object that a server sends: what is known."""
    fresh, read, written = usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens
    hour, thought = usage.cache_write_1h_tokens or 0, usage.reasoning_tokens
    lived = {
        "ephemeral_5m_input_tokens": (written or 0) - hour,
        "ephemeral_1h_input_tokens": hour,
    }
    return known(
        {
            "input_tokens": None if fresh is None else fresh - (read or 0) - (written or 0),
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
            "cache_creation": None if written is None else lived,
            "output_tokens": usage.output_tokens,
            "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
        }
    )


def _messages_of(body: _Body) -> Iterator[Message]:
    """The messages of a request, the system prompt first. Tool results know the names of their
    tools."""
    system = _text(body.system or "")
    if system:
        yield SystemMessage(content=system)
    names: dict[str, str] = {}
    for place, turn in enumerate(body.messages):
        if turn.role == "assistant":
            message = _assistant(turn.content, str(place))
            names.update((call.id, call.name) for call in message.tool_calls)
            yield message
        else:
            yield from _user(turn.content, names)


def _assistant(content: str | list[Block], salt: str) -> AssistantMessage:
    if isinstance(content, str):
        return AssistantMessage(content=content)
    return anthropic_message(map(_content, content), salt)


def _content(block: Block) -> Content:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "tool_use":
        return Call(block.get("id"), block.get("name"), _arguments(block.get("input")))
    return {k: v for k, v in block.items() if k != "cache_control"} if kind in THINKING else None


def _arguments(value: Any) -> str:
    """Arguments as the model wrote them: the client wraps what is not an object."""
    if isinstance(value, dict) and value.keys() == {UNPARSED} and isinstance(value[UNPARSED], str):
        return str(value[UNPARSED])
    return encode_json(value).decode()


def _user(content: str | list[Block], names: Mapping[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        yield UserMessage(content=content)
        return
    parts: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            yield _user_message(parts)
            parts = []
        call_id = str(block.get("tool_use_id", ""))
        text = _text(block.get("content") or "")
        yield ToolMessage(tool_call_id=call_id, name=names.get(call_id, ""), content=text)
    if parts:
        yield _user_message(parts)


def _user_message(parts: list[dict[str, Any]]) -> UserMessage:
    if len(parts) == 1 and parts[0].get("type") == "text":
        return UserMessage(content=parts[0]["text"])
    return UserMessage(content=parts)


def _part(block: Block) -> dict[str, Any]:
    """One of OpenAI's content parts."""
    if block.get("type") == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, Mapping):
        return {k: v for k, v in block.items() if k != "cache_control"}
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    texts = (b.get("text") for b in blocks if isinstance(b, Mapping) and b.get("type") == "text")
    return "\n\n".join(t for t in texts if isinstance(t, str))


def _check(body: _Body) -> list[str]:
    """The lifetimes of a request's cache markers.

    Raises: ValueError with the API's complaint.
    """
    if not body.messages:
        raise ValueError("messages: at least one message is required")
    if body.max_tokens < 1:
        raise ValueError("max_tokens: must be greater than or equal to 1")
    budgeted = _check_thinking(body)
    called: set[str] = set()
    known: set[str] = set()
    for place, turn in enumerate(body.messages):
        called = _check_turn(turn, called, f"messages.{place}")
        _check_new(turn, known, f"messages.{place}")
    if called:
        raise ValueError(
            f"messages.{len(body.messages) - 1}: `tool_use` ids were found without `tool_result`"
            f" blocks immediately after: {', '.join(sorted(called))}"
        )
    if budgeted:
        _check_thought(body.messages)
    marks = [_lifetime(block) for block in _marked_blocks(body) if "cache_control" in block]
    if len(marks) > _MARKS:
        raise ValueError(
            f"A maximum of {_MARKS} blocks with cache_control may be provided. Found {len(marks)}."
        )
    return marks


def _check_thinking(body: _Body) -> bool:
    """Whether the model thinks within a budget."""
    thinking = body.thinking or {}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive"):
        return False
    if body.temperature not in (None, 1) or body.top_k is not None:
        raise ValueError("`temperature` may only be set to 1 when thinking is enabled.")
    if kind == "adaptive":
        return False
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int) or budget < _LEAST_BUDGET:
        raise ValueError(f"thinking.enabled.budget_tokens: at least {_LEAST_BUDGET} is required")
    if budget >= body.max_tokens:
        raise ValueError("`max_tokens` must be greater than `thinking.budget_tokens`.")
    return True


def _check_thought(turns: list[_Turn]) -> None:
    """The last answer thinks before the calls whose results are sent: so is it with a budget."""
    answers = [(place, turn) for place, turn in enumerate(turns) if turn.role == "assistant"]
    place, last = answers[-1] if answers else (0, _Turn(role="assistant", content=""))
    blocks = last.content if isinstance(last.content, list) else []
    first = blocks[0].get("type") if blocks else None
    if _ids(blocks, "tool_use", "id") and first not in ("thinking", "redacted_thinking"):
        raise ValueError(
            f"messages.{place}.content.0.type: Expected `thinking` or `redacted_thinking`, but"
            f" found `{first}`. When `thinking` is enabled, a final `assistant` message must start"
            " with a thinking block."
        )


def _check_turn(turn: _Turn, called: set[str], place: str) -> set[str]:
    """The ids of the calls that a turn leaves open.

    Args:
        called: those that the turn before it left open.
    """
    if turn.role not in ("user", "assistant"):
        raise ValueError(f"{place}.role: Input should be 'user' or 'assistant'")
    blocks = turn.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    if not blocks:
        raise ValueError(f"{place}: all messages must have non-empty content")
    for block in blocks:
        if block.get("type") == "text" and not str(block.get("text", "")).strip():
            raise ValueError("messages: text content blocks must be non-empty")
        if block.get("type") == "thinking" and not isinstance(block.get("signature"), str):
            raise ValueError(f"{place}.content.thinking.signature: Field required")
    results = _ids(blocks, "tool_result", "tool_use_id")
    if turn.role == "user" and (stray := results - called):
        raise ValueError(
            f"{place}: unexpected `tool_use_id` found in `tool_result` blocks:"
            f" {', '.join(sorted(stray))}"
        )
    if missing := called - results:
        raise ValueError(
            f"{place}: `tool_use` ids were found without `tool_result` blocks immediately after:"
            f" {', '.join(sorted(missing))}"
        )
    return _ids(blocks, "tool_use", "id") if turn.role == "assistant" else set()


def _check_new(turn: _Turn, known: set[str], place: str) -> None:
    """Each call has an id that none before it had; all are added to `known`."""
    for block in turn.content if isinstance(turn.content, list) else ():
        if block.get("type") != "tool_use":
            continue
        name = str(block.get("id"))
        if name in known:
            raise ValueError(f"{place}: `tool_use` ids must be unique")
        known.add(name)


def _ids(blocks: list[dict[str, Any]], kind: str, name: str) -> set[str]:
    return {str(block.get(name)) for block in blocks if block.get("type") == kind}


def _marked_blocks(body: _Body) -> Iterator[dict[str, Any]]:
    """All that can carry a marker."""
    yield from body.tools or ()
    yield from body.system if isinstance(body.system, list) else ()
    for turn in body.messages:
        yield from turn.content if isinstance(turn.content, list) else ()


def _lifetime(block: dict[str, Any]) -> str:
    control = block["cache_control"]
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ValueError("cache_control: Input should be {'type': 'ephemeral'}")
    if block.get("type") in ("thinking", "redacted_thinking"):
        raise ValueError("cache_control cannot be set for thinking blocks")
    return str(control.get("ttl", "5m"))
