"""The conversation that an agent keeps between runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hermes_rl.events import Event, MessageAdded
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    UserMessage,
    text_of,
)


def continuable(messages: Iterable[Message]) -> list[Message]:
    """The conversation without its system message, so that a user message may come next.

    Calls at the end that never got a result are dropped, and so is an empty answer.
    """
    kept: list[Message] = [m for m in messages if not isinstance(m, SystemMessage)]
    if kept and isinstance(last := kept[-1], AssistantMessage):
        kept.pop()
        if last.content.strip():
            said = AssistantMessage(content=last.content, reasoning_content=last.reasoning_content)
            kept.append(said if last.tool_calls else last)
    return kept


def with_user(history: Sequence[Message], text: str) -> list[Message]:
    """The conversation with a user message at its end; two in a row become one."""
    text = sendable(text)
    if history and isinstance(last := history[-1], UserMessage):
        return [*history[:-1], UserMessage(content=f"{text_of(last)}\n\n{text}")]
    return [*history, UserMessage(content=text)]


def sendable(text: str) -> str:
    """A text without lone surrogates, which can be neither sent nor stored."""
    return text.encode("utf-8", "replace").decode()


def last_answer(events: Iterable[Event]) -> str | None:
    """The model's last text in the events of one run."""
    own = [e.message for e in events if isinstance(e, MessageAdded) and e.turn and not e.synthetic]
    said = [m.content for m in own if isinstance(m, AssistantMessage)]
    return said[-1] if said else None


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system prompt of a conversation, if it begins with one, and the rest."""
    if messages and isinstance(first := messages[0], SystemMessage):
        return first.content, list(messages[1:])
    return None, list(messages)
