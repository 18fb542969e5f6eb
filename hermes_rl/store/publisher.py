"""Turns sealed batches of one writer into parts, by size, by age, or on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hermes_rl.errors import StoreError
from hermes_rl.store.commit import Commit, publish_batch
from hermes_rl.store.journal import Batch, JournalWriter
from hermes_rl.threads import in_thread, to_end

PUBLISH_EVERY_S = 300.0
"""A finished row stands in Parquet after this many seconds at the latest."""


class Publisher:
    """Publishes one writer's batches in order.

    Args:
        journal: the writer.
        every_s: a batch is published when its first row is this old.
        on_commit: told of every commit, on the event loop.
    """

    def __init__(
        self,
        journal: JournalWriter,
        *,
        every_s: float = PUBLISH_EVERY_S,
        on_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self._journal = journal
        self._every_s = every_s
        self._on_commit = on_commit
        self._sealed: list[Batch] = []
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Publish whenever a batch is large or old enough, for ever. Raises: DiskFull."""
        while True:
            left = self._every_s - self._journal.age_s
            try:
                async with asyncio.timeout(max(0.0, min(left, 1.0))):
                    await self._journal.full.wait()
            except TimeoutError:
                pass
            if self._journal.full.is_set() or self._journal.age_s >= self._every_s:
                await self.drain()

    async def drain(self) -> None:
        """Publish all that is finished; a cancellation waits for that.

        Raises: DiskFull; what is left is tried next time.
        """
        await to_end(self._drain())

    async def _drain(self) -> None:
        async with self._busy:
            batch = await self._journal.seal()
            if batch is not None:
                self._sealed.append(batch)
            while self._sealed:
                await self._publish(self._sealed[0])
                self._sealed.pop(0)

    async def _publish(self, batch: Batch) -> None:
        commit = await in_thread(self._publish_alive, batch)
        await self._journal.committed(batch)
        if commit is not None and self._on_commit is not None:
            self._on_commit(commit)

    def _publish_alive(self, batch: Batch) -> Commit | None:
        """The thread holds `alive` itself: it may go on after its writer was closed, when the disk
        stalls, and recovery must not touch the batch before it has ended."""
        alive = self._journal.alive
        if alive is None:
            raise StoreError(f"writer {self._journal.writer} is closed")
        with alive.shared():
            return publish_batch(self._journal.run_dir, batch.file.path, batch.stem)
