"""The conversation of an agent: how it continues from run to run, and is kept in a session."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.agent.summaries import stored_todos
from hermes_rl.events import CallEnded, CallStarted, ContextStarted, Event, MessageAdded
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    UserMessage,
    from_openai,
)
from hermes_rl.sessions import (
    RecordsTurns,
    Session,
    SessionStore,
    TurnRecord,
    common_length,
    open_session,
)
from hermes_rl.text import clean
from hermes_rl.tools import TODO, Tool

_log = logging.getLogger(__name__)


class SavedConversation:
    """Keeps an agent's conversation in a session, turn by turn.

    Args:
        where: as `AIAgent` takes it.
    """

    def __init__(self, where: str | Path | SessionStore | Session) -> None:
        self._where = where
        self._session: Session | None = None
        self._lock = threading.Lock()  # a turn may still be saved when its run is cancelled
        self._events: list[Event] = []
        """Those that are not saved yet."""

    def open(self) -> list[Message] | None:
        """Open the session; the conversation in it, or None when it was open. Raises: UserError."""
        if self._session is not None:
            return None
        self._session = open_session(self._where)
        return self._session.load()

    @property
    def session_id(self) -> str:
        """Of the open session."""
        assert self._session is not None
        return self._session.session_id

    @property
    def system_prompt(self) -> str | None:
        """As it was sent last; None where the session does not have it."""
        return self._session.system_prompt if isinstance(self._session, RecordsTurns) else None

    def note(self, event: Event) -> None:
        """Take an event of the run."""
        if isinstance(event, CallStarted | CallEnded | ContextStarted):
            self._events.append(event)

    def save(self, messages: Sequence[Message], system: str, model: str, end_reason: str) -> None:
        """Keep the conversation. What cannot be kept now is tried again after the next turn."""
        with self._lock:
            session, events = self._session, list(self._events)
            if session is None:
                return
            try:
                if isinstance(session, RecordsTurns):
                    session.record(
                        TurnRecord(
                            messages=messages,
                            events=events,
                            system_prompt=system,
                            model=model,
                            end_reason=end_reason,
                        )
                    )
                else:
                    before = session.load()
                    kept = common_length(before, messages)
                    if before != list(messages):
                        session.append(kept, messages[kept:], end_reason)
                self._events = self._events[len(events) :]
            except Exception:  # also of a session that is not ours: the answer is paid for
                _log.exception("the conversation could not be saved")

    def close(self) -> None:
        """Release the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def continuable(messages: Iterable[Message]) -> list[Message]:
    """The conversation without its system message, so that a user message may come next.

    Calls at the end that never got a result are dropped, and so is an empty answer.
    """
    kept: list[Message] = [m for m in messages if not isinstance(m, SystemMessage)]
    if kept and isinstance(last := kept[-1], AssistantMessage):
        kept.pop()
        if last.content.strip():
            shown = AssistantMessage(content=last.content, reasoning_content=last.reasoning_content)
            kept.append(shown if last.tool_calls else last)
    return kept


def keep_todos(
    state: dict[str, Any], tools: Mapping[str, Tool], history: Sequence[Message] | None
) -> None:
    """Put the todo list of a conversation into the state of the tools.

    Args:
        history: a conversation that was read; its list takes the place of that in the state.
    """
    mine = TODO in tools and tools[TODO].toolset == TODO  # not a function of that name
    if mine and (history is not None or TODO not in state):
        state[TODO] = stored_todos(history or ())


def with_user(
    history: Sequence[Message],
    content: str | Sequence[Mapping[str, Any]],
    *,
    joined: bool = True,
) -> list[Message]:
    """The conversation with a user message at its end.

    Args:
        content: text, or OpenAI content parts.
        joined: two user messages in a row become one.

    Raises: UserError for parts that are not objects.
    """
    if isinstance(content, str):
        content = clean(content)
    message = from_openai({"role": "user", "content": content})
    assert isinstance(message, UserMessage)
    if joined and history and isinstance(last := history[-1], UserMessage):
        if isinstance(last.content, str) and isinstance(message.content, str):
            content = f"{last.content}\n\n{message.content}"
        else:
            parts = [*_content_parts(last), *_content_parts(message)]
            return [*history[:-1], UserMessage(content=parts)]
        return [*history[:-1], UserMessage(content=content)]
    return [*history, message]


def _content_parts(message: UserMessage) -> list[dict[str, Any]]:
    content = message.content
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def last_answer(events: Iterable[Event]) -> str | None:
    """The model's last text in the events of one run."""
    added = [
        e.message for e in events if isinstance(e, MessageAdded) and e.turn and not e.synthetic
    ]
    contents = [m.content for m in added if isinstance(m, AssistantMessage)]
    return contents[-1] if contents else None


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system messages that a conversation begins with, as one text, and the rest."""
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, SystemMessage):
            break
        texts.append(message.content)
    return "\n\n".join(texts) or None, list(messages[len(texts) :])
