"""Faults that the fake servers inject: by seeded probability, or where a script asks for one.

Whether a request meets a fault of the plan, and which, is a pure function of the plan and of the
request's own identity (its call id; for clients without one the body's hash and the client's retry
count). So a run can be repeated, the server keeps no state, and another attempt is another draw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from hermes_rl.messages import UserMessage
from hermes_rl.testing.dialects.base import ServedRequest, ServerDialect
from hermes_rl.usage import Usage

OUTPUT_CAP = 4096
"""The most output tokens of the fault `over_cap`."""
WINDOW = 8192
PROMPT = 6192
"""The window of the fault `over_window`, and what it takes every prompt to be."""
MESSAGES = 3
"""The most messages that the fault `too_many` accepts."""
IMAGE_CHARS = 300_000
"""Characters of the longest image that the fault `heavy_images` accepts, in base64."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/]+")


class Refusal(NamedTuple):
    """An answer that is an error before any work."""

    status: int
    kind: str
    code: str | None
    message: str


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One refusal in refusals.toml."""

    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    code: str | None = None
    contains: tuple[str, ...] = ()

    @property
    def refusal(self) -> Refusal:
        return Refusal(self.status, self.kind, self.code, self.message)


_TABLE = msgspec.toml.decode(
    (Path(__file__).parent / "refusals.toml").read_bytes(), type=dict[str, dict[str, _Row]]
)

REFUSALS: dict[str, Refusal] = {kind: row.refusal for kind, row in _TABLE["always"].items()}
"""Fault kind -> the refusal. Nothing is served."""

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
"""The mixture of `FaultPlan(mixed=...)`, in equal parts; another attempt gets over each of them."""


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
        """Return the fault that a request meets, if any."""
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
    """Parse a plan, for example `{"seed": 1, "mixed": 0.2}`. Raises: ValueError."""
    return msgspec.json.decode(text.encode(), type=FaultPlan)


def refusal_for(fault: str | None, dialect: str) -> Refusal | None:
    """Return the refusal for a fault on a wire; None if the fault is not one."""
    row = _TABLE.get(dialect, {}).get(fault or "")
    return row.refusal if row is not None else REFUSALS.get(fault or "")


def conditional_refusal(fault: str | None, request: ServedRequest, body: bytes) -> Refusal | None:
    """Return the refusal of what a request holds; None for a request without it.

    A client that sends the request again without it gets the step's answer.
    """
    row = _TABLE["conditional"].get(fault or "")
    if row is None:
        return None
    met = any(text.encode() in body for text in row.contains) or (
        fault in _CONDITIONS and _CONDITIONS[fault](request, body)
    )
    return row.refusal if met else None


def over_window(request: ServedRequest, usage: Usage, window: int | None) -> Refusal | None:
    """Return the refusal of a request that does not fit in a window.

    Args:
        usage: what the request and its answer take.
    """
    prompt, most = usage.input_tokens or 0, request.sampling.max_tokens or 0
    if window is None or prompt + max(1, most) <= window:
        return None
    message = (
        f"This model's maximum context length is {window} tokens. However, you requested "
        f"{prompt + most} tokens ({prompt} in the messages, {most} in the completion). Please "
        "reduce the length of the messages or completion."
    )
    return Refusal(400, "invalid_request_error", "context_length_exceeded", message)


def _over(request: ServedRequest, cap: int) -> bool:
    limit = request.sampling.max_tokens
    return limit is None or limit > cap


_CONDITIONS: dict[str, Callable[[ServedRequest, bytes], bool]] = {
    "heavy_images": lambda _, body: any(
        len(found[0]) > IMAGE_CHARS for found in _BASE64.finditer(body)
    ),
    "parts": lambda request, _: any(
        isinstance(m.content, list) for m in request.messages if isinstance(m, UserMessage)
    ),
    "over_cap": lambda request, _: _over(request, OUTPUT_CAP),
    "over_window": lambda request, _: _over(request, WINDOW - PROMPT),
    "too_many": lambda request, _: len(request.messages) > MESSAGES,
}


def refusal_body(refusal: Refusal, dialect: ServerDialect) -> bytes:
    """Encode a refusal as JSON of a wire."""
    return dialect.encode_error(
        refusal.message, status=refusal.status, kind=refusal.kind, code=refusal.code
    )
