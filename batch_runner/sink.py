"""Where receipts end: the counters of a run's progress. Small and of constant size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes_rl.ports import Receipt
from hermes_rl.store.ledger import Disposition
from hermes_rl.usage import UsageTotal, add_totals

RATE_WINDOW_S = 60.0
"""Rates are taken over the last minute."""


_NOTHING = UsageTotal(input_tokens=0, output_tokens=0, total_tokens=0)


@dataclass
class Tally:
    """What this start of the run has seen so far."""

    attempts: int = 0
    done: int = 0
    graded: int = 0
    solved: int = 0
    """Reward 1 or more."""
    reward: float = 0.0
    """Sum over graded units."""
    failed: int = 0
    """Attempts that failed, retried or not."""
    given_up: int = 0
    given_up_error: str | None = None
    """Why the last unit was given up."""
    cancelled: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    """Failed attempts by cause."""
    usage: UsageTotal = _NOTHING
    cost_usd: float | None = None
    unpriced_calls: int = 0
    requests: int = 0
    throttled: int = 0
    """Requests that were refused with 429."""


@dataclass(frozen=True)
class Rates:
    """Speed over the last minute."""

    units_per_s: float
    output_tokens_per_s: float


Listener = Callable[[Receipt, Disposition], None]


class Sink:
    """Counts receipts and tells listeners of each."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self.tally = Tally()
        self.started = time.monotonic()
        self._listeners = listeners
        self._recent: deque[tuple[float, int, int]] = deque()
        """(time, units ended, output tokens), one entry a second at most."""

    def receive(self, receipt: Receipt, disposition: Disposition) -> None:
        """Count one attempt's end."""
        tally = self.tally
        tally.attempts += 1
        tally.usage = add_totals((tally.usage, receipt.usage))
        tally.unpriced_calls += receipt.unpriced_calls
        if receipt.cost_usd is not None:
            tally.cost_usd = (tally.cost_usd or 0.0) + receipt.cost_usd
        if receipt.status == "ok":
            self._count_done(receipt)
        else:
            self._count_failure(receipt, disposition)
        self._note(int(disposition != "open"), receipt.usage.output_tokens or 0)
        for listener in self._listeners:
            listener(receipt, disposition)

    def heard(self, requests: int, throttled: int) -> None:
        """Count what workers say of their requests."""
        self.tally.requests += requests
        self.tally.throttled += throttled

    def rates(self) -> Rates:
        """Speed over the last minute, or since the start when that is less."""
        now = time.monotonic()
        self._forget(now)
        span = max(1.0, min(RATE_WINDOW_S, now - self.started))
        units = sum(ended for _, ended, _ in self._recent)
        tokens = sum(count for _, _, count in self._recent)
        return Rates(units / span, tokens / span)

    def _count_done(self, receipt: Receipt) -> None:
        tally = self.tally
        tally.done += 1
        if receipt.reward is not None:
            tally.graded += 1
            tally.reward += receipt.reward
            tally.solved += receipt.reward >= 1.0

    def _count_failure(self, receipt: Receipt, disposition: Disposition) -> None:
        tally = self.tally
        cause = receipt.cause or "harness"
        tally.causes[cause] = tally.causes.get(cause, 0) + 1
        if receipt.status == "cancelled":
            tally.cancelled += 1
        else:
            tally.failed += 1
        if disposition == "given_up":
            tally.given_up += 1
            tally.given_up_error = receipt.error

    def _note(self, ended: int, tokens: int) -> None:
        now = time.monotonic()
        self._forget(now)
        if self._recent and now - self._recent[-1][0] < 1.0:
            at, earlier, count = self._recent.pop()
            self._recent.append((at, earlier + ended, count + tokens))
        else:
            self._recent.append((now, ended, tokens))

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()
