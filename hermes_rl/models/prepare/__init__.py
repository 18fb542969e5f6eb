"""How the messages of a request are made from the stored ones: small pure steps, list to list.

Every dialect builds its body from `outgoing(request)`, never from the conversation itself:

    ready = outgoing(request)
    ready.system                      # the system prompt with the ephemeral layer, or None
    ready.messages                    # system first (`ready.lead` messages), prefill, then the rest
    ready.encoded(key, encode)        # bytes of each of them, made once per message and key
    cache_marks(ready.messages, ...)  # which of them carry a cache marker

Steps, in this order: repair the arguments of tool calls; repair the alternation of roles; put the
ephemeral layer behind the system prompt; drop internal fields; put the prefill after the system
prompt; pair tool results with their calls; drop assistant turns that hold only thinking, and merge
the neighbours that this makes; write arguments as canonical JSON; clean half surrogates; last, what
`request.adaptations` ask for. Cache markers are the dialect's, since each has its own: they are put
on copies of a few messages' bytes. What needs no change stays the same object, so that its bytes
are reused. With `request.exact` only the ephemeral layer, the prefill and the adaptations remain.

Tool schemas: `without_grammar`. What images may cost: `ready.image_tokens(model)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from hermes_rl.messages import Message, SystemMessage, ToolMessage
from hermes_rl.models.base import Adaptation, ModelRequest, View
from hermes_rl.models.prepare.arguments import (
    canonical_arguments,
    canonical_json,
    repair_arguments,
    repaired_arguments,
)
from hermes_rl.models.prepare.images import MOST_BYTES, MOST_SIDE, can_shrink, small_images
from hermes_rl.models.prepare.messages import (
    NO_IMAGE,
    NO_RESULT,
    alternate,
    blocks_of,
    clean_surrogates,
    cut,
    drop_internal,
    drop_thinking_only,
    images_in,
    join_texts,
    pair_results,
    says_something,
    text_only,
    tokens_of_images,
    without_encrypted,
    without_images,
    without_signatures,
)

__all__ = [
    "Outgoing",
    "blocks_of",
    "cache_marks",
    "outgoing",
    "prepare",
    "says_something",
    "without_grammar",
]

Step = Callable[[list[Message]], list[Message]]

REPAIRS: tuple[Step, ...] = (
    repair_arguments,
    alternate,
    drop_internal,
    pair_results,
    drop_thinking_only,
    alternate,
    canonical_arguments,
    clean_surrogates,
)
"""The steps of every request that is not exact."""

ADAPTATIONS: dict[Adaptation, Step] = {
    "small_images": small_images,
    "no_images": without_images,
    "text_only": text_only,
    "no_signatures": without_signatures,
    "no_encrypted_reasoning": without_encrypted,
}
"""The steps of adaptations; `no_grammar` concerns tools alone."""


def prepare(
    messages: Sequence[Message],
    *,
    exact: bool = False,
    adaptations: frozenset[Adaptation] = frozenset(),
) -> list[Message]:
    """The messages as they are sent, but for the ephemeral layer and the prefill. Idempotent."""
    return _pipeline(exact, adaptations).run(list(messages))


@dataclass(frozen=True)
class Outgoing:
    """The messages of one request."""

    messages: Sequence[Message]
    """All of them, in order."""
    lead: int
    """So many of them, at the head, are system messages."""
    added: tuple[tuple[int, int], ...]
    """(place in `messages`, stored messages that it stands for): the ephemeral layer and the
    prefill, which are encoded at each call."""
    view: View

    @property
    def system(self) -> str | None:
        """The system prompt as one text; None when there is none."""
        texts = [str(m.content) for m in self.messages[: self.lead]]
        return "\n\n".join(texts) if texts else None

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> Sequence[bytes]:
        """`encode` of each of `messages`; each stored one is encoded once. Not to be changed.

        Args:
            key: names `encode`; the adaptations need not be in it.
        """
        stored = self.view.encoded(key, encode)
        if not self.added:
            return stored
        out = list(stored)
        for place, stands_for in self.added:
            out[place : place + stands_for] = [encode(self.messages[place])]
        return out

    @property
    def cache_key(self) -> str:
        """Names the conversation for a provider's cache: the same at each turn, and for each
        repeat of a task."""
        first = self.messages[: self.lead + 1]
        return blake2b(repr(first).encode("utf-8", "replace"), digest_size=16).hexdigest()

    def image_tokens(self, model: str) -> int:
        """An upper bound on the tokens of all images."""
        # One byte for each, so that each message is looked at once, like its encoding.
        counts = self.encoded("images", lambda message: b"i" * images_in(message))
        return tokens_of_images(sum(map(len, counts)), model)


def outgoing(request: ModelRequest) -> Outgoing:
    """What a request sends."""
    pipeline = _pipeline(request.exact, request.adaptations)
    view = request.conversation.view(pipeline, pipeline)
    messages = view.messages()
    lead = next(
        (i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages)
    )
    if not request.ephemeral and not request.prefill:
        return Outgoing(messages, lead, (), view)
    out = list(messages)
    added: list[tuple[int, int]] = []
    if request.ephemeral:
        before = str(out[lead - 1].content) if lead else ""
        place, stands_for = max(lead - 1, 0), min(lead, 1)
        out[place : place + stands_for] = [
            SystemMessage(content=join_texts(before, request.ephemeral))
        ]
        added.append((place, stands_for))
        lead = place + 1
    for message in request.prefill:
        place = lead + len(added) - bool(request.ephemeral)
        out[place:place] = [message]
        added.append((place, 0))
    return Outgoing(out, lead, tuple(added), view)


def cache_marks(messages: Sequence[Message], *, last: int = 3, tools: bool = True) -> list[int]:
    """The places that carry a cache marker (`system_and_3`): the last system message of the head,
    and the `last` messages that have a text.

    Args:
        tools: tool results can carry a marker in this wire.
    """
    lead = 0
    while lead < len(messages) and isinstance(messages[lead], SystemMessage):
        lead += 1
    places: list[int] = []
    for place in range(len(messages) - 1, lead - 1, -1):
        if len(places) == last:
            break
        message = messages[place]
        if message.content and (tools or not isinstance(message, ToolMessage)):
            places.append(place)
    if lead and messages[lead - 1].content:
        places.append(lead - 1)
    return places[::-1]


def without_grammar(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Adaptation `no_grammar`: schemas without the keywords `pattern` and `format`, which some
    engines cannot turn into a grammar. Properties of these names stay."""
    return tuple(_plain(tool) for tool in tools)


def _plain(schema: Any, *, names: bool = False) -> Any:
    """A schema without the keywords; `names`: its keys are names of properties."""
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema if names else {k: v for k, v in schema.items() if not _is_grammar(k, v)}
    return {
        k: _plain(v, names=not names and k in ("properties", "$defs", "definitions"))
        for k, v in kept.items()
    }


def _is_grammar(key: str, value: Any) -> bool:
    return key in ("pattern", "format") and isinstance(value, str)


class _Pipeline:
    """See `Preparation`."""

    def __init__(self, exact: bool, adaptations: frozenset[Adaptation]) -> None:
        asked = tuple(step for name, step in ADAPTATIONS.items() if name in adaptations)
        self._steps = asked if exact else (*REPAIRS, *asked)
        self._exact = exact

    def run(self, messages: list[Message]) -> list[Message]:
        """See `Preparation.run`."""
        for step in self._steps:
            messages = step(messages)
        return messages

    def cut(self, messages: list[Message], start: int) -> int:
        """See `Preparation.cut`."""
        return len(messages) if self._exact else cut(messages, start)


@lru_cache
def _pipeline(exact: bool, adaptations: frozenset[Adaptation]) -> _Pipeline:
    """The same object for the same question: it is the key of a conversation's view."""
    return _Pipeline(exact, adaptations)
