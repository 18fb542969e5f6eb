"""Whether a branch may be trained on, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from hermes_rl.events import TokensAdded
from hermes_rl.models.base import LogprobsKind
from hermes_rl.models.tokens.engines.base import LOWEST
from hermes_rl.segments.calls import CallFacts

Exclusion = Literal[
    "failed",
    "discarded",
    "aborted",
    "summary",
    "retokenized",
    "mixed_models",
    "no_logprobs",
    "bad_logprobs",
    "unknown_logprobs",
    "constrained_logprobs",
    "raw_logprobs",
]
"""Why a segment is not trainable: its attempt failed; its answer was thrown away, given up by the
engine, or a summary for a new context; ids come from a text that was tokenised again; its calls
went to several models, or were tokenised in several ways; logprobs are absent, or none (over 0, not
finite); nobody knows what they are of; a grammar cut what they are of; they are the model's own,
and sampling was not plainly from that (temperature 1, and neither filters nor penalties)."""

NOISE = 1e-4
"""A logprob may be above 0 by this much: float32 sums over a large vocabulary are no more exact."""


def sound(values: Sequence[float]) -> list[float | None]:
    """Logprobs as they are stored; None for what is none. vLLM writes `LOWEST`, and SGLang the
    lowest float, in the place of minus infinity."""
    if all(LOWEST < v <= 0.0 for v in values):
        return list(values)
    return [min(v, 0.0) if LOWEST < v <= NOISE else None for v in values]


def exclusion(
    ok: bool, own: Sequence[CallFacts], path: Sequence[tuple[CallFacts, TokensAdded]]
) -> Exclusion | None:
    """Why a branch is not trainable; None when it is.

    Args:
        ok: the rollout has a row in `trajectories`.
        own: the branch's own calls.
        path: all calls with answers on its path, and what they added.
    """
    if not ok:
        return "failed"
    aside = next((call.aside for call in own if call.aside is not None), None)
    if aside is not None:
        return _ASIDE[aside]
    if any(added.source == "retokenized" for _, added in path):
        return "retokenized"
    makers = {(call.model, a.tokenizer_hash) for call, a in path}
    if len(makers) > 1:
        return "mixed_models"
    found: Exclusion | None = next(filter(None, (_logprobs(added) for _, added in path)), None)
    if found is None and len({added.logprobs_kind for _, added in path}) > 1:
        return "unknown_logprobs"
    return found


_ASIDE: dict[str, Exclusion] = {
    "discarded": "discarded",
    "aborted": "aborted",
    "summary": "summary",
}

_OF_KIND: dict[LogprobsKind, Exclusion] = {
    "unknown": "unknown_logprobs",
    "constrained": "constrained_logprobs",
}


def _logprobs(added: TokensAdded) -> Exclusion | None:
    if added.logprobs is None:
        return "no_logprobs"
    if added.logprobs_kind == "sampling":
        return None
    if added.logprobs_kind == "raw":
        return None if plainly_sampled(added) else "raw_logprobs"
    return _OF_KIND[added.logprobs_kind]


def plainly_sampled(added: TokensAdded) -> bool:
    """Whether the model's own distribution was sampled from. All of it must have been sent: servers
    fill in what a model's files recommend, or what they are used to (llama.cpp: min-p 0.05)."""
    return (
        added.temperature == 1.0
        and added.top_p == 1.0
        and added.top_k in (-1, 0)
        and added.min_p == 0
        and not added.shaped_by
    )


def common(values: Iterable[float | None]) -> float | None:
    """The one value that all have; None when they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
