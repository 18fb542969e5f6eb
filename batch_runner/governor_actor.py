"""The governor as a Ray actor, in a module of its own, so that Ray's processes import it."""

from __future__ import annotations

import asyncio
import os
import time

from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import (
    decode_charter,
    decode_report,
    encode_grant,
    encode_summary,
)
from hermes_rl.models.limits.rests import Rests


class GovernorActor:
    """Never restarted by Ray: the driver makes a new one, which the workers tell what they know."""

    def __init__(self, charter: bytes) -> None:
        self._governor = Governor(decode_charter(charter), time.monotonic, Rests())

    async def pid(self) -> int:
        """The process that it lives in."""
        return os.getpid()

    async def exchange(self, report: bytes) -> bytes:
        """See `hermes_rl.models.limits.share.Line`."""
        return encode_grant(self._governor.handle(decode_report(report)))

    async def forget(self, worker: str) -> None:
        """See `GovernorHost`."""
        self._governor.forget(worker)

    async def summary(self) -> bytes:
        """See `GovernorHost`."""
        return encode_summary(self._governor.summary())

    async def stay(self) -> None:
        """Never returns: who waits for it hears of this actor's death at once."""
        await asyncio.Event().wait()
