"""Decisions after failures, by table: one failure after another, and what comes next."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.calls import (
    Again,
    FallBack,
    GiveUp,
    Recovery,
    RetryPolicy,
    Rotate,
    Situation,
    Wait,
)
from hermes_rl.models.errors import table


def upper(low, high):
    return high


class Plan:
    """One rollout's recovery and its call under way; a failed request is as it was sent."""

    def __init__(self, policy):
        self.rollout = Recovery(policy, upper)
        self.begin()

    def begin(self):
        self.call = self.rollout.begin()
        self.fit, self.hold = self.call.fit, self.call.hold

    def decide(self, error, situation):
        sent = self.call.fit(request()).adaptations
        return self.call.decide(error, replace(situation, adaptations=sent))

    @property
    def route(self):
        return self.call.route


def recovery(**policy):
    return Plan(RetryPolicy(**policy))


def request(max_tokens=None):
    return ModelRequest(
        model="m",
        conversation=Conversation([UserMessage(content="hi")]),
        call_id="",
        sampling=Sampling(max_tokens=max_tokens),
    )


def at(now=0.0, **more):
    return Situation(now=now, **more)


def refused(reason, **facts):
    return table().kinds[reason]("no", status=400, reason=reason, facts=e.Facts(**facts))


ADAPTED = {
    "image_too_large": "no_images",
    "multimodal_tool_content_unsupported": "text_only",
    "thinking_signature": "no_signatures",
    "invalid_encrypted_content": "no_encrypted_reasoning",
    "llama_cpp_grammar_pattern": "no_grammar",
}


@pytest.mark.parametrize("reason", ADAPTED)
def test_what_was_refused_is_left_out_once_and_for_the_rest_of_the_conversation(reason):
    plan, error = recovery(), refused(reason)
    assert plan.decide(error, at(images=True)) == Again()
    assert plan.fit(request()).adaptations == {ADAPTED[reason]}
    assert plan.decide(error, at(images=True)) == GiveUp(error), "it did not help"
    plan.begin()
    assert plan.fit(request()).adaptations == {ADAPTED[reason]}
    assert plan.decide(error, at(images=True)) == GiveUp(error)


@pytest.mark.parametrize("reason", ADAPTED)
def test_nothing_is_left_out_where_the_policy_forbids_it(reason):
    error = refused(reason)
    assert recovery(adapt=False).decide(error, at(images=True)) == GiveUp(error)
    assert recovery().decide(error, at(images=True, exact=True)) == GiveUp(error)


def test_another_name_for_the_bound_is_learned_for_exact_requests_too():
    error = refused("format_error", completion_cap=True)
    for plan in (recovery(), recovery(adapt=False)):
        assert plan.decide(error, at(exact=True)) == Again()
        assert plan.fit(request()).adaptations == {"completion_cap"}
        assert plan.decide(error, at(exact=True)) == GiveUp(error)


def test_large_images_are_made_smaller_first():
    plan, error = recovery(), refused("image_too_large")
    assert plan.decide(error, at(images=True, shrinkable=True)) == Again()
    assert plan.fit(request()).adaptations == {"small_images"}
    assert plan.decide(error, at(images=True)) == Again()
    assert plan.fit(request()).adaptations == {"small_images", "no_images"}
    assert plan.decide(error, at(images=True)) == GiveUp(error)
    heavy, none = refused("payload_too_large"), refused("format_error", no_images=True)
    for asked, first in ((heavy, "small_images"), (none, "no_images")):
        plan = recovery()
        assert plan.decide(asked, at(images=True, shrinkable=True)) == Again()
        assert plan.fit(request()).adaptations == {first}


def test_images_are_only_taken_out_where_there_are_some():
    for error in (refused("image_too_large"), refused("format_error", no_images=True)):
        assert recovery().decide(error, at()) == GiveUp(error)
        assert recovery().decide(error, at(images=True)) == Again()


def test_a_body_that_is_too_large_loses_its_images():
    error = refused("payload_too_large")
    assert recovery().decide(error, at(images=True)) == Again()
    assert recovery().decide(error, at()) == GiveUp(error)


def test_adaptations_of_several_kinds_add_up():
    plan = recovery()
    for reason in ADAPTED:
        assert plan.decide(refused(reason), at(images=True)) == Again()
    assert plan.fit(request()).adaptations == set(ADAPTED.values())


@pytest.mark.parametrize("reason", ["auth", "auth_permanent", "billing", "rate_limit"])
def test_another_account_comes_first(reason):
    error = refused(reason)
    assert recovery().decide(error, at(rotated=True, routes_left=True)) == Rotate()


@pytest.mark.parametrize("reason", ["upstream_rate_limit", "overloaded", "server_error"])
def test_another_account_does_not_help_against_others_trouble(reason):
    assert isinstance(recovery().decide(refused(reason), at(rotated=True)), Wait)


def test_a_cap_of_the_model_stays_known():
    plan, error = recovery(), refused("format_error", max_output_tokens=4096)
    assert plan.decide(error, at(max_tokens=9000)) == Again()
    assert plan.fit(request(9000)).sampling.max_tokens == 4096
    plan.begin()
    assert plan.fit(request(9000)).sampling.max_tokens == 4096
    assert plan.fit(request(None)).sampling.max_tokens == 4096
    assert plan.fit(request(100)).sampling.max_tokens == 100


def test_the_room_that_a_full_window_leaves_is_for_one_call():
    plan, error = recovery(), refused("context_overflow", max_output_tokens=2000)
    assert plan.decide(error, at(max_tokens=4000)) == Again()
    assert plan.fit(request(4000)).sampling.max_tokens == 2000
    assert plan.decide(error, at(max_tokens=2000)) == GiveUp(error), "once"
    plan.begin()
    assert plan.fit(request(4000)).sampling.max_tokens == 4000


@pytest.mark.parametrize(("cap", "asked"), [(100, 4000), (4000, 4000), (None, 4000)])
def test_when_fewer_output_tokens_do_not_help(cap, asked):
    error = refused("context_overflow", max_output_tokens=cap)
    assert recovery().decide(error, at(max_tokens=asked)) == GiveUp(error)


AT_ONCE = (
    "auth", "auth_permanent", "billing", "model_not_found", "content_policy_blocked",
    "format_error", "thinking_signature",
)  # fmt: skip


@pytest.mark.parametrize("reason", AT_ONCE)
def test_what_no_wait_mends_falls_back_at_once(reason):
    plan, error = recovery(adapt=False), refused(reason)
    assert plan.decide(error, at(routes_left=True)) == FallBack()
    assert plan.route == 1
    assert plan.decide(error, at()) == GiveUp(error)
    plan.begin()
    assert plan.route == 1, "no return in this conversation"


@pytest.mark.parametrize(
    "error",
    [
        e.RateLimited("429", status=429),
        e.RateLimited("429", status=429, reason="upstream_rate_limit"),
        e.Overloaded("529", status=529),
        e.ServerError("500", status=500),
        e.ConnectionLost("refused"),
        e.ModelTimeout("silent", served=True),
        e.ProtocolError("cut", served=True),
    ],
)
def test_trouble_falls_back_after_two_tries(error):
    plan = recovery()
    assert isinstance(plan.decide(error, at(routes_left=True)), Wait)
    assert isinstance(plan.decide(error, at(routes_left=True)), Wait)
    assert plan.decide(error, at(routes_left=True)) == FallBack()
    assert isinstance(plan.decide(error, at()), Wait), "the next route's failures count anew"


def test_a_long_retry_after_falls_back_at_once():
    long, short = (e.RateLimited("429", status=429, retry_after_s=s) for s in (31, 29))
    assert recovery().decide(long, at(routes_left=True)) == FallBack()
    assert isinstance(recovery().decide(short, at(routes_left=True)), Wait)


@pytest.mark.parametrize(
    "reason",
    ["ssl_cert_verification", "provider_policy_blocked", "context_overflow", "payload_too_large"],
)
def test_what_a_fallback_would_hide_does_not_fall_back(reason):
    error = refused(reason)
    assert recovery().decide(error, at(routes_left=True)) == GiveUp(error)


def test_calls_under_way_at_once_learn_from_each_other_and_give_up_alone():
    rollout, error = Recovery(RetryPolicy(), upper), refused("thinking_signature")
    one, two = rollout.begin(), rollout.begin()
    assert one.decide(error, at()) == Again()
    assert two.decide(error, at()) == Again(), "its request was not sent without signatures yet"
    assert two.fit(request()).adaptations == {"no_signatures"}
    gone = refused("model_not_found")
    assert one.decide(gone, at(routes_left=True)) == FallBack()
    assert two.decide(gone, at(routes_left=True)) == FallBack()
    assert (one.route, two.route, rollout.begin().route) == (1, 1, 1)


def test_adaptations_belong_to_their_route():
    plan = recovery()
    assert plan.decide(refused("thinking_signature"), at()) == Again()
    assert plan.decide(refused("billing"), at(routes_left=True)) == FallBack()
    assert plan.fit(request()).adaptations == frozenset()


def test_pauses_double_to_the_cap_and_hints_come_on_top():
    plan, error = recovery(base_s=1.0, cap_s=10.0), e.Overloaded("529", status=529)
    pauses = [plan.decide(error, at()).seconds for _ in range(6)]
    assert pauses == [1, 2, 4, 8, 10, 10]
    hinted = e.RateLimited("429", status=429, retry_after_s=7)
    assert recovery(base_s=1.0).decide(hinted, at()).seconds == 8
    endless = e.RateLimited("429", status=429, retry_after_s=86_400)
    assert recovery(base_s=1.0).decide(endless, at()).seconds == 601


def test_connections_are_renewed_once_a_call():
    plan, error = recovery(), e.ConnectionLost("refused")
    assert [plan.decide(error, at()).renew for _ in range(4)] == [False, True, False, False]
    plan.begin()
    other = e.Overloaded("529", status=529)
    renewed = [plan.decide(x, at()).renew for x in (error, other, error, error)]
    assert renewed == [False, False, False, True], "two in a row"


def test_only_what_may_have_been_served_needs_a_share_of_the_traffic():
    assert recovery().decide(e.ConnectionLost("reset", served=True), at()).paid
    assert recovery().decide(e.ServerError("502", status=502, served=True), at()).paid
    assert not recovery().decide(e.ServerError("500", status=500), at()).paid


def test_the_end_of_patience_says_who_is_at_fault():
    error = e.Overloaded("529: Overloaded", status=529, request_id="r")
    for answered, kind in ((None, e.Outage), (50.0, e.Outage), (150.0, e.Overloaded)):
        plan = recovery(outage_s=600)
        assert isinstance(plan.decide(error, at(100.0)), Wait)
        last = plan.decide(error, at(699.9, answered_at=answered))
        assert isinstance(last, GiveUp)
        assert type(last.error) is kind
        assert last.error.reason == "overloaded"
        assert (last.error.status, last.error.request_id) == (529, "r")


def test_a_hold_ends_with_patience_too():
    plan, error = recovery(outage_s=600), e.ConnectionLost("reset", served=True)
    assert isinstance(plan.decide(error, at(0.0)), Wait)
    assert plan.hold(error, at(10.0)) == Wait(30.0, paid=True)
    assert isinstance(plan.hold(error, at(590.0)).error, e.Outage)


reasons = st.sampled_from(sorted(table().kinds))
failures = st.builds(
    lambda reason, served, hint, cap, no_images: table().kinds[reason](
        "x", reason=reason, served=served, retry_after_s=hint,
        facts=e.Facts(max_output_tokens=cap, no_images=no_images),
    ),
    reasons, st.booleans(), st.none() | st.floats(0, 1e6), st.none() | st.integers(0, 10**6),
    st.booleans(),
)  # fmt: skip
situations = st.builds(
    lambda **fields: fields,
    rotated=st.just(False),
    images=st.booleans(),
    shrinkable=st.booleans(),
    max_tokens=st.none() | st.integers(1, 10**6),
)


@settings(max_examples=200)
@given(st.lists(st.tuples(failures, situations), min_size=1, max_size=12))
def test_every_call_comes_to_an_end(script):
    """Whatever fails, again and again, in any order: at some time it is given up."""
    plan, now, routes = recovery(), 0.0, 3
    for turn in range(5_000):
        error, rest = script[turn % len(script)]
        left = plan.route + 1 < routes
        action = plan.decide(error, Situation(now=now, routes_left=left, **rest))
        if isinstance(action, GiveUp):
            assert action.error is error or isinstance(action.error, e.Outage)
            return
        if isinstance(action, Wait):
            assert 0 <= action.seconds <= 630
            now += action.seconds
    pytest.fail("never given up")
