"""Accounts that must rest: which key must not be used before when.

A pool of accounts asks `until` before it chooses and calls `rest` when a provider refused one. In a
run with workers the same object is kept in step with the others by `share`: what one worker learned
the others know a moment later. Times are unix times, because they travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """One account's rest."""

    account: str
    """Its name: the variable that holds the key, never the key."""
    until: float
    """Unix time."""
    reason: str
    """Of the error that brought it, a `Reason` of `hermes_rl.errors`."""


class Rests:
    """Account -> its rest. The later end stands: two refusals do not shorten each other.

    Args:
        clock: unix time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rests: dict[str, Rest] = {}

    def now(self) -> float:
        """Unix time."""
        return self._clock()

    def until(self, account: str) -> float:
        """Unix time from which an account may be used; 0 when it may now."""
        known = self._rests.get(account)
        return known.until if known is not None and known.until > self._clock() else 0.0

    def left_s(self, account: str) -> float:
        """Seconds until an account may be used; 0 when it may now."""
        until = self.until(account)
        return max(0.0, until - self._clock()) if until else 0.0

    def rest(self, account: str, seconds: float, reason: str) -> None:
        """Let an account rest from now on."""
        self.learn((Rest(account=account, until=self._clock() + seconds, reason=reason),))

    def learn(self, rests: Iterable[Rest]) -> bool:
        """Take in what others know. Returns whether any of it was news."""
        news = False
        for rest in rests:
            known = self._rests.get(rest.account)
            if rest.until > self._clock() and (known is None or rest.until > known.until):
                self._rests[rest.account] = rest
                news = True
        return news

    def current(self) -> tuple[Rest, ...]:
        """The rests that have not ended."""
        now = self._clock()
        self._rests = {name: rest for name, rest in self._rests.items() if rest.until > now}
        return tuple(self._rests.values())
