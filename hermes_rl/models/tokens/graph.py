"""The tokens of one rollout as a graph: every call holds only what it added.

A call's *path* is all that the model saw and said: its prompt, then its answer. A new call's prompt
is compared with all paths by ids. Where it goes on from the end of one, it extends it; else it
forks at the longest common prefix. Tokens are kept as int32 bytes: four bytes each, compared by
`memcmp`, and shared with the recorded event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec

from hermes_rl.errors import HermesError
from hermes_rl.events import TokensAdded

_WIDTH = 4
"""Bytes of an id."""


class TokensFault(HermesError):
    """Recorded tokens contradict themselves or a rule: a bug of ours (cause `harness`)."""


@dataclass(frozen=True)
class Node:
    """One call's tokens. Offsets count tokens from the beginning of its path."""

    added: TokensAdded
    agent: str
    parent: int
    """Index of the node whose path it begins with; -1 for none."""
    prompt_end: int
    """Where its answer begins."""
    end: int
    """Where its answer ends: the length of its path."""

    @property
    def kept(self) -> int:
        """Where its own tokens begin."""
        return self.added.kept


class Stretch(NamedTuple):
    """Tokens of a path that one call added: its glue, or (the beginning of) its answer."""

    node: int
    sampled: bool
    data: bytes


class TokenGraph:
    """The nodes of one rollout, in the order in which the calls ended. Not for threads."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index: dict[str, int] = {}

    @classmethod
    def of(cls, events: Iterable[TokensAdded], agents: Mapping[str, str]) -> Self:
        """The graph that was recorded.

        Args:
            agents: call_id -> agent.

        Raises: TokensFault when it cannot have been recorded by a graph.
        """
        graph = cls()
        for event in events:
            graph._put(event, agents.get(event.call_id, "main"))
        return graph

    def add(self, tokens: TokensAdded, prompt: bytes, agent: str) -> TokensAdded:
        """Place a call.

        Args:
            tokens: the call without its place: `parent`, `kept` and `glue` are replaced.
            prompt: its whole prompt, as `events.pack_ids` makes it.
            agent: whose call it is.

        Returns: the event to record.

        Raises: TokensFault for a call that is in the graph already.
        """
        parent, shared = self._nearest(prompt, agent)
        placed = msgspec.structs.replace(
            tokens,
            parent=self.nodes[parent].added.call_id if shared else None,
            kept=shared,
            glue=prompt[shared * _WIDTH :],
        )
        self._put(placed, agent)
        return placed

    def index(self, call_id: str) -> int | None:
        """The number of a call's node; None for a call without tokens."""
        return self._index.get(call_id)

    def stretches(self, node: int) -> list[Stretch]:
        """A call's whole path, piece by piece, in order; no piece is empty."""
        pieces = list(self._backwards(node))
        pieces.reverse()
        return pieces

    def path(self, node: int) -> bytes:
        """A call's whole path: int32."""
        return b"".join(piece.data for piece in self.stretches(node))

    def _backwards(self, number: int) -> Iterator[Stretch]:
        limit = self.nodes[number].end
        while number >= 0:
            node = self.nodes[number]
            if limit > node.prompt_end:
                yield Stretch(number, True, node.added.sampled[: (limit - node.prompt_end) * 4])
                limit = node.prompt_end
            if limit > node.kept:
                yield Stretch(number, False, node.added.glue[: (limit - node.kept) * _WIDTH])
            limit = min(limit, node.kept)
            number = node.parent

    def _nearest(self, prompt: bytes, agent: str) -> tuple[int, int]:
        """The node that shares most with a prompt, and how many tokens that are.

        Of equals, one whose whole path is shared comes first, then one of the same agent, then the
        latest: the same answer may have been given twice. Each node's own tokens are looked at
        once, and only where all before them is shared.
        """
        best, rank = -1, (0, False, False)
        shared: list[int] = []
        for number, node in enumerate(self.nodes):
            before = shared[node.parent] if node.parent >= 0 else 0
            length = min(before, node.kept)
            if length == node.kept:
                length += _common(prompt, length, node.added.glue)
            if length == node.prompt_end:
                length += _common(prompt, length, node.added.sampled)
            shared.append(length)
            this = (length, length == node.end, node.agent == agent)
            if this > rank or (this == rank and this[1]):
                best, rank = number, this
        return best, rank[0]

    def _put(self, event: TokensAdded, agent: str) -> None:
        if event.call_id in self._index:
            raise TokensFault(f"the tokens of call {event.call_id} are recorded twice")
        parent = -1
        if event.parent is not None:
            parent = self._index.get(event.parent, -1)
            if parent < 0:
                raise TokensFault(f"call {event.call_id} goes on from {event.parent}: unknown")
        end_of_parent = self.nodes[parent].end if parent >= 0 else 0
        if not 0 <= event.kept <= end_of_parent:
            raise TokensFault(
                f"call {event.call_id} shares {event.kept} of {end_of_parent} tokens with another"
            )
        if len(event.glue) % _WIDTH or len(event.sampled) % _WIDTH:
            raise TokensFault(f"call {event.call_id}: ids of broken length")
        prompt_end = event.kept + len(event.glue) // _WIDTH
        self._index[event.call_id] = len(self.nodes)
        self.nodes.append(
            Node(
                added=event,
                agent=agent,
                parent=parent,
                prompt_end=prompt_end,
                end=prompt_end + len(event.sampled) // _WIDTH,
            )
        )


def _common(prompt: bytes, start: int, own: bytes) -> int:
    """How many of a node's tokens a prompt has from token `start` on."""
    there = prompt[start * _WIDTH : start * _WIDTH + len(own)]
    if there == own[: len(there)]:
        return len(there) // _WIDTH
    low, high = 0, len(there) // _WIDTH  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        stretch = slice(low * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if there[stretch] == own[stretch] else (low, middle)
    return low
