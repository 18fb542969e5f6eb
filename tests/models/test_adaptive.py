"""The adaptive rate: concurrency, and what refusals alone tell of a rate, on a simulated clock."""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.models.rate import (
    AdaptiveConcurrency,
    AdaptiveRate,
    Estimate,
    Events,
    Expectation,
    History,
    Pace,
    signal_of,
)

ONE = Expectation().charge(Estimate())


class Server:
    """A token bucket of `rate` per second that holds `burst_s` seconds of it."""

    def __init__(self, rate, burst_s, closed=(0.0, 0.0)):
        self.rate, self.burst_s, self.closed = rate, burst_s, closed
        self.tokens, self.at = rate * burst_s, 0.0

    def admits(self, now):
        self.tokens = min(self.rate * self.burst_s, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if self.tokens < 1 or self.closed[0] <= now < self.closed[1]:
            return False
        self.tokens -= 1
        return True


class Windows:
    """Admits `rate` per second, but all that the minute allows at once."""

    def __init__(self, rate):
        self.rate = rate
        self.minute = self.admitted = 0

    def admits(self, now):
        if now // 60 > self.minute:
            self.minute, self.admitted = now // 60, 0
        if self.admitted >= 60 * self.rate:
            return False
        self.admitted += 1
        return True


def simulate(server, seconds, *, latency, callers, changes=(), seed=1, refusal=0.05, hint=0.0):
    """Callers that ask again and again, as one limiter allows. Returns (time, answered) per
    request; `changes` are (time, factor of the rate). Who is refused waits for `hint` and more."""
    chance, changes = random.Random(seed), list(changes)
    regulator = AdaptiveRate(callers, 0.0)
    ends, events, order = [], [(0.0, 0, "tick")], 0
    waiting, in_flight = callers, 0
    while events[0][0] <= seconds:
        now, _, what = heapq.heappop(events)
        while changes and now >= changes[0][0]:
            server.rate *= changes.pop(0)[1]
        again = None
        if what == "tick":  # somebody waits for a bucket, and a worker reports
            regulator.update(Events(running=in_flight), now)
            again = (now + 0.05, "tick")
        elif what == "back":
            waiting += 1
        else:
            in_flight -= 1
            ends.append((now, what == "clean"))
            regulator.update(Events(running=in_flight, **{what: 1}), now)
            again = (now + (what != "clean") * (hint + chance.uniform(0.2, 2.0)), "back")
        begun = [again] if again else []
        while waiting and in_flight < regulator.concurrency.limit:
            if regulator.buckets.wait_s(ONE, now) > 0:
                break
            regulator.buckets.take(ONE)
            waiting, in_flight = waiting - 1, in_flight + 1
            regulator.concurrency.note_started(in_flight)
            regulator.update(Events(started=1, running=in_flight), now)
            if server.admits(now):
                begun.append((now + latency * chance.uniform(0.5, 1.5), "clean"))
            else:
                begun.append((now + refusal, "throttled"))
        for at, kind in begun:
            order += 1
            heapq.heappush(events, (at, order, kind))
    return ends


def between(ends, since, until):
    """(answers per second, share of refusals)."""
    found = [ok for at, ok in ends if since <= at < until]
    return sum(found) / (until - since), 1 - sum(found) / len(found)


def reached(ends, since, per_s):
    """Seconds after `since` until so many were answered per second over five seconds."""
    times = [at for at, ok in ends if ok and at >= since]
    number = math.ceil(5 * per_s)
    ends_at = (last for first, last in zip(times, times[number:], strict=False) if last - first < 5)
    return next(ends_at, math.inf) - since


@pytest.mark.parametrize("burst_s", [1, 5, 60])
@pytest.mark.parametrize("rate", [2.5, 10])
@pytest.mark.parametrize("latency", [0.05, 1.0])
def test_refusals_alone_find_the_rate_and_its_double(burst_s, rate, latency):
    server = Server(rate, burst_s)
    callers = max(64, int(4 * rate * latency))
    ends = simulate(server, 410, latency=latency, callers=callers, changes=[(300, 2.0)])
    answered, refused = between(ends, 120, 300)
    assert answered >= 0.85 * rate
    assert refused < 0.05
    assert reached(ends, 300, 0.85 * 2 * rate) < 50
    assert between(ends, 350, 410)[0] >= 0.85 * 2 * rate


@pytest.mark.parametrize("burst_s", [1, 5, 60])
@pytest.mark.parametrize("rate", [2.5, 10])
@pytest.mark.parametrize("latency", [0.05, 2.0])
def test_callers_that_all_wait_for_89_seconds_come_back_paced(burst_s, rate, latency):
    """All are refused in the first second, and nobody asks until then."""
    callers = int(26 * rate)
    ends = simulate(
        Server(rate, burst_s), 510, latency=latency, callers=callers, changes=[(420, 2.0)], hint=89
    )
    answered, refused = between(ends, 180, 420)
    assert answered >= 0.85 * rate
    assert refused < 0.05
    assert reached(ends, 420, 0.85 * 2 * rate) < 50


def test_where_nobody_was_let_in_there_is_no_rate_to_keep():
    """Whoever was refused is held back by his own pause, and nothing else."""
    pace = Pace(0.0)
    pace.update(0.0, Events(started=8, running=8))
    pace.update(0.1, Events(throttled=8))
    for tick in range(1, 100):
        pace.update(tick / 2, Events())
    assert pace.per_s is None


def test_a_few_refusals_while_others_are_served_begin_no_pace():
    """Their answers are slow, so nobody begins: that is no silence."""
    pace = Pace(0.0)
    pace.update(0.0, Events(started=64, running=64))
    pace.update(0.1, Events(throttled=5, running=59))
    for tick in range(1, 100):
        pace.update(tick / 2, Events(running=59))
    assert pace.per_s is None
    pace.update(50.0, Events(started=5, clean=59, running=5))
    pace.update(60.0, Events(clean=5))
    pace.update(600.0, Events())
    assert pace.per_s is None


@pytest.mark.parametrize("seed", range(8))
def test_a_quota_that_doubles_at_any_time_is_used_in_less_than_a_minute(seed):
    """Just after a cut, in the middle of growth, before a refusal."""
    doubles = 180 + 4 * seed
    server = Server(2.5, (1, 5)[seed % 2])
    ends = simulate(
        server, doubles + 65, latency=0.05, callers=64, changes=[(doubles, 2.0)], seed=seed
    )
    assert reached(ends, doubles, 0.85 * 5) < 50


def test_slow_answers_hide_no_rate():
    ends = simulate(Server(10, 60), 560, latency=10.0, callers=400, changes=[(500, 2.0)])
    answered, refused = between(ends, 200, 500)
    assert answered >= 0.85 * 10
    assert refused < 0.05
    assert between(ends, 550, 560)[0] >= 0.75 * 20  # these were sent 35 to 55 s after the rise


def test_slow_answers_and_a_tiny_burst():
    """The limit of requests in flight is not cut where the pace is: what ends in bunches would
    begin in bunches, and be refused."""
    ends = simulate(Server(2.5, 1), 500, latency=30.0, callers=300)
    answered, refused = between(ends, 200, 500)
    assert answered >= 0.85 * 2.5
    assert refused < 0.05


def test_a_quota_that_falls_is_followed():
    ends = simulate(Server(40, 60), 300, latency=1.0, callers=200, changes=[(180, 0.25)])
    answered, refused = between(ends, 240, 300)
    assert answered >= 0.85 * 10
    assert refused < 0.05


@pytest.mark.parametrize("refusal", [0.05, 0.5, 2.0])
def test_a_server_that_refuses_everybody_for_minutes_teaches_nothing(refusal):
    """However long its refusals take: some are on their way all the time."""
    server = Server(2.5, 60, closed=(200, 800))
    ends = simulate(server, 900, latency=1.0, callers=64, refusal=refusal)
    assert reached(ends, 800, 0.85 * 2.5) < 50
    assert sum(not ok for at, ok in ends if 200 <= at < 800) < 700


@pytest.mark.parametrize("latency", [0.05, 10.0])
@pytest.mark.parametrize("rate", [1, 10])
def test_fixed_windows_without_headers_are_used(rate, latency):
    """Their ends are not learned: more requests are refused there than elsewhere."""
    callers = max(64, int(4 * rate * latency))
    ends = simulate(Windows(rate), 900, latency=latency, callers=callers)
    assert between(ends, 240, 900)[0] >= 0.85 * rate


def test_there_is_no_pace_without_refusals_in_a_row():
    pace = Pace(0.0)
    for second in range(600):
        pace.update(float(second), Events(started=20, throttled=second % 100 == 99))
    assert pace.per_s is None


def steady(pace, seconds, since, per_s, *, used=1.0, **ends):
    for tick in range(int(seconds * 10)):
        pace.update(since + tick / 10, Events(started=round(per_s * used / 10), **ends))


def measured():
    """A pace that began with 100 requests a second of which 20 were admitted."""
    pace = Pace(0.0)
    for tick in range(100):
        pace.update(tick / 10, Events(started=10, throttled=8))
        if pace.per_s is not None:
            return pace, tick / 10
    raise AssertionError("no pace")


def test_what_is_admitted_between_refusals_is_the_quota():
    pace, now = measured()
    assert pace.per_s == pytest.approx(0.95 * 20, rel=0.1)
    assert now < 5.0


def test_what_was_on_its_way_when_the_pace_was_set_says_nothing_of_it():
    pace, now = measured()
    first = pace.per_s
    pace.update(now + 0.1, Events(throttled=8))
    for tick in range(2, 60):  # as many again were on their way and are admitted
        pace.update(now + tick / 10, Events(started=round(first / 10), throttled=tick == 20))
    assert pace.per_s == first


def test_requests_that_all_were_on_their_way_tell_no_quota():
    pace, now = measured()
    first = pace.per_s
    pace.update(now + 1.1, Events(started=100))
    for tick in range(30):  # more end refused than begin
        pace.update(now + 1.1 + tick / 10, Events(started=1, throttled=4))
    assert pace.per_s >= 0.8 * first


def grown(pace, seconds, since):
    """What the pace was, where it is used."""
    found = []
    for tick in range(int(10 * seconds)):
        pace.update(since + tick / 10, Events(started=round(pace.per_s / 10) + 1))
        found.append(pace.per_s)
    return sorted(set(found))


def test_it_grows_by_five_percent_a_round_where_it_is_used():
    pace, now = measured()
    first = pace.per_s
    now += 16.0
    steady(pace, 30, now, first, used=0.5)
    assert pace.per_s == first
    steps = grown(pace, 7.0, now + 30.0)
    assert len(steps) in (3, 4)
    for one, two in itertools.pairwise(steps):
        assert two == pytest.approx(1.05 * one)


def test_after_four_clean_rounds_it_grows_twice_as_fast_until_it_is_refused():
    pace, now = measured()
    now += 16.0
    steps = grown(pace, 21.0, now)
    assert [two / one for one, two in itertools.pairwise(steps)][4:] == pytest.approx(
        [1.05**2] * (len(steps) - 5)
    )
    assert len(steps) in (7, 8)
    pace.update(now + 21.0, Events(started=1, throttled=1))
    low = pace.per_s
    pace.update(now + 24.5, Events(started=round(3 * low)))  # the end of a round that is not clean
    steps = grown(pace, 6.5, now + 36.5)
    assert steps[1] / steps[0] == pytest.approx(1.05)


def test_trouble_holds_it_and_cuts_nothing():
    pace, now = measured()
    first = pace.per_s
    steady(pace, 30, now + 16.0, 1.2 * first, trouble=1)
    assert pace.per_s == first


def test_a_few_refusals_after_a_cut_show_the_quota_too():
    """Never three in a round of three seconds, and yet far too many."""
    pace, now = measured()
    now += 16.0
    for second in range(16):
        pace.update(now + second, Events(started=10, clean=8, throttled=2 * (second % 2)))
    assert pace.per_s == pytest.approx(0.95 * 9, rel=0.1)


def test_one_cut_in_fifteen_seconds():
    pace, now = measured()
    first, now = pace.per_s, now + 16.0
    for second in range(16):
        pace.update(now + second, Events(started=20, clean=19, throttled=1))
    assert pace.per_s == pytest.approx(0.64 * first)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),
            st.integers(-2, 50),
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(0, 3),
        ),
        max_size=80,
    )
)
def test_the_pace_keeps_its_bounds(news):
    pace, now = Pace(0.0), 0.0
    for seconds, started, clean, throttled, trouble in news:
        now += seconds
        before = pace.per_s
        pace.update(now, Events(started, clean, throttled, trouble))
        if pace.per_s is None:
            continue
        assert pace.per_s >= 1 / 15
        assert 0 < pace.rate(now) <= pace.per_s
        if before is not None:  # it doubles where it is low and no quota was measured yet
            assert pace.per_s <= max(1.05**2 * before, 2 * min(before, 5.0)) * 1.0001


SIGNALS = st.lists(
    st.tuples(
        st.sampled_from(["clean", "throttled", "trouble", "neutral"]),
        st.floats(min_value=0, max_value=40),
        st.integers(min_value=0, max_value=300),
    ),
    max_size=300,
)


@settings(deadline=None, max_examples=60)
@given(st.integers(-3, 200), st.integers(1, 64), SIGNALS)
def test_the_limit_keeps_its_bounds(maximum, start, heard):
    controller, now, last_cut = AdaptiveConcurrency(maximum, start), 0.0, None
    for signal, seconds, in_flight in heard:
        now += seconds
        before = controller.limit
        controller.note_started(min(in_flight, before))
        controller.note_ended(signal, now)
        after = controller.limit
        assert 1 <= after <= max(1, maximum)
        if after < before:
            assert signal == "throttled"
            assert last_cut is None or now - last_cut >= 15
            assert after >= int(before * 0.8)
            last_cut = now
        if after > before:
            assert signal == "clean"
            assert after <= max(before + 1, before * 1.05)


def answer(controller, requests, now=0.0):
    for _ in range(requests):
        controller.note_started(controller.limit)
        controller.note_ended("clean", now)


def test_after_a_refusal_it_grows_by_five_percent_a_round():
    controller = AdaptiveConcurrency(1000, start=100)
    controller.note_ended("throttled", 0.0)
    assert controller.limit == 80
    answer(controller, 80)
    assert controller.limit == 84
    answer(controller, 83)
    assert controller.limit == 84


def test_it_does_not_go_back_to_where_it_was_refused_before_a_cut_is_due():
    controller = AdaptiveConcurrency(1000, start=100)
    controller.note_ended("throttled", 0.0)
    answer(controller, 1000, now=14.0)
    assert controller.limit == 95
    answer(controller, 95, now=15.0)
    assert controller.limit == 99


def test_an_unused_limit_does_not_grow():
    controller = AdaptiveConcurrency(1000, start=100)
    for _ in range(500):
        controller.note_started(79)
        controller.note_ended("clean", 0.0)
    assert controller.limit == 100


def test_the_servers_trouble_only_holds_growth():
    controller = AdaptiveConcurrency(1000, start=100)
    controller.note_ended("throttled", 0.0)
    for _ in range(10):
        answer(controller, 79)
        controller.note_ended("trouble", 1.0)
    assert controller.limit == 80


def test_it_grows_from_one():
    controller = AdaptiveConcurrency(10, start=1)
    controller.note_ended("throttled", 0.0)
    answer(controller, 5, now=14.0)
    assert controller.limit == 1
    answer(controller, 1, now=15.0)
    assert controller.limit == 2


def test_signals():
    assert signal_of(None) == "clean"
    assert signal_of(e.RateLimited("", retry_after_s=3600)) == "throttled"
    assert signal_of(e.Overloaded("")) == "trouble"
    assert signal_of(e.ServerError("")) == "trouble"
    assert signal_of(e.ModelTimeout("")) == "neutral"


def test_long_hints_and_quick_retries_do_not_freeze_it():
    """Refusals every 2 s that each ask for 89 s: cut by cut goes on, and so does growth after."""
    controller, now = AdaptiveConcurrency(1000, start=100), 0.0
    refusal = e.RateLimited("slow down", retry_after_s=89.0)
    limits = []
    for _ in range(45):
        controller.note_started(controller.limit)
        controller.note_ended(signal_of(refusal), now)
        limits.append(controller.limit)
        now += 2.0
    assert len(set(limits)) == 6  # one cut per 15 s in 90 s
    low = controller.limit
    for _ in range(60):  # a minute of answers, one round a second
        answer(controller, controller.limit, now)
        now += 1.0
    assert controller.limit > 2 * low
    assert [c.reason for c in controller.history.changes][:3] == ["start", "throttled", "throttled"]


@given(st.lists(st.sampled_from(["slow_start", "clean_round", "throttled"]), max_size=900))
def test_a_history_is_bounded_and_keeps_its_ends(reasons):
    history = History(0.0)
    history.add(0.0, 32, "start")
    for n, reason in enumerate(reasons):
        history.add(1.0 + n, n, reason)
    kept = history.changes
    assert len(kept) <= History.BOUND + 1
    assert kept[0].reason == "start"
    assert not reasons or kept[-1].value == len(reasons) - 1
    assert [c.at_s for c in kept] == sorted(c.at_s for c in kept)
