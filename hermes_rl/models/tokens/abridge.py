"""A long conversation with less in it, for what depends on its build and not on its words.

What a template writes behind a turn depends on who spoke before, on calls, on reasoning, on how
a message begins and ends; not on the middle of a tool's output, and not on the fortieth round of
calls that is built as the third was. Without this, each turn of a long conversation would render
all turns before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)

_EDGE = 120
"""Characters that are kept at both ends of a text."""
_LAST = 6
"""Messages at the end that are all kept."""


def abridged(messages: Sequence[Message]) -> list[Message]:
    """The conversation with long texts cut in their middle, and without rounds of calls between two
    questions that are built as one that is kept."""
    out: list[Message] = []
    seen: set[Hashable] = set()
    last = len(messages) - _LAST
    place = 0
    while place < len(messages):
        end = _round_end(messages, place)
        build = tuple(_build(message) for message in messages[place:end])
        if isinstance(messages[place], UserMessage):
            seen = set()
        if build not in seen or end > last or not isinstance(messages[place], AssistantMessage):
            out += [_short(message) for message in messages[place:end]]
        seen.add(build)
        place = end
    return out


def _round_end(messages: Sequence[Message], start: int) -> int:
    """Behind the message, and behind the results of its calls."""
    end = start + 1
    calls = isinstance(messages[start], AssistantMessage)
    while calls and end < len(messages) and isinstance(messages[end], ToolMessage):
        end += 1
    return end


def _build(message: Message) -> Hashable:
    if isinstance(message, AssistantMessage):
        reasons = bool(message.reasoning_content), "<think>" in message.content
        return "assistant", bool(message.content), len(message.tool_calls), reasons
    return type(message).__name__, bool(message.content)


def _short(message: Message) -> Message:
    if isinstance(message, AssistantMessage) or not isinstance(message.content, str):
        return message
    if len(message.content) <= 3 * _EDGE:
        return message
    content = f"{message.content[:_EDGE]}\n{message.content[-_EDGE:]}"
    if isinstance(message, SystemMessage):
        return SystemMessage(content=content)
    return msgspec.structs.replace(message, content=content)
