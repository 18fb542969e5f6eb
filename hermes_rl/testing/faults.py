"""Faults that the fake model server injects, by seeded probability.

Whether a request meets a fault, and which, is a pure function of the plan and of the request's own
identity (its call id; for clients without one the body's hash and the client's retry count). So a
run can be repeated, the server keeps no state, and another attempt is another draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from hermes_rl.testing.dialects.base import ServerDialect


class Refusal(NamedTuple):
    """An answer that is an error before any work."""

    status: int
    kind: str
    code: str | None
    message: str


REFUSALS: dict[str, Refusal] = {
    "bad_request": Refusal(400, "invalid_request_error", None, "Invalid value for 'messages'."),
    "context_overflow": Refusal(
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    ),
    "content_filter": Refusal(
        400, "invalid_request_error", "content_filter", "The prompt was filtered."
    ),
    "auth": Refusal(401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    "billing": Refusal(402, "insufficient_credits", None, "Insufficient credits."),
    "forbidden": Refusal(403, "permission_error", None, "You may not use this model."),
    "not_found": Refusal(404, "not_found_error", "model_not_found", "The model does not exist."),
    "timeout": Refusal(408, "timeout_error", None, "Request timed out."),
    "too_large": Refusal(413, "request_too_large", None, "Request body is too large."),
    "rate_limit": Refusal(429, "rate_limit_error", "rate_limit_exceeded", "Rate limit reached."),
    "rate_limit_after": Refusal(429, "rate_limit_error", "rate_limit_exceeded", "Slow down."),
    "rate_limit_date": Refusal(429, "rate_limit_error", "rate_limit_exceeded", "Slow down."),
    "quota": Refusal(
        429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota."
    ),
    "server_error": Refusal(500, "server_error", None, "Internal server error."),
    "unavailable": Refusal(503, "server_error", None, "The server is overloaded."),
    "overloaded": Refusal(529, "overloaded_error", None, "Overloaded."),
}
"""Fault kind -> the refusal. Nothing is served."""

OWN_WORDS: dict[str, dict[str, Refusal]] = {
    "anthropic_messages": {
        "context_overflow": Refusal(
            400, "invalid_request_error", None, "prompt is too long: 5000 tokens > 4096 maximum"
        ),
        "content_filter": Refusal(
            400, "invalid_request_error", None, "Output blocked by content filtering policy"
        ),
        "auth": Refusal(401, "authentication_error", None, "invalid x-api-key"),
        "billing": Refusal(402, "billing_error", None, "There is an issue with your billing."),
        "not_found": Refusal(404, "not_found_error", None, "model: no-such-model"),
        "too_large": Refusal(
            413, "request_too_large", None, "Request exceeds the maximum allowed number of bytes."
        ),
        "quota": Refusal(
            400,
            "invalid_request_error",
            None,
            "Your credit balance is too low to access the Anthropic API.",
        ),
    },
}
"""Wire -> fault kind -> the refusal where a provider says it in words or a status of its own."""

BREAKS = ("reset", "cut", "garbage", "stall_first", "stall_mid")
"""The request is served, and its answer is lost: connection reset before the first byte; body cut
in the middle; no JSON; silence before the first byte; silence in the middle."""

ODD = ("slow", "no_usage", "partial_usage", "filtered", "abort")
"""A complete answer that is late, lacks usage, or whose finish reason is `content_filter` or
`abort`."""

KINDS = (*REFUSALS, *BREAKS, *ODD)

MIXED = (
    "rate_limit", "rate_limit_after", "server_error", "overloaded", "unavailable", "reset", "cut",
    "garbage", "slow", "no_usage", "partial_usage",
)  # fmt: skip
"""The mixture of `FaultPlan(mixed=...)`: what another attempt mends, in equal parts."""


@dataclass(frozen=True)
class FaultPlan:
    """Which faults, how often."""

    seed: int = 0
    mixed: float = 0.0
    """Share of requests that meet one of `MIXED`."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Fault kind -> share of requests, beside `mixed`."""
    retry_after_s: float = 1.0
    """What a hint asks to wait (dates round up to whole seconds)."""
    slow_s: float = 0.05
    """How late a slow answer is."""
    stall_s: float = 3600.0
    """How long a silence lasts."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rates) - set(KINDS))
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r}; there are {', '.join(KINDS)}")
        if self.mixed + sum(self.rates.values()) > 1:
            raise ValueError("the shares of faults add up to more than 1")

    def draw(self, identity: bytes) -> str | None:
        """The fault that a request meets, if any."""
        if not self.mixed and not self.rates:
            return None
        digest = hashlib.blake2b(identity, digest_size=8, key=str(self.seed).encode()).digest()
        at = int.from_bytes(digest, "big") / 2**64
        if at < self.mixed:
            return MIXED[int(at / self.mixed * len(MIXED))]
        at -= self.mixed
        for kind, share in self.rates.items():
            if at < share:
                return kind
            at -= share
        return None


def plan_from_json(text: str) -> FaultPlan:
    """A plan from its JSON form, for example `{"seed": 1, "mixed": 0.2}`. Raises: ValueError."""
    return msgspec.json.decode(text.encode(), type=FaultPlan)


def refusal_for(fault: str, dialect: str) -> Refusal | None:
    """How a fault is refused on a wire; None when the fault is no refusal."""
    own = OWN_WORDS.get(dialect, {})
    return own.get(fault) or REFUSALS.get(fault)


def refusal_body(refusal: Refusal, dialect: ServerDialect) -> bytes:
    """The JSON of a refusal in the form of a wire."""
    return dialect.encode_error(
        refusal.message, status=refusal.status, kind=refusal.kind, code=refusal.code
    )
