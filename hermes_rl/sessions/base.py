"""What an agent needs of the place where its conversation is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hermes_rl.events import Event
from hermes_rl.messages import Message


class Session(Protocol):
    """Where an agent's conversation is kept."""

    session_id: str

    def load(self) -> list[Message]:
        """The conversation so far, without a system message; empty for a new session."""
        ...

    def append(self, kept: int, added: Sequence[Message], end_reason: str) -> None:
        """Store a turn: so many messages stay as they were, then these follow.

        Args:
            end_reason: how the run ended; `running` while it has not.
        """
        ...

    def close(self) -> None:
        """Release it."""
        ...


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """An agent's conversation after a turn, with what happened since the last record."""

    messages: Sequence[Message]
    """The whole conversation, without a system message."""
    events: Sequence[Event] = field(default_factory=tuple)
    """What happened since the last record: its model calls are stored."""
    system_prompt: str | None = None
    model: str = ""
    end_reason: str = "running"


@runtime_checkable
class RecordsTurns(Protocol):
    """What a session may offer beside `Session`: it stores calls and the system prompt too."""

    system_prompt: str | None
    """As it was last sent; None before the first turn."""

    def record(self, turn: TurnRecord) -> None:
        """Store a turn; durable when this returns. `session_id` may be another one afterwards: a
        conversation that was compressed or begun again continues in a session of its own."""
        ...


def common_length(before: Sequence[Message], after: Sequence[Message]) -> int:
    """How many messages at the head of two conversations are the same."""
    pairs = zip(before, after, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
