"""The pace: what refusals alone tell of a rate, on a simulated clock."""

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.models.limits.buckets import Estimate, Expectation
from hermes_rl.models.limits.pace import Pace
from hermes_rl.models.limits.regulator import News, Regulator

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


def simulate(server, seconds, *, latency, callers, changes=()):
    """Callers that ask again and again, as one limiter allows. Returns (time, answered) per
    request; `changes` are (time, factor of the rate)."""
    chance, changes = random.Random(1), list(changes)
    regulator = Regulator(callers, 0.0)
    ends, events, order = [], [(0.0, 0, "tick")], 0
    waiting, in_flight = callers, 0
    while events[0][0] <= seconds:
        now, _, what = heapq.heappop(events)
        while changes and now >= changes[0][0]:
            server.rate *= changes.pop(0)[1]
        again = None
        if what == "tick":  # somebody waits for a bucket
            again = (now + 0.05, "tick")
        elif what == "back":
            waiting += 1
        else:
            in_flight -= 1
            ends.append((now, what == "clean"))
            regulator.heard(News(**{what: 1}), now)
            again = (now + (what != "clean") * chance.uniform(0.2, 2.0), "back")
        begun = [again] if again else []
        while waiting and in_flight < regulator.controller.limit:
            if regulator.buckets.wait_s(ONE, now) > 0:
                break
            regulator.buckets.take(ONE)
            waiting, in_flight = waiting - 1, in_flight + 1
            regulator.controller.started(in_flight)
            regulator.heard(News(started=1), now)
            if server.admits(now):
                begun.append((now + latency * chance.uniform(0.5, 1.5), "clean"))
            else:
                begun.append((now + 0.05, "throttled"))
        for at, kind in begun:
            order += 1
            heapq.heappush(events, (at, order, kind))
    return ends


def between(ends, since, until):
    """(answers per second, share of refusals)."""
    found = [ok for at, ok in ends if since <= at < until]
    return sum(found) / (until - since), 1 - sum(found) / len(found)


@pytest.mark.parametrize("burst_s", [1, 5, 60])
@pytest.mark.parametrize("rate", [2.5, 10])
@pytest.mark.parametrize("latency", [0.05, 1.0])
def test_refusals_alone_find_the_rate_and_its_double(burst_s, rate, latency):
    server = Server(rate, burst_s)
    callers = max(64, int(4 * rate * latency))
    ends = simulate(server, 365, latency=latency, callers=callers, changes=[(300, 2.0)])
    answered, refused = between(ends, 120, 300)
    assert answered >= 0.85 * rate
    assert refused < 0.05
    answered, _ = between(ends, 350, 360)  # the last of the minute after
    assert answered >= 0.85 * 2 * rate


def test_slow_answers_hide_no_rate():
    ends = simulate(Server(10, 60), 560, latency=10.0, callers=400, changes=[(500, 2.0)])
    answered, refused = between(ends, 200, 500)
    assert answered >= 0.85 * 10
    assert refused < 0.05
    assert between(ends, 550, 560)[0] >= 0.75 * 20  # these were sent 35 to 55 s after the rise


def test_a_quota_that_falls_is_followed():
    ends = simulate(Server(40, 60), 300, latency=1.0, callers=200, changes=[(180, 0.25)])
    answered, refused = between(ends, 240, 300)
    assert answered >= 0.85 * 10
    assert refused < 0.05


def test_a_server_that_refuses_everybody_for_minutes_teaches_nothing():
    ends = simulate(Server(10, 60, closed=(200, 800)), 900, latency=1.0, callers=64)
    assert between(ends, 860, 900)[0] >= 0.85 * 10


def test_there_is_no_pace_without_refusals_in_a_row():
    pace = Pace(0.0)
    for second in range(600):
        pace.heard(float(second), started=20, throttled=second % 100 == 99)
    assert pace.per_s is None


def steady(pace, seconds, since, per_s, *, used=1.0, **ends):
    for tick in range(int(seconds * 10)):
        pace.heard(since + tick / 10, started=round(per_s * used / 10), **ends)


def measured():
    """A pace that began with 100 requests a second of which 20 were admitted."""
    pace = Pace(0.0)
    for tick in range(100):
        pace.heard(tick / 10, started=10, throttled=8)
        if pace.per_s is not None:
            return pace, tick / 10
    raise AssertionError("no pace")


def test_what_is_admitted_between_refusals_is_the_quota():
    pace, now = measured()
    assert pace.per_s == pytest.approx(0.95 * 20, rel=0.1)
    assert now < 5.0


def test_it_grows_by_five_percent_a_round_where_it_is_used():
    pace, now = measured()
    first = pace.per_s
    now += 16.0
    steady(pace, 30, now, first, used=0.5)
    assert pace.per_s == first
    now += 30.0
    grown = []
    for tick in range(70):
        pace.heard(now + tick / 10, started=round(pace.per_s / 10) + 1)
        grown.append(pace.per_s)
    steps = sorted(set(grown))
    assert len(steps) in (3, 4)
    for one, two in itertools.pairwise(steps):
        assert two == pytest.approx(1.05 * one)


def test_trouble_holds_it_and_cuts_nothing():
    pace, now = measured()
    first = pace.per_s
    steady(pace, 30, now + 16.0, 1.2 * first, trouble=1)
    assert pace.per_s == first


def test_one_cut_in_fifteen_seconds():
    pace, now = measured()
    first, now = pace.per_s, now + 16.0
    for second in range(16):
        pace.heard(now + second, started=20, throttled=1)
    assert pace.per_s == pytest.approx(0.64 * first)


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(-2, 50), st.integers(0, 50), st.integers(0, 3)),
        max_size=80,
    ),
    st.floats(0, 1e6),
)
def test_it_keeps_its_bounds_and_another_goes_on_with_it(news, shift):
    pace, now = Pace(0.0), 0.0
    for seconds, started, throttled, trouble in news:
        now += seconds
        before = pace.per_s
        pace.heard(now, started=started, throttled=throttled, trouble=trouble)
        if pace.per_s is not None:
            assert pace.per_s >= 1 / 15
            if before is not None:
                assert pace.per_s <= max(before, 1.05 * before)
    other = Pace(now + shift)
    other.resume(pace.state(now), now + shift)
    assert other.per_s == pace.per_s
    assert other.state(now + shift).history == pace.state(now).history
