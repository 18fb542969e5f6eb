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
- Such a server admits one window's quota between two of these times.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from hermes_rl.models.limits.door import Door
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
    clean: int = 0
    throttled: int = 0
    trouble: int = 0
    refusals: tuple[tuple[float, int], ...] = ()
    """The first and the last: when, and started less throttled by then. That is not what was
    admitted, as some are on their way, but what it grows by is: as many are at both times."""

    @property
    def admitted(self) -> int:
        """Requests that were not refused."""
        return max(0, self.started - self.throttled)

    def add(self, now: float, started: int, clean: int, throttled: int, trouble: int) -> None:
        """What happened since the last time."""
        self.started += started
        self.clean += clean
        self.throttled += throttled
        self.trouble += trouble
        if throttled:
            self.refusals = (*self.refusals[:1], (now, self.started - self.throttled))

    def quota(self, least_s: float) -> float | None:
        """What was admitted per second between the first refusal and the last; None where nothing
        was, or less than `least_s` seconds lie between them."""
        if len(self.refusals) < 2:
            return None
        (first, before), (last, after) = self.refusals
        if last - first < least_s or after <= before:
            return None
        return (after - before) / (last - first)


@dataclass
class _Burst:
    """Refusals that came together."""

    refused: int = 0
    ended: float = 0.0
    """When the last of them was."""
    back: int = 0
    """Began since."""

    def add(self, now: float, started: int, throttled: int) -> None:
        """What happened since the last time."""
        self.back += started
        if throttled:
            self.refused, self.ended, self.back = self.refused + throttled, now, 0


class Pace:
    """The rate at which requests start, once refusals have shown that there is one.

    - None at first: no bound. It begins with a round of many refusals (three, and a tenth of its
      requests), or when cuts were due twice within a minute, or when most were refused and do not
      come back soon, as their refusals said: with what the last minute admitted or refused, if that
      is more, per minute. It doubles after each clean round until a quota is measured or five
      requests begin in a second.
    - A round is a fifth of the time between two cuts, and longer until five requests were admitted.
      After a clean one (no refusal, no trouble of the server) that used 80 % of the pace: 5 % more,
      and twice that when four before it were clean too: a quota that doubled is used within 45 s.
      Until the next cut is due not above 95 % of the measured quota.
    - A refusal: four fifths, at most once per 15 s.
    - Many refusals in a round, or since the last cut: 95 % of the quota that they showed.
    - While nobody is let in at all (`door`) there are only knocks, and the pace stays as it is. A
      door that was shut for less than a window ends one: what was admitted until then is the quota.
      The pace is 95 % of it for a window or for a hundred requests, whichever is longer, and rounds
      are as long as the time between two cuts.
    - An answer must show that somebody was let in: requests that are on their way to a slow refusal
      look as if they had been admitted, and a server that refused everybody for minutes would cut
      the pace to nothing.

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
    SURE = 4
    """Clean rounds in a row, after which it grows by two steps at a time."""
    SETTLE = 1 / 15
    """Of the time between two cuts: what was on its way is refused in it, and not counted."""
    WORTH = 100
    """Requests for which a window's end is not tried again: it costs about four refusals."""
    HUSH = 1 / 10
    """Of the time between two cuts: whoever was refused and is not back by then waits for long."""

    def __init__(self, now: float, *, interval_s: float = 15.0, window_s: float = 60.0) -> None:
        self.per_s: float | None = None
        self._interval_s, self._window_s = interval_s, window_s
        self._born = now
        self._quota: float | None = None
        self._last_cut: float | None = None
        self._round = _Stretch(now)
        self._since_cut = _Stretch(now)
        self._past: deque[tuple[float, int]] = deque()
        self._streak = 0
        """Clean rounds in a row after which it might grow."""
        self._held_until = now
        """It does not grow beyond what was measured before."""
        self._door = Door(now, interval_s * self.SETTLE)
        self._since_open = _Stretch(now)
        self._windows = False
        """The server counts by fixed windows."""
        self._burst = _Burst()
        self._closed: float | None = None
        """When the door was shut; None while it is known to be open."""
        self._history: History[PaceChange] = History()

    def heard(
        self,
        now: float,
        *,
        started: int = 0,
        clean: int = 0,
        throttled: int = 0,
        trouble: int = 0,
        running: int = 0,
    ) -> None:
        """What happened since the last time. Ends rounds too: call it often.

        Args:
            started: requests that were sent; below 0 where some were not after all.
            clean: requests that were answered.
            throttled: requests that were refused for their rate.
            trouble: requests that met trouble of the server's own.
            running: requests that are under way now.
        """
        self._hush(now, running)
        self._burst.add(now, started, throttled)
        for stretch in (self._round, self._since_cut, self._since_open):
            if now >= stretch.began:
                stretch.add(now, started, clean, throttled, trouble)
        if self.per_s is not None:
            self._knock(now, started, throttled)
        if throttled and not self.shut and self._may_cut(now):
            self._cut(now)
        lasted = now - self._round.began
        full = self._round.admitted >= self.ADMITTED or lasted >= self._interval_s
        if full and lasted >= self._interval_s / (1 if self._windows else self.ROUNDS):
            self._end_round(now, lasted)

    @property
    def shut(self) -> bool:
        """Whether nobody is let in."""
        return self._door.shut_at is not None

    def rate(self, now: float) -> float | None:
        """Requests that may start per second now: the pace, or less while nobody is let in."""
        if self.per_s is None or not self.shut:
            return self.per_s
        return min(self.per_s, 1 / self._door.knock_s(now))

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
        if state.since_cut_s is not None:
            self._last_cut = now - state.since_cut_s
            self._held_until = self._last_cut + self._interval_s
        self._round, self._since_cut = _Stretch(now), _Stretch(now)
        self._past.clear()
        self._history = History(state.history)

    def _hush(self, now: float, running: int) -> None:
        """Whoever was refused waits, and then comes back together with the others: unpaced, all
        would be refused again, and never show the rate. What the last minute admitted is not above
        it where the server's bucket was full and holds no more than a minute's worth."""
        burst, since = self._burst, self._burst.ended + self._interval_s * self.HUSH
        many = burst.refused >= self.REFUSALS and burst.refused > max(running, 2 * burst.back)
        admitted = self._minute(since) - running
        if self.per_s is None and many and now >= since and admitted > 1:
            per_s = max(admitted, burst.refused) / self._window_s
            self._set(max(per_s, 1 / self._interval_s), "measured", now)

    def _knock(self, now: float, started: int, throttled: int) -> None:
        was_shut = self.shut
        self._door.heard(now, started, throttled)
        if was_shut and not self.shut:
            self._round = _Stretch(now)  # it will show whether somebody is let in
        elif self.shut and not was_shut:
            if self._closed is not None and self._round.clean:
                first, self._round = self._round, _Stretch(now)
                self._opened(first, now)
            if self._closed is None:
                self._closed = now

    def _opened(self, first: _Stretch, now: float) -> None:
        """It lets people in again. What one window admitted, or all of them since it was
        opened before, is the quota; a longer time says nothing of it."""
        assert self._closed is not None
        closed, self._closed = self._closed, None
        since, self._since_open = self._since_open, first
        last = [n for at, n in self._past if first.began - self._window_s < at <= first.began]
        self._past.clear()
        self._past.append((now, first.admitted))
        lasted, shut_s = first.began - since.began, first.began - closed
        window = self._interval_s / self.ROUNDS <= shut_s <= self._window_s
        if window and lasted >= self._window_s / 2:
            mean = (since.admitted - first.admitted) / lasted
            self._quota = max(mean, sum(last) / self._window_s)
            self._windows = True
            self._held_until = first.began + self._held_s()
            per_s = min(self._quota * self.HEADROOM, (self.per_s or math.inf) / self.CUT)
            self._set(max(per_s, 1 / self._interval_s), "measured", now)

    def _may_cut(self, now: float) -> bool:
        return self._last_cut is None or now - self._last_cut >= self._interval_s

    def _cut(self, now: float) -> None:
        if self._last_cut is not None and self._since_cut.admitted:
            self._quota = self._between_cuts(now - self._since_cut.began)
            if self.per_s is not None:
                if self._since_cut.clean:
                    self._lower(self.per_s * self.CUT, "throttled", now)
            elif now - self._last_cut <= self._window_s:
                lasted = now - self._round.began
                asked = self._round.started / max(lasted, self._interval_s / self.ROUNDS)
                most = 4 * self._minute(now) / self._window_s  # it may have let in all at once
                self._lower(max(self._quota, min(asked * self.CUT, most)), "throttled", now)
        settled = now + self._interval_s * self.SETTLE
        if self.per_s is None:  # what a full bucket gave is none of the quota
            self._remember(now)
            self._round = _Stretch(settled)
        self._last_cut, self._since_cut = now, _Stretch(settled)
        self._held_until = max(self._held_until, now + self._held_s())

    def _between_cuts(self, lasted: float) -> float:
        """What was admitted since the last one. A window may have given all that in a moment."""
        quota = self._since_cut.admitted / lasted
        if not self._windows or self._quota is None:
            return quota
        return self._quota if lasted < self._window_s else max(quota, self._quota)

    def _held_s(self) -> float:
        """How long it does not grow beyond what was measured."""
        if not self._windows or not self._quota:
            return self._interval_s
        return max(self._window_s, self.WORTH / self._quota)

    def _end_round(self, now: float, lasted: float) -> None:
        self._remember(now)
        ended, self._round = self._round, _Stretch(now)
        bad = ended.throttled or ended.trouble
        self._streak = 0 if bad else self._streak
        self._burst = _Burst() if ended.clean and not bad else self._burst
        if self.shut:
            return
        if self._closed is not None and (
            ended.clean or (not bad and ended.admitted >= self.ADMITTED)
        ):
            self._opened(ended, now)
            return
        if not bad:
            self._grow(ended, lasted, now)
            return
        if ended.refusals and ended.admitted - ended.refusals[0][1] >= self.ADMITTED:
            self._windows = False  # somebody was let in after a refusal
        many = (s for s in (ended, self._since_cut) if s.throttled >= self._many(s))
        stretch = next(many, None)
        quota = stretch.quota(self._interval_s / self.ROUNDS / 2) if stretch else None
        if quota is not None and (self.per_s is None or ended.clean):
            self._quota = quota
            self._lower(quota * self.HEADROOM, "measured", now)
            self._round = _Stretch(now + self._interval_s * self.SETTLE)

    def _many(self, stretch: _Stretch) -> float:
        return max(self.REFUSALS, self.SHARE * stretch.started)

    def _grow(self, ended: _Stretch, lasted: float, now: float) -> None:
        if self.per_s is None or ended.started < self.SATURATED * self.per_s * lasted:
            return
        grown = self.per_s * self.GROWTH ** (2 if self._streak >= self.SURE else 1)
        if self._quota is None and self.per_s * self._interval_s * self.SETTLE < self.ADMITTED:
            grown = 2 * self.per_s  # nothing is known, and few would be refused
        if now < self._held_until and self._quota is not None:
            grown = min(grown, max(self.per_s, self.HEADROOM * self._quota))
        else:
            self._streak += 1
        self._set(grown, "clean_round", now)

    def _lower(self, per_s: float, reason: PaceReason, now: float) -> None:
        """Never more than before, and never less than half of what the last minute admitted."""
        per_s = max(per_s, self._minute(now) / 2 / self._window_s, 1 / self._interval_s)
        self._set(per_s if self.per_s is None else min(per_s, self.per_s), reason, now)

    def _minute(self, now: float) -> int:
        """What was admitted in the last one."""
        since = now - self._window_s
        return sum(n for at, n in self._past if at >= since) + self._round.admitted

    def _remember(self, now: float) -> None:
        self._past.append((now, self._round.admitted))
        while self._past[0][0] < now - self._window_s:
            self._past.popleft()

    def _set(self, per_s: float, reason: PaceReason, now: float) -> None:
        if per_s != self.per_s:
            self.per_s = per_s
            at_s = round(now - self._born, 3)
            self._history.add(PaceChange(at_s=at_s, per_s=round(per_s, 4), reason=reason))
