"""The order of roles: user and assistant take turns, each tool result follows its call."""

from __future__ import annotations

from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage

NO_RESULT = "No result: the call was interrupted."
"""Stands for the result of a call that has none."""


def alternate(messages: list[Message]) -> list[Message]:
    """Neighbouring user messages become one, and so do neighbouring assistant messages, unless the
    first has tool calls (its results are then missing: see `pair_results`) or one of them says
    nothing (see `drop_thinking_only`)."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            out[-1] = UserMessage(content=_joined(last.content, message.content))
        elif (
            isinstance(message, AssistantMessage)
            and isinstance(last, AssistantMessage)
            and _is_text(last)
            and says_something(message)
        ):
            out[-1] = _one_assistant(last, message)
        else:
            out.append(message)
    return out


def pair_results(messages: list[Message]) -> list[Message]:
    """Each tool result follows the message with its call: results without a call are left out, a
    call without a result gets `NO_RESULT`."""
    out: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            found = next((w for w in waiting if w[0] == message.tool_call_id), None)
            if found is not None:
                waiting.remove(found)
                out.append(message)
            continue
        out += _stubs(waiting)
        waiting = []
        if isinstance(message, AssistantMessage):
            waiting = [(call.id, call.name) for call in message.tool_calls]
        out.append(message)
    return out + _stubs(waiting)


def drop_thinking_only(messages: list[Message]) -> list[Message]:
    """Assistant messages without text and calls are left out: providers refuse them."""
    return [m for m in messages if not isinstance(m, AssistantMessage) or says_something(m)]


def _is_text(message: AssistantMessage) -> bool:
    return not message.tool_calls and says_something(message)


def says_something(message: AssistantMessage) -> bool:
    """Whether a message has a text or a call."""
    return bool(message.tool_calls) or bool(message.content.strip())


def cut(messages: list[Message], start: int) -> int:
    """The last place before an assistant message at which the steps of this file (and all that look
    at one message only) never look across: what stands before it is a user message, or an
    assistant message with calls (and its results)."""
    for place in range(len(messages) - 1, start, -1):
        here = messages[place]
        speaks = isinstance(here, AssistantMessage) and says_something(here)
        if speaks and _is_closed(messages, start, place):
            return place
    return start


def _is_closed(messages: list[Message], start: int, place: int) -> bool:
    for index in range(place - 1, start - 1, -1):
        before = messages[index]
        if isinstance(before, UserMessage | SystemMessage):
            return True
        if isinstance(before, AssistantMessage) and says_something(before):
            return bool(before.tool_calls)
    return False


def _stubs(waiting: list[tuple[str, str]]) -> list[Message]:
    return [ToolMessage(tool_call_id=i, name=name, content=NO_RESULT) for i, name in waiting]


def _joined(
    first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if isinstance(first, str) and isinstance(second, str):
        return join_texts(first, second)
    return _parts(first) + _parts(second)


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def join_texts(first: str, second: str) -> str:
    """Two texts with an empty line between them, if both are there."""
    return f"{first}\n\n{second}" if first and second else first or second


def _one_assistant(first: AssistantMessage, second: AssistantMessage) -> AssistantMessage:
    thoughts = join_texts(first.reasoning_content or "", second.reasoning_content or "")
    details = [*_blocks(first), *_blocks(second)]
    return msgspec.structs.replace(
        second,
        content=join_texts(first.content, second.content),
        reasoning_content=thoughts or None,
        raw_content=None,
        reasoning_details=details or None,
    )


def _blocks(message: AssistantMessage) -> list[Any]:
    details = message.reasoning_details
    if details is None:
        return []
    return details if isinstance(details, list) else [details]
