"""stats.json and report.html: pure functions of the commit summaries, the ledger and the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hermes_rl.store.caching import cache_shares
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.page import page
from hermes_rl.store.rundir import RunDir
from hermes_rl.store.summary import REWARD_EDGES, UNPARSED_COUNT, Summary, known_causes
from hermes_rl.trajectory import UNSENT

_TOKENS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "total_tokens",
)
MANY_FORKS = 0.05
"""A higher share of forks says that histories drift: their shared beginnings are computed and
stored again with each."""

_DIGITS = 9
"""Sums of floats are rounded to this, so that the order of the batches does not show."""


def compute_stats(summary: Summary, ledger: Ledger, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics of a run.

    Args:
        summary: of all commits.
        ledger: of the same commits.
        plan: `units` (planned, None when unknown) and whatever else should stand in the file.
    """
    counts, sums = summary.counts, summary.sums
    graded = counts.get("graded", 0)
    reward = sums.get("reward", 0.0)
    planned = plan.get("units")
    return {
        "plan": dict(plan),
        "units": {
            "done": ledger.done,
            "given_up": ledger.given_up,
            "open": None if planned is None else max(0, planned - ledger.done - ledger.given_up),
        },
        "attempts": {
            "finished": counts.get("trajectories", 0),
            "failed": counts.get("failures", 0),
            "truncated": counts.get("truncated", 0),
        },
        "ends": _prefixed(counts, "end."),
        "causes": known_causes(summary),
        "owners": _prefixed(counts, "owner."),
        "reward": {
            "graded": graded,
            "solved": counts.get("solved", 0),
            "mean": round(reward / graded, _DIGITS) if graded else None,
        },
        "turns": counts.get("turns", 0),
        "tool_calls": counts.get("tool_calls", 0),
        "calls": {
            "total": counts.get("calls", 0),
            "unknown": counts.get("unknown_calls", 0),
            "unpriced": counts.get("unpriced_calls", 0),
            "suspected_unparsed": counts.get(UNPARSED_COUNT, 0),
            "unsent": _prefixed(counts, UNSENT),
        },
        "tokens": {name: counts.get(name) for name in _TOKENS},
        "cache": cache_shares(counts),
        "exact_tokens": _exact_tokens(counts),
        "cost_usd": _cost(summary),
        "known_cost_usd": round(sums["known_cost_usd"], _DIGITS)
        if "known_cost_usd" in sums
        else None,
        "seconds": {n: round(v, 3) for n, v in sorted(sums.items()) if n.endswith("_s")},
        "histograms": {
            "reward_upper_ends": list(REWARD_EDGES),
            **{
                name: {str(b): n for b, n in sorted(buckets.items())}
                for name, buckets in sorted(summary.histograms.items())
            },
        },
    }


def write_stats(run_dir: RunDir, ledger: Ledger, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write stats.json and report.html from a ledger that was loaded from all commits. Blocking."""
    stats = compute_stats(ledger.summary, ledger, plan)
    text = json.dumps(stats, indent=2, ensure_ascii=False) + "\n"
    run_dir.storage.put("stats.json", text.encode())
    name = run_dir.path.absolute().name
    run_dir.storage.put("report.html", page(name, stats).encode("utf-8", "replace"))
    return stats


def _exact_tokens(counts: Mapping[str, int]) -> dict[str, Any] | None:
    """Table segments in sum; None when no call brought ids. `fork_rate` is the share of calls that
    an exact history would have made extensions of the one before, and that began a branch."""
    if "captured_calls" not in counts:
        return None
    followed, forked = counts.get("followed_calls", 0), counts.get("forked_calls", 0)
    rate = round(forked / followed, _DIGITS) if followed else None
    return {
        "calls": counts["captured_calls"],
        "segments": counts.get("segments", 0),
        "trainable": counts.get("trainable_segments", 0),
        "trained_tokens": counts.get("trained_tokens", 0),
        "followed_calls": followed,
        "forked_calls": forked,
        "fork_rate": rate,
        "many_forks": rate is not None and rate > MANY_FORKS,
        "rejected": counts.get("segments_rejected", 0),
    }


def _cost(summary: Summary) -> float | None:
    """The sum of costs; None while any call is unpriced."""
    if summary.counts.get("unpriced_calls") or "cost_usd" not in summary.sums:
        return None
    return round(summary.sums["cost_usd"], _DIGITS)


def _prefixed(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    found = {k.removeprefix(prefix): n for k, n in counts.items() if k.startswith(prefix)}
    return dict(sorted(found.items()))
