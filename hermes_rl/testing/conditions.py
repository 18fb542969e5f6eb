"""The fake model server's day: its clock, outages and prices, and how limits are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.faults import REFUSALS, Refusal
from hermes_rl.testing.limits import (
    Limit,
    Limits,
    Verdict,
    anthropic_headers,
    openai_headers,
)
from hermes_rl.usage import Usage

_MILLION = Decimal(1_000_000)


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens. What is None costs as much as other input."""

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_1h: Decimal | None = None

    def bill(self, usage: Usage) -> Decimal:
        """What a call costs: every token of its prompt once, as what it is."""
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

    def bill(self, model: str, usage: Usage) -> Decimal | None:
        """What a call costs; None for a model without a price."""
        price = self.prices.get(model) or self.prices.get("*")
        return None if price is None else price.bill(usage)


def needs_of(request: ServedRequest, usage: Usage) -> dict[Limit, float]:
    """What a request takes of each limit."""
    read = 0 if request.cache_marks is None else usage.cache_read_tokens or 0
    given, taken = (usage.input_tokens or 0) - read, usage.output_tokens or 0
    return {"requests": 1, "tokens": given + taken, "input_tokens": given, "output_tokens": taken}


def limit_headers(limits: Limits, verdict: Verdict, dialect: str, unix: float) -> dict[str, str]:
    """The rate-limit headers of an answer."""
    headers: dict[str, str] = {}
    if limits.limits.headers:
        tell = anthropic_headers if dialect == "anthropic_messages" else openai_headers
        headers = tell(verdict.states, unix)
    if verdict.refused is not None:
        wait = verdict.wait_s
        headers["retry-after"] = str(max(1, -int(-wait // 1)))
        if dialect != "anthropic_messages":
            headers["retry-after-ms"] = str(max(1, int(wait * 1000)))
    return headers


def too_much(limit: Limit) -> Refusal:
    """The refusal of a request that meets a limit."""
    words = limit.replace("_", " ")
    return Refusal(
        429, limit, "rate_limit_exceeded", f"Rate limit reached for {words} per minute. Try later."
    )
