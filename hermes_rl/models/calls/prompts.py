"""How many tokens a prompt may have: its bytes, less what is known of its beginning.

A prompt has no more tokens than bytes, but four times fewer as a rule. What a server said of one
prompt bounds the beginning that another one shares with it: the same conversation some messages
ago, or another conversation with the same system prompt and tools. Only the rest counts by bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from hermes_rl.messages import SystemMessage
from hermes_rl.models.base import Conversation, ModelClient, ModelRequest

_KEY = "prompt tokens"

Heads = MutableMapping[Hashable, int]
"""System prompt and tools -> the tokens of the shortest prompt that began with them."""


class _Known(NamedTuple):
    """A beginning: its bound in bytes, and its tokens at most."""

    bound: int
    tokens: int


def prompt_bound(client: ModelClient, request: ModelRequest, heads: Heads) -> int:
    """An upper bound on the tokens of a request's prompt."""
    bound = client.bound(request)
    known = request.conversation.attachments.get((_KEY, request.model))
    if known is None:
        own, key = _head(client, request)
        known = _Known(own, heads[key]) if key in heads else None
    if known is None or bound < known.bound:
        return bound
    return min(bound, int(known.tokens + bound - known.bound))


def learn(client: ModelClient, request: ModelRequest, tokens: int | None, heads: Heads) -> None:
    """Keep what a server said of a prompt."""
    if not tokens or request.prompt_ids is not None:
        return
    kept = request.conversation.attachments
    if (_KEY, request.model) not in kept:
        _, key = _head(client, request)
        heads[key] = min(tokens, heads.get(key, tokens))
    kept[_KEY, request.model] = _Known(client.bound(request), tokens)


def _head(client: ModelClient, request: ModelRequest) -> tuple[int, Hashable]:
    """The bound of what comes before the first message of a conversation, and what names it."""
    system = [*takewhile(lambda m: isinstance(m, SystemMessage), request.conversation)]
    bound = client.bound(replace(request, conversation=Conversation(system), prefill=()))
    return bound, (request.model, bound, tuple(str(message.content) for message in system))
