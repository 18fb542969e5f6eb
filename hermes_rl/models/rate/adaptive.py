"""The adaptive rate of one endpoint, account and model: token buckets, concurrency and pace. Pure.

A bucket counts one kind of use per minute, as providers do. A request reserves its expected use and
settles its actual use. A balance may be negative (an answer was longer than expected, or a request
exceeds the bucket): the debt is refilled before the next request starts.

Limited concurrency does not bound the rate if answers are quick. So if a server refuses requests
repeatedly, the rate that it admits is measured, and requests start at that pace.
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
    """Upper bounds of a request's tokens; 0 if unknown."""

    input_tokens: int = 0
    """An upper bound."""
    output_tokens: int = 0
    """An upper bound."""


@dataclass(frozen=True)
class Rates:
    """Known limits per minute; None if there is none."""

    requests: float | None = None
    tokens: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None


class Bucket:
    """A balance that refills with time.

    Args:
        per_s: refill rate.
        capacity: maximum balance. A larger request starts when the bucket is full.
        balance: initial balance; None for full.
    """

    def __init__(
        self, per_s: float, capacity: float, now: float, balance: float | None = None
    ) -> None:
        self.per_s = per_s
        self.capacity = max(1.0, capacity)
        self.balance = self.capacity if balance is None else balance
        self._filled = now

    def fill(self, now: float) -> float:
        """Refill up to now and return the balance."""
        gained = max(0.0, now - self._filled) * self.per_s
        self._filled = max(now, self._filled)
        if self.balance < self.capacity:
            self.balance = min(self.capacity, self.balance + gained)
        return self.balance

    def resize(self, per_s: float, capacity: float, now: float) -> None:
        """Change refill rate and capacity."""
        self.fill(now)
        self.per_s, self.capacity = per_s, max(1.0, capacity)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until an amount may be taken; infinite without a refill."""
        missing = min(amount, self.capacity) - self.fill(now)
        if missing <= 1e-9:
            return 0.0
        return missing / self.per_s if self.per_s > 0 else math.inf


WINDOW_S = 60.0
"""The period of limits."""

CUT_INTERVAL_S = 15.0
"""Minimum seconds between two cuts."""

ROUND_S = 3.0
"""Seconds of a round of requests."""

MARGIN = 0.98
"""The part of a limit that is used: the server's clock differs from ours."""

BURST = 1 / 12
"""The part of a minute that a bucket of a configured limit holds: servers enforce limits over
shorter windows than a minute."""

PACE_BURST = 1 / 20
"""The same for a measured pace."""


class Buckets:
    """The buckets of one account and model.

    Limits are learned from headers unless configured. The remaining amount in a header is never
    exceeded.
    """

    def __init__(self, rates: Rates = Rates(), now: float = 0.0) -> None:
        self.by_kind: dict[Kind, Bucket] = {}
        for kind in KINDS:
            rate: float | None = getattr(rates, kind)
            if rate is not None:
                self.by_kind[kind] = Bucket(rate / WINDOW_S, rate * BURST, now)
        self._configured = frozenset(self.by_kind)

    def wait_s(self, charge: Charge, now: float) -> float:
        """Return the seconds until a request may start."""
        waits = (b.wait_s(charge.get(kind, 0.0), now) for kind, b in self.by_kind.items())
        return max(waits, default=0.0)

    def backlog_s(
        self, requests: int, now: float, refill: Mapping[Kind, float] | None = None
    ) -> float:
        """Return the seconds until this many requests could have started.

        Args:
            refill: refill rates that replace those of the buckets.
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
        """Take the charge of a request that starts."""
        for kind, bucket in self.by_kind.items():
            bucket.balance -= charge.get(kind, 0.0)

    def give(self, charge: Charge) -> None:
        """Return the charge of a request that did not start."""
        for kind, bucket in self.by_kind.items():
            bucket.balance = min(bucket.capacity, bucket.balance + charge.get(kind, 0.0))

    def settle(self, reserved: Charge, used: Charge) -> None:
        """Correct the charge of a request that ended. Kinds missing in `used` stay as reserved."""
        for kind, bucket in self.by_kind.items():
            if kind in used:
                back = reserved.get(kind, 0.0) - used[kind]
                bucket.balance = min(bucket.capacity, bucket.balance + back)

    def learn(self, quotas: Iterable[Quota], now: float) -> None:
        """Learn from response headers."""
        for quota in quotas:
            per_s, bucket = quota.per_s(WINDOW_S), self.by_kind.get(quota.kind)
            if per_s is not None and quota.limit and quota.kind not in self._configured:
                if bucket is None:
                    bucket = self.by_kind[quota.kind] = Bucket(per_s * MARGIN, quota.limit, now)
                bucket.resize(per_s * MARGIN, quota.limit, now)
            if bucket is not None and quota.remaining is not None:
                bucket.balance = min(bucket.fill(now), quota.remaining)

    def set_pace(self, per_s: float | None, now: float) -> None:
        """Limit the rate at which requests start; None for no limit."""
        if per_s is None:
            self.by_kind.pop("pace", None)
            return
        bucket = self.by_kind.setdefault("pace", Bucket(per_s, 1.0, now, 0.0))
        bucket.resize(per_s, per_s * WINDOW_S * PACE_BURST, now)

    def drain(self, now: float) -> None:
        """Empty all buckets after a refusal."""
        for bucket in self.by_kind.values():
            bucket.balance = min(bucket.fill(now), 0.0)


class UsageEstimator:
    """Estimates the use of requests from those that ended: prompt bounds are far above the actual
    counts, and output limits are seldom reached."""

    WEIGHT = 0.1

    def __init__(self) -> None:
        self._input_share = 1.0
        self._output: float | None = None

    def charge(self, estimate: Estimate) -> Charge:
        """Return the expected use of a request."""
        prompt = estimate.input_tokens * self._input_share
        bound = estimate.output_tokens
        output = float(bound) if self._output is None else self._output
        output = min(output, bound) if bound else output
        return _charge(prompt, prompt, output)

    def learn(self, estimate: Estimate, usage: Usage) -> Charge:
        """Learn from the actual use of a request, and return it."""
        prompt, output = usage.input_tokens or 0, usage.output_tokens or 0
        weight = self.WEIGHT if self._output is not None else 1.0
        if estimate.input_tokens > 0:
            share = prompt / estimate.input_tokens
            self._input_share += weight * (share - self._input_share)
        self._output = (
            output if self._output is None else self._output + weight * (output - self._output)
        )
        # Limits on input tokens do not count cached ones.
        return _charge(prompt, prompt - (usage.cache_read_tokens or 0), output)


def _charge(prompt: float, uncached: float, output: float) -> Charge:
    return {
        "requests": 1.0,
        "pace": 1.0,
        "tokens": prompt + output,
        "input_tokens": uncached,
        "output_tokens": output,
    }


Signal = Literal["clean", "throttled", "trouble", "neutral"]
"""What the end of a request means for the rate: an answer, a rate-limit refusal, a server error, or
nothing."""

Reason = Literal["start", "slow_start", "clean_round", "throttled", "measured"]
"""Why a value changed."""

V = TypeVar("V", int, float)


def rate_signal(error: ModelError | None) -> Signal:
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
    """The limit of requests in flight: additive increase, multiplicative decrease.

    - Slow start: one more per clean request while the limit is in use, until the first refusal, so
      the limit doubles each round.
    - Then 5 % more (at least one) after each clean round that used 80 % of the limit. A round is as
      many answers as the limit, or 3 s with five answers if that is sooner.
    - A refusal (429) cuts the limit to four fifths, at most once per 15 s, because refusals of one
      burst have one cause. Until the next cut is due, the limit stays below 95 % of where it was
      cut.
    - A server error (529, 5xx) only restarts the round.
    - Retry-After delays the refused request, not the limit, which could otherwise never increase.

    Args:
        maximum: upper bound, at least 1.
        start: initial limit of slow start.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    ANSWERS = 5
    """Answers in such a round."""

    def __init__(self, maximum: int, start: int = 32, *, now: float = 0.0) -> None:
        self.maximum = max(1, maximum)
        self.limit = max(1, min(start, self.maximum))
        self.slow_start = True
        self.history = History[int](now)
        self._answers = self._peak = 0
        self._round_began = now
        self._last_cut: float | None = None
        self._refused_at = self.limit
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
            self._increase(now)

    def _increase(self, now: float) -> None:
        saturated = self._peak >= self.SATURATED * self.limit
        if self.slow_start:
            if saturated:
                self._set(min(self.maximum, self.limit + 1), "slow_start", now)
            return
        self._answers += 1
        # Refusals come at once, however long answers take: a round need not wait for all answers.
        timely = now - self._round_began >= ROUND_S
        if self._answers < (min(self.ANSWERS, self.limit) if timely else self.limit):
            return
        if saturated:
            increased = max(self.limit + 1, int(self.limit * self.GROWTH))
            if not self._may_cut(now):
                increased = min(increased, max(self.limit, int(self._refused_at * self.HEADROOM)))
            self._set(min(self.maximum, increased), "clean_round", now)
        self._begin_round(now)

    def _cut(self, now: float) -> None:
        self.slow_start = False
        self._begin_round(now)
        if self._may_cut(now):
            self._last_cut = now
            self._refused_at = self.limit
            self._set(max(1, int(self.limit * self.CUT)), "throttled", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= CUT_INTERVAL_S

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
    """Time of the first and the last refusal, with the requests started less those throttled by
    then. The difference of these counts is what was admitted in between, since about as many were
    in flight at both times."""

    @property
    def admitted(self) -> int:
        """Number of requests that were not refused."""
        return max(0, self.started - self.throttled)

    def add(self, now: float, events: Events) -> None:
        """Add events."""
        self.started += events.started
        self.clean += events.clean
        self.throttled += events.throttled
        self.trouble += events.trouble
        if events.throttled:
            self.refusals = (*self.refusals[:1], (now, self.started - self.throttled))

    def rate_between_refusals(self, least_s: float) -> float | None:
        """Return requests admitted per second between the first and the last refusal; None if none
        were, or if less than `least_s` seconds lie between them."""
        if len(self.refusals) < 2:
            return None
        (first, before), (last, after) = self.refusals
        if last - first < least_s or after <= before:
            return None
        return (after - before) / (last - first)


class Events(msgspec.Struct, frozen=True):
    """What happened on a lane since the last update."""

    started: int = 0
    """Requests started; negative for requests that were not sent after all."""
    clean: int = 0
    throttled: int = 0
    trouble: int = 0
    running: int = 0
    """Requests in flight now."""
    quotas: tuple[Quota, ...] = ()
    """Limits from response headers, the latest of each kind."""


class Pace:
    """The rate at which requests start, once refusals have shown a rate limit.

    A server's bucket was empty at both of two refusals, so what it admitted between them was its
    refill: the quota. A minute admits at most twice the quota, which bounds estimates from below.

    - At first there is no pace. It begins with a round of many refusals (three, and a tenth of its
      requests), with two cuts within a minute, or when most requests were refused and do not return
      soon (long Retry-After): without a pace they would return all at once. The first pace is
      the admitted rate.
    - A round is a fifth of the interval, and longer until five requests were admitted. After a
      clean round that used 80 % of the pace it increases by 5 %, from the fifth in a row on by 10
      %. Until the next cut is due, it stays below 95 % of the measured quota.
    - A refusal cuts it to four fifths, at most once per interval; many refusals to 95 % of the
      measured quota.
    - While all responses are refusals, requests start less and less often, down to twice a minute.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    ADMITTED = 5
    """Minimum requests admitted in a round."""
    REFUSALS, SHARE = 3, 0.1
    """Many refusals: at least this number, and this share of the requests."""
    FAST_AFTER = 4
    """After this many clean rounds in a row the pace increases by two steps."""
    SETTLE_S = 1.0
    """Time that is not counted after a cut, as requests in flight are still refused."""
    SILENCE_S = 1.5
    """Refused callers that have not returned after this time are taken to wait for long."""
    PROBES, PROBE_S = 5, 30.0
    """While all requests are refused: requests per doubling of time, and their maximum distance."""

    def __init__(self, now: float) -> None:
        self.per_s: float | None = None
        self.history = History[float](now)
        self._quota: float | None = None
        self._last_cut: float | None = None
        self._round, self._since_cut = _Period(now), _Period(now)
        self._past: deque[tuple[float, int]] = deque()
        """End of each round, and what it admitted."""
        self._streak = 0
        """Consecutive clean rounds that used the pace."""
        self._refused_alone, self._answered_at, self._refused_at = 0, now, now
        """Refusals since the last answer; time of that answer, and of the last refusal."""
        self._burst = self._back = 0
        """Refusals since the last round without any; requests started since the last refusal."""

    def update(self, now: float, events: Events) -> None:
        """Process events and end rounds. Call it often."""
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
        full = self._round.admitted >= self.ADMITTED or lasted >= CUT_INTERVAL_S
        if full and lasted >= ROUND_S:
            self._end_round(now, lasted)

    def restart(self, now: float) -> None:
        """Restart measuring after a pause, as when the process was stopped."""
        self._round, self._since_cut = _Period(now), _Period(now)
        self._last_cut = None if self._last_cut is None else now
        self._burst = self._back = self._refused_alone = 0
        self._answered_at = now

    def rate(self, now: float) -> float | None:
        """Return the requests that may start per second now; None for no limit."""
        silent_s = now - self._answered_at
        known = self.per_s is not None or silent_s > CUT_INTERVAL_S
        if self._refused_alone < self.REFUSALS or not known:
            return self.per_s
        gap_s = min(max(silent_s / self.PROBES, self.SETTLE_S), self.PROBE_S)
        return min(self.per_s or math.inf, 1 / gap_s)

    def _pace_silence(self, now: float, running: int) -> None:
        """Begin a pace if most callers were refused and wait for long."""
        if self.per_s is not None or now < self._refused_at + self.SILENCE_S:
            return
        admitted, burst = self._last_window(self._refused_at) - running, self._burst
        if burst >= self.REFUSALS and burst > max(running, 2 * self._back) and admitted > 1:
            self._quota = None
            self._set(max(admitted, burst) / WINDOW_S, "measured", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= CUT_INTERVAL_S

    def _cut(self, now: float) -> None:
        if self._last_cut is not None and self._since_cut.admitted:
            self._quota = self._since_cut.admitted / (now - self._since_cut.began)
            if self.per_s is not None:
                if self._since_cut.clean:
                    self._lower(self.per_s * self.CUT, "throttled", now)
            elif now - self._last_cut <= WINDOW_S:
                self._lower(self._quota, "throttled", now)
        if self.per_s is None:  # the content of a full bucket is not part of the quota
            self._remember(now)
            self._round = _Period(now + self.SETTLE_S)
        self._last_cut, self._since_cut = now, _Period(now + self.SETTLE_S)

    def _end_round(self, now: float, lasted: float) -> None:
        self._remember(now)
        ended, self._round = self._round, _Period(now)
        if not ended.throttled and not ended.trouble:
            self._burst = 0 if ended.clean else self._burst
            self._increase(ended, lasted, now)
            return
        self._streak = 0
        many = (p for p in (ended, self._since_cut) if p.throttled >= self._many(p))
        period = next(many, None)
        least_s = ROUND_S / 2
        quota = period.rate_between_refusals(least_s) if period else None
        if quota is not None and (self.per_s is None or ended.clean):
            self._quota = quota
            self._lower(quota * self.HEADROOM, "measured", now)
            self._round = _Period(now + self.SETTLE_S)

    def _many(self, period: _Period) -> float:
        return max(self.REFUSALS, self.SHARE * period.started)

    def _increase(self, ended: _Period, lasted: float, now: float) -> None:
        if self.per_s is None or ended.started < self.SATURATED * self.per_s * lasted:
            return
        increased = self.per_s * self.GROWTH ** (2 if self._streak >= self.FAST_AFTER else 1)
        if not self._may_cut(now) and self._quota is not None:
            increased = min(increased, max(self.per_s, self.HEADROOM * self._quota))
        else:
            self._streak += 1
        self._set(increased, "clean_round", now)

    def _lower(self, per_s: float, reason: Reason, now: float) -> None:
        """Lower the pace, to no less than half of what the last window admitted."""
        per_s = max(per_s, self._last_window(now) / 2 / WINDOW_S)
        self._set(min(per_s, self.per_s or math.inf), reason, now)

    def _last_window(self, now: float) -> int:
        """Return the requests admitted in the last window."""
        since = now - WINDOW_S
        return sum(n for at, n in self._past if at >= since) + self._round.admitted

    def _remember(self, now: float) -> None:
        self._past.append((now, self._round.admitted))
        while self._past[0][0] < now - WINDOW_S:
            self._past.popleft()

    def _set(self, per_s: float, reason: Reason, now: float) -> None:
        per_s = max(per_s, 1 / CUT_INTERVAL_S)
        if per_s != self.per_s:
            self.per_s = per_s
            self.history.add(now, round(per_s, 4), reason)


class AdaptiveRate:
    """Concurrency, pace and buckets of one lane.

    With a pace, refusals cut only the pace, and concurrency increases until it is not used: a limit
    on concurrency would start requests in bursts, as slow answers end.

    Args:
        maximum: of requests in flight.
        start: initial limit of slow start.
        rates: known limits; others are learned.
        beside: a lane with which this one shares concurrency and pace.
    """

    def __init__(
        self,
        maximum: int,
        now: float,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        beside: AdaptiveRate | None = None,
    ) -> None:
        self.concurrency = AdaptiveConcurrency(maximum, start, now=now)
        self.buckets = Buckets(rates, now)
        self.pace = Pace(now)
        if beside is not None:
            self.concurrency, self.pace = beside.concurrency, beside.pace

    def update(self, events: Events, now: float, *, pace_share: float = 1.0) -> None:
        """Process events. Refusals of one update count as one.

        Args:
            pace_share: of this lane.
        """
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
        pace = self.pace.rate(now)
        self.buckets.set_pace(None if pace is None else pace * pace_share, now)
