"""The run's budgets and limits for work of the driver's own: scoring groups, grading again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from batch_runner.governing import LocalGovernor, Prices, as_plain, charter_of, pots_of
from batch_runner.spent import spent_before
from hermes_rl.config import RunConfig
from hermes_rl.models.limits.share import Share
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
    pots, prices = pots_of(config), Prices(config)
    known = (pots, prices.worst, prices.models, prices.output_max)
    spent = await asyncio.to_thread(spent_before, run_dir, *known)
    governor = LocalGovernor(charter_of(config, concurrency, spent))
    try:
        async with Share("driver", governor.line(), tuple(pots)) as share:
            yield share
    finally:
        governed |= as_plain(await governor.summary(), pots)
