"""One lane's judgement: the limit of requests in flight, the token buckets, and the pace. Pure.

The in-process limiter has one, and a governor has one per lane; both tell it the same news.

Where there is a pace it alone is cut by refusals, and the limit of requests in flight grows as at
first until it is not used any more: cut as well, it would let requests begin in the bunches in
which slow answers end, which is refused again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hermes_rl.models.limits.buckets import Buckets, Rates
from hermes_rl.models.limits.controller import Controller
from hermes_rl.models.limits.pace import Pace
from hermes_rl.models.limits.quotas import Quota

_CLAMP_S = 1.0
"""How long a `remaining` without a reset is believed."""


@dataclass(frozen=True)
class News:
    """What happened since the last time."""

    started: int = 0
    """Requests that were sent; below 0 where some were not after all."""
    clean: int = 0
    """Requests that ended well."""
    throttled: int = 0
    trouble: int = 0
    running: int = 0
    """Requests that are under way now."""
    quotas: Collection[Quota] = ()
    """What answers' headers said."""


class Regulator:
    """See the module.

    Args:
        maximum: requests in flight, at most.
        start: where slow start begins.
        rates: limits that are known; others are learned.
        interval_s: seconds between two cuts.
        window_s: what limits are named for.
    """

    def __init__(
        self,
        maximum: int,
        now: float,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        interval_s: float = 15.0,
        window_s: float = 60.0,
    ) -> None:
        self.controller = Controller(maximum, start, interval_s=interval_s)
        self.buckets = Buckets(rates, now, window_s=window_s)
        self.pace = Pace(now, interval_s=interval_s, window_s=window_s)

    def heard(self, news: News, now: float) -> None:
        """Requests began and ended. A burst of refusals is one piece of news."""
        for _ in range(news.clean):
            self.controller.heard("clean", now)
        if news.trouble:
            self.controller.heard("trouble", now)
        if news.throttled:
            self.buckets.throttled(now)
            if self.pace.per_s is None:
                self.controller.heard("throttled", now)
        self.pace.heard(
            now,
            started=news.started,
            clean=news.clean,
            throttled=news.throttled,
            trouble=news.trouble,
            running=news.running,
        )
        if news.quotas:
            self.buckets.learn(news.quotas, now)
            self._clamp(news.quotas, now)
        rate = self.pace.rate(now)
        if rate is not None:
            self.buckets.pace(rate, now)
            self.controller.slow_start = True

    def _clamp(self, quotas: Collection[Quota], now: float) -> None:
        """Requests that a server says to be left bound those in flight, where no bucket counts
        them."""
        for quota in quotas:
            if quota.kind != "requests" or quota.remaining is None:
                continue
            if "requests" in self.buckets.by_kind:
                continue
            hold = _CLAMP_S if quota.reset_s is None else min(quota.reset_s, 60.0)
            self.controller.clamp(int(quota.remaining), now, now + hold)
