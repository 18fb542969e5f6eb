"""Read rate limits from response headers, in the spellings of OpenAI and Anthropic.

OpenAI and compatible servers: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, resets as
durations (`6m0s`, `120ms`) or seconds. Anthropic:
`anthropic-ratelimit-{requests,tokens,input-tokens,output-tokens}-{limit,remaining,reset}`, resets
as RFC 3339 times. OpenRouter: `x-ratelimit-{limit,remaining,reset}`, resets as unix milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

Kind = Literal["requests", "tokens", "input_tokens", "output_tokens", "pace"]
"""What is counted. `tokens` is input and output together; `pace` counts requests, at the measured
rate."""

KINDS: tuple[Kind, ...] = ("requests", "tokens", "input_tokens", "output_tokens")
"""The kinds that servers limit."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One limit as reported by a server; None where it did not report it."""

    kind: Kind
    limit: float | None = None
    """Per window."""
    remaining: float | None = None
    reset_s: float | None = None
    """Seconds until the limit is fully available."""

    def per_s(self, window_s: float) -> float | None:
        """Return the refill rate per second; None if it is unknown.

        A server that refills continuously reports a reset of used / rate. A server that enforces a
        limit per minute over shorter windows reports a short one. Without a reset the window is
        unknown, and the limit is ignored: it might be per second.
        """
        if self.limit is None or self.limit < 1 or self.reset_s is None:
            return None
        used = self.limit - (self.limit if self.remaining is None else self.remaining)
        by_reset = used / self.reset_s if self.reset_s > 0 and used > 0 else 0.0
        return max(self.limit / window_s, by_reset)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|d|h|m|s)")
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_OPENAI = {"requests": "-requests", "tokens": "-tokens"}
_MAX_RESET_S = 7 * 86400.0
"""A later reset is that of a subscription, or invalid."""


def read_quotas(headers: Mapping[str, str], unix_now: float) -> tuple[Quota, ...]:
    """Return the limits in an answer's headers.

    Args:
        headers: names in lower case.
    """
    found = (
        _anthropic(headers, kind, unix_now) or _openai(headers, kind, unix_now) for kind in KINDS
    )
    return tuple(quota for quota in found if quota is not None)


def seconds_until_reset(headers: Mapping[str, str], unix_now: float) -> float | None:
    """Return the seconds until the exhausted limits are available; None if none is exhausted."""
    quotas = read_quotas(headers, unix_now)
    used_up = (q for q in quotas if q.remaining is not None and q.remaining < 1)
    return max((q.reset_s for q in used_up if q.reset_s is not None), default=None)


def _anthropic(headers: Mapping[str, str], kind: Kind, now: float) -> Quota | None:
    name = f"anthropic-ratelimit-{kind.replace('_', '-')}"
    return _quota(headers, kind, (f"{name}-limit", f"{name}-remaining", f"{name}-reset"), now)


def _openai(headers: Mapping[str, str], kind: Kind, now: float) -> Quota | None:
    if kind not in _OPENAI:
        return None
    end = _OPENAI[kind]
    names = tuple(f"x-ratelimit-{part}{end}" for part in ("limit", "remaining", "reset"))
    quota = _quota(headers, kind, names, now)
    if quota is None and kind == "requests":
        names = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")
        quota = _quota(headers, kind, names, now)
    return quota


def _quota(
    headers: Mapping[str, str], kind: Kind, names: tuple[str, ...], now: float
) -> Quota | None:
    limit, remaining = _number(headers.get(names[0])), _number(headers.get(names[1]))
    if limit is None and remaining is None:
        return None
    reset = _seconds(headers.get(names[2]), now)
    return Quota(kind=kind, limit=limit, remaining=remaining, reset_s=reset)


def _number(text: str | None) -> float | None:
    """Return a count; None for other text, and for the -1 of servers without that limit."""
    if text is None or not re.fullmatch(r"\s*\d{1,15}(\.\d{1,9})?\s*", text):
        return None
    return float(text)


def _seconds(text: str | None, now: float) -> float | None:
    """Return a reset in seconds from now."""
    if text is None:
        return None
    text = text.strip()
    number = _number(text)
    if number is not None:
        if number > 1e11:
            number = number / 1000 - now
        elif number > 1e8:
            number -= now
        return _plausible_reset(number)
    pieces = _DURATION.findall(text)
    if pieces and "".join(value + unit for value, unit in pieces) == text:
        return _plausible_reset(sum(float(value) * _UNITS.get(unit, 0.0) for value, unit in pieces))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _plausible_reset(moment.timestamp() - now)


def _plausible_reset(seconds: float) -> float | None:
    return max(0.0, seconds) if seconds < _MAX_RESET_S else None
