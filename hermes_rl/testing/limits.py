"""Rate limits of the fake model server: token buckets per account, told in a provider's headers.

Each limit is a bucket that refills continuously and holds what comes in during `burst_s`. A request
passes when every bucket holds what it needs, or is full (else a request larger than a bucket would
never pass), and takes it; a refused one takes nothing. What a request needs is known beforehand,
because answers are scripted. Cache reads do not count where the wire marks what it caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Limit = Literal["requests", "tokens", "input_tokens", "output_tokens"]


@dataclass(frozen=True)
class RateLimits:
    """What one account (API key) may use in a minute; None is no limit."""

    requests: float | None = None
    tokens: float | None = None
    """Input and output together, as OpenAI counts."""
    input_tokens: float | None = None
    output_tokens: float | None = None
    burst_s: float = 60.0
    """Seconds of refill that a bucket holds."""
    schedule: tuple[tuple[float, float], ...] = ()
    """(seconds since the server's start, factor of all limits from then on), in order."""
    retry_after_s: float | None = None
    """What a refusal asks to wait; by default the time until the request would pass."""
    headers: bool = True
    """Answers tell limits and what is left of them."""

    def factor(self, now: float) -> float:
        """The schedule's factor at a time."""
        return next((f for since, f in reversed(self.schedule) if now >= since), 1.0)


class State(NamedTuple):
    """One limit, as headers tell it."""

    limit: float
    remaining: float
    reset_s: float
    """Until the bucket is full."""


class Verdict(NamedTuple):
    """Whether a request passes."""

    refused: Limit | None
    """The limit that it meets."""
    wait_s: float
    """Until it would pass."""
    states: Mapping[Limit, State]
    """After the request."""


@dataclass
class _Bucket:
    per_minute: float
    level: float
    """Share of a full bucket, so that a changed quota changes what is in it too."""
    at: float


@dataclass
class Limits:
    """The buckets of all accounts."""

    limits: RateLimits
    factor: float = 1.0
    """On top of the schedule's; a test may change it at any time."""
    _accounts: dict[str, dict[Limit, _Bucket]] = field(default_factory=dict)

    def admit(self, account: str, needs: Mapping[Limit, float], now: float) -> Verdict:
        """Let a request in, or not.

        Args:
            needs: how much the request takes of each limit.
            now: seconds since the server's start.
        """
        buckets = self._accounts.get(account)
        if buckets is None:
            buckets = self._accounts[account] = self._fresh(now)
        factor = self.factor * self.limits.factor(now)
        refused: Limit | None = None
        wait = 0.0
        for name, bucket in buckets.items():
            self._refill(bucket, now)
            lacking = min(needs.get(name, 0.0) / self._size(bucket, factor), 1.0) - bucket.level
            if lacking > 1e-9 and lacking * self.limits.burst_s >= wait:
                refused, wait = name, lacking * self.limits.burst_s
        if refused is None:
            for name, bucket in buckets.items():
                bucket.level -= needs.get(name, 0.0) / self._size(bucket, factor)
        states = {name: self._state(bucket, factor) for name, bucket in buckets.items()}
        given = self.limits.retry_after_s
        return Verdict(refused, wait if given is None else given, states)

    def _fresh(self, now: float) -> dict[Limit, _Bucket]:
        given: dict[Limit, float | None] = {
            "requests": self.limits.requests,
            "tokens": self.limits.tokens,
            "input_tokens": self.limits.input_tokens,
            "output_tokens": self.limits.output_tokens,
        }
        return {name: _Bucket(n, 1.0, now) for name, n in given.items() if n is not None}

    def _size(self, bucket: _Bucket, factor: float) -> float:
        return bucket.per_minute * factor * self.limits.burst_s / 60

    def _refill(self, bucket: _Bucket, now: float) -> None:
        bucket.level = min(1.0, bucket.level + (now - bucket.at) / self.limits.burst_s)
        bucket.at = now

    def _state(self, bucket: _Bucket, factor: float) -> State:
        remaining = max(0.0, bucket.level) * self._size(bucket, factor)
        reset = (1.0 - bucket.level) * self.limits.burst_s
        return State(bucket.per_minute * factor, remaining, reset)


def openai_headers(states: Mapping[Limit, State], unix_now: float) -> dict[str, str]:
    """As OpenAI sends them: resets are durations. What is not combined there is told as tokens."""
    told = {k: v for k, v in states.items() if k != "output_tokens" and k != "input_tokens"}
    if "tokens" not in told and "input_tokens" in states:
        told["tokens"] = states["input_tokens"]
    out = {}
    for name, state in told.items():
        out[f"x-ratelimit-limit-{name}"] = str(int(state.limit))
        out[f"x-ratelimit-remaining-{name}"] = str(int(state.remaining))
        out[f"x-ratelimit-reset-{name}"] = _duration(state.reset_s)
    return out


def anthropic_headers(states: Mapping[Limit, State], unix_now: float) -> dict[str, str]:
    """As Anthropic sends them: resets are points in time."""
    out = {}
    for name, state in states.items():
        scope = f"anthropic-ratelimit-{name.replace('_', '-')}"
        reset = datetime.fromtimestamp(math.ceil(unix_now + state.reset_s), UTC)
        out[f"{scope}-limit"] = str(int(state.limit))
        out[f"{scope}-remaining"] = str(int(state.remaining))
        out[f"{scope}-reset"] = reset.isoformat().replace("+00:00", "Z")
    return out


def _duration(seconds: float) -> str:
    """`120ms`, `1.5s` or `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
