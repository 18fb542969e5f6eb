"""Several runs at the same time in one process, such as the models of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from batch_runner.budgets import earlier_cost
from batch_runner.interrupts import Interrupts
from batch_runner.plan import RunSource
from batch_runner.pool import SharedRay, Watchdog
from batch_runner.progress import Progress, View
from batch_runner.settings import Settings
from hermes_rl.config import RunConfig
from hermes_rl.models.rate import NANO, RUN_USD, JointLimits, Ledger
from hermes_rl.ports import Receipt
from hermes_rl.store import Disposition

T = TypeVar("T")

VIEW_S = 0.5
"""Interval at which runs report to a shared display, in seconds."""
LEAST_USD = 1 / NANO
"""A budget must be above 0."""


class Member(Protocol):
    """A run, as the others see it."""

    settings: Settings
    source: RunSource

    def drain(self) -> None:
        """Start nothing more; running rollouts end."""

    def end_at_once(self) -> None:
        """Cancel the running rollouts."""


class JointRuns:
    """What runs at the same time share: limits of endpoints, rollouts in flight, Ray and signals.

    The first rollouts of all start together. Each run may have an equal part of the rollouts in
    flight. When one has ended, the others divide its part.

    Args:
        runs: their number.
        limits: of endpoints, and a budget.
        shared: the Ray of all.
    """

    interrupts: Interrupts
    """Catches signals for all."""

    def __init__(self, runs: int, limits: JointLimits, shared: SharedRay) -> None:
        self.runs, self.limits = runs, limits
        self._unfinished, self._ray = runs, shared
        self._members: list[Member] = []
        self._begun, self._waiting = asyncio.Event(), 0
        self._draining = False

    async def one(self, run: Awaitable[T]) -> T:
        """Await one of the runs. When it fails, the others start nothing more."""
        try:
            return await run
        except BaseException:
            self.drain()
            raise
        finally:
            self._unfinished -= 1
            self._begin_if_ready()
            self._divide()

    def add(self, member: Member) -> None:
        """Add a run that begins."""
        self._members.append(member)
        member.source.gate = self._wait_for_all
        self._divide()
        if self._draining:
            member.drain()

    def drain(self) -> None:
        """Let the running rollouts of all runs end."""
        self._draining = True
        self._begun.set()
        for member in self._members:
            member.drain()

    def end_at_once(self) -> None:
        """Cancel the running rollouts of all runs."""
        for member in self._members:
            member.end_at_once()

    @contextmanager
    def ray(self, workers: int) -> Iterator[Watchdog | None]:
        """Connect to the Ray of all runs. Raises: KeyboardInterrupt for a signal meanwhile."""
        with ExitStack() as stack:
            with self.interrupts.raising_in_blocking_code():
                watchdog = stack.enter_context(self._ray.connect(workers))
            yield watchdog

    async def _wait_for_all(self) -> None:
        if not self._begun.is_set():
            self._waiting += 1
            self._begin_if_ready()
            await self._begun.wait()

    def _begin_if_ready(self) -> None:
        if self._waiting >= self._unfinished:
            self._begun.set()

    def _divide(self) -> None:
        for member in self._members:
            most = max(1, member.settings.concurrency // max(1, self._unfinished))
            member.source.hold(most=most)


def joint_limits(
    configs: Mapping[str, RunConfig], budget_usd: float | None
) -> tuple[JointLimits, dict[str, RunConfig]]:
    """Return the limits of several runs, and their configurations with what each may spend at most.

    Blocking. Without all prices there is no budget.

    Args:
        budget_usd: of all runs and all their starts together, in US dollars.
    """
    costs = {name: earlier_cost(one) for name, one in configs.items()} if budget_usd else {}
    known = [cost for cost in costs.values() if cost is not None]
    if budget_usd is None or len(known) < len(configs):
        return JointLimits(), dict(configs)
    spent, changed = sum(known), dict[str, RunConfig]()
    for name, config in configs.items():
        left = max(budget_usd - spent + (costs[name] or 0.0), LEAST_USD)
        run = config.run.model_copy(update={"budget_usd": left})
        changed[name] = config.model_copy(update={"run": run})
    usd = Ledger(RUN_USD, round(budget_usd * NANO), round(spent * NANO), len(configs))
    return JointLimits(usd), changed


class JointProgress:
    """One display for several runs, with a line for each.

    Args:
        notes: those for all runs that were shown; extended.
    """

    def __init__(self, display: Progress, notes: set[str]) -> None:
        self.display, self.notes = display, notes
        self._views: dict[str, View | None] = {}

    def of(self, name: str) -> Progress:
        """Return the progress of one run."""
        self._views[name] = None
        return _OneRun(name, self)

    def update(self, name: str, view: View) -> None:
        """Note the state of a run; trouble is shown at once."""
        before, self._views[name] = self._views[name], replace(view, name=name)
        if before is not None and before.trouble != view.trouble:
            self._show()

    async def show(self) -> None:
        """Show all runs until cancelled, and a last time then."""
        try:
            while True:
                await asyncio.sleep(self.display.every_s)
                self._show()
        finally:
            self._show(last=True)

    def _show(self, *, last: bool = False) -> None:
        views = [view for view in self._views.values() if view is not None]
        if views:
            show = self.display.close if last else self.display.tick
            show(replace(views[0], others=tuple(views[1:])))


class _OneRun(Progress):
    every_s = VIEW_S

    def __init__(self, name: str, joint: JointProgress) -> None:
        self._name, self._joint = name, joint

    def note(self, text: str) -> None:
        self._joint.display.note(f"{self._name}: {text}")

    def note_for_all(self, text: str) -> None:
        if text not in self._joint.notes:
            self._joint.notes.add(text)
            self._joint.display.note(text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        self._joint.display.attempt(receipt, disposition)

    def tick(self, view: View) -> None:
        self._joint.update(self._name, view)
