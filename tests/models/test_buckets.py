"""What headers say of rate limits, and the buckets that keep within them."""

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import ModelError
from hermes_rl.models.calls import RetryPolicy, Route
from hermes_rl.models.rate import (
    Bucket,
    Buckets,
    Estimate,
    Limiter,
    Quota,
    Rates,
    UsageEstimator,
    read_quotas,
)
from hermes_rl.testing import RateLimits
from hermes_rl.usage import Usage

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z


def openai(kind, limit, remaining, reset):
    names = ("limit", "remaining", "reset")
    values = (limit, remaining, reset)
    return {f"x-ratelimit-{n}-{kind}": str(v) for n, v in zip(names, values, strict=True)}


def test_openai_headers_are_read():
    headers = openai("requests", 500, 499, "120ms") | openai("tokens", 30000, 29000, "6m0.5s")
    assert read_quotas(headers, NOW) == (
        Quota(kind="requests", limit=500, remaining=499, reset_s=0.12),
        Quota(kind="tokens", limit=30000, remaining=29000, reset_s=360.5),
    )


def test_anthropic_headers_are_read():
    headers = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "49",
        "anthropic-ratelimit-requests-reset": "2026-09-21T14:13:21Z",
        "anthropic-ratelimit-input-tokens-limit": "40000",
        "anthropic-ratelimit-input-tokens-remaining": "0",
        "anthropic-ratelimit-input-tokens-reset": "2026-09-21T14:14:20Z",
        "anthropic-ratelimit-output-tokens-limit": "8000",
        "anthropic-ratelimit-output-tokens-remaining": "8000",
        "anthropic-ratelimit-output-tokens-reset": "2026-09-21T14:13:20Z",
    }
    assert read_quotas(headers, NOW) == (
        Quota(kind="requests", limit=50, remaining=49, reset_s=1.0),
        Quota(kind="input_tokens", limit=40000, remaining=0, reset_s=60.0),
        Quota(kind="output_tokens", limit=8000, remaining=8000, reset_s=0.0),
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("1h2m3.5s", 3723.5),
        ("17", 17.0),
        ("0.5", 0.5),
        ("-1", None),
        ("", None),
        ("soon", None),
        ("1s later", None),
        (str(int(NOW + 5)), 5.0),
        (str(int((NOW + 5) * 1000)), 5.0),
        ("2026-09-21T16:13:25+02:00", 5.0),
        ("2026-09-21T14:13:10Z", 0.0),
        ("2027-09-21T14:13:10Z", None),
    ],
)
def test_resets_are_read(text, seconds):
    (quota,) = read_quotas(openai("requests", 10, 5, text), NOW)
    assert quota.reset_s == seconds


def test_unlimited_or_other_headers_give_no_quota():
    assert read_quotas({"retry-after": "5", "x-ratelimit-limit-images": "3"}, NOW) == ()
    assert read_quotas(openai("requests", -1, -1, -1), NOW) == ()


@given(
    st.dictionaries(
        st.sampled_from(
            [
                f"x-ratelimit-{p}{k}"
                for p in ("limit", "remaining", "reset")
                for k in ("-requests", "")
            ]
            + [f"anthropic-ratelimit-tokens-{p}" for p in ("limit", "remaining", "reset")]
        ),
        st.text(max_size=30) | st.from_regex(r"[0-9.:TZ+hms-]{0,30}", fullmatch=True),
    )
)
def test_any_header_is_parsed_safely(headers):
    for quota in read_quotas(headers, NOW):
        for number in (quota.limit, quota.remaining, quota.reset_s, quota.per_s(60.0)):
            assert number is None or (number >= 0 and math.isfinite(number))
        assert (quota.per_s(60.0) or 1.0) >= 1 / 60, "no header stops a run"


def test_rate_follows_from_limit_and_reset():
    assert Quota(kind="requests", limit=500, remaining=499, reset_s=0.12).per_s(60) == 500 / 60
    # A second's limit that calls itself one of a minute is not throttled sixtyfold.
    assert Quota(kind="requests", limit=10, remaining=5, reset_s=0.5).per_s(60) == 10
    assert Quota(kind="requests", limit=10, remaining=5).per_s(60) is None
    assert Quota(kind="requests", limit=1e-9, remaining=0, reset_s=5).per_s(60) is None


def test_bucket_refills_after_a_debt():
    bucket = Bucket(10.0, 50.0, 0.0)
    assert bucket.wait_s(50, 0.0) == 0
    bucket.balance -= 80
    assert bucket.wait_s(1, 0.0) == pytest.approx(3.1)
    assert bucket.fill(5.0) == 20
    assert bucket.fill(100.0) == 50
    assert bucket.wait_s(1000, 100.0) == 0  # larger than the bucket: a full one will do


def test_unused_reservations_return_to_buckets():
    buckets = Buckets(Rates(input_tokens=1200, requests=60), 0.0)
    reserved = {"requests": 1.0, "input_tokens": 100.0}
    assert buckets.wait_s(reserved, 0.0) == 0
    buckets.take(reserved)
    assert buckets.wait_s(reserved, 0.0) == pytest.approx(5.0)
    buckets.settle(reserved, {"requests": 1.0, "input_tokens": 20.0})
    assert buckets.by_kind["input_tokens"].balance == 80
    assert buckets.by_kind["requests"].balance == 4
    buckets.settle(reserved, {"requests": 1.0, "input_tokens": 400.0})
    assert buckets.by_kind["input_tokens"].balance == -220


def test_limits_are_learned_and_remaining_amounts_obeyed():
    buckets = Buckets(Rates(), 0.0)
    assert buckets.wait_s({"requests": 1.0}, 0.0) == 0
    buckets.learn([Quota(kind="requests", limit=60, remaining=2, reset_s=58)], 0.0)
    buckets.take({"requests": 1.0})
    buckets.take({"requests": 1.0})
    assert buckets.wait_s({"requests": 1.0}, 0.0) == pytest.approx(1.0, rel=0.05)
    buckets.learn([Quota(kind="requests", limit=120, remaining=10, reset_s=55)], 10.0)
    assert buckets.by_kind["requests"].balance == pytest.approx(9.8)
    assert buckets.by_kind["requests"].per_s == pytest.approx(2, rel=0.05)


def test_configured_limit_is_not_overridden():
    buckets = Buckets(Rates(requests=60), 0.0)
    buckets.learn([Quota(kind="requests", limit=6000, remaining=0, reset_s=60)], 0.0)
    assert buckets.by_kind["requests"].per_s == 1
    assert buckets.by_kind["requests"].balance == 0


def test_estimates_converge_to_actual_use():
    expected = UsageEstimator()
    estimate = Estimate(input_tokens=4000, output_tokens=8000)
    assert expected.charge(estimate)["tokens"] == 12000
    for _ in range(60):
        used = expected.learn(
            estimate, Usage(input_tokens=1000, output_tokens=50, cache_read_tokens=900)
        )
    assert used == {
        "requests": 1.0, "pace": 1.0, "tokens": 1050.0,
        "input_tokens": 100.0, "output_tokens": 50.0,
    }  # fmt: skip
    assert expected.charge(estimate)["tokens"] == pytest.approx(1050, rel=0.01)


async def test_limiter_keeps_the_request_rate():
    limiter = Limiter(100, rates=Rates(requests=60 * 100))  # 100 a second, 500 at first
    limiter.rate.buckets.by_kind["requests"].balance = 0
    began = time.monotonic()

    async def one():
        async with limiter.slot() as slot:
            slot.report(None)

    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(one())
    assert time.monotonic() - began >= 0.45


@pytest.mark.parametrize("transport", ["http", "sdk"])
@pytest.mark.parametrize("mode", ["chat_completions", "anthropic_messages"])
async def test_limits_are_learned_from_the_first_refusal(stage, kit, mode, transport):
    async with stage() as s:
        server = await s.server(rate=RateLimits(requests=1, burst_s=60.0))
        client = s.client(server, api_mode=mode, transport=transport)
        await client.complete(kit.request())  # empties the bucket without this limiter
        limiter = Limiter(100)
        route = Route.single("", client, limiter)
        calling = s.caller(route, policy=RetryPolicy(base_s=0.01, outage_s=0.0))
        with pytest.raises(ModelError):
            await calling.call(kit.request(), turn=1)
        reported = limiter.rate.buckets.by_kind["requests"]
        assert reported.capacity == 1
        assert reported.balance <= 1
        assert limiter.rate.buckets.wait_s({"requests": 1.0}, time.monotonic()) > 0
