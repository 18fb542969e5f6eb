"""The fake server's limits, outages and prices."""

import asyncio
import time
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.models import Endpoint, connect
from hermes_rl.testing import Conditions, FakeConfig, FakeServer, Limits, Price, RateLimits

MODES = ["chat_completions", "anthropic_messages", "codex_responses"]


@settings(deadline=None, max_examples=50)
@given(
    st.floats(1, 600),
    st.floats(1, 60),
    st.lists(st.floats(0.001, 2), min_size=1, max_size=200),
)
def test_fake_limits_admit_at_most_bucket_plus_refill(rate, burst_s, gaps):
    limits, now, passed = Limits(RateLimits(requests=rate, burst_s=burst_s)), 0.0, 0
    for gap in gaps:
        now += gap
        verdict = limits.admit("a", {"requests": 1}, now)
        passed += verdict.refused is None
        if verdict.refused is not None:
            now += verdict.wait_s
            passed += 1
            assert limits.admit("a", {"requests": 1}, now).refused is None
    assert passed <= max(1.0, rate * burst_s / 60) + rate * now / 60 + 1


def test_accounts_have_separate_buckets_that_refill():
    limits = Limits(RateLimits(requests=60, burst_s=1))
    assert limits.admit("a", {"requests": 1}, 0).refused is None
    refused = limits.admit("a", {"requests": 1}, 0.25)
    assert refused.refused == "requests"
    assert refused.wait_s == pytest.approx(0.75)
    assert limits.admit("b", {"requests": 1}, 0.25).refused is None
    assert limits.admit("a", {"requests": 1}, 1.0).refused is None


def test_quota_factor_changes_the_rate():
    limits = Limits(RateLimits(requests=60, burst_s=1))

    def passed(since):
        steps = (since + i / 100 for i in range(1000))
        return sum(limits.admit("a", {"requests": 1}, t).refused is None for t in steps)

    assert passed(0) == pytest.approx(10, abs=1)
    limits.factor = 4.0
    assert passed(10) == pytest.approx(40, abs=4)


async def ask(kit, server, mode, prompt="hi", key="sk-1234567", **fields):
    client = connect(Endpoint(server.base_url, api_key=key, api_mode=mode))
    try:
        return await client.complete(kit.request(prompt, "noop", **fields))
    finally:
        await client.aclose()


@pytest.mark.parametrize("mode", MODES)
async def test_limits_are_reported_and_enforced(kit, mode):
    rate = RateLimits(requests=2, input_tokens=1000, output_tokens=1000)
    async with FakeServer(FakeConfig(rate=rate)) as server:
        first = await ask(kit, server, mode)
        await ask(kit, server, mode)
        with pytest.raises(e.RateLimited) as caught:
            await ask(kit, server, mode)
        await ask(kit, server, mode, key="sk-7654321")
        *_, refused, _ = server.entries
    assert (refused.outcome, refused.fault, refused.api_mode) == ("refused", "rate_limit", mode)
    assert 20 < caught.value.retry_after_s <= 30
    reported = first.rate_limit
    if mode != "anthropic_messages":
        assert reported["x-ratelimit-limit-requests"] == "2"
        assert reported["x-ratelimit-remaining-requests"] == "1"
        assert reported["x-ratelimit-reset-requests"] == "30s"
        assert reported["x-ratelimit-remaining-tokens"] == "996"
    else:
        assert reported["anthropic-ratelimit-requests-limit"] == "2"
        assert reported["anthropic-ratelimit-requests-remaining"] == "1"
        assert reported["anthropic-ratelimit-input-tokens-remaining"] == "996"
        assert reported["anthropic-ratelimit-output-tokens-remaining"] == "998"
        assert reported["anthropic-ratelimit-requests-reset"].endswith("Z")


async def test_clock_scale_shortens_the_servers_minute(kit):
    """A thousand times as fast: a limit of one request in a minute is one in 60 ms."""
    config = FakeConfig(rate=RateLimits(requests=1), conditions=Conditions(clock_scale=1000))
    async with FakeServer(config) as server:
        began, served = time.monotonic(), 0
        while served < 5:
            try:
                await ask(kit, server, MODES[0])
                served += 1
            except e.RateLimited as error:
                await asyncio.sleep(error.retry_after_s / 1000)
        assert time.monotonic() - began > 0.2


@pytest.mark.parametrize("mode", MODES)
async def test_scheduled_outages_begin_and_end(kit, mode):
    day = Conditions(outages=((0.0, 1e9),), outage="overloaded")
    async with FakeServer(FakeConfig(conditions=day)) as server:
        with pytest.raises(e.Overloaded):
            await ask(kit, server, mode)
        over = replace(day, outages=((0.0, server.now),))
        server.config = replace(server.config, conditions=over)
        await ask(kit, server, mode)
    assert [(x.outcome, x.fault) for x in server.entries] == [
        ("refused", "overloaded"),
        ("served", None),
    ]


def test_unknown_outage_kind_is_refused():
    with pytest.raises(ValueError, match="no refusal 'weather'"):
        Conditions(outage="weather")


async def test_server_prices_each_call(kit):
    price = Price(
        input=Decimal(3), output=Decimal(15), cache_read=Decimal("0.3"), cache_write=Decimal("3.75")
    )
    day = Conditions(prices={"noop": price})
    async with FakeServer(FakeConfig(conditions=day)) as server:
        await ask(kit, server, "anthropic_messages", cache="5m")
        await ask(kit, server, "chat_completions")
        with pytest.raises(e.ModelError):
            await ask(kit, server, "anthropic_messages", "SCRIPT: [oops]")
        marked, plain, refused = server.entries
    assert marked.dollars == (4 * Decimal("3.75") + 2 * Decimal(15)) / 1_000_000
    assert marked.cache_write_tokens == 4
    assert plain.dollars == (4 * Decimal(3) + 2 * Decimal(15)) / 1_000_000
    assert refused.dollars is None
