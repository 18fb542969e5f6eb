"""The adaptive rate of one endpoint, account and model: token buckets, concurrency and pace. Pure.

A bucket counts one kind of use per minute, as providers do. A request reserves what it is expected
to use and settles what it did use. A balance may go below zero (an answer was longer than expected,
or one request is larger than the whole bucket): the debt is worked off before the next request
starts.

Concurrency alone cannot hold a rate where answers are quick: one caller may ask too often. So where
a server refuses again and again, what it admits is measured, and requests start at that pace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from hermes_rl.errors import ModelError, Overloaded, RateLimited, ServerError
from hermes_rl.models.rate.headers import KINDS, Kind, Quota
from hermes_rl.usage import Usage

Charge = Mapping[Kind, float]
"""What one request uses, by kind."""


@dataclass(frozen=True)
class Estimate:
    """What a request may cost its rate limits, in tokens; 0 where nothing is known."""

    input_tokens: int = 0
    """An upper bound."""
    output_tokens: int = 0
    """An upper bound."""


@dataclass(frozen=True)
class Rates:
    """Limits per minute that are known beforehand; None where there is none."""

    requests: float | None = None
    tokens: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None


class Bucket:
    """One balance that fills with time.

    Args:
        per_s: how fast it fills.
        capacity: how full it gets, and at most so much must be there before a request starts.
        balance: what is in it at first; None is full.
    """

    def __init__(
        self, per_s: float, capacity: float, now: float, balance: float | None = None
    ) -> None:
        self.per_s = per_s
        self.capacity = max(1.0, capacity)
        self.balance = self.capacity if balance is None else balance
        self._filled = now

    def fill(self, now: float) -> float:
        """The balance now. What others still hold back from it is theirs to return."""
        gained = max(0.0, now - self._filled) * self.per_s
        self._filled = max(now, self._filled)
        if self.balance < self.capacity:
            self.balance = min(self.capacity, self.balance + gained)
        return self.balance

    def resize(self, per_s: float, capacity: float, now: float) -> None:
        """Fill at another rate from now on, up to another capacity."""
        self.fill(now)
        self.per_s, self.capacity = per_s, max(1.0, capacity)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be taken; infinite when it does not fill by itself."""
        missing = min(amount, self.capacity) - self.fill(now)
        if missing <= 1e-9:
            return 0.0
        return missing / self.per_s if self.per_s > 0 else math.inf


MARGIN = 0.98
"""So much of a limit is used: two clocks and a network lie between its count and ours."""

BURST = 1 / 12
"""A bucket of a configured limit holds so much of a minute: limits are enforced over shorter
windows than they are named for."""

PACE_BURST = 1 / 20
"""The same for a rate that refusals showed."""


class Buckets:
    """The buckets of one account and model.

    Limits that headers name are learned, unless one was configured for that kind; what they say to
    be left is never exceeded.

    Args:
        window_s: what limits are named for.
    """

    def __init__(self, rates: Rates = Rates(), now: float = 0.0, *, window_s: float = 60.0) -> None:
        self.by_kind: dict[Kind, Bucket] = {}
        self._window_s = window_s
        for kind in KINDS:
            rate: float | None = getattr(rates, kind)
            if rate is not None:
                self.by_kind[kind] = Bucket(rate / window_s, rate * BURST, now)
        self._configured = frozenset(self.by_kind)

    def wait_s(self, charge: Charge, now: float) -> float:
        """Seconds until a request may start."""
        waits = (b.wait_s(charge.get(kind, 0.0), now) for kind, b in self.by_kind.items())
        return max(waits, default=0.0)

    def backlog_s(
        self, requests: int, now: float, refill: Mapping[Kind, float] | None = None
    ) -> float:
        """Seconds until so many requests could have started, one after another.

        Args:
            refill: how fast each bucket fills, where its own rate is not meant.
        """
        longest = 0.0
        for kind in ("requests", "pace"):
            bucket = self.by_kind.get(kind)
            missing = requests - bucket.fill(now) if bucket is not None else 0.0
            if bucket is not None and missing > 1e-9:
                per_s = bucket.per_s if refill is None else refill.get(kind, 0.0)
                longest = max(longest, missing / per_s if per_s > 0 else math.inf)
        return longest

    def take(self, charge: Charge) -> None:
        """A request starts."""
        for kind, bucket in self.by_kind.items():
            bucket.balance -= charge.get(kind, 0.0)

    def give(self, charge: Charge) -> None:
        """A request did not start after all."""
        for kind, bucket in self.by_kind.items():
            bucket.balance = min(bucket.capacity, bucket.balance + charge.get(kind, 0.0))

    def settle(self, reserved: Charge, used: Charge) -> None:
        """A request ended; kinds that `used` lacks were used as reserved."""
        for kind, bucket in self.by_kind.items():
            if kind in used:
                back = reserved.get(kind, 0.0) - used[kind]
                bucket.balance = min(bucket.capacity, bucket.balance + back)

    def learn(self, quotas: Iterable[Quota], now: float) -> None:
        """Take in what response headers say."""
        for quota in quotas:
            per_s, bucket = quota.per_s(self._window_s), self.by_kind.get(quota.kind)
            if per_s is not None and quota.limit and quota.kind not in self._configured:
                if bucket is None:
                    bucket = self.by_kind[quota.kind] = Bucket(per_s * MARGIN, quota.limit, now)
                bucket.resize(per_s * MARGIN, quota.limit, now)
            if bucket is not None and quota.remaining is not None:
                bucket.balance = min(bucket.fill(now), quota.remaining)

    def set_pace(self, per_s: float | None, now: float) -> None:
        """Start requests at that rate from now on; None means no bound."""
        if per_s is None:
            self.by_kind.pop("pace", None)
            return
        bucket = self.by_kind.setdefault("pace", Bucket(per_s, 1.0, now, 0.0))
        bucket.resize(per_s, per_s * self._window_s * PACE_BURST, now)

    def drain(self, now: float) -> None:
        """A request was refused: nothing is left, whatever was expected."""
        for bucket in self.by_kind.values():
            bucket.balance = min(bucket.fill(now), 0.0)


class Expectation:
    """What requests come to use, learned from those that ended: bounds on the prompt are far above
    what is counted, and a bound on the output is seldom reached."""

    WEIGHT = 0.1

    def __init__(self) -> None:
        self._input_share = 1.0
        self._output: float | None = None

    def charge(self, estimate: Estimate) -> Charge:
        """What a request is expected to use."""
        given = estimate.input_tokens * self._input_share
        bound = estimate.output_tokens
        made = float(bound) if self._output is None else self._output
        made = min(made, bound) if bound else made
        return _charge(given, given, made)

    def learn(self, estimate: Estimate, usage: Usage) -> Charge:
        """Learn from what a request used; returns that."""
        given, made = usage.input_tokens or 0, usage.output_tokens or 0
        weight = self.WEIGHT if self._output is not None else 1.0
        if estimate.input_tokens > 0:
            share = given / estimate.input_tokens
            self._input_share += weight * (share - self._input_share)
        self._output = (
            made if self._output is None else self._output + weight * (made - self._output)
        )
        # Where input and output are counted apart, what the cache gave does not count.
        return _charge(given, given - (usage.cache_read_tokens or 0), made)


def _charge(given: float, uncached: float, made: float) -> Charge:
    return {
        "requests": 1.0,
        "pace": 1.0,
        "tokens": given + made,
        "input_tokens": uncached,
        "output_tokens": made,
    }


Signal = Literal["clean", "throttled", "trouble", "neutral"]
"""What the end of a request means for the rate: an answer, a refusal for the rate, an error of the
server, or nothing."""

Reason = Literal["start", "slow_start", "clean_round", "throttled", "measured"]
"""Why a value changed."""

V = TypeVar("V", int, float)


def signal_of(error: ModelError | None) -> Signal:
    """Return what an error means for the rate; None is an answer."""
    if error is None:
        return "clean"
    if isinstance(error, RateLimited):
        return "throttled"
    return "trouble" if isinstance(error, Overloaded | ServerError) else "neutral"


class Change(msgspec.Struct, Generic[V], frozen=True, array_like=True):
    """One step in the history of a limit or a pace."""

    at_s: float
    """Seconds since the beginning."""
    value: V
    reason: Reason


class History(Generic[V]):
    """The changes of a value, in order and bounded in number.

    Consecutive growth is stored as its first and last change. When there are too many changes,
    every other one of the older half is dropped.
    """

    BOUND = 256

    def __init__(self, now: float) -> None:
        self._began = now
        self._changes: list[Change[V]] = []

    @property
    def changes(self) -> tuple[Change[V], ...]:
        """The changes that are kept."""
        return tuple(self._changes)

    def add(self, now: float, value: V, reason: Reason) -> None:
        """Append a change."""
        change = Change(round(now - self._began, 3), value, reason)
        last = self._changes[-2:]
        growing = reason in ("slow_start", "clean_round")
        if growing and len(last) == 2 and all(c.reason == reason for c in last):
            self._changes[-1] = change
            return
        self._changes.append(change)
        if len(self._changes) > self.BOUND:
            half = self.BOUND // 2
            self._changes[1:half] = self._changes[1:half:2]


class AdaptiveConcurrency:
    """How many requests may be in flight: additive increase, multiplicative decrease.

    - Slow start: one more per clean request while the limit is used, until the first refusal, so
      the limit doubles each round. The same below a quarter of the limit before repeated cuts.
    - Then 5 % more (at least one) after each clean round. A round is as many answers as the limit,
      or 3 s with five answers where that is sooner. It counts when 80 % of the limit was in use.
    - A refusal (429): four fifths, at most once per 15 s, because refusals of one burst have one
      cause. Until the next cut is due the limit stays below 95 % of where it was refused.
    - An error of the server (529, 5xx) only restarts the round.
    - Retry-After delays the request that got it, not the limit: hints may be longer than the pauses
      between refusals, and the limit would never grow.

    Args:
        maximum: upper bound, at least 1.
        start: where slow start begins.
        interval_s: seconds between two cuts.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    FAR = 4
    ROUNDS = 5
    """Rounds per interval, at least, where answers are slow."""
    ANSWERS = 5
    """Answers in such a round."""

    def __init__(
        self, maximum: int, start: int = 32, *, now: float = 0.0, interval_s: float = 15.0
    ) -> None:
        self.maximum = max(1, maximum)
        self.limit = max(1, min(start, self.maximum))
        self.slow_start = True
        self.history = History[int](now)
        self._interval_s = interval_s
        self._answers = self._peak = 0
        self._round_began = now
        self._last_cut: float | None = None
        self._refused_at = self.limit
        self._before_cuts, self._grew = 0, True
        self.history.add(now, self.limit, "start")

    def note_started(self, in_flight: int) -> None:
        """A request started; `in_flight` includes it."""
        self._peak = max(self._peak, in_flight)

    def note_ended(self, signal: Signal, now: float) -> None:
        """A request ended."""
        if signal == "throttled":
            self._cut(now)
        elif signal == "trouble":
            self._begin_round(now)
        elif signal == "clean":
            self._grow(now)

    def _grow(self, now: float) -> None:
        saturated = self._peak >= self.SATURATED * self.limit
        if self.slow_start or self.FAR * self.limit <= self._before_cuts:
            if saturated:
                self._grew = True
                self._set(min(self.maximum, self.limit + 1), "slow_start", now)
            return
        self._answers += 1
        # A refusal comes at once, however long an answer takes: a round need not wait for answers.
        timely = now - self._round_began >= self._interval_s / self.ROUNDS
        if self._answers < (min(self.ANSWERS, self.limit) if timely else self.limit):
            return
        if saturated:
            self._grew = True
            grown = max(self.limit + 1, int(self.limit * self.GROWTH))
            if not self._may_cut(now):
                grown = min(grown, max(self.limit, int(self._refused_at * self.HEADROOM)))
            self._set(min(self.maximum, grown), "clean_round", now)
        self._begin_round(now)

    def _cut(self, now: float) -> None:
        self.slow_start = False
        self._begin_round(now)
        if self._may_cut(now):
            self._last_cut = now
            self._refused_at = self.limit
            if self._grew:
                self._before_cuts, self._grew = self.limit, False
            self._set(max(1, int(self.limit * self.CUT)), "throttled", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self._interval_s

    def _begin_round(self, now: float) -> None:
        self._answers = self._peak = 0
        self._round_began = now

    def _set(self, limit: int, reason: Reason, now: float) -> None:
        if limit != self.limit:
            self.limit = limit
            self.history.add(now, limit, reason)


@dataclass
class _Period:
    """What happened since `began`."""

    began: float
    started: int = 0
    clean: int = 0
    throttled: int = 0
    trouble: int = 0
    refusals: tuple[tuple[float, int], ...] = ()
    """The first and the last refusal: its time, and started less throttled by then. That number
    grows by what was admitted between them, as about as many are on their way at both times."""

    @property
    def admitted(self) -> int:
        """Requests that were not refused."""
        return max(0, self.started - self.throttled)

    def add(self, now: float, events: Events) -> None:
        """Add what happened."""
        self.started += events.started
        self.clean += events.clean
        self.throttled += events.throttled
        self.trouble += events.trouble
        if events.throttled:
            self.refusals = (*self.refusals[:1], (now, self.started - self.throttled))

    def rate_between_refusals(self, least_s: float) -> float | None:
        """Requests admitted per second between the first refusal and the last; None where none
        were, or where less than `least_s` seconds lie between them."""
        if len(self.refusals) < 2:
            return None
        (first, before), (last, after) = self.refusals
        if last - first < least_s or after <= before:
            return None
        return (after - before) / (last - first)


class Events(msgspec.Struct, frozen=True):
    """What happened to the requests of a lane since the last time."""

    started: int = 0
    """Requests sent; negative where some were not sent after all."""
    clean: int = 0
    throttled: int = 0
    trouble: int = 0
    running: int = 0
    """Requests in flight now."""
    quotas: tuple[Quota, ...] = ()
    """Limits from response headers, the latest of each kind."""


class Pace:
    """The rate at which requests start, once refusals have shown that there is one.

    Between two refusals a server's bucket was empty twice, so what it admitted is what flowed in:
    the quota. A minute admits at most twice the quota, which bounds estimates from below.

    - None at first: no bound. It begins with a round of many refusals (three, and a tenth of its
      requests), when cuts were due twice within a minute, or when most requests were refused and do
      not come back soon (long Retry-After): unpaced, they would all come back together. The first
      pace is what was admitted; it doubles per clean round while it is low and no quota is known.
    - A round is a fifth of the interval, and longer until five requests were admitted. After a
      clean one that used 80 % of the pace: 5 % more, 10 % from the fifth in a row on. Until the
      next cut is due the pace stays below 95 % of the measured quota.
    - A refusal: four fifths, at most once per interval. Many refusals: 95 % of what they showed.
    - While refusals are the only responses, requests start ever less often, down to twice a minute,
      and the pace stays as it is.

    Args:
        interval_s: seconds between two cuts.
        window_s: seconds that limits are stated for.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    ROUNDS = 5
    """Rounds per interval, at most."""
    ADMITTED = 5
    """Requests admitted in a round, at least."""
    REFUSALS, SHARE = 3, 0.1
    """Many refusals: so many, and that share of the requests."""
    FAST_AFTER = 4
    """Clean rounds in a row, after which the pace grows by two steps at a time."""
    SETTLE = 1 / 15
    """Part of the interval in which requests on their way are refused; it is not counted."""
    SILENCE = 1 / 10
    """Part of the interval: refused callers that are not back by then wait for long."""
    PROBES, PROBE_S = 5, 30.0
    """Requests while a server refuses everybody: so many as time doubles, at most so far apart."""

    def __init__(self, now: float, *, interval_s: float = 15.0, window_s: float = 60.0) -> None:
        self.per_s: float | None = None
        self.history = History[float](now)
        self._interval_s, self._window_s = interval_s, window_s
        self._settle_s = interval_s * self.SETTLE
        self._quota: float | None = None
        self._last_cut: float | None = None
        self._round, self._since_cut = _Period(now), _Period(now)
        self._past: deque[tuple[float, int]] = deque()
        """When a round ended, and what it admitted."""
        self._streak = 0
        """Clean rounds in a row that used the pace."""
        self._refused_alone, self._answered_at, self._refused_at = 0, now, now
        """Refusals since the last answer; when that was, and when the last refusal was."""
        self._burst = self._back = 0
        """Refusals since the last round without any, and requests started since the last one."""

    def update(self, now: float, events: Events) -> None:
        """Take in what happened. Ends rounds too: call it often."""
        self._pace_silence(now, events.running)
        self._back += events.started
        if events.clean:
            self._refused_alone, self._answered_at = 0, now
        if events.throttled:
            self._refused_alone += events.throttled
            self._burst += events.throttled
            self._refused_at, self._back = now, 0
        for period in (self._round, self._since_cut):
            if now >= period.began:
                period.add(now, events)
        if events.throttled and self._may_cut(now):
            self._cut(now)
        lasted = now - self._round.began
        full = self._round.admitted >= self.ADMITTED or lasted >= self._interval_s
        if full and lasted >= self._interval_s / self.ROUNDS:
            self._end_round(now, lasted)

    def restart(self, now: float) -> None:
        """Measure from now on: nothing ran for a while, as when the process was stopped."""
        self._round, self._since_cut = _Period(now), _Period(now)
        self._last_cut = None if self._last_cut is None else now
        self._burst = self._back = self._refused_alone = 0
        self._answered_at = now

    def rate(self, now: float) -> float | None:
        """Requests that may start per second now; None means no bound."""
        silent_s = now - self._answered_at
        known = self.per_s is not None or silent_s > self._interval_s
        if self._refused_alone < self.REFUSALS or not known:
            return self.per_s
        gap_s = min(max(silent_s / self.PROBES, self._settle_s), self.PROBE_S * self._settle_s)
        return min(self.per_s or math.inf, 1 / gap_s)

    def _pace_silence(self, now: float, running: int) -> None:
        """Begin a pace when most callers were refused and wait for long."""
        if self.per_s is not None or now < self._refused_at + self._interval_s * self.SILENCE:
            return
        admitted, burst = self._last_window(self._refused_at) - running, self._burst
        if burst >= self.REFUSALS and burst > max(running, 2 * self._back) and admitted > 1:
            self._quota = None
            self._set(max(admitted, burst) / self._window_s, "measured", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self._interval_s

    def _cut(self, now: float) -> None:
        if self._last_cut is not None and self._since_cut.admitted:
            self._quota = self._since_cut.admitted / (now - self._since_cut.began)
            if self.per_s is not None:
                if self._since_cut.clean:
                    self._lower(self.per_s * self.CUT, "throttled", now)
            elif now - self._last_cut <= self._window_s:
                lasted = max(now - self._round.began, self._interval_s / self.ROUNDS)
                most = 4 * self._last_window(now) / self._window_s
                asked = self._round.started / lasted * self.CUT
                self._lower(max(self._quota, min(asked, most)), "throttled", now)
        if self.per_s is None:  # what a full bucket gave is not part of the quota
            self._remember(now)
            self._round = _Period(now + self._settle_s)
        self._last_cut, self._since_cut = now, _Period(now + self._settle_s)

    def _end_round(self, now: float, lasted: float) -> None:
        self._remember(now)
        ended, self._round = self._round, _Period(now)
        if not ended.throttled and not ended.trouble:
            self._burst = 0 if ended.clean else self._burst
            self._grow(ended, lasted, now)
            return
        self._streak = 0
        many = (p for p in (ended, self._since_cut) if p.throttled >= self._many(p))
        period = next(many, None)
        least_s = self._interval_s / self.ROUNDS / 2
        quota = period.rate_between_refusals(least_s) if period else None
        if quota is not None and (self.per_s is None or ended.clean):
            self._quota = quota
            self._lower(quota * self.HEADROOM, "measured", now)
            self._round = _Period(now + self._settle_s)

    def _many(self, period: _Period) -> float:
        return max(self.REFUSALS, self.SHARE * period.started)

    def _grow(self, ended: _Period, lasted: float, now: float) -> None:
        if self.per_s is None or ended.started < self.SATURATED * self.per_s * lasted:
            return
        grown = self.per_s * self.GROWTH ** (2 if self._streak >= self.FAST_AFTER else 1)
        if self._quota is None and self.per_s * self._settle_s < self.ADMITTED:
            grown = 2 * self.per_s
        if not self._may_cut(now) and self._quota is not None:
            grown = min(grown, max(self.per_s, self.HEADROOM * self._quota))
        else:
            self._streak += 1
        self._set(grown, "clean_round", now)

    def _lower(self, per_s: float, reason: Reason, now: float) -> None:
        """Never more than before, and never less than half of what the last window admitted."""
        per_s = max(per_s, self._last_window(now) / 2 / self._window_s)
        self._set(min(per_s, self.per_s or math.inf), reason, now)

    def _last_window(self, now: float) -> int:
        """Requests admitted in the last window."""
        since = now - self._window_s
        return sum(n for at, n in self._past if at >= since) + self._round.admitted

    def _remember(self, now: float) -> None:
        self._past.append((now, self._round.admitted))
        while self._past[0][0] < now - self._window_s:
            self._past.popleft()

    def _set(self, per_s: float, reason: Reason, now: float) -> None:
        per_s = max(per_s, 1 / self._interval_s)
        if per_s != self.per_s:
            self.per_s = per_s
            self.history.add(now, round(per_s, 4), reason)


class AdaptiveRate:
    """Concurrency, pace and buckets of one lane, told of the same events.

    Where there is a pace it alone is cut by refusals, and concurrency grows until it is not used
    any more: cut as well, it would start requests in the bunches in which slow answers end.

    Args:
        maximum: requests in flight, at most.
        start: where slow start begins.
        rates: limits that are known; others are learned.
        interval_s: seconds between two cuts.
        window_s: seconds that limits are stated for.
    """

    def __init__(
        self,
        maximum: int,
        now: float,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        interval_s: float = 15.0,
        window_s: float = 60.0,
    ) -> None:
        self.concurrency = AdaptiveConcurrency(maximum, start, now=now, interval_s=interval_s)
        self.buckets = Buckets(rates, now, window_s=window_s)
        self.pace = Pace(now, interval_s=interval_s, window_s=window_s)

    def update(self, events: Events, now: float) -> None:
        """Take in what happened. Refusals of one update are one event."""
        for _ in range(events.clean):
            self.concurrency.note_ended("clean", now)
        if events.trouble:
            self.concurrency.note_ended("trouble", now)
        if events.throttled:
            self.buckets.drain(now)
            if self.pace.per_s is None:
                self.concurrency.note_ended("throttled", now)
        self.pace.update(now, events)
        if events.quotas:
            self.buckets.learn(events.quotas, now)
        self.buckets.set_pace(self.pace.rate(now), now)
        if self.pace.per_s is not None:
            self.concurrency.slow_start = True
