"""What the calls at one account have seen lately: whether it answers, and how much may be retried.

A retry of a request that may have been served can be paid twice, and retries pile up just when a
server is weakest. So such retries are a share of the traffic: each new call earns a fifth of one,
and one more comes every few seconds, so that an account that fails always is still tried. This is
the token bucket of gRPC's retry throttling and Finagle's RetryBudget (a ratio of requests plus a
floor per second); unlike them, a retry without a token waits for one, because another limit, the
time, already says when to give up.
"""

from __future__ import annotations


class Traffic:
    """Shared by all rollouts of a process at one endpoint, account and model."""

    RATIO = 0.2
    """Retries earned by a call."""
    FLOOR_S = 5.0
    """Seconds in which one more is earned, whatever the traffic."""
    START = 10.0
    MOST = 100.0
    """The last 500 calls count."""

    def __init__(self) -> None:
        self.answered_at: float | None = None
        """When it last gave a complete answer, to whomever; seconds of a monotonic clock."""
        self._tokens = self.START
        self._earned_at: float | None = None

    def called(self) -> None:
        """A call began: not one of its retries."""
        self._tokens = min(self.MOST, self._tokens + self.RATIO)

    def answered(self, now: float) -> None:
        """A complete answer came."""
        self.answered_at = now

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
