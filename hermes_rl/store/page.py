"""report.html: stats.json as one page for people. No script, nothing that is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from hermes_rl.usage import cost_text

Bar = tuple[str, float, str]
"""Label, value, and the value as text."""

_STYLE = """\
:root { color-scheme: light dark; --ink: #1c1f24; --soft: #5d6570; --bar: #3565b5; --line: #d9dde3;
  --back: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3ae; --bar: #7ba4ea; --line: #363c45; --back: #15181c } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 0 0 .5rem }
p { color: var(--soft); margin: 0 0 1.5rem }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem;
  margin: 0 0 2rem }
dt { color: var(--soft) }
dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums }
main { display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)) }
table { border-collapse: collapse; width: 100% }
th { font-weight: normal; text-align: left; white-space: nowrap; padding: .15rem .8rem .15rem 0 }
td { padding: .15rem 0; font-variant-numeric: tabular-nums }
td:nth-child(2) { width: 60%; border-left: 1px solid var(--line) }
td:last-child { text-align: right; padding-left: .8rem; white-space: nowrap }
td div { background: var(--bar); height: .8rem }
"""

_PARTS = {
    "model_s": "model",
    "tool_s": "tools",
    "sandbox_s": "sandbox",
    "verify_s": "verifier",
    "waiting_s": "waiting",
}
"""Where a rollout's seconds go; `queued_s` is before it begins."""


def page(name: str, stats: Mapping[str, Any]) -> str:
    """The page.

    Args:
        name: the run directory's.
        stats: as `stats.compute_stats` makes them.
    """
    histograms = stats["histograms"]
    sections = [
        ("Reward", _rewards(histograms)),
        ("How rollouts ended", _counted(stats["ends"])),
        ("Failed attempts by cause", _counted(stats["causes"])),
        ("Turns of a rollout", _doubling(histograms.get("turns", {}))),
        ("Tokens of a rollout", _doubling(histograms.get("total_tokens", {}))),
        ("Seconds of a rollout", _doubling(histograms.get("total_s", {}))),
        ("Where the time went", _times(stats["seconds"])),
    ]
    shown = "\n".join(_section(title, bars) for title, bars in sections if bars)
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in _figures(stats)
    )
    return document(name, _headline(stats), f"<dl>{figures}</dl>\n<main>\n{shown}\n</main>")


def document(title: str, lead: str, body: str, style: str = "") -> str:
    """A page that fetches nothing.

    Args:
        title: text, as `lead` below it.
        body: HTML.
        style: CSS beside that of all pages.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n{body}\n</body>\n</html>\n"
    )


def _headline(stats: Mapping[str, Any]) -> str:
    units, planned = stats["units"], stats["plan"].get("units")
    whole = "" if planned is None else f" of {planned:,}"
    more = "".join(
        f", {units[key]:,} {word}"
        for key, word in (("given_up", "given up"), ("open", "open"))
        if units[key]
    )
    return f"{units['done']:,}{whole} units done{more}. All starts of this run together."


def _figures(stats: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
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


def _rewards(histograms: Mapping[str, Any]) -> list[Bar]:
    """Every bucket between the least and the greatest, also where nothing is in it."""
    ends = histograms["reward_upper_ends"]
    labels = [f"{ends[0]:g} or less", *(f"to {end:g}" for end in ends[1:]), f"over {ends[-1]:g}"]
    return _filled(histograms.get("reward", {}), lambda bucket: labels[bucket])


def _doubling(buckets: Mapping[str, int]) -> list[Bar]:
    """Bucket b holds values from 2^(b-1) to below 2^b; bucket 0 those below 1."""
    return _filled(buckets, _range)


def _range(bucket: int) -> str:
    low, high = 1 << bucket >> 1, (1 << bucket) - 1
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _filled(buckets: Mapping[str, int], label: Callable[[int], str]) -> list[Bar]:
    counts = {int(bucket): n for bucket, n in buckets.items()}
    if not counts:
        return []
    every = range(min(counts), max(counts) + 1)
    return [(label(b), counts.get(b, 0), f"{counts.get(b, 0):,}") for b in every]


def _times(seconds: Mapping[str, float]) -> list[Bar]:
    return [
        (label, seconds[name], f"{seconds[name]:,.1f} s")
        for name, label in _PARTS.items()
        if seconds.get(name)
    ]
