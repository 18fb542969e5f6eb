"""What the calls at one endpoint, account and model have seen lately: whether it answers, what it
says when it does not, how many calls wait for it, and how much may be retried.

A retry of a request that may have been served can be paid twice, and retries pile up just when a
server is weakest. So such retries are a share of the traffic: each new call earns a fifth of one,
and one more comes every few seconds, so that an account that fails always is still tried. This is
the token bucket of gRPC's retry throttling and Finagle's RetryBudget (a ratio of requests plus a
floor per second); unlike them, a retry without a token waits for one, because another limit, the
time, already says when to give up.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from hermes_rl.errors import (
    BadRequest,
    ConnectionLost,
    ModelError,
    ModelTimeout,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerError,
)

_NO_SIGN_OF_LIFE = (ServerError, ModelTimeout, ConnectionLost, ProtocolError)
"""Failures after which nobody may be there who could ever answer."""
_BETWEEN_TRIES_S = 1.0
"""A call's next try begins well within this."""
_SAID_CHARS = 160
_VARIES = re.compile(r"\w*\d\w*")
"""Counts, sizes and request ids: refusals that differ in these alone are the same refusal."""


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that wait for answers. In healthy traffic `since_s` is short."""

    message: str = ""
    """What the last failed request was told: `answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer: in flight, queued, or pausing before their next try."""
    since_s: float
    """Seconds since the first failure after the last answer; else since the last answer, or since
    calls began to wait."""
    never: bool = False
    """Nobody was ever answered."""
    alive: bool = True
    """There was a sign of life, so `endpoint.outage_seconds` holds."""


class Traffic:
    """Shared by all rollouts of a process at one endpoint, account and model. Times are seconds of
    a monotonic clock."""

    RATIO = 0.2
    """Retries earned by a call."""
    FLOOR_S = 5.0
    """Seconds in which one more is earned, whatever the traffic."""
    START = 10.0
    MOST = 100.0
    """The last 500 calls count."""

    def __init__(self) -> None:
        self.answered_at: float | None = None
        """When it last gave a complete answer, to whomever."""
        self.alive = False
        """It answered, refused a request with a reason, or said that it is busy or still loading:
        somebody is there."""
        self.probed = False
        """It was asked for a word because it had kept silent."""
        self.waiting_since = 0.0
        """Since when there have always been calls without an answer."""
        self._waiting = 0
        self._idle_since = -math.inf
        self._failing_since: float | None = None
        self.message = ""
        """What the last request was told, since the last answer."""
        self._refusals: Counter[str] = Counter()
        self._refusal = ""
        self._tokens = self.START
        self._earned_at: float | None = None

    @contextmanager
    def asking(self, clock: Callable[[], float]) -> Iterator[None]:
        """A call waits here for its answer; the pause before its next try is part of a try."""
        if not self._waiting and clock() - self._idle_since > _BETWEEN_TRIES_S:
            self.waiting_since = clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._idle_since = clock()

    def called(self) -> None:
        """A call began: not one of its retries."""
        self._tokens = min(self.MOST, self._tokens + self.RATIO)

    def answered(self, now: float) -> None:
        """A complete answer came."""
        self.answered_at, self.alive = now, True
        self._failing_since, self.message = None, ""
        self._refusals.clear()

    def failed(self, error: ModelError, now: float) -> None:
        """A request failed."""
        if not isinstance(error, _NO_SIGN_OF_LIFE):
            self.alive = True
        if isinstance(error, (*_NO_SIGN_OF_LIFE, RateLimited, Overloaded, BadRequest)):
            self.message = _report(error)
            if self._failing_since is None:
                self._failing_since = now

    def refused(self, error: BadRequest) -> None:
        """A call was given up for a refusal."""
        self._refusals[_VARIES.sub("#", str(error))] += 1
        self._refusal = str(error)

    def refused_alike(self, calls: int) -> str | None:
        """The last refusal, once so many calls since the last answer were refused in the same
        words; else None."""
        return self._refusal if max(self._refusals.values(), default=0) >= calls else None

    def unanswered(self, now: float) -> Unanswered | None:
        """What keeps the calls that wait from their answers; None where none waits."""
        if not self._waiting:
            return None
        since = self.waiting_since
        if self.alive and self._failing_since is not None:
            since = self._failing_since
        elif self.answered_at is not None:
            since = max(since, self.answered_at)
        return Unanswered(
            message=self.message,
            waiting=self._waiting,
            since_s=max(0.0, now - since),
            never=self.answered_at is None,
            alive=self.alive,
        )

    def take(self, now: float) -> bool:
        """Take one retry out of the share; False when there is none left now."""
        if self._earned_at is not None:
            earned = max(0.0, now - self._earned_at) / self.FLOOR_S
            self._tokens = min(self.MOST, self._tokens + earned)
        self._earned_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _report(error: ModelError) -> str:
    """`answers 500 'injected'`; what is no answer of a server in its own words."""
    text = str(error)
    status, _, said = text.partition(": ")
    if error.status is None or status != str(error.status):
        return text[:_SAID_CHARS]
    return f"answers {status} '{said[:_SAID_CHARS]}'" if said else f"answers {status}"
