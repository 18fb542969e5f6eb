"""Decisions after failures, by table: one failure after another, and what comes next."""

import base64
import io
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hermes_rl import errors as e
from hermes_rl.messages import UserMessage
from hermes_rl.models import Sampling
from hermes_rl.models.calls import (
    Failure,
    FallBack,
    GiveUp,
    Recovery,
    Resend,
    RetryPolicy,
    SwitchAccount,
    Wait,
)
from hermes_rl.models.errors import table


def picture(width):
    file = io.BytesIO()
    Image.new("L", (width, 1)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [UserMessage(content=[{"type": "image_url", "image_url": {"url": url}}])]


SMALL, LARGE = picture(1), picture(3000)


class Plan:
    """One rollout's recovery and its call under way; a failed request is as it was sent."""

    def __init__(self, kit, rollout=None, **policy):
        self.kit = kit
        self.rollout = rollout or Recovery(RetryPolicy(**policy), lambda low, high: high)
        self.begin()

    def begin(self):
        self.call = self.rollout.begin()

    def sent(self, max_tokens=None, prompt="hi", *, exact=False):
        request = self.kit.request(prompt, sampling=Sampling(max_tokens=max_tokens), exact=exact)
        return self.call.adapt_request(request, lambda request: 11, imposed=False)

    def failure(self, error, *, now=0.0, answered=None, routes=False, rotated=False, **request):
        client = SimpleNamespace(bound=lambda request: 11)
        account = SimpleNamespace(name="A", client=client, answered_at=answered, silent_since=None)
        return Failure(
            error=error, request=self.sent(**request), account=account, now=now,
            rotated=rotated, routes_left=routes,
        )  # fmt: skip

    def decide(self, error, **situation):
        return self.call.decide(self.failure(error, **situation))


@pytest.fixture
def recovery(kit):
    return lambda *rollout, **policy: Plan(kit, *rollout, **policy)


def refused(reason, **facts):
    return table().kinds[reason]("no", status=400, reason=reason, facts=e.Facts(**facts))


RENAMED = refused("format_error", completion_cap=True)
ADAPTED = {
    "image_too_large": "no_images",
    "multimodal_tool_content_unsupported": "text_only",
    "thinking_signature": "no_signatures",
    "invalid_encrypted_content": "no_encrypted_reasoning",
    "llama_cpp_grammar_pattern": "no_grammar",
}


@pytest.mark.parametrize("reason", ADAPTED)
def test_refused_feature_is_left_out_for_the_conversation(recovery, reason):
    plan, error = recovery(), refused(reason)
    assert plan.decide(error, prompt=SMALL) == Resend()
    assert plan.sent().adaptations == {ADAPTED[reason]}
    for _ in range(2):
        assert plan.decide(error, prompt=SMALL) == GiveUp(error), "it did not help"
        plan.begin()
        assert plan.sent().adaptations == {ADAPTED[reason]}
    assert recovery().decide(error, prompt=SMALL, exact=True) == GiveUp(error)


def test_renamed_output_limit_is_learned_for_exact_requests(recovery):
    plan = recovery()
    assert plan.decide(RENAMED, exact=True) == Resend()
    assert plan.sent().adaptations == {"completion_cap"}
    assert plan.decide(RENAMED, exact=True) == GiveUp(RENAMED)


@pytest.mark.parametrize(
    ("error", "prompt", "steps"),
    [
        (refused("image_too_large"), LARGE, ["small_images", "no_images"]),
        (refused("payload_too_large"), LARGE, ["small_images", "no_images"]),
        (refused("payload_too_large"), SMALL, ["no_images"]),
        (refused("format_error", no_images=True), LARGE, ["no_images"]),
        (refused("image_too_large"), "no image", []),
        (refused("payload_too_large"), "no image", []),
        (refused("format_error", no_images=True), "no image", []),
    ],
)
def test_large_images_are_shrunk_before_removal(recovery, error, prompt, steps):
    plan = recovery()
    for number in range(len(steps)):
        assert plan.decide(error, prompt=prompt) == Resend()
        assert plan.sent().adaptations == set(steps[: number + 1])
    assert plan.decide(error, prompt=prompt) == GiveUp(error)


def test_adaptations_accumulate_per_route(recovery):
    plan = recovery()
    for reason in ADAPTED:
        assert plan.decide(refused(reason), prompt=SMALL) == Resend()
    assert plan.sent().adaptations == set(ADAPTED.values())
    assert plan.decide(refused("billing"), routes=True) == FallBack()
    assert plan.sent().adaptations == frozenset()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        *(
            (reason, SwitchAccount)
            for reason in ("auth", "auth_permanent", "billing", "rate_limit")
        ),
        *((reason, Wait) for reason in ("upstream_rate_limit", "overloaded", "server_error")),
    ],
)
def test_account_is_switched_for_account_errors(recovery, reason, kind):
    assert type(recovery().decide(refused(reason), rotated=True, routes=True)) is kind


def test_model_output_cap_is_kept_and_window_cap_is_for_one_call(recovery):
    plan = recovery()
    cap = refused("format_error", max_output_tokens=4096)
    assert plan.decide(cap, max_tokens=9000) == Resend()
    for _ in range(2):
        assert [plan.sent(n).sampling.max_tokens for n in (9000, None, 100)] == [4096, 4096, 100]
        plan.begin()
    plan, full = recovery(), refused("context_overflow", max_output_tokens=2000)
    assert plan.decide(full, max_tokens=4000) == Resend()
    assert plan.sent(4000).sampling.max_tokens == 2000
    assert plan.decide(full, max_tokens=2000) == GiveUp(full), "once"
    plan.begin()
    assert plan.sent(4000).sampling.max_tokens == 4000


@pytest.mark.parametrize("cap", [100, 4000, None])
def test_full_window_ends_the_call_if_a_lower_limit_cannot_help(recovery, cap):
    error = refused("context_overflow", max_output_tokens=cap)
    assert recovery().decide(error, max_tokens=4000) == GiveUp(error)


def failed(kind, status=None, **fields):
    return kind("no", status=status, **fields)


AT_ONCE = [
    refused(reason)
    for reason in (
        "auth", "auth_permanent", "billing", "model_not_found", "content_policy_blocked",
        "format_error", "thinking_signature",
    )
]  # fmt: skip
NEVER = [
    refused(reason)
    for reason in (
        "ssl_cert_verification", "provider_policy_blocked", "context_overflow",
        "payload_too_large",
    )
]  # fmt: skip
LATER = [
    failed(e.RateLimited, 429),
    failed(e.RateLimited, 429, retry_after_s=29),
    failed(e.RateLimited, 429, reason="upstream_rate_limit"),
    failed(e.Overloaded, 529),
    failed(e.ServerError, 500),
    failed(e.ConnectionLost),
    failed(e.ModelTimeout, served=True),
    failed(e.ProtocolError, served=True),
]
AT_ONCE.append(failed(e.RateLimited, 429, retry_after_s=31))


@pytest.mark.parametrize(
    ("error", "tries"),
    [*((x, 0) for x in AT_ONCE), *((x, 2) for x in LATER), *((x, None) for x in NEVER)],
)
def test_fallback_is_immediate_after_two_failures_or_never(recovery, error, tries):
    plan = recovery()
    if tries is None:
        assert plan.decide(error, routes=True, exact=True) == GiveUp(error)
        return
    for _ in range(tries):
        assert isinstance(plan.decide(error, routes=True, exact=True), Wait)
    assert plan.decide(error, routes=True, exact=True) == FallBack()
    last = plan.decide(error, exact=True)
    assert isinstance(last, Wait if error.transient else GiveUp)
    plan.begin()
    assert plan.call.route == 1, "no return in this conversation"


def test_concurrent_calls_share_adaptations_but_not_failures(recovery):
    error, gone = refused("thinking_signature"), refused("model_not_found")
    one = recovery()
    two = recovery(one.rollout)
    failures = [plan.failure(error) for plan in (one, two)]
    assert one.call.decide(failures[0]) == Resend()
    assert two.call.decide(failures[1]) == Resend(), "it was sent before the first was refused"
    assert two.sent().adaptations == {"no_signatures"}
    assert one.decide(gone, routes=True) == two.decide(gone, routes=True) == FallBack()
    assert (one.call.route, two.call.route, one.rollout.begin().route) == (1, 1, 1)


@pytest.mark.parametrize(
    ("hint", "pauses"),
    [(None, [1, 2, 4, 8, 10, 10]), (7, [8, 9, 11]), (86_400, [601, 602])],
)
def test_pauses_double_up_to_the_cap_after_the_hint(recovery, hint, pauses):
    plan = recovery(base_s=1.0, cap_s=10.0)
    error = failed(e.RateLimited, 429, retry_after_s=hint)
    assert [plan.decide(error).seconds for _ in pauses] == pauses


def test_connections_are_renewed_once_after_two_losses(recovery):
    plan, lost, busy = recovery(), failed(e.ConnectionLost), failed(e.Overloaded, 529)
    assert [plan.decide(lost).renew for _ in range(4)] == [False, True, False, False]
    plan.begin()
    renewed = [plan.decide(error).renew for error in (lost, busy, lost, lost)]
    assert renewed == [False, False, False, True]


def test_only_failures_without_an_explanation_are_probed_once(recovery):
    plan, loaded = recovery(max_attempts=3), recovery(max_attempts=3)
    broken, busy = failed(e.ServerError, 500), failed(e.Overloaded, 503)
    assert [plan.decide(broken).probe for _ in range(5)] == [False, False, True, False, False]
    assert not any(loaded.decide(busy).probe for _ in range(5))


@pytest.mark.parametrize("served", [True, False])
def test_only_possibly_served_requests_need_a_retry_token(recovery, served):
    for error in (failed(e.ConnectionLost, served=served), failed(e.ServerError, served=served)):
        assert recovery().decide(error).paid is served


@pytest.mark.parametrize(
    ("answered", "kind"), [(None, e.Outage), (50.0, e.Outage), (150.0, e.Overloaded)]
)
def test_time_limit_blames_endpoint_or_request(recovery, answered, kind):
    plan = recovery(outage_s=600)
    error = e.Overloaded("529: Overloaded", status=529, request_id="r")
    assert isinstance(plan.decide(error, now=100.0), Wait)
    last = plan.decide(error, now=699.9, answered=answered)
    assert type(last.error) is kind
    assert (last.error.reason, last.error.status, last.error.request_id) == ("overloaded", 529, "r")


def test_waiting_for_a_retry_token_is_limited_in_time(recovery):
    plan, error = recovery(outage_s=600), failed(e.ConnectionLost, served=True)
    assert isinstance(plan.decide(error), Wait)
    assert plan.call.wait_for_retry_token(plan.failure(error, now=10.0)) == Wait(30.0, paid=True)
    assert isinstance(
        plan.call.wait_for_retry_token(plan.failure(error, now=590.0)).error, e.Outage
    )


failures = st.builds(
    lambda reason, served, hint, cap, no_images: table().kinds[reason](
        "x", reason=reason, served=served, retry_after_s=hint,
        facts=e.Facts(max_output_tokens=cap, no_images=no_images),
    ),
    st.sampled_from(sorted(table().kinds)), st.booleans(), st.none() | st.floats(0, 1e6),
    st.none() | st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
situations = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["hi", SMALL, LARGE]),
        "max_tokens": st.none() | st.integers(1, 10**6),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(failures, situations), min_size=1, max_size=12))
def test_every_call_ends(kit, script):
    """Whatever fails, again and again, in any order: at some time it is given up."""
    plan, now, routes = Plan(kit), 0.0, 3
    for turn in range(5_000):
        error, fields = script[turn % len(script)]
        action = plan.decide(error, now=now, routes=plan.call.route + 1 < routes, **fields)
        if isinstance(action, GiveUp):
            assert action.error is error or isinstance(action.error, e.Outage)
            return
        if isinstance(action, Wait):
            assert 0 <= action.seconds <= 630
            now += action.seconds
    pytest.fail("never given up")
