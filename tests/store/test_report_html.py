"""report.html shows the figures of stats.json, is self-contained and well formed for every run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import CAUSES, ENDINGS
from hermes_rl.store import Ledger, Summary, compute_stats, page

_VOID = {"meta"}
few = st.integers(1, 10**9)


class Read(HTMLParser):
    """Texts of a page; refuses tags that do not close each other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.fetched: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.fetched += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def stats_of(summary: Summary, planned: int | None = None) -> dict[str, Any]:
    return compute_stats(summary, Ledger(), {"units": planned})


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    counts = {f"end.{name}": draw(few) for name in draw(st.sets(st.sampled_from(list(ENDINGS))))}
    counts |= {f"cause.{name}": draw(few) for name in draw(st.sets(st.sampled_from(list(CAUSES))))}
    names = ("graded", "solved", "turns", "tool_calls", "calls", "unknown_calls", "input_tokens")
    counts |= {name: draw(few) for name in draw(st.sets(st.sampled_from(names)))}
    rewards = st.dictionaries(st.integers(0, 11), few)
    sizes = st.dictionaries(st.integers(0, 40), few)
    return Summary(
        counts=counts,
        sums={"model_s": draw(st.floats(0, 1e9)), "reward": draw(st.floats(0, 1e6))},
        histograms={"reward": draw(rewards), "turns": draw(sizes), "total_s": draw(sizes)},
    )


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), summaries())
def test_report_html_shows_every_count(name: str, summary: Summary) -> None:
    stats = stats_of(summary)
    read = Read(page(name, stats))
    assert "".join(read.texts.get("h1", [])).strip() == name.strip()
    assert read.fetched == []
    labels, cells = read.texts.get("th", []), read.texts.get("td", [])
    shown = list(zip(labels, cells, strict=True))
    for count in (stats["ends"], stats["causes"]):
        assert {(label, f"{n:,}") for label, n in count.items()} <= set(shown)
    for number in stats["histograms"].get("turns", {}).values():
        assert f"{number:,}" in cells
    assert f"{stats['turns']:,}" in read.texts["dd"]


def test_figures_of_report_html() -> None:
    counts = {"graded": 4, "solved": 3, "calls": 9, "unknown_calls": 2, "input_tokens": 12345}
    summary = Summary(
        counts={**counts, "unpriced_calls": 1},
        sums={"reward": 3.5, "known_cost_usd": 1.25},
        histograms={"reward": {5: 1, 10: 3}, "turns": {0: 1, 3: 2}},
    )
    read = Read(page("run", stats_of(summary, planned=6)))
    figures = dict(zip(read.texts["dt"], read.texts["dd"], strict=True))
    assert figures["solved (reward 1)"] == "3 of 4"
    assert figures["mean reward"] == "0.875"
    assert figures["tokens in"] == "12,345"
    assert figures["tokens out"] == "unknown"
    assert figures["of unknown usage"] == "2"
    assert figures["cost"] == "$1.25 + 1 call unpriced"
    assert read.texts["p"] == ["0 of 6 units done, 6 open. All starts of this run together."]
    assert list(zip(read.texts["th"], read.texts["td"], strict=True)) == [
        *(("to 0.5", "1"), ("to 0.6", "0"), ("to 0.7", "0"), ("to 0.8", "0"), ("to 0.9", "0")),
        *(("to 1", "3"), ("0", "1"), ("1", "0"), ("2 to 3", "0"), ("4 to 7", "2")),
    ]


def test_a_run_without_verifiers_is_not_graded() -> None:
    text = page("run", stats_of(Summary(counts={"graded": 0, "solved": 0})))
    assert "<dt>solved (reward 1)</dt><dd>not graded</dd>" in text


@pytest.mark.parametrize(
    ("counts", "sums", "cost"),
    [
        ({"calls": 2, "unpriced_calls": 2}, {}, "unpriced"),
        ({"calls": 2}, {"known_cost_usd": 0.0}, "$0.00"),
        ({"calls": 2, "unpriced_calls": 2}, {"known_cost_usd": 0.0}, "unpriced"),
    ],
)
def test_an_unknown_cost_is_not_zero(counts: Any, sums: Any, cost: str) -> None:
    text = page("run", stats_of(Summary(counts=counts, sums=sums)))
    assert re.search(r"<dt>cost</dt><dd>([^<]*)</dd>", text)[1] == cost  # type: ignore[index]
