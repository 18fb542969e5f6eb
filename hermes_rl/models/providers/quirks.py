"""What a provider does in its own way; the defaults fit most servers of each dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hermes_rl.models.base import Sampling

NO_LIMIT = (("top_k", -1), ("top_k", 0), ("min_p", 0.0))
"""Sampling parameters at values that cut nothing off."""

NO_FIELD: dict[str, tuple[str, ...]] = {
    "anthropic_messages": ("seed", "min_p"),
    "codex_responses": ("seed", "stop"),
}
"""Dialect -> sampling parameters that its wire has no field for."""

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True)
class Quirks:
    """Ways of one provider, for its dialects."""

    max_tokens_field: MaxTokensField = "max_tokens"
    """The field for the most output tokens in Chat Completions."""
    replay_reasoning: str | None = None
    """The field in which it wants the reasoning of earlier tool turns back; None: not at all."""
    needs_reasoning: bool = False
    """It refuses earlier tool calls without reasoning, also those of another model: a space stands
    for it (an empty text is refused too)."""
    stream_options: bool = True
    """It takes `stream_options.include_usage`."""
    top_k: bool = True
    """It takes `top_k` and `min_p`; else they are not sent where they mean nothing (-1, 0) and
    refused by the server where they do."""
    seed: bool = True
    """It takes `seed`."""
    cache_marks: bool = False
    """In Chat Completions it takes cache markers, for models whose name holds `claude`."""
    cache_key: bool = False
    """It takes `prompt_cache_key`: requests with one key go to one cache."""
    short_ids: bool = False
    """It takes ids of tool calls of at most 40 characters."""
    reports_cost: bool = False
    """Its answers say what they cost, in US dollars (`usage.cost`)."""


def sendable(sampling: Sampling, api_mode: str, quirks: Quirks) -> Sampling:
    """The sampling that is sent to a provider: without what its wire has no field for or the
    provider does not take, and without neutral values of engines' own parameters."""
    unset = list(NO_FIELD.get(api_mode, ()))
    if not quirks.seed:
        unset.append("seed")
    if not quirks.top_k:
        unset += [name for name, value in NO_LIMIT if getattr(sampling, name) == value]
    return sampling.without(unset) if unset else sampling
