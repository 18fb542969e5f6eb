"""The fake model server's rate limits, outages and prices, on a clock of its own.

Each limit is a token bucket per account that refills continuously, with a capacity of `burst_s`
seconds of refill. A request passes if every bucket has enough for it or is full (else a request
larger than a bucket would never pass). A refused request takes nothing. The needs of a request are
known beforehand, because answers are scripted. Cache reads do not count on wires that mark cached
content.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal, NamedTuple

from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.faults import REFUSALS, Refusal
from hermes_rl.usage import Usage

Limit = Literal["requests", "tokens", "input_tokens", "output_tokens"]

_MILLION = Decimal(1_000_000)


@dataclass(frozen=True)
class RateLimits:
    """Limits of one account (API key) per minute; None for unlimited."""

    requests: float | None = None
    tokens: float | None = None
    """Input and output together, as OpenAI counts."""
    input_tokens: float | None = None
    output_tokens: float | None = None
    burst_s: float = 60.0
    """Seconds of refill that a bucket holds."""
    retry_after_s: float | None = None
    """What a refusal asks to wait; by default the time until the request would pass."""
    headers: bool = True
    """Answers report the limits and what is left of them."""


@dataclass
class _Bucket:
    per_minute: float
    level: float
    """Share of a full bucket, so that a changed quota changes what is in it too."""
    at: float


class State(NamedTuple):
    """One limit, as headers report it."""

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

    @property
    def refusal(self) -> Refusal | None:
        """The answer to a request that does not pass."""
        if self.refused is None:
            return None
        texts = self.refused.replace("_", " ")
        text = f"Rate limit reached for {texts} per minute. Try later."
        return Refusal(429, self.refused, "rate_limit_exceeded", text)


@dataclass
class Limits:
    """The buckets of all accounts."""

    limits: RateLimits
    factor: float = 1.0
    """Factor of all limits; a test may change it at any time."""
    _accounts: dict[str, dict[Limit, _Bucket]] = field(default_factory=dict)

    def admit(self, account: str, needs: Mapping[Limit, float], now: float) -> Verdict:
        """Let a request in, or not.

        Args:
            needs: how much the request takes of each limit.
            now: seconds since the server's start.
        """
        burst, hint = self.limits.burst_s, self.limits.retry_after_s
        buckets = self._accounts.get(account) or self._open(account, now)
        factor = self.factor
        refused: Limit | None = None
        wait = 0.0
        for name, bucket in buckets.items():
            bucket.level = min(1.0, bucket.level + (now - bucket.at) / burst)
            bucket.at = now
            size = bucket.per_minute * factor * burst / 60
            lacking = min(needs.get(name, 0.0) / size, 1.0) - bucket.level
            if lacking > 1e-9 and lacking * burst >= wait:
                refused, wait = name, lacking * burst
        states: dict[Limit, State] = {}
        for name, bucket in buckets.items():
            size = bucket.per_minute * factor * burst / 60
            if refused is None:
                bucket.level -= needs.get(name, 0.0) / size
            remaining, reset = max(0.0, bucket.level) * size, (1.0 - bucket.level) * burst
            states[name] = State(bucket.per_minute * factor, remaining, reset)
        return Verdict(refused, wait if hint is None else hint, states)

    def _open(self, account: str, now: float) -> dict[Limit, _Bucket]:
        fields: dict[Limit, float | None] = {
            "requests": self.limits.requests,
            "tokens": self.limits.tokens,
            "input_tokens": self.limits.input_tokens,
            "output_tokens": self.limits.output_tokens,
        }
        buckets = {name: _Bucket(n, 1.0, now) for name, n in fields.items() if n is not None}
        self._accounts[account] = buckets
        return buckets

    def headers(self, verdict: Verdict, dialect: str, unix_now: float) -> dict[str, str]:
        """Return the rate-limit headers of an answer."""
        anthropic = dialect == "anthropic_messages"
        headers: dict[str, str] = {}
        if self.limits.headers:
            write = _anthropic_headers if anthropic else _openai_headers
            headers = write(verdict.states, unix_now)
        if verdict.refused is not None:
            headers["retry-after"] = str(max(1, math.ceil(verdict.wait_s)))
            if not anthropic:
                headers["retry-after-ms"] = str(max(1, int(verdict.wait_s * 1000)))
        return headers


def needs_of(request: ServedRequest, usage: Usage) -> dict[Limit, float]:
    """Return what a request takes of each limit."""
    read = 0 if request.cache_marks is None else usage.cache_read_tokens or 0
    fields, taken = (usage.input_tokens or 0) - read, usage.output_tokens or 0
    return {"requests": 1, "tokens": fields + taken, "input_tokens": fields, "output_tokens": taken}


def _openai_headers(states: Mapping[Limit, State], unix_now: float) -> dict[str, str]:
    """Resets are durations. OpenAI has only combined tokens; without that limit, input tokens."""
    shown = {"requests": states.get("requests")}
    shown["tokens"] = states.get("tokens") or states.get("input_tokens")
    out = {}
    for name, state in shown.items():
        if state is not None:
            out[f"x-ratelimit-limit-{name}"] = str(int(state.limit))
            out[f"x-ratelimit-remaining-{name}"] = str(int(state.remaining))
            out[f"x-ratelimit-reset-{name}"] = _duration(state.reset_s)
    return out


def _anthropic_headers(states: Mapping[Limit, State], unix_now: float) -> dict[str, str]:
    """Resets are points in time."""
    out = {}
    for name, state in states.items():
        scope = f"anthropic-ratelimit-{name.replace('_', '-')}"
        reset = datetime.fromtimestamp(math.ceil(unix_now + state.reset_s), UTC)
        out[f"{scope}-limit"] = str(int(state.limit))
        out[f"{scope}-remaining"] = str(int(state.remaining))
        out[f"{scope}-reset"] = reset.isoformat().replace("+00:00", "Z")
    return out


def _duration(seconds: float) -> str:
    """Format as OpenAI does: `120ms`, `1.5s` or `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


# Outages and prices


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens. What is None costs as much as other input."""

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_1h: Decimal | None = None

    def cost(self, usage: Usage) -> Decimal:
        """Return the cost of a call: every token of its prompt once, as what it is."""
        read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
        hour = usage.cache_write_1h_tokens or 0
        short = self.input if self.cache_write is None else self.cache_write
        parts = (
            ((usage.input_tokens or 0) - read - written, self.input),
            (read, self.input if self.cache_read is None else self.cache_read),
            (written - hour, short),
            (hour, short if self.cache_write_1h is None else self.cache_write_1h),
            (usage.output_tokens or 0, self.output),
        )
        return sum((tokens * price for tokens, price in parts), Decimal(0)) / _MILLION


@dataclass(frozen=True)
class Conditions:
    """All times are seconds of the server's own clock, from its start."""

    outages: tuple[tuple[float, float], ...] = ()
    """(from, to): every request is refused."""
    outage: str = "unavailable"
    """The kind of refusal then; see `faults.REFUSALS`."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Model -> price; `*` for all others."""
    clock_scale: float = 1.0
    """Seconds of the server's clock in one second: 60 makes a minute of limits and outages last a
    second. Waits that it asks for are seconds of its clock."""

    def __post_init__(self) -> None:
        if self.outage not in REFUSALS:
            raise ValueError(f"no refusal {self.outage!r}; there are {', '.join(REFUSALS)}")

    def is_out(self, now: float) -> bool:
        """Whether there is an outage."""
        return any(since <= now < until for since, until in self.outages)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        """Return the cost of a call; None for a model without a price."""
        price = self.prices.get(model) or self.prices.get("*")
        return None if price is None else price.cost(usage)
