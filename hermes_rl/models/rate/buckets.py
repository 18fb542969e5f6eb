"""Token buckets for what a provider counts per minute: requests, input tokens, output tokens. Pure.

A request reserves what it is expected to use and settles what it did use. A balance may go below
zero (an answer was longer than expected, one request is larger than the whole bucket): the debt is
worked off before the next request starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
