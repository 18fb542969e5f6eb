"""Crash points for tests: the process kills itself at a named step of the commit protocol.

`HERMES_RL_CRASH_AT=publish-7-renamed:2` kills the process (kill -9) when it reaches that point for
the second time; `publish-7-renamed:2:15` stalls there for 15 s, like a disk that does not answer.
The variable is read when a run directory is opened. With `HERMES_RL_CRASH_ONCE=FILE`, only the
process that removes that file dies: one of several workers. Points are numbered like the steps of
the protocol: attempt 1-5, publish 6-9, recovery R1-R6, compaction 1-6.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

CRASH_VARIABLE = "HERMES_RL_CRASH_AT"
ONCE_VARIABLE = "HERMES_RL_CRASH_ONCE"

CRASH_POINTS = (
    "attempt-1-dispatch-torn",
    "attempt-1-dispatch",
    "attempt-2-live-torn",
    "attempt-2-live",
    "attempt-3-done-torn",
    "attempt-3-done",
    "attempt-4-synced",
    "attempt-5-receipt",
    "publish-6-opened",
    "publish-6-sealed",
    "publish-7-half",
    "publish-7-prepared",
    "publish-7-written",
    "publish-7-renamed",
    "publish-7-durable",
    "publish-8-written",
    "publish-8-renamed",
    "publish-8-durable",
    "publish-9-done",
    "publish-9-live",
    "recover-1-locked",
    "recover-1-epoch",
    "recover-1-compared",
    "recover-2-fenced",
    "recover-3-batch",
    "recover-4-written",
    "recover-4-published",
    "recover-4-unlinked",
    "recover-5-emptied",
    "recover-5-loaded",
    "recover-6-ready",
)

COMPACTION_POINTS = (
    "compact-1-written",
    "compact-2-staged",
    "compact-3-recorded",
    "compact-4-due",
    "compact-4-exchanged",
    "compact-5-switched",
    "compact-6-removed",
)


class CrashHook:
    """Counts how often one point is reached, and kills the process there.

    Args:
        spec: `NAME` or `NAME:K` (K-th time, from 1), or `NAME:K:SECONDS` to stall there and
            continue; empty for never.

    Raises: ValueError for an unknown crash point, and for a stall in the middle of a write.
    """

    def __init__(self, spec: str = "") -> None:
        name, nth, seconds = [*spec.split(":"), "", ""][:3]
        if name and (
            name not in (*CRASH_POINTS, *COMPACTION_POINTS) or (seconds and name.endswith("-torn"))
        ):
            raise ValueError(f"{CRASH_VARIABLE}={spec}: no such crash point")
        self._name = name
        self._left = int(nth or 1)
        self._stall_s = float(seconds or 0.0)

    @classmethod
    def from_environment(cls) -> CrashHook:
        """The hook that the environment variable configures."""
        return cls(os.environ.get(CRASH_VARIABLE, ""))

    def due(self, name: str) -> bool:
        """Count one time that a point is reached; True when the process shall die there."""
        if name != self._name:
            return False
        self._left -= 1
        if self._left == 0 and (file := os.environ.get(ONCE_VARIABLE)):
            with suppress(FileNotFoundError):
                os.unlink(file)
                return True
            return False
        return self._left == 0

    def die(self) -> None:
        """kill -9 this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, name: str) -> None:
        """Reach a point: die or stall when it is due."""
        if not self.due(name):
            return
        if self._stall_s:
            time.sleep(self._stall_s)
        else:
            self.die()
