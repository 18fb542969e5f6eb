"""How many requests may start per second, as a function of how requests ended. Pure: time is told.

A bound on requests in flight cannot hold a rate where answers are quick: one caller alone may ask
too often. So where a server refuses again and again, what it admits is measured, and requests are
paced by that: as the adaptive mode of AWS's SDKs does it, with the steps of `controller` in the
place of CUBIC's.

What can be measured of a server that counts by a token bucket (admitted = started - refused):

- Between two refusals the bucket was empty twice, so what was admitted is what flowed in: the
  quota, whatever the bucket holds. It is less only where the bucket was full for a while.
- Where limits are counted by the minute, never more than twice the quota is admitted in a minute:
  half of a minute's admissions is not above the quota. This bounds estimates from below, because
  servers with fixed windows admit nothing at all until the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from hermes_rl.models.limits.history import History

PaceReason = Literal["measured", "throttled", "clean_round"]
"""Why a pace changed."""


class PaceChange(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a pace's history."""

    at_s: float
    """Seconds since the lane began."""
    per_s: float
    reason: PaceReason


class PaceState(msgspec.Struct, frozen=True, kw_only=True):
    """What another that takes its place on another clock has to know."""

    per_s: float | None = None
    quota: float | None = None
    age_s: float = 0.0
    since_cut_s: float | None = None
    history: tuple[PaceChange, ...] = ()


@dataclass
class _Stretch:
    """What happened in some time."""

    began: float
    started: int = 0
    throttled: int = 0
    trouble: int = 0
    refusals: tuple[tuple[float, int], ...] = ()
    """The first and the last: when, and started less throttled by then. That is not what was
    admitted, as some are on their way, but what it grows by is: as many are at both times."""

    @property
    def admitted(self) -> int:
        """Requests that were not refused."""
        return max(0, self.started - self.throttled)

    def add(self, now: float, started: int, throttled: int, trouble: int) -> None:
        """What happened since the last time."""
        self.started += started
        self.throttled += throttled
        self.trouble += trouble
        if throttled:
            self.refusals = (*self.refusals[:1], (now, self.started - self.throttled))

    def quota(self, least_s: float) -> float | None:
        """What was admitted per second between the first refusal and the last; None where less than
        `least_s` seconds lie between them."""
        if len(self.refusals) < 2:
            return None
        (first, before), (last, after) = self.refusals
        return (after - before) / (last - first) if last - first >= least_s else None


class Pace:
    """The rate at which requests start, once refusals have shown that there is one.

    - None at first: no bound. It begins with a round of many refusals (three, and a tenth of its
      requests), or when cuts were due twice within a minute.
    - A round is a fifth of the time between two cuts, and longer until five requests were admitted.
      After a clean one (no refusal, no trouble of the server) that used 80 % of the pace: 5 % more;
      until the next cut is due not above 95 % of the measured quota.
    - A refusal: four fifths, at most once per 15 s.
    - A round of many refusals: 95 % of the quota that it showed.
    - Where nothing at all is admitted the server is closed, and says nothing of the quota: the pace
      stays as it is until it opens.

    Args:
        now: seconds of a monotonic clock, as in all that follows.
        interval_s: between two cuts.
        window_s: what servers count limits by.
    """

    SATURATED = 0.8
    GROWTH = 1.05
    CUT = 0.8
    HEADROOM = 0.95
    ROUNDS = 5
    """In the time between two cuts, at most."""
    ADMITTED = 5
    REFUSALS, SHARE = 3, 0.1
    SETTLE = 1 / 15
    """Of the time between two cuts: what was on its way is refused in it, and not counted."""

    def __init__(self, now: float, *, interval_s: float = 15.0, window_s: float = 60.0) -> None:
        self.per_s: float | None = None
        self._interval_s, self._window_s = interval_s, window_s
        self._born = now
        self._quota: float | None = None
        self._last_cut: float | None = None
        self._round = _Stretch(now)
        self._since_cut = _Stretch(now)
        self._past: deque[tuple[float, int]] = deque()
        self._history: History[PaceChange] = History()

    def heard(self, now: float, *, started: int = 0, throttled: int = 0, trouble: int = 0) -> None:
        """What happened since the last time. Ends rounds too: call it often.

        Args:
            started: requests that were sent; below 0 where some were not after all.
            throttled: requests that were refused for their rate.
            trouble: requests that met trouble of the server's own.
        """
        for stretch in (self._round, self._since_cut):
            if now >= stretch.began:
                stretch.add(now, started, throttled, trouble)
        if throttled and self._may_cut(now):
            self._cut(now)
        lasted = now - self._round.began
        full = self._round.admitted >= self.ADMITTED or lasted >= self._interval_s
        if full and lasted >= self._interval_s / self.ROUNDS:
            self._end_round(now, lasted)

    def state(self, now: float) -> PaceState:
        """For one that takes its place."""
        return PaceState(
            per_s=self.per_s,
            quota=self._quota,
            age_s=now - self._born,
            since_cut_s=None if self._last_cut is None else now - self._last_cut,
            history=self._history.changes,
        )

    def resume(self, state: PaceState, now: float) -> None:
        """Go on where another one was."""
        self.per_s, self._quota = state.per_s, state.quota
        self._born = now - state.age_s
        self._last_cut = None if state.since_cut_s is None else now - state.since_cut_s
        self._round, self._since_cut = _Stretch(now), _Stretch(now)
        self._past.clear()
        self._history = History(state.history)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self._interval_s

    def _cut(self, now: float) -> None:
        if self._last_cut is not None and self._since_cut.admitted:
            self._quota = self._since_cut.admitted / (now - self._since_cut.began)
            if self.per_s is not None:
                self._lower(self.per_s * self.CUT, "throttled", now)
            elif now - self._last_cut <= self._window_s:
                lasted = now - self._round.began
                asked = self._round.started / max(lasted, self._interval_s / self.ROUNDS)
                self._lower(max(self._quota, asked * self.CUT), "throttled", now)
        settled = now + self._interval_s * self.SETTLE
        if self.per_s is None:  # what a full bucket gave is none of the quota
            self._remember(now)
            self._round = _Stretch(settled)
        self._last_cut, self._since_cut = now, _Stretch(settled)

    def _end_round(self, now: float, lasted: float) -> None:
        self._remember(now)
        ended, self._round = self._round, _Stretch(now)
        if ended.throttled >= max(self.REFUSALS, self.SHARE * ended.started):
            quota = ended.quota(self._interval_s / self.ROUNDS / 2)
            if quota:
                self._quota = quota
                self._lower(quota * self.HEADROOM, "measured", now)
        elif not ended.throttled and not ended.trouble:
            self._grow(ended, lasted, now)

    def _grow(self, ended: _Stretch, lasted: float, now: float) -> None:
        if self.per_s is None or ended.started < self.SATURATED * self.per_s * lasted:
            return
        grown = self.per_s * self.GROWTH
        if not self._may_cut(now) and self._quota is not None:
            grown = min(grown, max(self.per_s, self.HEADROOM * self._quota))
        self._set(grown, "clean_round", now)

    def _lower(self, per_s: float, reason: PaceReason, now: float) -> None:
        """Never more than before, and never less than half of what the last minute admitted."""
        since = now - self._window_s
        minute = sum(n for at, n in self._past if at >= since) + self._round.admitted
        per_s = max(per_s, minute / 2 / self._window_s, 1 / self._interval_s)
        self._set(per_s if self.per_s is None else min(per_s, self.per_s), reason, now)

    def _remember(self, now: float) -> None:
        self._past.append((now, self._round.admitted))
        while self._past[0][0] < now - self._window_s:
            self._past.popleft()

    def _set(self, per_s: float, reason: PaceReason, now: float) -> None:
        if per_s != self.per_s:
            self.per_s = per_s
            at_s = round(now - self._born, 3)
            self._history.add(PaceChange(at_s=at_s, per_s=round(per_s, 4), reason=reason))
