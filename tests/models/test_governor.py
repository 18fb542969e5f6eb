"""The governor and the workers' sides of it: what holds whatever happens, on a fake clock."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import Overloaded, RateLimited
from hermes_rl.models.limits.allotment import alone_share, fair_shares, with_headroom
from hermes_rl.models.limits.buckets import Estimate
from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import (
    Charter,
    LaneReport,
    Report,
    decode_grant,
    decode_report,
    encode_grant,
    encode_report,
)
from hermes_rl.models.limits.quotas import Quota
from hermes_rl.models.limits.rests import Rest, Rests
from hermes_rl.models.limits.shared_lane import SharedLane

WORKERS = ("a", "b", "c")
LANE = "host|KEY|model"


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def govern(clock, **charter):
    return Governor(Charter(**{"maximum": 1000, "start": 12, **charter}), clock, Rests())


DEMANDS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50), min_size=1)


@given(st.integers(-2, 200), DEMANDS, st.integers(0, 9))
def test_fair_shares(limit, demands, turn):
    shares = fair_shares(limit, demands, turn)
    assert sum(shares.values()) == min(max(0, limit), sum(demands.values()))
    for name, share in shares.items():
        assert 0 <= share <= demands[name]
        if share < demands[name]:  # whoever lacks has no less than anybody else, a unit apart
            assert share >= max(shares.values()) - 1
    roomy = with_headroom(limit, shares)
    assert sum(roomy.values()) <= max(0, limit)
    assert all(roomy[name] >= shares[name] for name in shares)
    assert sum(alone_share(limit, list(demands), name) for name in demands) == max(0, limit)


def test_the_last_slots_go_round():
    demands = dict.fromkeys("abcd", 3)
    turns = [{n for n, s in fair_shares(2, demands, turn).items() if s} for turn in range(4)]
    assert set.union(*turns) == set("abcd")


class Fleet:
    """Workers without calls of their own: what each holds and runs, as the wire sees it."""

    def __init__(self, **charter):
        self.clock = Clock()
        self.charter = charter
        self.governor = govern(self.clock, **charter)
        self.running = dict.fromkeys(WORKERS, 0)
        self.grants = {}
        self.memory = {}
        self.cut_off = set()
        self.signals = {name: [] for name in WORKERS}

    def allowed(self, worker):
        grant, until, _ = self.grants.get(worker, (None, 0, 0))
        if grant is None:
            return 0
        if self.clock.now < until:
            return grant.slots
        return min(grant.alone, grant.slots) if self.clock.now < until + 5 else grant.alone

    def out(self):
        return sum(max(self.allowed(w), self.running[w]) for w in WORKERS)

    def exchange(self, worker, demand):
        if self.governor is None:
            self.cut_off.add(worker)
            return
        heard = self.signals[worker]
        lane = LaneReport(
            lane=LANE,
            clean=heard.count("clean"),
            throttled=heard.count("throttled"),
            peak=self.running[worker],
            demand=max(demand, self.running[worker]),
            running=self.running[worker],
            held=self.allowed(worker),
            alone=self.grants[worker][0].alone if worker in self.grants else 0,
        )
        memory = self.memory.get(worker) if worker in self.cut_off else None
        report = Report(worker=worker, lanes=(lane,), memory=memory)
        grant = decode_grant(
            encode_grant(self.governor.handle(decode_report(encode_report(report))))
        )
        heard.clear()
        self.cut_off.discard(worker)
        self.memory[worker] = grant.memory or self.memory.get(worker)
        self.grants[worker] = (grant.lanes[0], self.clock.now + grant.lease_s, demand)

    def limit(self):
        if self.governor is None or LANE not in self.governor.lanes:
            return 0
        return self.governor.lanes[LANE].controller.limit

    def wait(self, seconds):
        """Workers are never silent for a whole lease while there is a governor."""
        for _ in range(seconds):
            self.clock.now += 1
            for worker in self.grants:
                self.exchange(worker, self.grants[worker][2])

    def succeed(self):
        self.governor = govern(self.clock, successor=True, **self.charter)
        self.cut_off = set(WORKERS)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "clean", "throttled", "exchange", "wait", "die", "succeed"]),
        st.sampled_from(WORKERS),
        st.integers(0, 30),
    ),
    max_size=150,
)


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_shares_never_sum_above_the_limit(steps):
    fleet, highest = Fleet(), 12
    for what, worker, number in steps:
        before = fleet.out()
        if what == "start" and fleet.running[worker] < fleet.allowed(worker):
            fleet.running[worker] += 1
        elif what in ("clean", "throttled") and fleet.running[worker]:
            fleet.running[worker] -= 1
            fleet.signals[worker].append(what)
        elif what == "exchange":
            fleet.exchange(worker, number)
            if fleet.governor is not None:
                # What was out before a cut comes back by and by, but nothing is added to it.
                assert fleet.out() <= max(fleet.limit(), before)
        elif what == "wait":
            fleet.wait(number)
        elif what == "die":
            fleet.governor = None
        elif what == "succeed":
            fleet.succeed()
        highest = max(highest, fleet.limit())
        assert fleet.out() <= highest


def test_a_worker_that_came_late_is_known_to_a_successor():
    fleet = Fleet()
    for worker in WORKERS:
        fleet.exchange(worker, 20)
    for _ in range(3):
        for worker in WORKERS:
            fleet.exchange(worker, 20)
    fleet.governor = None
    fleet.wait(60)
    fleet.succeed()
    fleet.exchange("a", 20)  # its memory names the others, though they came within a moment
    assert fleet.out() == 12


def test_one_worker_gets_the_whole_limit_and_others_their_part():
    fleet = Fleet()
    fleet.exchange("a", 20)
    assert fleet.allowed("a") == 12
    fleet.exchange("b", 20)
    assert fleet.allowed("b") == 0  # a has it all still
    fleet.exchange("a", 20)
    fleet.exchange("b", 20)
    assert fleet.allowed("b") == 0  # a may have begun calls before it heard that it has less
    fleet.exchange("a", 20)
    fleet.exchange("b", 20)
    assert fleet.allowed("a") == fleet.allowed("b") == 6
    fleet.exchange("c", 1)
    for _ in range(3):
        fleet.exchange("a", 20)
        fleet.exchange("b", 20)
        fleet.exchange("c", 1)
    assert sorted(map(fleet.allowed, WORKERS)) == [1, 5, 5] or fleet.out() == 12


def test_a_dead_workers_part_goes_to_the_others():
    fleet = Fleet()
    fleet.exchange("a", 6)
    fleet.exchange("b", 6)
    fleet.running["a"] = 6
    fleet.exchange("a", 6)
    fleet.governor.forget("a")
    fleet.running["a"] = 0
    fleet.grants.pop("a")
    fleet.exchange("b", 20)
    assert fleet.allowed("b") == 12


def test_without_a_governor_equal_parts_and_no_more():
    fleet = Fleet()
    for _ in range(2):
        for worker in WORKERS:
            fleet.exchange(worker, 20)
    fleet.clock.now += 1000
    assert [fleet.allowed(w) for w in WORKERS] == [4, 4, 4]


def test_a_successor_goes_on_where_the_dead_one_was():
    fleet = Fleet()
    for worker in WORKERS:
        fleet.exchange(worker, 20)
    fleet.signals["a"] = ["throttled"]
    fleet.clock.now += 2
    for worker in WORKERS:
        fleet.exchange(worker, 20)
    assert fleet.limit() == 9
    history = fleet.governor.summary().lanes[0].state.history
    fleet.succeed()
    held = [fleet.allowed(w) for w in WORKERS]
    fleet.exchange("a", 20)
    fleet.exchange("b", 20)
    assert [fleet.allowed(w) for w in WORKERS] == held  # c is not heard yet
    fleet.exchange("c", 20)
    fleet.exchange("a", 20)
    fleet.exchange("b", 20)
    assert fleet.limit() == 9
    assert fleet.out() == 9
    summary = fleet.governor.summary().lanes[0]
    assert summary.state.history[: len(history)] == history
    assert summary.throttled == 1
    fleet.signals["b"] = ["throttled"]  # within the 15 s of the cut before
    fleet.exchange("b", 20)
    assert fleet.limit() == 9


def test_rests_are_known_to_all():
    governor = govern(Clock())
    rest = Rest(account="KEY_1", until=4e9, reason="billing")
    governor.handle(Report(worker="a", rests=(rest,)))
    assert governor.handle(Report(worker="b")).rests == (rest,)


def test_a_bucket_is_divided_and_never_handed_out_twice():
    clock = Clock()
    governor = govern(clock, rates={"requests": 60.0, "input_tokens": 6000.0})
    purses = {w: {"requests": 0.0, "input_tokens": 0.0} for w in WORKERS}
    used = {"requests": 0.0, "input_tokens": 0.0}
    for step in range(1200):
        clock.now += 0.1
        worker = WORKERS[step % 3]
        purse = purses[worker]
        need = {"requests": 1.0, "input_tokens": 70.0}
        want = {kind: 4 * amount for kind, amount in need.items()}
        lane = LaneReport(lane=LANE, demand=4, purse=dict(purse), want=want, first=need)
        grant = governor.handle(Report(worker=worker, lanes=(lane,))).lanes[0]
        purse.update(grant.purse)
        while all(purse[kind] >= need[kind] for kind in need):
            for kind, amount in need.items():
                purse[kind] -= amount
                used[kind] += amount
    # 120 s: a request a second, and five at first.
    assert 115 <= used["requests"] <= 125.1
    assert used["input_tokens"] <= 120 * 100 + 500


def test_headers_of_one_worker_bind_all():
    clock = Clock()
    governor = govern(clock)
    quota = Quota(kind="requests", limit=60, remaining=2, reset_s=58)
    governor.handle(Report(worker="a", lanes=(LaneReport(lane=LANE, quotas=(quota,)),)))
    want = LaneReport(lane=LANE, demand=9, want={"requests": 9}, first={"requests": 1})
    first = governor.handle(Report(worker="b", lanes=(want,))).lanes[0]
    assert (first.slots, first.purse) == (0, {"requests": 0})  # a has all slots still
    governor.handle(Report(worker="a", lanes=(LaneReport(lane=LANE),)))
    assert governor.handle(Report(worker="b", lanes=(want,))).lanes[0].purse == {"requests": 2}


def test_a_bucket_is_divided_whoever_reports_first_after_a_refill():
    clock = Clock()
    governor = govern(clock, rates={"requests": 60.0})
    waits = LaneReport(lane=LANE, demand=4, held=4, want={"requests": 8}, first={"requests": 1})
    for worker in WORKERS:
        governor.handle(Report(worker=worker, lanes=(waits,)))
    given = dict.fromkeys(WORKERS, 0.0)
    for _ in range(300):  # a new request a second, and a is always the first to ask
        clock.now += 0.25
        for worker in WORKERS:
            grant = governor.handle(Report(worker=worker, lanes=(waits,)))
            given[worker] += grant.lanes[0].purse["requests"]
    assert sum(given.values()) >= 70
    assert max(given.values()) - min(given.values()) <= 6


def test_two_deaths_in_a_moment_forget_nobody():
    fleet = Fleet()
    fleet.exchange("a", 20)
    fleet.succeed()
    fleet.exchange("b", 20)  # the second governor has not heard of a
    fleet.succeed()
    fleet.exchange("b", 20)
    assert fleet.out() == 12


def lane_of(governor, clock):
    lane = SharedLane(LANE, lambda: None, clock)

    def exchange(worker="a"):
        report = lane.report()
        grant = governor.handle(Report(worker=worker, lanes=(report,)))
        lane.granted(report, grant.lanes[0], grant.lease_s)

    return lane, exchange


async def test_a_lane_waits_for_its_grant_and_reports_what_it_heard():
    clock = Clock()
    governor = govern(clock, start=2)
    lane, exchange = lane_of(governor, clock)

    async def call(error):
        async with lane.slot() as slot:
            slot.report(error)

    tasks = [asyncio.create_task(call(e)) for e in (None, None, RateLimited(""), Overloaded(""))]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    exchange()
    await asyncio.gather(*tasks)
    exchange()
    told = governor.summary().lanes[0]
    assert (told.clean, told.throttled, told.trouble) == (2, 1, 1)
    exchange()
    assert governor.summary().lanes[0] == told  # told once


async def test_what_headers_say_while_a_report_is_on_its_way_is_told_next():
    clock = Clock()
    governor = govern(clock)
    lane, exchange = lane_of(governor, clock)
    exchange()
    report = lane.report()
    async with lane.slot() as slot:
        slot.report(None, headers={"x-ratelimit-remaining-requests": "7"})
    grant = governor.handle(Report(worker="a", lanes=(report,)))
    lane.granted(report, grant.lanes[0], grant.lease_s)
    exchange()
    assert governor.lanes[LANE].quotas["requests"].remaining == 7
    exchange()
    assert lane.report().quotas == ()


async def test_a_lane_without_governor_adapts_its_own_part():
    clock = Clock()
    governor = govern(clock, start=20)
    lane, exchange = lane_of(governor, clock)
    exchange()
    clock.now += 6  # the grant has ended

    async def call(error=None):
        async with lane.slot() as slot:
            slot.report(error)

    assert lane.report().held == 20
    await call(RateLimited(""))
    assert lane.report().held == 16
    exchange()
    assert governor.lanes[LANE].controller.limit == 16


async def test_a_request_larger_than_a_bucket_begins_when_it_is_full_and_leaves_a_debt():
    clock, began = Clock(), []
    lane, exchange = lane_of(govern(clock, rates={"input_tokens": 600.0}), clock)  # a bucket of 50

    async def call():
        async with lane.slot(Estimate(1000)):
            began.append(clock.now)

    tasks = [asyncio.create_task(call()) for _ in range(2)]
    for _ in range(600):
        await asyncio.sleep(0)
        exchange()
        clock.now += 0.25
    await asyncio.gather(*tasks)
    assert 99 <= began[1] - began[0] <= 101
