"""Whether a server lets anybody in, and how often to knock while it does not. Pure: time is told.

Servers with fixed windows refuse everybody from the moment when a window is used up until the next
one begins, and so do servers that close for some time. To go on asking at a pace teaches nothing.
"""

from __future__ import annotations


class Door:
    """Shut or open.

    - Shut after a beat or more in which three requests or more were refused and no more than these
      began.
    - Then somebody knocks after a beat, and again when a fifth of the time since has passed, two
      intervals apart at most.
    - Open when a request was not refused for a beat: a refusal comes at once, an answer may not.

    Args:
        now: seconds of a monotonic clock, as in all that follows.
        beat_s: what is on its way is refused within it.
    """

    REFUSALS = 3
    KNOCKS = 5
    FAR = 30
    """Beats between two knocks, at most."""

    def __init__(self, now: float, beat_s: float) -> None:
        self.shut_at: float | None = None
        """None where it is open."""
        self._beat_s = beat_s
        self._since = now
        self._started = self._refused = 0
        self._knocked: float | None = None
        """When a request began that was not refused until now."""

    def heard(self, now: float, started: int, throttled: int) -> None:
        """What happened since the last time.

        Args:
            started: requests that were sent.
            throttled: requests that were refused.
        """
        self._started += started
        self._refused += throttled
        if now < self._since + self._beat_s:
            return
        if self.shut_at is None:
            self._watch(now)
        else:
            self._listen(now)

    def knock_s(self, now: float) -> float:
        """Seconds between two knocks; 0 where it is open."""
        if self.shut_at is None:
            return 0.0
        seconds = max(self._beat_s, (now - self.shut_at) / self.KNOCKS)
        return min(seconds, self.FAR * self._beat_s)

    def _watch(self, now: float) -> None:
        if self._started > self._refused or not self._refused:
            self._begin(now)
        elif self._refused >= self.REFUSALS:
            self.shut_at = self._since
            self._begin(now)

    def _listen(self, now: float) -> None:
        if self._started <= self._refused:
            self._started = self._refused = 0
            self._knocked = None
        elif self._knocked is None:
            self._knocked = now
        elif now - self._knocked >= self._beat_s:
            self.shut_at = None
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._since, self._knocked = now, None
        self._started = self._refused = 0
