"""What a run's calls wait for: an endpoint that fails or is silent, and when the run gives up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.models.endpoint import EMBEDDED
from hermes_rl.models.rate.coordinator import Coordinator, LaneSummary, Summary

LOOK_S = 0.5
_VERBS = ("answers ", "does not answer")
FAILING_S = 2.0
"""So long without an answer after a failure is trouble."""
QUIET_S = 3.0
"""So long without anything from an endpoint that never answered."""
STALLED_S = 60.0
"""So long without anything from an endpoint that has answered, or from the embedded model, whose
first answer can take a minute on a slow CPU."""
REWRITE_S = 5.0
"""The file that other terminals read is written again at most so often."""


@dataclass(frozen=True)
class Trouble:
    """One endpoint that does not answer."""

    endpoint: str
    """Host and port."""
    said: str
    """`answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer."""
    gives_up_at: float | None
    """Unix time at which calls are given up; None where that depends on the calls."""

    @property
    def line(self) -> str:
        """`127.0.0.1:8105 answers 500 'injected'; 20 calls waiting; gives up in 29 min`."""
        told = self.said or "does not answer"
        if self.endpoint not in told:
            told = f"{self.endpoint}{'' if told.startswith(_VERBS) else ':'} {told}"
        calls = "call" if self.waiting == 1 else "calls"
        parts = [told, f"{self.waiting:,} {calls} waiting"]
        if self.gives_up_at is not None:
            left = max(0.0, self.gives_up_at - time.time())
            parts.append(f"gives up in {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'}")
        return "; ".join(parts)


def troubles(summary: Summary, where: EndpointSection, now: float) -> tuple[Trouble, ...]:
    """The endpoints in trouble.

    Args:
        where: says how long calls go on.
        now: Unix time.
    """
    return tuple(found for lane in summary.lanes if (found := _trouble(lane, where, now)))


def _trouble(lane: LaneSummary, where: EndpointSection, now: float) -> Trouble | None:
    calls = lane.unanswered
    if calls is None:
        return None
    quiet, computed_here = not calls.message, lane.endpoint.startswith(EMBEDDED)
    normal_s = FAILING_S
    if quiet:
        normal_s = QUIET_S if calls.never and not computed_here else STALLED_S
    if calls.since_s < normal_s:
        return None
    patience_s = None if quiet else where.outage_seconds
    if calls.never and not calls.alive and not (quiet and computed_here):
        patience_s = where.first_answer_seconds
    return Trouble(
        endpoint=lane.endpoint,
        said=calls.message,
        waiting=calls.waiting,
        gives_up_at=None if patience_s is None else now - calls.since_s + patience_s,
    )


class Watch:
    """Looks at a run's lanes for trouble.

    Args:
        changed: called when trouble begins, ends or becomes another.
        store: keeps the present trouble where other terminals find it.
    """

    def __init__(
        self,
        where: EndpointSection,
        changed: Callable[[], None],
        store: Callable[[tuple[Trouble, ...]], Awaitable[None]],
    ) -> None:
        self.troubles: tuple[Trouble, ...] = ()
        self.answered = False
        """Somebody was answered in this start."""
        self._where, self._changed, self._store = where, changed, store
        self._stored_at = 0.0

    async def run(self, coordinator: Coordinator) -> None:
        """Until it is cancelled; then nothing waits any more."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.look(coordinator)
        finally:
            self.troubles = ()

    async def look(self, coordinator: Coordinator) -> None:
        """Take in how things are now."""
        summary = coordinator.summary()
        self.answered = self.answered or any(lane.clean for lane in summary.lanes)
        before = self.troubles
        self.troubles = troubles(summary, self._where, time.time())
        news = _words(before) != _words(self.troubles)
        if news:
            self._changed()
        if news or (self.troubles and time.monotonic() - self._stored_at > REWRITE_S):
            self._stored_at = time.monotonic()
            await self._store(self.troubles)


def _words(found: tuple[Trouble, ...]) -> list[tuple[str, str]]:
    return [(trouble.endpoint, trouble.said) for trouble in found]
