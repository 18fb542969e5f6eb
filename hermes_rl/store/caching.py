"""How much of the input the provider's prompt cache could have served, and did.

An agent's next call repeats the last one's prompt, so about that much of it should be read from the
cache. Providers keep prefixes from 1,024 tokens on; shorter prompts are not expected to hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LEAST_TOKENS = 1024
"""Prompts shorter than this are not cached by any provider that says so."""
NOTABLE_TOKENS = 100_000
"""From so many cacheable tokens on, a low share is worth a line."""
LOW = 0.5
"""Below this part of what was to be expected, a share is low."""


def cache_counts(calls: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Token sums over the calls of one row whose usage reports cache reads.

    `cache_input_tokens`: their input. `cacheable_tokens`: what of it the same agent had sent to the
    same model the call before. Empty when no call reports them.
    """
    known: dict[tuple[Any, ...], int] = {}
    input_tokens = cacheable = reported = 0
    for call in calls:
        sent, read = call["input_tokens"], call["cache_read_tokens"]
        if sent is None:
            continue
        context = (call["agent"], call["purpose"], call["model"])
        before = known.get(context, 0)
        known[context] = sent
        if read is not None:
            reported += 1
            input_tokens += sent
            cacheable += min(before, sent) if min(before, sent) >= LEAST_TOKENS else 0
    if not reported:
        return {}
    return {"cache_input_tokens": input_tokens, "cacheable_tokens": cacheable}


def cache_shares(counts: Mapping[str, int]) -> dict[str, Any]:
    """What stats.json says of the cache: shares of the input of calls that report cache reads."""
    input_tokens = counts.get("cache_input_tokens") or 0
    if not input_tokens:
        return {"read_share": None, "expected_share": None, "low": False}
    read = counts.get("cache_read_tokens", 0) / input_tokens
    cacheable = counts.get("cacheable_tokens", 0)
    expected = cacheable / input_tokens
    return {
        "read_share": round(read, 4),
        "expected_share": round(expected, 4),
        "low": cacheable >= NOTABLE_TOKENS and read < LOW * expected,
    }
