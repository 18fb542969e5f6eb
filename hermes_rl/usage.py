"""Token usage. `input_tokens` includes cached ones, `output_tokens` includes reasoning.

`cache_read`, `cache_write` and `reasoning` are parts of those two. What a provider did not report
is
None, never 0; sums keep the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from hermes_rl.text import many

Int64 = Annotated[int, msgspec.Meta(extra={"arrow": "int64"})]
"""A whole number whose Parquet column has 64 bits; the columns of other ones have 32."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model call."""

    input_tokens: int | None = None
    """All prompt tokens, cached ones included."""
    cache_read_tokens: int | None = None
    """Part of input_tokens that was read from the provider's cache."""
    cache_write_tokens: int | None = None
    """Part of input_tokens that was written to the provider's cache."""
    cache_write_1h_tokens: int | None = None
    """Part of cache_write_tokens that is kept for an hour, which costs more; None where a provider
    does not distinguish it."""
    output_tokens: int | None = None
    """All sampled tokens, reasoning included."""
    reasoning_tokens: int | None = None
    """Part of output_tokens that was reasoning."""
    reported_cost: float | None = None
    """The cost in the answer, in the unit of the provider."""

    @property
    def total_tokens(self) -> int | None:
        """Input and output tokens; None when either is unknown."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of known usage; `unknown_calls` is the number of calls without it."""

    input_tokens: Int64 | None = None
    cache_read_tokens: Int64 | None = None
    cache_write_tokens: Int64 | None = None
    output_tokens: Int64 | None = None
    reasoning_tokens: Int64 | None = None
    total_tokens: Int64 | None = None
    unknown_calls: int = 0


def _sum(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def total_usage(usages: Iterable[Usage], *, unknown_calls: int = 0) -> UsageTotal:
    """The sum of usages, field by field; a field that no call reported stays None.

    Args:
        usages: usages of the calls that reported one.
        unknown_calls: calls that a server may have served without our learning the usage.
    """
    calls = list(usages)
    if not calls and not unknown_calls:
        return UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)
    return UsageTotal(
        input_tokens=_sum(u.input_tokens for u in calls),
        cache_read_tokens=_sum(u.cache_read_tokens for u in calls),
        cache_write_tokens=_sum(u.cache_write_tokens for u in calls),
        output_tokens=_sum(u.output_tokens for u in calls),
        reasoning_tokens=_sum(u.reasoning_tokens for u in calls),
        total_tokens=_sum(u.total_tokens for u in calls),
        unknown_calls=unknown_calls,
    )


def add_totals(totals: Iterable[UsageTotal]) -> UsageTotal:
    """The sum of totals over many rows."""
    rows = list(totals)
    fields = (f for f in UsageTotal.__struct_fields__ if f != "unknown_calls")
    sums = {f: _sum(getattr(r, f) for r in rows) for f in fields}
    return UsageTotal(**sums, unknown_calls=sum(r.unknown_calls for r in rows))


def cost_text(cost_usd: float | None, unpriced_calls: int) -> str:
    """A cost; `unpriced` where no price is known."""
    if cost_usd is None or (not cost_usd and unpriced_calls):
        return "unpriced"
    more = f" + {many(unpriced_calls, 'call')} unpriced" if unpriced_calls else ""
    return f"${cost_usd:,.2f}{more}" if cost_usd >= 0.01 or not cost_usd else f"<$0.01{more}"
