"""How many requests may be in flight, as a function of how requests ended. Pure: time is told."""

from __future__ import annotations

from typing import Literal

import msgspec

from hermes_rl.errors import ModelError, Overloaded, RateLimited, ServerError
from hermes_rl.models.limits.history import History

Signal = Literal["clean", "throttled", "trouble", "neutral"]
"""What one request's end says about the rate: fine; ours is too high; the server's own trouble;
nothing."""

Reason = Literal["start", "slow_start", "clean_round", "throttled", "remaining"]
"""Why a limit changed."""


def signal_of(error: ModelError | None) -> Signal:
    """What an end says about the rate."""
    if error is None:
        return "clean"
    if isinstance(error, RateLimited):
        return "throttled"
    return "trouble" if isinstance(error, Overloaded | ServerError) else "neutral"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a limit's history."""

    at_s: float
    """Seconds since the limit began."""
    limit: int
    reason: Reason


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a controller knows, for one that takes its place on another clock."""

    limit: int
    slow_start: bool
    refused_at: int
    carried: int = 0
    age_s: float = 0.0
    """Since its beginning."""
    since_cut_s: float | None = None
    history: tuple[Change, ...] = ()


class Controller:
    """The limit as a function of what was heard (additive increase, multiplicative decrease).

    - Slow start: one more per clean request while the limit is used, until the first throttling:
      the limit doubles with each clean round. The same again below a quarter of what it was before
      cuts in a row: a server that had refused everybody for minutes is not found out step by step.
    - Then 5 % more (at least one) after each clean round. A round is as many answers as the limit,
      or 3 s with five of them where that is sooner; it is clean without throttling or trouble, and
      counts only when 80 % of the limit was in use.
    - Throttling (429): four fifths, at most once per 15 s, because the refusals of one burst speak
      of one cause. Until another cut is due the limit stays below 95 % of where it was refused, so
      that the next refusals are answered at once.
    - Trouble of the server (529, 5xx) only begins the round anew: it is not our rate.
    - Retry-After has no say here: it delays the one request that it was sent to. A limiter whose
      cooldown followed the server's hints would never grow again where hints are longer than the
      pauses between refusals.

    Args:
        maximum: never more than this, at least 1.
        start: where slow start begins.
        interval_s: seconds between two cuts.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    FAR = 4
    ROUNDS = 5
    """In the time between two cuts, at least, where answers are slow."""
    ANSWERS = 5
    """That a round has then."""

    def __init__(self, maximum: int, start: int = 32, *, interval_s: float = 15.0) -> None:
        self.maximum = max(1, maximum)
        self.limit = max(1, min(start, self.maximum))
        self.slow_start = True
        self._interval_s = interval_s
        self._ended = 0
        self._peak = 0
        self._began: float | None = None
        self._round_began = 0.0
        self._last_cut: float | None = None
        self._refused_at = self.limit
        self._carried, self._grew = 0, True
        """The limit at the first refusal after growth."""
        self._ceiling: tuple[int, float] | None = None
        self._history: History[Change] = History()
        self._history.add(Change(at_s=0.0, limit=self.limit, reason="start"))

    @property
    def history(self) -> tuple[Change, ...]:
        """How the limit came about; thinned where it is long."""
        return self._history.changes

    def allowed(self, now: float) -> int:
        """How many may be in flight now: the limit, or less while a clamp holds."""
        if self._ceiling is not None and now < self._ceiling[1]:
            return min(self.limit, self._ceiling[0])
        self._ceiling = None
        return self.limit

    def clamped_s(self, now: float) -> float:
        """Seconds until a clamp ends; 0 without one."""
        return max(0.0, self._ceiling[1] - now) if self._ceiling is not None else 0.0

    def started(self, in_flight: int) -> None:
        """A request began; `in_flight` counts it."""
        self._peak = max(self._peak, in_flight)

    def heard(self, signal: Signal, now: float) -> None:
        """A request ended.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._began is None:
            self._began = self._round_began = now
        if signal == "throttled":
            self._cut(now)
        elif signal == "trouble":
            self._new_round(now)
        elif signal == "clean":
            self._grow(now)

    def clamp(self, remaining: int, now: float, until: float) -> None:
        """A server said how many requests it still takes before its window begins anew: no more
        are in flight until then. The limit itself stays."""
        ceiling = max(1, remaining)
        news = self._ceiling is None or ceiling < self._ceiling[0]
        self._ceiling = (ceiling, until)
        if news and ceiling < self.limit:
            self._note(ceiling, "remaining", now)

    def state(self, now: float) -> ControllerState:
        """For one that takes its place."""
        return ControllerState(
            limit=self.limit,
            slow_start=self.slow_start,
            refused_at=self._refused_at,
            carried=self._carried,
            age_s=0.0 if self._began is None else now - self._began,
            since_cut_s=None if self._last_cut is None else now - self._last_cut,
            history=self.history,
        )

    def resume(self, state: ControllerState, now: float) -> None:
        """Go on where another one was."""
        self.limit = max(1, min(state.limit, self.maximum))
        self.slow_start = state.slow_start
        self._refused_at, self._carried = state.refused_at, state.carried
        self._grew = False
        self._began = now - state.age_s
        self._last_cut = None if state.since_cut_s is None else now - state.since_cut_s
        self._history = History(state.history)
        self._new_round(now)

    def _grow(self, now: float) -> None:
        saturated = self._peak >= self.SATURATED * self.limit
        if self.slow_start or self.FAR * self.limit <= self._carried:
            if saturated:
                self._grew = True
                self._set(min(self.maximum, self.limit + 1), "slow_start", now)
            return
        self._ended += 1
        # A refusal comes at once, however long an answer takes: a round need not wait for that.
        timely = now - self._round_began >= self._interval_s / self.ROUNDS
        if self._ended < (min(self.ANSWERS, self.limit) if timely else self.limit):
            return
        if saturated:
            self._grew = True
            grown = max(self.limit + 1, int(self.limit * self.GROWTH))
            if not self._may_cut(now):
                grown = min(grown, max(self.limit, int(self._refused_at * self.HEADROOM)))
            self._set(min(self.maximum, grown), "clean_round", now)
        self._new_round(now)

    def _cut(self, now: float) -> None:
        self.slow_start = False
        self._new_round(now)
        if self._may_cut(now):
            self._last_cut = now
            self._refused_at = self.limit
            if self._grew:
                self._carried, self._grew = self.limit, False
            self._set(max(1, int(self.limit * self.CUT)), "throttled", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self._interval_s

    def _new_round(self, now: float) -> None:
        self._ended = self._peak = 0
        self._round_began = now

    def _set(self, limit: int, reason: Reason, now: float) -> None:
        if limit != self.limit:
            self.limit = limit
            self._note(limit, reason, now)

    def _note(self, limit: int, reason: Reason, now: float) -> None:
        began = now if self._began is None else self._began
        self._history.add(Change(at_s=round(now - began, 3), limit=limit, reason=reason))
