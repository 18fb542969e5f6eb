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
    History,
    Pace,
    UsageEstimator,
    rate_signal,
)

ONE = UsageEstimator().charge(Estimate())


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
        if what == "tick":  # a call waits for a bucket, and a worker reports
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


def scenarios():
    """(id, server, how it is called, since when the rate is used, since when it is another)."""
    for burst_s, rate, latency in itertools.product((1, 5, 60), (2.5, 10), (0.05, 1.0)):
        callers = max(64, int(4 * rate * latency))
        calls = {"latency": latency, "callers": callers}
        yield f"burst {burst_s} s, {rate}/s, {latency} s", (rate, burst_s), calls, 120, 300, 2.0
    for burst_s, rate, latency in itertools.product((1, 5, 60), (2.5, 10), (0.05, 2.0)):
        # All are refused in the first second, and none is sent again until then.
        calls = {"latency": latency, "callers": int(26 * rate), "hint": 89}
        yield (
            f"hint 89 s, burst {burst_s} s, {rate}/s, {latency} s",
            (rate, burst_s),
            calls,
            180,
            420,
            2.0,
        )
    for seed in range(8):  # just after a cut, in the middle of growth, before a refusal
        calls = {"latency": 0.05, "callers": 64, "seed": seed}
        yield f"seed {seed}", (2.5, (1, 5)[seed % 2]), calls, 120, 180 + 4 * seed, 2.0
    slow = {"latency": 30.0, "callers": 300}
    yield "slow answers, tiny burst", (2.5, 1), slow, 200, 500, None
    yield "slow answers", (10, 60), {"latency": 10.0, "callers": 400}, 200, 500, None
    yield "a quota that falls", (40, 60), {"latency": 1.0, "callers": 200}, 120, 180, 0.25


@pytest.mark.parametrize(
    ("server", "calls", "since", "changes_at", "factor"),
    [pytest.param(*rest, id=name) for name, *rest in scenarios()],
)
def test_rate_is_found_and_followed_from_refusals_only(server, calls, since, changes_at, factor):
    """85 % of a rate is used and under 5 % are refused; a doubled one is used within 50 s."""
    rate = server[0]
    changes = [(changes_at, factor)] if factor else []
    ends = simulate(Server(*server), changes_at + 120, changes=changes, **calls)
    phases = [(since, changes_at, rate)]
    if factor:
        phases.append((changes_at + 60, changes_at + 120, factor * rate))
    for begins, until, allowed in phases:
        answered, refused = between(ends, begins, until)
        assert answered >= 0.85 * allowed
        assert refused < 0.05
    if factor == 2.0:
        assert reached(ends, changes_at, 0.85 * 2 * rate) < 50


def test_rise_is_followed_with_slow_answers():
    ends = simulate(Server(10, 60), 560, latency=10.0, callers=400, changes=[(500, 2.0)])
    assert between(ends, 550, 560)[0] >= 0.75 * 20  # these were sent 35 to 55 s after the rise


@pytest.mark.parametrize("refusal", [0.05, 0.5, 2.0])
def test_blocked_server_is_probed_rarely_and_found_again(refusal):
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


@pytest.mark.parametrize(
    "news",
    [
        # No request was admitted: there is no rate.
        [(0.0, Events(8, running=8)), (0.1, Events(throttled=8)),
         *((tick / 2, Events()) for tick in range(1, 100))],
        # A few were refused while slow answers hold the others back: that is not silence.
        [(0.0, Events(64, running=64)), (0.1, Events(throttled=5, running=59)),
         *((tick / 2, Events(running=59)) for tick in range(1, 100)),
         (50.0, Events(5, 59, running=5)), (60.0, Events(clean=5)), (600.0, Events())],
        # A refusal now and then.
        [(float(second), Events(20, throttled=second % 100 == 99)) for second in range(600)],
    ],
)  # fmt: skip
def test_no_pace_without_refusals_that_show_a_rate(news):
    pace = Pace(0.0)
    for now, events in news:
        pace.update(now, events)
        assert pace.per_s is None


def test_server_errors_do_not_increase_the_pace():
    pace, tick = Pace(0.0), 0
    while pace.per_s is None:  # of ten requests a tick two are admitted
        tick += 1
        pace.update(tick / 10, Events(started=10, throttled=8))
    first = pace.per_s
    assert first == pytest.approx(0.95 * 20, rel=0.1), "what is admitted between two refusals"
    for later in range(tick + 160, tick + 460):
        pace.update(later / 10, Events(started=3, trouble=1))
    assert pace.per_s == first


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
def test_pace_keeps_its_bounds(news):
    pace, now = Pace(0.0), 0.0
    for seconds, started, clean, throttled, trouble in news:
        now += seconds
        before = pace.per_s
        pace.update(now, Events(started, clean, throttled, trouble))
        if pace.per_s is None:
            continue
        assert pace.per_s >= 1 / 15
        assert 0 < pace.rate(now) <= pace.per_s
        if before is not None:
            assert pace.per_s <= 1.05**2 * before * 1.0001


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
def test_concurrency_keeps_its_bounds(maximum, start, signals):
    controller, now, last_cut = AdaptiveConcurrency(maximum, start), 0.0, None
    for signal, seconds, in_flight in signals:
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


@pytest.mark.parametrize(
    ("maximum", "start", "steps"),
    [
        # After a refusal 5 % a round, of as many answers as the limit; an error only restarts it.
        (1000, 100, [("throttled", 1, 0, 80), ("clean", 80, 0, 84), ("clean", 83, 0, 84)]),
        (1000, 100, [("throttled", 1, 0, 80), ("clean", 79, 0, 80), ("trouble", 1, 1, 80),
                     ("clean", 79, 1, 80), ("clean", 1, 1, 84)]),
        # Not back to where it was refused before a cut is due.
        (1000, 100, [("throttled", 1, 0, 80), ("clean", 1000, 14, 95), ("clean", 95, 15, 99)]),
        (10, 1, [("throttled", 1, 0, 1), ("clean", 5, 14, 1), ("clean", 1, 15, 2)]),
        # Long hints do not matter: one cut in 15 s however often requests are refused.
        (1000, 100, [("throttled", 9, 0, 80), ("throttled", 9, 14, 80), ("throttled", 9, 15, 64)]),
    ],
)  # fmt: skip
def test_concurrency_after_cuts_and_clean_rounds(maximum, start, steps):
    controller = AdaptiveConcurrency(maximum, start)
    for signal, times, now, limit in steps:
        for _ in range(times):
            controller.note_started(controller.limit)
            controller.note_ended(signal, float(now))
        assert controller.limit == limit


def test_unused_limit_does_not_increase():
    controller = AdaptiveConcurrency(1000, start=100)
    for _ in range(500):
        controller.note_started(79)
        controller.note_ended("clean", 0.0)
    assert controller.limit == 100


@pytest.mark.parametrize(
    ("error", "signal"),
    [
        (None, "clean"),
        (e.RateLimited("", retry_after_s=3600), "throttled"),
        (e.Overloaded(""), "trouble"),
        (e.ServerError(""), "trouble"),
        (e.ModelTimeout(""), "neutral"),
    ],
)
def test_rate_signal_of_errors(error, signal):
    assert rate_signal(error) == signal


@given(st.lists(st.sampled_from(["slow_start", "clean_round", "throttled"]), max_size=900))
def test_history_is_bounded_and_keeps_its_ends(reasons):
    history = History(0.0)
    history.add(0.0, 32, "start")
    for n, reason in enumerate(reasons):
        history.add(1.0 + n, n, reason)
    kept = history.changes
    assert len(kept) <= History.BOUND + 1
    assert kept[0].reason == "start"
    assert not reasons or kept[-1].value == len(reasons) - 1
    assert [c.at_s for c in kept] == sorted(c.at_s for c in kept)
