"""`open_live`: a run in the background whose groups a trainer takes (`hermes_rl.rl.rollouts`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batch_runner.live import LiveGroups
from batch_runner.progress import Silent
from batch_runner.runner import arun_batch
from hermes_rl.config import RunConfig
from hermes_rl.rl import LiveOptions

_log = logging.getLogger(__name__)


class _Logged(Silent):
    """Shows nothing, since the terminal is the trainer's; notes go to the log."""

    def note(self, text: str) -> None:
        _log.info("%s", text)


@asynccontextmanager
async def open_live(config: RunConfig, options: LiveOptions) -> AsyncIterator[LiveGroups]:
    """Start a live run. At exit it ends: finished rollouts are kept, running ones are cancelled.

    Raises: UserError and StoreError, as `arun_batch`.
    """
    live = LiveGroups(options)
    work = asyncio.create_task(arun_batch(config, progress=_Logged(), live=live))
    waiting = asyncio.create_task(live.ready.wait())
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not live.ready.is_set():
            await work
        work.add_done_callback(live.end)
        yield live
    finally:
        waiting.cancel()
        if live.ready.is_set() and not work.done():
            live.leave()
        if not live.ready.is_set():
            work.cancel()
        await asyncio.wait((work,))
    await work
