"""The run's budgets and limits for work of the driver's own: scoring groups, grading again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from batch_runner.budgets import as_plain, budgets_of, make_coordinator
from hermes_rl.config import RunConfig
from hermes_rl.models.rate.share import Share
from hermes_rl.store.rundir import RunDir


@asynccontextmanager
async def within_budgets(
    config: RunConfig, run_dir: RunDir, concurrency: int, governed: dict[str, Any]
) -> AsyncIterator[Share]:
    """What is left of the run's budgets, and limiters; no worker is at work.

    Args:
        concurrency: calls at once, at most.
        governed: takes what there is to say when it is over: see `as_plain`. Its budgets are those
            of all starts of the run so far.
    """
    coordinator = await asyncio.to_thread(make_coordinator, config, run_dir, concurrency)
    try:
        async with Share("driver", coordinator.budgets).coordinated(coordinator.handle) as share:
            yield share
    finally:
        governed |= as_plain(coordinator.summary(), budgets_of(config))
