"""Turns with several calls, for templates that write one call a turn.

Such a model may still sample two calls, and that is its own deed: what it sampled stays as it is,
and where the turn must be rendered it is written as several turns, each with its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The conversation with one call a turn; each call's result stands behind it."""
    out: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if not isinstance(message, AssistantMessage) or len(message.tool_calls) < 2:
            out.append(message)
            continue
        results: list[ToolMessage] = []
        while place < len(messages) and isinstance(result := messages[place], ToolMessage):
            results.append(result)
            place += 1
        out += _parted(message, results)
    return out


def _parted(message: AssistantMessage, results: list[ToolMessage]) -> list[Message]:
    out: list[Message] = []
    left = list(results)
    first, *others = message.tool_calls
    out.append(msgspec.structs.replace(message, tool_calls=(first,), raw_content=None))
    out += _take(left, first)
    for call in others:
        out.append(AssistantMessage(tool_calls=(call,)))
        out += _take(left, call)
    return [*out, *left]


def _take(results: list[ToolMessage], call: ToolCall) -> list[ToolMessage]:
    """The call's result, out of those that are left."""
    found = next((result for result in results if result.tool_call_id == call.id), None)
    if found is None:
        return []
    results.remove(found)
    return [found]
