"""Requests of the Messages API, brought to the internal form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.wire.anthropic.answer import Call, Content, arguments_of, message_of
from hermes_rl.models.wire.anthropic.blocks import THINKING, Block


class Turn(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[dict[str, Any]]


class Body(msgspec.Struct, kw_only=True):
    """A request's body; unknown fields are left out."""

    model: str
    max_tokens: int
    messages: list[Turn]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def messages_of(body: Body) -> Iterator[Message]:
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
    return message_of([c for block in content if (c := _content(block)) is not None], salt)


def _content(block: Block) -> Content | None:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "tool_use":
        return Call(block.get("id"), block.get("name"), _arguments(block.get("input")))
    return {k: v for k, v in block.items() if k != "cache_control"} if kind in THINKING else None


def _arguments(given: Any) -> str:
    """Arguments as the model wrote them, where the client had to wrap what was no object."""
    if isinstance(given, dict) and given.keys() == {UNPARSED} and isinstance(given[UNPARSED], str):
        return str(given[UNPARSED])
    return arguments_of(given)


def _user(content: str | list[Block], names: Mapping[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        yield UserMessage(content=content)
        return
    said: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") != "tool_result":
            said.append(_part(block))
            continue
        if said:
            yield _said(said)
            said = []
        call_id = str(block.get("tool_use_id", ""))
        text = _text(block.get("content") or "")
        yield ToolMessage(tool_call_id=call_id, name=names.get(call_id, ""), content=text)
    if said:
        yield _said(said)


def _said(parts: list[dict[str, Any]]) -> UserMessage:
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
