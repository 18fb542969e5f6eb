"""What a rollout's events say of its calls with tokens, and the branches that these calls form.

A branch is a chain of calls of one agent in which each extends the one before. Answers that joined
no conversation (thrown away, aborted, summaries) stand aside, each in a branch of its own: what
comes after continues from the prompt that they answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hermes_rl import events as ev
from hermes_rl.events import ForkReason
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.tokens import TokenGraph, TokensFault
from hermes_rl.trajectory import thrown_away

Aside = Literal["discarded", "aborted", "summary"]


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
    aside: Aside | None
    """Why it is no part of the conversation; None when it is."""


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


def _aside(start: ev.CallStarted, end: ev.CallEnded | None, thrown: bool) -> Aside | None:
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


DRIFT: tuple[ForkReason, ...] = (
    "retokenized_history",
    "dropped_reasoning",
    "template",
    "edited_history",
)
"""Forks that an exact history would not have."""

MAIN = "main"
"""The agent that a rollout begins with."""

_KINDS: dict[ForkReason, str] = {
    "compaction": "compaction",
    "subagent": "subagent",
    "retry": "retry",
}


@dataclass
class Branch:
    """A chain of calls."""

    number: int
    agent: str
    kind: str
    reason: ForkReason | None
    parent: int | None
    """The branch that it shares its beginning with."""
    nodes: list[int] = field(default_factory=list)
    """Its own calls, in order."""


class Branches:
    """All branches of a rollout, found in one pass over the calls in the order of their ends.

    Raises: TokensFault for tokens without a call.
    """

    def __init__(self, graph: TokenGraph, calls: Happened) -> None:
        for node in graph.nodes:
            if node.added.call_id not in calls.calls:
                raise TokensFault(f"the tokens of {node.added.call_id} belong to no call")
        self.graph = graph
        self.followed = self.drifted = 0
        """Calls of which an exact history would make an extension; those of them that forked."""
        self._contexts, self._thought = calls.contexts, calls.thought
        self._facts = [calls.calls[node.added.call_id] for node in graph.nodes]
        self._owner: dict[int, int] = {}
        """Node -> branch."""
        self._last: dict[str, int] = {}
        """Agent -> its latest call that did not stand aside."""
        self.branches: list[Branch] = []
        """The main agent's first one in front."""
        for number in range(len(graph.nodes)):
            self._place(number)
        self._adopt()
        self._renumber()

    def _place(self, number: int) -> None:
        facts = self._facts[number]
        anchor, kept = self._anchor(number)
        if facts.aside is not None:
            reason: ForkReason = "compaction" if facts.aside == "summary" else "retry"
            self._begin(number, _KINDS[reason], reason, anchor)
            return
        previous = self._last.get(facts.agent)
        self._last[facts.agent] = number
        exact = previous is not None and not self._new_context(previous, facts)
        self.followed += exact
        if self._extends(number, anchor, kept):
            branch = self.branches[self._owner[anchor]]
            branch.nodes.append(number)
            self._owner[number] = branch.number
            return
        reason_, kind = self._reason(number, anchor, kept, previous), MAIN
        if reason_ is not None:
            kind = _KINDS.get(reason_, "fork")
            self.drifted += exact and reason_ in DRIFT
        self._begin(number, kind, reason_, anchor)

    def _begin(self, number: int, kind: str, reason: ForkReason | None, anchor: int) -> None:
        branch = Branch(
            number=len(self.branches),
            agent=self._facts[number].agent,
            kind=kind,
            reason=reason,
            parent=self._owner.get(anchor),
            nodes=[number],
        )
        self.branches.append(branch)
        self._owner[number] = branch.number

    def _anchor(self, number: int) -> tuple[int, int]:
        """The call that a prompt goes on from, and how far: what it shares with the prompt of one
        that stands aside belongs to the call before that."""
        node = self.graph.nodes[number]
        anchor, kept = node.parent, node.kept
        while anchor >= 0 and self._facts[anchor].aside is not None:
            aside = self.graph.nodes[anchor]
            if kept > aside.prompt_end:
                break
            anchor, kept = aside.parent, min(kept, aside.kept)
        return anchor, kept

    def _extends(self, number: int, anchor: int, kept: int) -> bool:
        if anchor < 0 or kept != self.graph.nodes[anchor].end:
            return False
        before, this = self._facts[anchor], self._facts[number]
        last = self.branches[self._owner[anchor]].nodes[-1]
        return before.aside is None and before.agent == this.agent and last == anchor

    def _new_context(self, previous: int, facts: CallFacts) -> bool:
        ended = self._facts[previous].ended
        return any(ended < place < facts.began for place in self._contexts)

    def _reason(
        self, number: int, anchor: int, kept: int, previous: int | None
    ) -> ForkReason | None:
        facts = self._facts[number]
        if previous is None:
            return None if facts.agent == MAIN else "subagent"
        if self._new_context(previous, facts):
            return "compaction"
        if self._beside(number):
            return "parallel_call"
        if facts.turn == self._facts[previous].turn:
            return "retry"
        recorded = self.graph.nodes[number].added.fork_reason
        return recorded or self._drift(anchor, kept)

    def _beside(self, number: int) -> bool:
        """Whether a call of the same agent was under way at the same time."""
        this = self._facts[number]
        return any(
            other.agent == this.agent
            and other.aside is None
            and other.began < this.ended
            and this.began < other.ended
            for other in self._facts[:number]
        )

    def _drift(self, anchor: int, kept: int) -> ForkReason:
        """Why a prompt that ought to extend a path leaves it."""
        if anchor < 0 or kept < self.graph.nodes[anchor].prompt_end:
            return "template"  # tokens that nobody sampled are written otherwise
        if self._facts[anchor].turn in self._thought:
            return "dropped_reasoning"
        return "retokenized_history"

    def _adopt(self) -> None:
        """An answer that stands aside and shares its beginning with later calls only belongs to
        theirs."""
        for branch in self.branches:
            aside = branch.nodes[0]
            if branch.parent is not None or self._facts[aside].aside is None:
                continue
            later = (n for n, node in enumerate(self.graph.nodes) if node.parent == aside)
            branch.parent = next(
                (self._owner[n] for n in later if self._facts[n].aside is None), None
            )

    def _renumber(self) -> None:
        """The main agent's first branch in front, the others as they began."""
        self.branches.sort(key=lambda branch: (branch.kind != MAIN, branch.number))
        place = {branch.number: n for n, branch in enumerate(self.branches)}
        for branch in self.branches:
            branch.number = place[branch.number]
            branch.parent = None if branch.parent is None else place[branch.parent]
