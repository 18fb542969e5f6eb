"""Whether this process ran all the time: its workers end while it does not."""

from __future__ import annotations

import asyncio
import time


class Pulse:
    """Notices that this process did not run for a while: it was stopped, or its loop was blocked.
    Its workers ended by themselves then, whatever they were running."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last = _now()
        self._pause, self._until = 0.0, self._last

    async def beat(self) -> None:
        """Look at the clock again and again."""
        while True:
            self._look()
            await asyncio.sleep(self._lease_s / 12)

    def pause(self) -> float:
        """Seconds of the last pause that may have cost workers their lease; 0 for none."""
        self._look()
        return self._pause if _now() - self._until < 2 * self._lease_s else 0.0

    def _look(self) -> None:
        now = _now()
        if now - self._last > self._lease_s / 2:
            self._pause, self._until = now - self._last, now
        self._last = now


def _now() -> float:
    """A clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
