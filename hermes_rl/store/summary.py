"""The summary of a batch: counters and fixed-bucket histograms, which are merged by addition.

Prompt caching: each call of an agent repeats the prompt of the one before, so about that much
should be read from the cache of the provider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.trajectory import UNSENT

LEAST_TOKENS = 1024
"""No provider with documented limits caches shorter prompts."""
NOTABLE_TOKENS = 100_000
"""Cacheable tokens from which a low share is reported."""
LOW = 0.5
"""A share is low below this fraction of the expected one."""


def cache_counts(calls: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Token sums over the calls of one row whose usage reports cache reads.

    `cache_input_tokens`: their input. `cacheable_tokens`: the part of it that the same agent sent
    to the same model in the call before. Empty when no call reports cache reads."""
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
    """The cache entry of stats.json: shares of the input of calls that report cache reads."""
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


REWARD_EDGES = tuple(i / 10 for i in range(11))
"""Upper ends of the reward buckets; one more bucket contains higher rewards."""

TOKENS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "total_tokens",
)
UNPARSED_COUNT = "suspected_unparsed_calls"
"""Metric of rollouts: answers that may contain an unparsed tool call."""
_SUMMED_METRICS = (
    "captured_calls",
    "followed_calls",
    "forked_calls",
    "segments_rejected",
    UNPARSED_COUNT,
)
"""The first four are of rollouts with exact tokens (`segments.with_segments`)."""


class Summary(msgspec.Struct, kw_only=True):
    """Sums over the root rows of a batch (or of many); sub-agents are inside their root's row."""

    counts: dict[str, int] = {}
    """`trajectories`, `failures`, `end.REASON`, `cause.CAUSE`, `owner.OWNER`, `graded`, `solved`,
    `turns`, `tool_calls`, `calls`, token sums (with `cache_counts`), metrics that are summed, rows
    by parameter that an endpoint refused (`UNSENT`), `segments`, `trainable_segments` and
    `trained_tokens`. A key that nothing reported is absent."""
    sums: dict[str, float] = {}
    """`reward`, `cost_usd` (of priced rows), `known_cost_usd` (of priced calls) and seconds by
    part."""
    histograms: dict[str, dict[int, int]] = {}
    """Bucket -> rows. `reward` uses REWARD_EDGES; `turns`, `total_tokens` and `total_s` use powers
    of two: bucket b holds values in [2^(b-1), 2^b), bucket 0 those below 1."""

    def add(self, row: Mapping[str, Any], table: str) -> None:
        """Count one root row."""
        metrics = row["metrics"]
        counts: dict[str, int | None] = {
            table: 1,
            f"end.{row['end_reason']}": 1,
            f"owner.{row['owner']}": 1,
            f"cause.{row['cause']}": None if row["cause"] is None else 1,
            "turns": row["turns"],
            "tool_calls": row["tool_call_count"],
            "calls": len(row["calls"]),
            "unpriced_calls": row["unpriced_calls"],
            "unknown_calls": row["usage"]["unknown_calls"],
            **{name: row["usage"][name] for name in TOKENS},
            **cache_counts(row["calls"]),
            **{name: int(metrics[name]) for name in _SUMMED_METRICS if name in metrics},
            **{name: 1 for name in metrics if name.startswith(UNSENT)},
        }
        costs = {"cost_usd": row["cost_usd"], "known_cost_usd": known_cost(row)}
        _add(self.counts, counts)
        _add(self.sums, {**costs, **row["timing"]})
        if table == "trajectories":
            self._add_outcome(row)

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        """Count one token-exact segment; its tokens only when they may be trained."""
        _add(self.counts, {"segments": 1})
        if segment["trainable"]:
            tokens = sum(segment["loss_mask"])
            _add(self.counts, {"trainable_segments": 1, "trained_tokens": tokens})

    def _add_outcome(self, row: Mapping[str, Any]) -> None:
        buckets = {
            "turns": int(row["turns"]).bit_length(),
            "total_tokens": int(row["usage"]["total_tokens"] or 0).bit_length(),
            "total_s": int(row["timing"]["total_s"]).bit_length(),
        }
        if row["truncated"]:
            _add(self.counts, {"truncated": 1})
        if (reward := row["reward"]) is not None:
            _add(self.counts, {"graded": 1, "solved": int(reward >= 1.0)})
            _add(self.sums, {"reward": reward})
            buckets["reward"] = sum(reward > edge for edge in REWARD_EDGES)
        for name, bucket in buckets.items():
            _add(self.histograms.setdefault(name, {}), {bucket: 1})

    def merge(self, other: Summary) -> None:
        """Add another summary to this one."""
        _add(self.counts, other.counts)
        _add(self.sums, other.sums)
        for name, buckets in other.histograms.items():
            _add(self.histograms.setdefault(name, {}), buckets)


def _add(total: dict[Any, Any], more: Mapping[Any, float | None]) -> None:
    """Add numbers by name; None is not reported."""
    for name, number in more.items():
        if number is not None:
            total[name] = total.get(name, 0) + number


def known_cost(row: Mapping[str, Any]) -> float | None:
    """The known cost of a row in US dollars, although one call of unknown usage makes `cost_usd`
    null; None when no cost is known."""
    if row["cost_usd"] is not None:
        return float(row["cost_usd"])
    costs = [call["cost_usd"] for call in row["calls"] or () if call["cost_usd"] is not None]
    return sum(costs) if costs else None
