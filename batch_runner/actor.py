"""The worker as a Ray actor. It lives in a module of its own, so that Ray's processes import it."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack

import msgspec

from batch_runner.open_files import make_room
from batch_runner.wire import Reply, decode_item, decode_spec, encode_reply
from batch_runner.worker import Worker, open_worker
from hermes_rl.errors import HermesError, cause_of
from hermes_rl.models.rate.share import decode_grant, encode

_GATHER_S = 0.01
"""Receipts that come within this time of the first travel together."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of its start."""

    pid: int
    host: str
    fault: str | None = None
    """Why it could not start, for people."""


class WorkerActor:
    """One event loop with many rollouts. Never restarted and never retried by Ray: the driver
    recovers what a dead actor left. It ends by itself when it does not hear its driver for the
    lease, and publishes nothing then."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._stack = AsyncExitStack()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, spec: bytes, keys: dict[str, str]) -> bytes:
        """Open journal and context; returns `Started`."""
        fault = None
        try:
            told = decode_spec(spec)
            make_room(told.capacity)
            opened = open_worker(told, keys=keys)
            self._worker = await self._stack.enter_async_context(opened)
            self._watch = asyncio.create_task(self._outlive_driver())
        except HermesError as error:
            fault = str(error)
        said = Started(pid=os.getpid(), host=socket.gethostname(), fault=fault)
        return msgspec.msgpack.encode(said)

    async def send(self, item: bytes) -> None:
        """Start an attempt."""
        self._opened().submit(decode_item(item))

    async def poll(self, wait_s: float) -> bytes:
        """Receipts since the last poll; waits a while for some. Also the driver's heartbeat."""
        return encode_reply(await self._opened().poll(wait_s, _GATHER_S))

    async def share(self, grant: bytes) -> bytes:
        """Follow a grant of the coordinator; return the next report."""
        share = self._opened().share
        share.take_grant(decode_grant(grant))
        return encode(await share.next_report())

    async def close(self) -> bytes:
        """Publish what is finished and let the journal go."""
        if self._watch is not None:
            self._watch.cancel()  # publishing may take longer than a lease
        reply = Reply()
        try:
            await self._opened().publish()
            await self._opened().share.leave()
        except HermesError as error:
            reply = Reply(fault=str(error), cause=cause_of(error))
        await self._stack.aclose()
        return encode_reply(reply)

    def _opened(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _outlive_driver(self) -> None:
        await self._opened().outlive_driver()
        await self._stack.aclose()
        # Nobody listens any more, and Ray would keep the process for a driver that may be gone.
        os._exit(1)
