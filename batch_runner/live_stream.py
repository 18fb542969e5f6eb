"""`open_live`: a run in the background whose groups a trainer takes (`hermes_rl.rl.rollouts`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batch_runner.live import LiveGroups
from batch_runner.progress import Silent, View
from batch_runner.runner import arun_batch
from hermes_rl.config import RunConfig
from hermes_rl.models.tokens import PROBLEMS
from hermes_rl.ports import Receipt
from hermes_rl.rl import LiveOptions
from hermes_rl.store import Disposition

_log = logging.getLogger(__name__)

ERRORS_LOGGED = 20
"""Different errors of rollouts that are logged, at most."""


class _Logged(Silent):
    """Shows nothing, since the terminal is the trainer's: notes go to the log. Its warnings: that
    nothing can be trained on, endpoints that do not answer, and errors of rollouts, each once."""

    def __init__(self) -> None:
        self._errors: set[str] = set()

    def note(self, text: str) -> None:
        _log.log(logging.WARNING if text.startswith(PROBLEMS) else logging.INFO, "%s", text)

    def attempt(self, receipt: Receipt, disposition: Disposition) -> None:
        error, logged = receipt.error, self._errors
        if disposition != "given_up" or not error or error in logged:
            return
        if len(logged) < ERRORS_LOGGED:
            logged.add(error)
            _log.warning("a rollout of task %s failed: %s", receipt.task_id, error)

    def tick(self, view: View) -> None:
        for line in view.trouble:
            _log.warning("%s", line)


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
