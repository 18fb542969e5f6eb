"""What a batch adds up to: counters and fixed-bucket histograms, merged by addition alone.

Prompt caching: an agent's next call repeats the last one's prompt, so about that much of it should
be read from the provider's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import CAUSES
from hermes_rl.trajectory import UNSENT

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


REWARD_EDGES = tuple(i / 10 for i in range(11))
"""Upper ends of the reward buckets; one more bucket takes what lies above."""

_TOKENS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "total_tokens",
    "unknown_calls",
)
TOKEN_COUNTS = ("captured_calls", "followed_calls", "forked_calls", "segments_rejected")
"""Metrics of rollouts with exact tokens (`segments.with_segments`), summed here."""
UNPARSED_COUNT = "suspected_unparsed_calls"
"""Metric of rollouts that is summed too: answers that may hold a call which no server parsed."""

_TIMES = ("queued_s", "sandbox_s", "model_s", "tool_s", "waiting_s", "verify_s", "total_s")


class Summary(msgspec.Struct, kw_only=True):
    """Sums over the root rows of a batch (or of many); sub-agents are inside their root's row."""

    counts: dict[str, int] = {}
    """`trajectories`, `failures`, `end.REASON`, `cause.CAUSE`, `owner.OWNER`, `graded`, `solved`,
    `turns`, `tool_calls`, `calls`, token sums (those of `caching` too), `UNPARSED_COUNT`, rows
    by parameter that an endpoint refused (`UNSENT`), and of exact tokens `TOKEN_COUNTS`,
    `segments`, `trainable_segments`, `trained_tokens`. A key that nothing reported is absent."""
    sums: dict[str, float] = {}
    """`reward`, `cost_usd` (of priced rows), `known_cost_usd` (of priced calls) and seconds by
    part."""
    histograms: dict[str, dict[int, int]] = {}
    """Bucket -> rows. `reward` uses REWARD_EDGES; `turns`, `total_tokens` and `total_s` use powers
    of two: bucket b holds values in [2^(b-1), 2^b), bucket 0 those below 1."""

    def add(self, row: Mapping[str, Any], table: str) -> None:
        """Count one root row."""
        self._count(table, 1)
        self._count(f"end.{row['end_reason']}", 1)
        self._count(f"owner.{row['owner']}", 1)
        if row["cause"] is not None:
            self._count(f"cause.{row['cause']}", 1)
        if table == "trajectories":
            self._add_outcome(row)
        self._count("turns", row["turns"])
        self._count("tool_calls", row["tool_call_count"])
        self._count("calls", len(row["calls"]))
        self._count("unpriced_calls", row["unpriced_calls"])
        for name in _TOKENS:
            self._count(name, row["usage"][name])
        for name, tokens in cache_counts(row["calls"]).items():
            self._count(name, tokens)
        for name in (*TOKEN_COUNTS, UNPARSED_COUNT):
            if name in row["metrics"]:
                self._count(name, int(row["metrics"][name]))
        for name in row["metrics"]:
            if name.startswith(UNSENT):
                self._count(name, 1)
        self._sum("cost_usd", row["cost_usd"])
        self._sum("known_cost_usd", known_cost(row))
        for name in _TIMES:
            self._sum(name, row["timing"][name])

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        """Count one token-exact segment; its tokens only when they may be trained."""
        self._count("segments", 1)
        if segment["trainable"]:
            self._count("trainable_segments", 1)
            self._count("trained_tokens", sum(segment["loss_mask"]))

    def _add_outcome(self, row: Mapping[str, Any]) -> None:
        if row["truncated"]:
            self._count("truncated", 1)
        if row["reward"] is not None:
            self._count("graded", 1)
            self._count("solved", int(row["reward"] >= 1.0))
            self._sum("reward", row["reward"])
            self._bucket("reward", sum(row["reward"] > edge for edge in REWARD_EDGES))
        self._bucket("turns", int(row["turns"]).bit_length())
        self._bucket("total_tokens", int(row["usage"]["total_tokens"] or 0).bit_length())
        self._bucket("total_s", int(row["timing"]["total_s"]).bit_length())

    def merge(self, other: Summary) -> None:
        """Add another summary to this one."""
        for name, count in other.counts.items():
            self._count(name, count)
        for name, value in other.sums.items():
            self._sum(name, value)
        for name, buckets in other.histograms.items():
            for bucket, rows in buckets.items():
                self._bucket(name, bucket, rows)

    def _count(self, name: str, more: int | None) -> None:
        if more is not None:
            self.counts[name] = self.counts.get(name, 0) + more

    def _sum(self, name: str, more: float | None) -> None:
        if more is not None:
            self.sums[name] = self.sums.get(name, 0.0) + more

    def _bucket(self, name: str, bucket: int, rows: int = 1) -> None:
        histogram = self.histograms.setdefault(name, {})
        histogram[bucket] = histogram.get(bucket, 0) + rows


def known_cost(row: Mapping[str, Any]) -> float | None:
    """What is known of a row's cost in US dollars: one call of unknown usage makes `cost_usd` null.
    None when nothing is known."""
    if row["cost_usd"] is not None:
        return float(row["cost_usd"])
    costs = [call["cost_usd"] for call in row["calls"] if call["cost_usd"] is not None]
    return sum(costs) if costs else None


def known_causes(summary: Summary) -> dict[str, int]:
    """Failures by cause, in the order of the error table."""
    return {c: n for c in CAUSES if (n := summary.counts.get(f"cause.{c}", 0))}
