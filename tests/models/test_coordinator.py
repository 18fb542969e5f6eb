"""How the driver divides one limit among workers: what holds whatever happens, on a fake clock."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import Overloaded, RateLimited
from hermes_rl.models.rate import (
    Coordinator,
    Estimate,
    Events,
    JointLimits,
    LaneReport,
    Limiter,
    Orders,
    Quota,
    Rates,
    Report,
    SlotShares,
    WorkerShare,
    decode_grant,
    decode_report,
    encode,
)

WORKERS = ("a", "b", "c")
LANE = "host|KEY|model"


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def coordinate(clock, **options):
    return Coordinator(1000, {}, {}, **{"start": 12, "clock": clock, "unix": clock, **options})


def workers(shares, names):
    parts = {name: WorkerShare(LaneReport(lane=LANE)) for name in names}
    for part in parts.values():
        shares.add(part)
    return parts


def settled(shares, parts, demands, limit, now):
    """What each worker has after some rounds of reports without requests."""
    for _ in range(5):
        for name, demand in demands.items():
            shares.update(parts[name], LaneReport(lane=LANE, demand=demand))
            shares.grant(parts[name], limit, now)
    return {name: parts[name].slots for name in demands}


DEMANDS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50), min_size=1)


@given(st.integers(-2, 200), DEMANDS)
def test_slots_are_divided_fairly(limit, demands):
    shares, served = SlotShares(), set()
    parts = workers(shares, demands)
    for turn in range(len(demands) + 1):
        slots = settled(shares, parts, demands, limit, 2.0 * turn)
        assert sum(slots.values()) <= max(0, limit)
        assert sum(slots.values()) >= min(max(0, limit), sum(demands.values()))
        for name, share in slots.items():
            if share < demands[name]:  # a worker below its demand has no less than any other
                assert share >= max(slots.values()) - 1
        served |= {name for name, share in slots.items() if share}
    assert limit < 1 or {n for n, demand in demands.items() if demand} <= served, "in turn"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["report", "report", "grant", "leave", "wait"]),
            st.sampled_from("abcdefgh"),
            st.integers(0, 40),
            st.integers(0, 20),
        ),
        max_size=100,
    ),
    st.integers(1, 60),
)
def test_sums_and_shares_do_not_depend_on_what_was_before(steps, limit):
    """They are kept as workers report, join and leave; here they are computed from scratch."""
    shares, now, parts = SlotShares(), 0.0, {}
    for what, name, demand, running in steps:
        if what == "report":
            if name not in parts:
                parts |= workers(shares, [name])
            events = Events(running=min(running, demand))
            report = LaneReport(lane=LANE, events=events, peak=running + 1, demand=demand)
            shares.update(parts[name], report)
        elif what == "grant" and name in parts:
            shares.grant(parts[name], limit - demand // 2, now)
        elif what == "leave" and name in parts:
            shares.remove(parts.pop(name))
        elif what == "wait":
            now += 0.1 * demand
        every = parts.values()
        assert shares.running == sum(part.report.events.running for part in every)
        assert shares.peak == sum(part.report.peak for part in every)
        assert shares.out == sum(part.out for part in every)
        assert shares.workers == len(every)
    demands = {name: part.report.demand for name, part in parts.items()}
    kept, fresh = settled(shares, parts, demands, limit, now), SlotShares()
    fresh = settled(fresh, workers(fresh, demands), demands, limit, now)
    assert sum(kept.values()) == sum(fresh.values())
    assert all(abs(kept[name] - fresh[name]) <= 1 for name in demands)


@pytest.mark.parametrize(
    ("count", "limit", "call_s", "report_s", "least"),
    [(2, 1, 2.0, 0.25, 60), (40, 60, 3.0, 4.0, 80), (40, 30, 3.0, 0.8, 50)],
)
def test_slots_are_used_in_turn_however_long_calls_and_reports_take(
    count, limit, call_s, report_s, least
):
    shares, ends, served = SlotShares(), [[] for _ in range(count)], [0] * count
    parts = [*workers(shares, range(count)).values()]
    for step in range(int(300 / report_s) * count):
        now, who = step * report_s / count, step % count
        ends[who] = [end for end in ends[who] if end > now]
        running = len(ends[who])
        events = Events(running=running)
        shares.update(parts[who], LaneReport(lane=LANE, events=events, peak=running, demand=5))
        started = max(0, shares.grant(parts[who], limit, now) - running)
        ends[who] += [now + call_s] * started
        served[who] += started
        assert shares.out <= limit
    assert min(served) >= least, served


class Fleet:
    """Workers without calls of their own: what each may use and runs, as messages see it."""

    def __init__(self):
        self.clock = Clock()
        self.coordinator = coordinate(self.clock)
        self.running = dict.fromkeys(WORKERS, 0)
        self.slots = dict.fromkeys(WORKERS, 0)
        self.ended = {name: [] for name in WORKERS}

    def out(self):
        return sum(max(self.slots[w], self.running[w]) for w in WORKERS)

    @property
    def limit(self):
        return self.coordinator.summary().lanes[0].limit

    def report(self, worker, demand):
        """Send a report; returns the grant, which may be on its way for a while."""
        running, ended = self.running[worker], self.ended[worker]
        lane = LaneReport(
            lane=LANE,
            events=Events(
                clean=ended.count("clean"),
                throttled=ended.count("throttled"),
                running=running,
            ),
            peak=running,
            demand=max(demand, running),
        )
        ended.clear()
        report = decode_report(encode(Report(worker=worker, lanes=(lane,))))
        return decode_grant(encode(self.coordinator.handle(report)))

    def exchange(self, worker, demand):
        self.slots[worker] = self.report(worker, demand).lanes[0].slots


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "clean", "throttled", "exchange", "ask", "take", "die", "wait"]),
        st.sampled_from(WORKERS),
        st.integers(0, 30),
    ),
    max_size=150,
)


@settings(deadline=None, max_examples=100)
@given(STEPS)
def test_workers_together_never_exceed_the_limit(steps):
    fleet, grants, highest = Fleet(), {}, 12
    for what, worker, number in steps:
        if what == "start":
            fleet.running[worker] += max(
                0, min(number, fleet.slots[worker] - fleet.running[worker])
            )
        elif what in ("clean", "throttled") and fleet.running[worker]:
            fleet.running[worker] -= 1
            fleet.ended[worker].append(what)
        elif what == "exchange" and worker not in grants:
            fleet.exchange(worker, number)
        elif what == "ask" and worker not in grants:
            grants[worker] = fleet.report(worker, number)
        elif what == "take" and worker in grants:
            fleet.slots[worker] = grants.pop(worker).lanes[0].slots
        elif what == "die":
            fleet.coordinator.remove(worker)
            fleet.running[worker] = fleet.slots[worker] = 0
            grants.pop(worker, None)
        elif what == "wait":
            fleet.clock.now += number
        if fleet.coordinator.summary().lanes:
            highest = max(highest, fleet.limit)
        assert fleet.out() <= highest


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["turn", "turn", "exchange", "ask", "take", "die"]),
            st.sampled_from(WORKERS[:2]),
        ),
        min_size=30,
        max_size=40,
    )
)
def test_a_pause_is_over_when_no_worker_may_start_a_request(steps):
    """Also where pauses follow each other before the grants between them arrive."""
    fleet, paused, grants = Fleet(), False, {}
    fleet.coordinator.orders = lambda model: Orders(paused)
    for what, worker in steps:
        if what == "turn":
            paused = not paused
        elif what == "exchange" and worker not in grants:
            fleet.exchange(worker, 6)
        elif what == "ask" and worker not in grants:
            grants[worker] = fleet.report(worker, 6)
        elif what == "take" and worker in grants:
            fleet.slots[worker] = grants.pop(worker).lanes[0].slots
        elif what == "die":
            fleet.coordinator.remove(worker)
            fleet.slots[worker] = 0
            grants.pop(worker, None)
        behind = fleet.coordinator.behind("model")
        assert not paused or {name for name in WORKERS if fleet.slots[name]} <= {*behind}
        on_the_way = {name for name, grant in grants.items() if grant.lanes[0].slots}
        assert not paused or on_the_way <= {*behind}


def test_runs_that_share_limits_divide_them_evenly_and_reuse_slots():
    joint = JointLimits()
    runs = {model: coordinate(Clock(), joint=joint) for model in ("one", "two")}

    def slots(model, demand):
        lane = LaneReport(lane=f"host|KEY|{model}", demand=demand)
        return runs[model].handle(Report(worker="a", lanes=(lane,))).lanes[0].slots

    assert slots("one", 20) == 12
    for _ in range(3):
        shares = [slots(model, 20) for model in runs]
    assert shares == [6, 6]
    runs["one"].close()  # its worker did not leave
    assert [slots("two", 20) for _ in range(2)][-1] == 12


def test_slots_of_a_lost_worker_are_reused():
    fleet = Fleet()
    fleet.exchange("a", 6)
    fleet.exchange("b", 6)
    fleet.coordinator.remove("a")
    fleet.exchange("b", 20)
    assert fleet.slots["b"] == 12


def test_bucket_contents_are_granted_once():
    clock = Clock()
    coordinator = coordinate(clock, rates=Rates(requests=60.0, input_tokens=6000.0))
    balances = {w: {"requests": 0.0, "input_tokens": 0.0} for w in WORKERS}
    used = {"requests": 0.0, "input_tokens": 0.0}
    for step in range(1200):
        clock.now += 0.1
        worker = WORKERS[step % 3]
        balance = balances[worker]
        need = {"requests": 1.0, "input_tokens": 70.0}
        want = {kind: 4 * amount for kind, amount in need.items()}
        lane = LaneReport(lane=LANE, demand=4, balance=dict(balance), want=want, first=need)
        balance.update(coordinator.handle(Report(worker=worker, lanes=(lane,))).lanes[0].balance)
        while all(balance[kind] >= need[kind] for kind in need):
            for kind, amount in need.items():
                balance[kind] -= amount
                used[kind] += amount
    # 120 s: a request a second, and five at first.
    assert 115 <= used["requests"] <= 125.1
    assert used["input_tokens"] <= 120 * 100 + 500


def test_headers_seen_by_one_worker_apply_to_all():
    coordinator = coordinate(Clock())
    quota = Quota(kind="requests", limit=60, remaining=2, reset_s=58)
    coordinator.handle(
        Report(worker="a", lanes=(LaneReport(lane=LANE, events=Events(quotas=(quota,))),))
    )
    want = LaneReport(lane=LANE, demand=9, want={"requests": 9}, first={"requests": 1})
    received = 0.0
    for _ in range(3):  # a has all slots until it reports again
        coordinator.handle(Report(worker="a", lanes=(LaneReport(lane=LANE),)))
        received += (
            coordinator.handle(Report(worker="b", lanes=(want,))).lanes[0].balance["requests"]
        )
    assert received == 2


def test_bucket_is_divided_fairly_after_a_refill():
    clock = Clock()
    coordinator = coordinate(clock, rates=Rates(requests=60.0))
    waits = LaneReport(lane=LANE, demand=4, want={"requests": 8}, first={"requests": 1})
    for _ in range(2):
        for worker in WORKERS:
            coordinator.handle(Report(worker=worker, lanes=(waits,)))
    received = dict.fromkeys(WORKERS, 0.0)
    for _ in range(300):  # a new request a second, and a is always the first to ask
        clock.now += 0.25
        for worker in WORKERS:
            grant = coordinator.handle(Report(worker=worker, lanes=(waits,)))
            received[worker] += grant.lanes[0].balance["requests"]
    assert sum(received.values()) >= 70
    assert max(received.values()) - min(received.values()) <= 6


def limiter_of(coordinator, clock):
    limiter = Limiter(None, name=LANE, clock=clock)

    def exchange():
        grant = coordinator.handle(Report(worker="a", lanes=(limiter.report(),)))
        limiter.take_grant(grant.lanes[0])

    return limiter, exchange


async def test_limiter_waits_for_its_grant_and_reports_events_once():
    clock = Clock()
    coordinator = coordinate(clock, start=2)
    limiter, exchange = limiter_of(coordinator, clock)

    async def call(error):
        async with limiter.slot() as slot:
            slot.report(error)

    tasks = [asyncio.create_task(call(e)) for e in (None, None, RateLimited(""), Overloaded(""))]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    exchange()
    await asyncio.gather(*tasks)
    exchange()
    (lane,) = coordinator.summary().lanes
    assert (lane.clean, lane.throttled, lane.trouble) == (2, 1, 1)
    exchange()
    assert coordinator.summary().lanes == (lane,)  # each event once


async def test_quotas_seen_before_a_grant_are_reported_next():
    clock = Clock()
    coordinator = coordinate(clock)
    limiter, exchange = limiter_of(coordinator, clock)
    exchange()
    limiter.report()
    async with limiter.slot() as slot:
        slot.report(None, headers={"x-ratelimit-remaining-requests": "7"})
    assert [quota.remaining for quota in limiter.report().events.quotas] == [7]
    assert limiter.report().events.quotas == ()


async def test_request_larger_than_a_bucket_starts_when_full():
    clock, began = Clock(), []
    coordinator = coordinate(clock, rates=Rates(input_tokens=600.0))  # a bucket of 50
    limiter, exchange = limiter_of(coordinator, clock)

    async def call():
        async with limiter.slot(Estimate(1000)):
            began.append(clock.now)

    tasks = [asyncio.create_task(call()) for _ in range(2)]
    for _ in range(600):
        await asyncio.sleep(0)
        exchange()
        clock.now += 0.25
    await asyncio.gather(*tasks)
    assert 99 <= began[1] - began[0] <= 101


def test_stopped_process_is_not_taken_for_a_slow_server():
    """Ctrl-Z after a few refusals: the seconds without requests say nothing about the server."""
    clock = Clock()
    coordinator = coordinate(clock)

    def report(**events):
        lane = LaneReport(lane=LANE, events=Events(**events), peak=6, demand=6)
        coordinator.handle(Report(worker="a", lanes=(lane,)))
        return coordinator.summary().lanes[0].per_s

    for _ in range(4):
        clock.now += 0.25
        report(started=4, clean=3, throttled=1, running=6)
    clock.now += 9.0
    assert report(started=1, running=6) is None
    for _ in range(60):  # and refusals after it are not measured against the stop
        clock.now += 0.25
        assert report(started=3, clean=3, running=6) is None
    clock.now += 0.25
    assert (report(started=2, throttled=2, running=6) or 12) > 9
