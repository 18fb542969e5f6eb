"""The token ids of a rollout: a graph of its calls, in which each call holds only what it added.

A call's *path* is everything that the model read and wrote: its prompt, then its answer. The prompt
of a new call is compared with all paths by ids. If it continues the end of one, it extends that
path; otherwise it forks at the longest common prefix. Tokens are kept as int32 bytes: four bytes
each, compared by `memcmp`, and shared with the recorded event.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec

from hermes_rl.errors import HermesError
from hermes_rl.events import Purpose, TokensAdded, pack_ids, pack_logprobs
from hermes_rl.models.base import ModelRequest, TokenCapture
from hermes_rl.models.tokens.logprobs import shaped_by

_WIDTH = 4
"""Bytes per id."""


class TokensFault(HermesError):
    """Recorded tokens contradict themselves or a rule: a bug in this package (cause `harness`)."""


@dataclass(frozen=True)
class Node:
    """The tokens of one call. Offsets count tokens from the beginning of its path."""

    added: TokensAdded
    agent: str
    parent: int
    """Index of the node whose path it extends or forks from; -1 for none."""
    prompt_end: int
    """Offset at which its answer begins."""
    end: int
    """Offset at which its answer ends: the length of its path."""

    @property
    def kept(self) -> int:
        """Offset at which the tokens that it added begin."""
        return self.added.kept


class TokenRun(NamedTuple):
    """Tokens of a path that one call added: its glue, or (the beginning of) its answer."""

    node: int
    sampled: bool
    data: bytes


class TokenGraph:
    """The nodes of one rollout, in the order in which the calls ended. Not thread-safe."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index: dict[str, int] = {}

    @classmethod
    def of(cls, events: Iterable[TokensAdded], agents: Mapping[str, str]) -> Self:
        """Rebuild the graph from its recorded events.

        Args:
            agents: call_id -> agent.

        Raises: TokensFault when no graph can have recorded these events.
        """
        graph = cls()
        for event in events:
            graph._put(event, agents.get(event.call_id, "main"))
        return graph

    def add(
        self, tokens: TokensAdded, prompt: bytes, agent: str, after: str | None = None
    ) -> TokensAdded:
        """Add a call.

        Args:
            tokens: the call without its position: `parent`, `kept` and `glue` are replaced.
            prompt: its whole prompt, as returned by `events.pack_ids`.
            agent: the agent that made the call.
            after: the call whose answer it continues.

        Returns: the event to record.

        Raises: TokensFault for a call that is already in the graph.
        """
        parent, shared = self._nearest(prompt, agent, self._index.get(after or "", -1))
        placed = msgspec.structs.replace(
            tokens,
            parent=self.nodes[parent].added.call_id if shared else None,
            kept=shared,
            glue=prompt[shared * _WIDTH :],
        )
        self._put(placed, agent)
        return placed

    def index(self, call_id: str) -> int | None:
        """Return the index of a call's node; None for a call without tokens."""
        return self._index.get(call_id)

    def token_runs(self, node: int) -> list[TokenRun]:
        """Return a call's whole path as token_runs, in order; none is empty."""
        pieces = list(self._backwards(node))
        pieces.reverse()
        return pieces

    def path(self, node: int) -> bytes:
        """Return a call's whole path, as int32."""
        return b"".join(piece.data for piece in self.token_runs(node))

    def _backwards(self, number: int) -> Iterator[TokenRun]:
        limit = self.nodes[number].end
        while number >= 0:
            node = self.nodes[number]
            if limit > node.prompt_end:
                yield TokenRun(number, True, node.added.sampled[: (limit - node.prompt_end) * 4])
                limit = node.prompt_end
            if limit > node.kept:
                yield TokenRun(number, False, node.added.glue[: (limit - node.kept) * _WIDTH])
            limit = min(limit, node.kept)
            number = node.parent

    def _nearest(self, prompt: bytes, agent: str, after: int) -> tuple[int, int]:
        """Return the node that shares most tokens with a prompt, and their number.

        Among equals, a node whose whole path is shared comes first, then the one that the call
        continues, then one of the same agent, then the latest: the same answer may have been
        sampled twice. The tokens that a node added are compared once, and only if everything before
        them is shared.
        """
        best, rank = -1, (0, False, False, False)
        shared: list[int] = []
        for number, node in enumerate(self.nodes):
            before = shared[node.parent] if node.parent >= 0 else 0
            length = min(before, node.kept)
            if length == node.kept:
                length += _common(prompt, length, node.added.glue)
            if length == node.prompt_end:
                length += _common(prompt, length, node.added.sampled)
            shared.append(length)
            this = (length, length == node.end, number == after, node.agent == agent)
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
                raise TokensFault(
                    f"call {event.call_id} continues {event.parent}, which is unknown"
                )
        end_of_parent = self.nodes[parent].end if parent >= 0 else 0
        if not 0 <= event.kept <= end_of_parent:
            raise TokensFault(
                f"call {event.call_id} shares {event.kept} of {end_of_parent} tokens with another"
            )
        if len(event.glue) % _WIDTH or len(event.sampled) % _WIDTH:
            raise TokensFault(f"call {event.call_id}: the length of its ids is not a multiple of 4")
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


def _common(prompt: bytes, start: int, added: bytes) -> int:
    """Return how many of a node's tokens a prompt shares from token `start` on."""
    there = prompt[start * _WIDTH : start * _WIDTH + len(added)]
    if there == added[: len(there)]:
        return len(there) // _WIDTH
    low, high = 0, len(there) // _WIDTH  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        stretch = slice(low * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if there[stretch] == added[stretch] else (low, middle)
    return low


CAPTURED: tuple[Purpose, ...] = ("agent", "summary")
"""Purposes of the policy's calls. Judges and simulated users are other models or other roles."""


def record_tokens(
    graph: TokenGraph, call_id: str, agent: str, tokens: TokenCapture, request: ModelRequest
) -> TokensAdded | None:
    """Add an answer's tokens to a rollout's graph.

    Returns: the event to record; None if ids of the prompt or of the answer are missing or invalid
        (more than 31 bits).

    Raises: TokensFault for a call that is already recorded.
    """
    sampled, prompt = tokens.completion_ids, tokens.prompt_ids
    if not sampled or prompt is None:
        return None
    try:
        packed, whole = pack_ids(sampled), pack_ids(prompt)
    except struct.error:
        return None
    sent = {**(tokens.sampling or request.sampling).as_dict(), **request.extra}
    event = TokensAdded(
        call_id=call_id,
        sampled=packed,
        logprobs=_logprobs(tokens),
        logprobs_kind=tokens.logprobs_kind,
        source=tokens.source,
        fork_reason=tokens.fork_reason,
        tokenizer_hash=tokens.tokenizer_hash,
        template_hash=tokens.template_hash,
        temperature=_number(sent.get("temperature")),
        top_p=_number(sent.get("top_p")),
        top_k=_whole(sent.get("top_k")),
        min_p=_number(sent.get("min_p")),
        shaped_by=tuple(dict.fromkeys((*tokens.shaped_by, *shaped_by(request.extra)))),
        versions=tuple((span.version, span.end) for span in tokens.versions),
    )
    return graph.add(event, whole, agent, request.partial.call_id if request.partial else None)


def _logprobs(tokens: TokenCapture) -> bytes | None:
    values = tokens.logprobs
    if values is None or len(values) != len(tokens.completion_ids or ()):
        return None
    try:
        return pack_logprobs(values)
    except OverflowError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 31 else None
