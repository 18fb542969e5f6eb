"""stats.json and report.html: pure functions of the commit summaries, the ledger and the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from hermes_rl.errors import CAUSES
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.rundir import RunDir
from hermes_rl.store.summary import (
    REWARD_EDGES,
    TOKENS,
    UNPARSED_COUNT,
    Summary,
    cache_shares,
)
from hermes_rl.trajectory import UNSENT
from hermes_rl.usage import cost_text

Bar = tuple[str, float, str]
"""Label, value, and the value as text."""

_PARTS = {
    "model_s": "model",
    "tool_s": "tools",
    "sandbox_s": "sandbox",
    "verify_s": "verifier",
    "waiting_s": "waiting",
}
"""Parts of the time of a rollout; `queued_s` is before its start."""


def page(name: str, stats: Mapping[str, Any]) -> str:
    """Render report.html.

    Args:
        name: of the run directory.
        stats: from `compute_stats`.
    """
    histograms, seconds = stats["histograms"], stats["seconds"]
    ends = [f"to {end:g}" for end in histograms["reward_upper_ends"]]
    rewards = [ends[0].removeprefix("to ") + " or less", *ends[1:], f"over {ends[-1][3:]}"]
    times = {label: seconds[key] for key, label in _PARTS.items() if seconds.get(key)}
    sections: list[tuple[str, list[Bar]]] = [
        ("Reward", _buckets(histograms.get("reward", {}), rewards.__getitem__)),
        ("How rollouts ended", _counted(stats["ends"])),
        ("Failed attempts by cause", _counted(stats["causes"])),
        ("Turns of a rollout", _buckets(histograms.get("turns", {}), _range)),
        ("Tokens of a rollout", _buckets(histograms.get("total_tokens", {}), _range)),
        ("Seconds of a rollout", _buckets(histograms.get("total_s", {}), _range)),
        ("Where the time went", [(label, s, f"{s:,.1f} s") for label, s in times.items()]),
    ]
    shown = "\n".join(_section(title, bars) for title, bars in sections if bars)
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in run_figures(stats)
    )
    return document(name, _headline(stats), f"<dl>{figures}</dl>\n<main>\n{shown}\n</main>")


def document(title: str, lead: str, body: str, style: str = "") -> str:
    """Render an HTML page without external references.

    Args:
        title, lead: plain text.
        body: HTML.
        style: additional CSS.
    """
    shared = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{shared}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n{body}\n</body>\n</html>\n"
    )


def _headline(stats: Mapping[str, Any]) -> str:
    units, planned = stats["units"], stats["plan"].get("units")
    whole = "" if planned is None else f" of {planned:,}"
    more = "".join(
        f", {units[key]:,} {label}"
        for key, label in (("given_up", "given up"), ("open", "open"))
        if units[key]
    )
    return f"{units['done']:,}{whole} units done{more}. All starts of this run together."


def run_figures(stats: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The main numbers of a run as names and texts."""
    reward, tokens, calls = stats["reward"], stats["tokens"], stats["calls"]
    graded = reward["graded"]
    yield "solved (reward 1)", f"{reward['solved']:,} of {graded:,}" if graded else "not graded"
    yield "mean reward", "none" if reward["mean"] is None else f"{reward['mean']:.3f}"
    yield "turns", f"{stats['turns']:,}"
    yield "tool calls", f"{stats['tool_calls']:,}"
    yield "model calls", f"{calls['total']:,}"
    if calls["unknown"]:
        yield "of unknown usage", f"{calls['unknown']:,}"
    yield "tokens in", _known(tokens["input_tokens"])
    yield "tokens out", _known(tokens["output_tokens"])
    yield "cost", cost_text(stats["known_cost_usd"], calls["unpriced"])
    exact = stats["exact_tokens"]
    if exact is not None:
        yield "tokens to train", f"{exact['trained_tokens']:,}"
        yield "segments", f"{exact['trainable']:,} of {exact['segments']:,}"


def _known(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _section(title: str, bars: list[Bar]) -> str:
    most = max(value for _, value, _ in bars) or 1
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        f'<td><div style="width:{100 * value / most:.1f}%"></div></td><td>{escape(text)}</td></tr>'
        for label, value, text in bars
    )
    return f"<section><h2>{escape(title)}</h2>\n<table>\n{rows}\n</table></section>"


def _counted(counts: Mapping[str, int]) -> list[Bar]:
    """The most frequent first."""
    return [(name, n, f"{n:,}") for name, n in sorted(counts.items(), key=lambda one: -one[1])]


def _range(bucket: int) -> str:
    """Bucket b holds values from 2^(b-1) to below 2^b; bucket 0 those below 1."""
    low, high = 1 << bucket >> 1, (1 << bucket) - 1
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _buckets(histogram: Mapping[str, int], label: Callable[[int], str]) -> list[Bar]:
    """All buckets between the lowest and the highest, including empty ones."""
    counts = {int(bucket): n for bucket, n in histogram.items()}
    every = range(min(counts), max(counts) + 1) if counts else range(0)
    return [(label(b), counts.get(b, 0), f"{counts.get(b, 0):,}") for b in every]


MANY_FORKS = 0.05
"""A higher share of forks means that histories drift: shared prefixes are computed and stored
repeatedly."""

_DIGITS = 9
"""Decimals of float sums, which hide the order of batches."""


def compute_stats(summary: Summary, ledger: Ledger, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics of a run.

    Args:
        summary: of all commits.
        ledger: of the same commits.
        plan: `units` (planned, None when unknown) and further entries of the file.
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
        "causes": {c: n for c in CAUSES if (n := counts.get(f"cause.{c}", 0))},
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
        "tokens": {name: counts.get(name) for name in TOKENS},
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
    """Totals of table segments; None when no call returned ids. `fork_rate` is the share of calls
    that should have extended the history before them and started a branch instead."""
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
