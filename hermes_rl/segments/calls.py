"""What an attempt's events say of each call whose tokens they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage
from hermes_rl.trajectory import thrown_away


@dataclass(frozen=True)
class CallFacts:
    """One call. Places are positions in the stream of events."""

    call_id: str
    agent: str
    turn: int
    purpose: str
    model: str
    began: int
    ended: int
    """The place of its end; the stream's length when it has none."""
    finish_reason: str | None
    policy_version: str | None
    aside: str | None
    """Why it is no part of the conversation: discarded, aborted, summary; None when it is."""


@dataclass(frozen=True)
class Happened:
    """An attempt, as far as its tokens are concerned."""

    tokens: list[ev.TokensAdded]
    calls: dict[str, CallFacts]
    contexts: list[int] = field(default_factory=list)
    """Where new contexts began."""
    thought: frozenset[int] = frozenset()
    """Turns whose answer held reasoning."""

    @property
    def agents(self) -> dict[str, str]:
        """call_id -> agent."""
        return {call_id: call.agent for call_id, call in self.calls.items()}


def happened(stream: Sequence[ev.Event]) -> Happened:
    """Read an attempt's events. Calls without tokens are left out."""
    tokens = [e for e in stream if isinstance(e, ev.TokensAdded)]
    wanted = {e.call_id for e in tokens}
    ends = {e.call_id: (n, e) for n, e in enumerate(stream) if isinstance(e, ev.CallEnded)}
    thrown = thrown_away(stream)
    calls = {
        e.call_id: _facts(e, place, ends.get(e.call_id), len(stream), e.call_id in thrown)
        for place, e in enumerate(stream)
        if isinstance(e, ev.CallStarted) and e.call_id in wanted
    }
    return Happened(
        tokens=tokens,
        calls=calls,
        contexts=[n for n, e in enumerate(stream) if isinstance(e, ev.ContextStarted)],
        thought=frozenset(
            e.turn for e in stream if isinstance(e, ev.MessageAdded) and _holds_reasoning(e)
        ),
    )


def version_number(text: str | None) -> int:
    """A policy version that is a whole number; -1 for any other."""
    if text is None or not (text.isascii() and text.isdigit()):
        return -1
    return int(text) if int(text) < 1 << 31 else -1


def _facts(
    start: ev.CallStarted,
    place: int,
    ended: tuple[int, ev.CallEnded] | None,
    length: int,
    thrown: bool,
) -> CallFacts:
    last, end = ended or (length, None)
    return CallFacts(
        call_id=start.call_id,
        agent=start.agent,
        turn=start.turn,
        purpose=start.purpose,
        model=start.model,
        began=place,
        ended=last,
        finish_reason=end.finish_reason if end else None,
        policy_version=end.policy_version if end else None,
        aside=_aside(start, end, thrown),
    )


def _aside(start: ev.CallStarted, end: ev.CallEnded | None, thrown: bool) -> str | None:
    if start.purpose != "agent":
        return "summary"
    if end is not None and (end.outcome != "ok" or end.error is not None):
        return "aborted"
    return "discarded" if thrown else None


def _holds_reasoning(e: ev.MessageAdded) -> bool:
    message = e.message
    if e.synthetic or not isinstance(message, AssistantMessage):
        return False
    return message.reasoning_content is not None or message.raw_content is not None
