"""The calls of a rollout that have tokens, and the branches that they form.

A branch is a chain of calls of one agent, each of which extends the previous one. An answer that is
in no conversation (discarded, aborted, or a summary) is detached: it has its own branch, and later
calls continue from its prompt. An answer that the engine cut off and that another call completed is
one answer of several calls: what became of the last one holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hermes_rl import events as ev
from hermes_rl.events import ForkReason
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.tokens import TokenGraph, TokensFault
from hermes_rl.trajectory import thrown_away

Detached = Literal["discarded", "aborted", "summary"]


@dataclass(frozen=True)
class CapturedCall:
    """One call. `began` and `ended` are positions in the stream of events."""

    call_id: str
    agent: str
    turn: int
    purpose: str
    model: str
    began: int
    ended: int
    """The length of the stream if the call did not end."""
    finish_reason: str | None
    policy_version: str | None
    detached: Detached | None
    """Why its answer is not in the conversation; None if it is."""


@dataclass(frozen=True)
class CapturedCalls:
    """The calls of an attempt that have tokens."""

    tokens: list[ev.TokensAdded]
    calls: dict[str, CapturedCall]
    contexts: list[tuple[str, int]] = field(default_factory=list)
    """Agents, and positions at which new contexts began."""
    reasoning_turns: frozenset[tuple[str, int]] = frozenset()
    """Agents, and turns whose answer contains reasoning."""

    @property
    def agents(self) -> dict[str, str]:
        """call_id -> agent."""
        return {call_id: call.agent for call_id, call in self.calls.items()}


def captured_calls(stream: Sequence[ev.Event]) -> CapturedCalls:
    """Read the calls with tokens from the events of an attempt."""
    tokens = [e for e in stream if isinstance(e, ev.TokensAdded)]
    wanted = {e.call_id for e in tokens}
    ends = {e.call_id: (n, e) for n, e in enumerate(stream) if isinstance(e, ev.CallEnded)}
    thrown = thrown_away(stream)
    calls: dict[str, CapturedCall] = {}
    starts = [(n, e) for n, e in enumerate(stream) if isinstance(e, ev.CallStarted)]
    starts = [(n, e) for n, e in starts if e.call_id in wanted]
    rest = {e.continues: e.call_id for _, e in starts if e.continues is not None}
    for place, e in reversed(starts):  # the rest of an answer before its beginning
        call = _call(e, place, ends.get(e.call_id), len(stream), e.call_id in thrown)
        if e.call_id in rest:
            call = replace(call, detached=calls[rest[e.call_id]].detached)
        calls[e.call_id] = call
    named = [(e.agent, e.inner) if isinstance(e, ev.SubagentEvent) else (MAIN, e) for e in stream]
    return CapturedCalls(
        tokens=tokens,
        calls=dict(reversed(calls.items())),
        contexts=[(a, n) for n, (a, e) in enumerate(named) if isinstance(e, ev.ContextStarted)],
        reasoning_turns=frozenset(
            (a, e.turn) for a, e in named if isinstance(e, ev.MessageAdded) and _has_reasoning(e)
        ),
    )


def token_versions(call: CapturedCall, added: ev.TokensAdded) -> list[str | None]:
    """Return the policy version of each sampled token; None if it is unknown."""
    count = len(added.sampled) // 4
    if not added.versions:
        return [call.policy_version] * count
    found: list[str | None] = []
    for version, end in added.versions:
        found += [version] * (min(end, count) - len(found))
    return found + [None] * (count - len(found))


def version_number(text: str | None) -> int:
    """Return a policy version as an integer; -1 if it is not a whole number."""
    if text is None or not (text.isascii() and text.isdigit()):
        return -1
    return int(text) if int(text) < 1 << 31 else -1


def _call(
    start: ev.CallStarted,
    place: int,
    ended: tuple[int, ev.CallEnded] | None,
    length: int,
    thrown: bool,
) -> CapturedCall:
    last, end = ended or (length, None)
    return CapturedCall(
        call_id=start.call_id,
        agent=start.agent,
        turn=start.turn,
        purpose=start.purpose,
        model=start.model,
        began=place,
        ended=last,
        finish_reason=end.finish_reason if end else None,
        policy_version=end.policy_version if end else None,
        detached=_detached_by(start, end, thrown),
    )


def _detached_by(start: ev.CallStarted, end: ev.CallEnded | None, thrown: bool) -> Detached | None:
    if start.purpose != "agent":
        return "summary"
    if end is not None and (end.outcome != "ok" or end.error is not None):
        return "aborted"
    return "discarded" if thrown else None


def _has_reasoning(e: ev.MessageAdded) -> bool:
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
"""Reasons of forks that do not occur with an exact history."""

MAIN = "main"
"""Name of the main agent."""

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
    """The branch with which it shares its first tokens."""
    nodes: list[int] = field(default_factory=list)
    """The calls that it trains, in order."""


class Branches:
    """The branches of a rollout, built in one pass over the calls in the order of their ends.

    Raises: TokensFault for tokens without a call.
    """

    def __init__(self, graph: TokenGraph, calls: CapturedCalls) -> None:
        for node in graph.nodes:
            if node.added.call_id not in calls.calls:
                raise TokensFault(f"no call {node.added.call_id}, but tokens of it")
        self.graph, self.captured = graph, calls
        self.followed = self.drifted = 0
        """Calls that extend their history if the history is exact; those of them that forked."""
        self._contexts, self._reasoning_turns = calls.contexts, calls.reasoning_turns
        self._calls = [calls.calls[node.added.call_id] for node in graph.nodes]
        self._owner: dict[int, int] = {}
        """Node -> branch."""
        self._last: dict[str, int] = {}
        """Agent -> its latest call that is not detached."""
        self.branches: list[Branch] = []
        """The first branch of the main agent comes first."""
        for number in range(len(graph.nodes)):
            self._add_call(number)
        self._assign_parents()
        self._renumber()

    def call(self, node: int) -> tuple[CapturedCall, ev.TokensAdded]:
        """Return the call of a node, and its tokens."""
        return self._calls[node], self.graph.nodes[node].added

    def _add_call(self, number: int) -> None:
        call = self._calls[number]
        anchor, kept = self._anchor(number)
        if call.detached is not None:
            reason: ForkReason = "compaction" if call.detached == "summary" else "retry"
            self._start_branch(number, _KINDS[reason], reason, anchor)
            return
        previous = self._last.get(call.agent)
        self._last[call.agent] = number
        exact = previous is not None and not self._new_context(previous, call)
        self.followed += exact
        if self._extends_anchor(number, anchor, kept):
            branch = self.branches[self._owner[anchor]]
            branch.nodes.append(number)
            self._owner[number] = branch.number
            return
        reason_, kind = self._reason(number, anchor, kept, previous), MAIN
        if reason_ is not None:
            kind = _KINDS.get(reason_, "fork")
            self.drifted += exact and reason_ in DRIFT
        self._start_branch(number, kind, reason_, anchor)

    def _start_branch(self, number: int, kind: str, reason: ForkReason | None, anchor: int) -> None:
        branch = Branch(
            number=len(self.branches),
            agent=self._calls[number].agent,
            kind=kind,
            reason=reason,
            parent=self._owner.get(anchor),
            nodes=[number],
        )
        self.branches.append(branch)
        self._owner[number] = branch.number

    def _anchor(self, number: int) -> tuple[int, int]:
        """Return the call that a prompt continues, and the number of shared tokens.

        Tokens shared with the prompt of a detached call belong to the call before it.
        """
        node = self.graph.nodes[number]
        anchor, kept = node.parent, node.kept
        while anchor >= 0 and self._calls[anchor].detached is not None:
            detached = self.graph.nodes[anchor]
            if kept > detached.prompt_end:
                break
            anchor, kept = detached.parent, min(kept, detached.kept)
        return anchor, kept

    def _extends_anchor(self, number: int, anchor: int, kept: int) -> bool:
        if anchor < 0 or kept != self.graph.nodes[anchor].end:
            return False
        before, this = self._calls[anchor], self._calls[number]
        last = self.branches[self._owner[anchor]].nodes[-1]
        return before.detached is None and before.agent == this.agent and last == anchor

    def _new_context(self, previous: int, call: CapturedCall) -> bool:
        ended = self._calls[previous].ended
        return any(a == call.agent and ended < n < call.began for a, n in self._contexts)

    def _reason(
        self, number: int, anchor: int, kept: int, previous: int | None
    ) -> ForkReason | None:
        call = self._calls[number]
        if previous is None:
            return None if call.agent == MAIN else "subagent"
        if self._new_context(previous, call):
            return "compaction"
        if self._runs_in_parallel(number):
            return "parallel_call"
        if call.turn == self._calls[previous].turn:
            return "retry"
        recorded = self.graph.nodes[number].added.fork_reason
        return recorded or self._drift_reason(anchor, kept)

    def _runs_in_parallel(self, number: int) -> bool:
        """Whether another call of the same agent was in flight at the same time."""
        this = self._calls[number]
        return any(
            other.agent == this.agent
            and other.detached is None
            and other.began < this.ended
            and this.began < other.ended
            for other in self._calls[:number]
        )

    def _drift_reason(self, anchor: int, kept: int) -> ForkReason:
        """Return why a prompt that should extend a path does not."""
        if anchor < 0 or kept < self.graph.nodes[anchor].prompt_end:
            return "template"  # tokens that were not sampled differ
        if (self._calls[anchor].agent, self._calls[anchor].turn) in self._reasoning_turns:
            return "dropped_reasoning"
        return "retokenized_history"

    def _assign_parents(self) -> None:
        """Give detached answers without a parent the branch of a later call that continues them."""
        for branch in self.branches:
            detached = branch.nodes[0]
            if branch.parent is not None or self._calls[detached].detached is None:
                continue
            later = (n for n, node in enumerate(self.graph.nodes) if node.parent == detached)
            branch.parent = next(
                (self._owner[n] for n in later if self._calls[n].detached is None), None
            )

    def _renumber(self) -> None:
        """Number the branches: first the main agent's first one, then the others in order."""
        self.branches.sort(key=lambda branch: (branch.kind != MAIN, branch.number))
        place = {branch.number: n for n, branch in enumerate(self.branches)}
        for branch in self.branches:
            branch.number = place[branch.number]
            branch.parent = None if branch.parent is None else place[branch.parent]
