"""The share of the input that came from the provider's prompt cache, and what was expected."""

from typing import Any

import pytest

from batch_runner import Report
from hermes_rl.store import Summary, cache_counts, cache_shares


def call(sent: int | None, read: int | None, **fields: Any) -> dict[str, Any]:
    known = {"agent": "main", "purpose": "agent", "model": "m"}
    return {**known, "input_tokens": sent, "cache_read_tokens": read, **fields}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], {}),
        ([call(5000, None), call(6000, None)], {}),
        ([call(5000, 0), call(6000, 4900)],
         {"cache_input_tokens": 11_000, "cacheable_tokens": 5000}),
        # Too short to be cached
        ([call(900, 0), call(1000, 0)], {"cache_input_tokens": 1900, "cacheable_tokens": 0}),
        # A failed call says nothing and breaks nothing
        ([call(5000, 0), call(None, None), call(6000, 5000)],
         {"cache_input_tokens": 11_000, "cacheable_tokens": 5000}),
        # Another agent, another model: another prefix
        ([call(5000, 0), call(6000, 0, agent="child"), call(7000, 0, model="n")],
         {"cache_input_tokens": 18_000, "cacheable_tokens": 0}),
        # A prompt that shrank
        ([call(9000, 0), call(3000, 2000)],
         {"cache_input_tokens": 12_000, "cacheable_tokens": 3000}),
    ],
)  # fmt: skip
def test_cacheable_tokens_of_calls(calls: list[dict[str, Any]], expected: dict[str, int]) -> None:
    assert cache_counts(calls) == expected


def shares(read: int, sent: int, cacheable: int) -> dict[str, Any]:
    summary = Summary()
    for half in (read // 2, read - read // 2):
        summary.merge(Summary(counts={"cache_read_tokens": half}))
    summary.merge(Summary(counts={"cache_input_tokens": sent, "cacheable_tokens": cacheable}))
    return cache_shares(summary.counts)


def test_a_low_cache_share_is_reported_from_a_token_threshold() -> None:
    assert shares(80, 100, 90) == {"read_share": 0.8, "expected_share": 0.9, "low": False}
    assert shares(0, 100, 90)["low"] is False  # too little to matter
    assert shares(100_000, 1_000_000, 900_000)["low"] is True
    assert shares(700_000, 1_000_000, 900_000)["low"] is False
    assert cache_shares({}) == {"read_share": None, "expected_share": None, "low": False}


@pytest.mark.parametrize(
    ("cache", "expected_text"),
    [
        ({"read_share": 0.125, "expected_share": 0.9, "low": True}, "12% of the input"),
        ({"read_share": 0.8, "expected_share": 0.9, "low": False}, None),
        ({"read_share": None, "expected_share": None, "low": False}, None),
        (None, None),
    ],
)
def test_the_report_warns_of_a_low_cache_share(
    cache: dict[str, Any] | None, expected_text: str | None
) -> None:
    report = Report(
        path="runs/x", run_id="r", units=1, done=1, solved=1, graded=1, mean_reward=1.0,
        given_up=0, open=0, left=0, bad_rows=0, failed_attempts=0, causes={}, input_tokens=1_000,
        output_tokens=10, unknown_calls=0, cost_usd=1.0, unpriced_calls=0, seconds=1.0, resume="",
        stats={} if cache is None else {"cache": cache},
    )  # fmt: skip
    lines = [line for line in report.lines() if line.startswith("prompt cache")]
    assert bool(lines) == bool(expected_text)
    assert (expected_text or "") in "".join(lines)
    share = cache and cache["read_share"]
    assert (f"1,000 in ({share:.0%} cached)" if share else "1,000 in, 10 out") in "\n".join(
        report.lines()
    )
