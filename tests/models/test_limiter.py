"""The adaptive limit: its pure controller, and the slots of one process."""

import asyncio
import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.models.limits.controller import Controller, signal_of
from hermes_rl.models.limits.governor_wire import LaneGrant
from hermes_rl.models.limits.limiter import InProcessLimiter
from hermes_rl.models.limits.shared_lane import SharedLane

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
    controller, now, last_cut = Controller(maximum, start), 0.0, None
    for signal, seconds, in_flight in heard:
        now += seconds
        before = controller.limit
        controller.started(min(in_flight, before))
        controller.heard(signal, now)
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


def steady(controller, requests, now=0.0):
    for _ in range(requests):
        controller.started(controller.limit)
        controller.heard("clean", now)


def test_slow_start_doubles_per_round():
    controller = Controller(1000, start=8)
    steady(controller, 8)
    assert controller.limit == 16
    steady(controller, 16)
    assert controller.limit == 32


def test_after_a_refusal_it_grows_by_five_percent_a_round():
    controller = Controller(1000, start=100)
    controller.heard("throttled", 0.0)
    assert controller.limit == 80
    steady(controller, 80)
    assert controller.limit == 84
    steady(controller, 83)
    assert controller.limit == 84


def test_it_does_not_go_back_to_where_it_was_refused_before_a_cut_is_due():
    controller = Controller(1000, start=100)
    controller.heard("throttled", 0.0)
    steady(controller, 1000, now=14.0)
    assert controller.limit == 95
    steady(controller, 95, now=15.0)
    assert controller.limit == 99


def test_a_burst_of_refusals_is_one_cut():
    controller = Controller(1000, start=100)
    for second in range(15):
        controller.heard("throttled", float(second))
    assert controller.limit == 80
    controller.heard("throttled", 15.0)
    assert controller.limit == 64


def test_an_unused_limit_does_not_grow():
    controller = Controller(1000, start=100)
    for _ in range(500):
        controller.started(79)
        controller.heard("clean", 0.0)
    assert controller.limit == 100


def test_the_servers_trouble_only_holds_growth():
    controller = Controller(1000, start=100)
    controller.heard("throttled", 0.0)
    for _ in range(10):
        steady(controller, 79)
        controller.heard("trouble", 1.0)
    assert controller.limit == 80


def test_it_grows_from_one():
    controller = Controller(10, start=1)
    controller.heard("throttled", 0.0)
    steady(controller, 5, now=14.0)
    assert controller.limit == 1
    steady(controller, 1, now=15.0)
    assert controller.limit == 2


def test_signals():
    assert signal_of(None) == "clean"
    assert signal_of(e.RateLimited("", retry_after_s=3600)) == "throttled"
    assert signal_of(e.Overloaded("")) == "trouble"
    assert signal_of(e.ServerError("")) == "trouble"
    assert signal_of(e.ModelTimeout("")) == "neutral"


def simulate(rate, seconds, *, maximum=200, latency=1.0, controller=None, start=0.0):
    """Requests against a token bucket of `rate` per second (burst of one second); refused ones come
    back after a second. Returns (admitted, refused) over the second half."""
    controller = controller or Controller(maximum)
    tokens, last, now = rate, start, start
    ends, in_flight, order = [], 0, 0
    admitted = refused = 0
    while now < start + seconds:
        while in_flight < controller.limit:
            tokens, last = min(rate, tokens + (now - last) * rate), now
            ok = tokens >= 1
            tokens -= ok
            in_flight += 1
            order += 1
            controller.started(in_flight)
            # A refused request gives its slot back at once, and its rollout pauses.
            heapq.heappush(ends, (now + (latency if ok else 0.5), order, ok))
        now, _, ok = heapq.heappop(ends)
        in_flight -= 1
        controller.heard("clean" if ok else "throttled", now)
        if now > start + seconds / 2:
            admitted += ok
            refused += not ok
    return admitted, refused, controller


@pytest.mark.parametrize("rate", [20, 60, 150])
def test_it_finds_the_allowed_rate(rate):
    admitted, refused, _ = simulate(rate, 1200)
    assert admitted >= 0.85 * rate * 600
    assert refused < 0.05 * (admitted + refused)


def test_it_recovers_when_the_quota_rises():
    _, _, controller = simulate(20, 600)
    low = controller.limit
    admitted, _, _ = simulate(60, 120, controller=controller, start=600.0)
    assert low < 35
    assert admitted / 60 > 2 * 20


async def hold(limiter, release):
    async with limiter.slot() as slot:
        await release.wait()
        return slot.waited_s


async def test_slots_are_first_come_first_served():
    limiter, order = InProcessLimiter(2), []

    async def work(name):
        async with limiter.slot():
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in range(20):
            group.create_task(work(name))
    assert order == list(range(20))
    assert limiter.in_flight == 0


async def test_never_more_than_the_limit():
    limiter, peak = InProcessLimiter(5, start=3), 0

    async def work():
        nonlocal peak
        async with limiter.slot() as slot:
            peak = max(peak, limiter.in_flight)
            assert limiter.in_flight <= limiter.controller.limit
            await asyncio.sleep(0.001)
            slot.report(None)

    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(work())
    assert peak == 5


async def test_growth_wakes_who_waits():
    limiter, release = InProcessLimiter(4, start=1), asyncio.Event()
    async with limiter.slot() as slot:
        assert slot.waited_s == 0
        tasks = [asyncio.create_task(hold(limiter, release)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert limiter.in_flight == 1
        for _ in range(3):
            slot.report(None)
        await asyncio.sleep(0.01)
        assert limiter.in_flight == 4
    release.set()
    assert min(await asyncio.gather(*tasks)) > 0


async def test_a_cancelled_waiter_leaves_no_hole():
    limiter, release = InProcessLimiter(1), asyncio.Event()
    first = asyncio.create_task(hold(limiter, release))
    second = asyncio.create_task(hold(limiter, release))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    async with asyncio.timeout(10):
        await hold(limiter, release)
    assert limiter.in_flight == 0


async def test_whoever_was_cancelled_in_the_queue_is_no_demand_any_more():
    """A worker would else be given slots for them, which others lack, until their turn comes."""
    clock = [0.0]
    lane = SharedLane("h|K|m", lambda: None, lambda: clock[0])
    tasks = [asyncio.create_task(hold(lane, asyncio.Event())) for _ in range(50)]
    await asyncio.sleep(0)
    report = lane.report()
    assert report.demand == 50
    lane.granted(report, LaneGrant(lane="h|K|m", slots=0, alone=0), 5.0)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks[1:])
    assert lane.report().demand == 1
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert lane.report().demand == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "cancel", "end", "turn"]), st.integers(0, 30)), max_size=80
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_no_slot_leaks_whoever_is_cancelled_when(steps):
    async def play():
        limiter = InProcessLimiter(3, start=3)
        tasks, events = [], []
        for what, number in steps:
            if what == "ask":
                events.append(asyncio.Event())
                tasks.append(asyncio.create_task(hold(limiter, events[-1])))
            elif tasks and what == "cancel":
                tasks[number % len(tasks)].cancel()
            elif tasks and what == "end":
                events[number % len(tasks)].set()
            elif what == "turn":
                await asyncio.sleep(0)
            assert limiter.in_flight <= 3
        for event in events:
            event.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks, return_exceptions=True)
            assert limiter.in_flight == 0
            done = asyncio.Event()
            done.set()
            await asyncio.gather(*(hold(limiter, done) for _ in range(3)))

    asyncio.run(play())


async def test_a_slot_that_comes_with_the_cancellation_is_handed_on():
    limiter, release = InProcessLimiter(1), asyncio.Event()
    release.set()
    async with limiter.slot():
        second = asyncio.create_task(hold(limiter, release))
        third = asyncio.create_task(hold(limiter, release))
        await asyncio.sleep(0.01)
    assert limiter.in_flight == 1  # the second's already
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    async with asyncio.timeout(10):
        await third
    assert limiter.in_flight == 0


def test_long_hints_and_quick_retries_do_not_freeze_it():
    """Refusals every 2 s that each ask for 89 s: cut by cut goes on, and so does growth after."""
    controller, now = Controller(1000, start=100), 0.0
    refusal = e.RateLimited("slow down", retry_after_s=89.0)
    limits = []
    for _ in range(45):
        controller.started(controller.limit)
        controller.heard(signal_of(refusal), now)
        limits.append(controller.limit)
        now += 2.0
    assert len(set(limits)) == 6  # one cut per 15 s in 90 s
    low = controller.limit
    for _ in range(60):  # a minute of answers, one round a second
        steady(controller, controller.limit, now)
        now += 1.0
    assert controller.limit > 2 * low
    assert [c.reason for c in controller.history][:3] == ["start", "throttled", "throttled"]


@given(st.integers(1, 400))
def test_history_is_bounded_and_keeps_its_ends(cuts):
    controller = Controller(10**6, start=10**6)
    for n in range(cuts):
        controller.heard("throttled", 20.0 * n)
        steady(controller, 2 if controller.limit == 1 else 0, 20.0 * n + 19)
    history = controller.history
    assert len(history) <= 257
    assert history[0].reason == "start"
    assert history[-1].limit == controller.limit
    assert [c.at_s for c in history] == sorted(c.at_s for c in history)


@given(SIGNALS, st.floats(0, 1e6))
def test_a_controller_resumes_where_another_was(heard, shift):
    one, now = Controller(200, 16), 0.0
    for signal, seconds, in_flight in heard:
        now += seconds
        one.started(min(in_flight, one.limit))
        one.heard(signal, now)
    two = Controller(200, 16)
    two.resume(one.state(now), now + shift)
    assert (two.limit, two.slow_start, two.history) == (one.limit, one.slow_start, one.history)
    for controller, at in ((one, now + 1), (two, now + shift + 1)):
        controller.heard("throttled", at)
    assert two.limit == one.limit
