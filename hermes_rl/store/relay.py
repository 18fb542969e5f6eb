"""A writer on a machine that does not see the run directory.

The worker's `RelayJournal` encodes the lines of its journal and keeps them until its driver polls
it. A `RelayedWriter` in the driver's process appends them to the journal EPOCH-WORKER, which is the
driver's: recovery, publishing and fencing know only that one. Lines arrive in their order, and
the receipt of an attempt is in the line with its rows, so none counts before they are durable. The
worker keeps at most the lines of its attempts in flight, since it is sent another one only for a
receipt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from hermes_rl.events import AttemptKey
from hermes_rl.ports import Receipt, Recorder
from hermes_rl.store.crash import CrashHook
from hermes_rl.store.files import convert_os_errors, pack
from hermes_rl.store.journal import JournalWriter, LiveRecorder, Publisher, encode_rows
from hermes_rl.store.rows import Finished, RelayedLine, receipt_of
from hermes_rl.text import SECRETS

FLUSH_S = 1.0
"""Events of running attempts travel after this time; with a lost worker, younger ones are lost."""
REPLY_BYTES = 4 * 2**20
"""One reply has lines of this size, or one longer line."""
STOP_S = 10.0
"""How long a writer that is closed waits for its publishing, which may last longer on a stalled
disk."""


class RelayJournal:
    """The journal of a worker, whose lines the driver takes.

    Args:
        writer: its name.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.notify: Callable[[], None] = lambda: None
        """Called when lines should travel."""
        self._lines: deque[RelayedLine] = deque()
        self._numbers: dict[AttemptKey, int] = {}
        self._begun = 0
        self._flush: asyncio.TimerHandle | None = None
        self._crash = CrashHook.from_environment()
        SECRETS.learn_environment()

    @property
    def empty(self) -> bool:
        """Whether all lines were taken."""
        return not self._lines

    def recorder(self, key: AttemptKey) -> Recorder:
        """See `JournalWriter`."""
        self._begun += 1
        number = self._numbers[key] = self._begun
        first: list[AttemptKey] = [key]

        def append(line: bytes) -> None:
            if self._numbers.get(key) != number:
                return  # a call that the attempt did not wait for; its rows are complete
            self._crash("attempt-2-live")
            self._add(RelayedLine(pack(line), number, first.pop() if first else None))

        return LiveRecorder(append, number, set())

    async def finish(self, rows: Finished) -> None:
        """Send the rows of a finished attempt with its receipt, without secrets of this process."""
        line = await encode_rows(rows)
        number = self._numbers.pop(rows.key)
        self._crash("attempt-3-done")
        self._lines.append(RelayedLine(line, number, None, receipt_of(rows, self.writer)))
        self.notify()

    def append_connection(self, line: bytes) -> None:
        """Send a line of the network log."""
        self._add(RelayedLine(line))

    def _add(self, line: RelayedLine) -> None:
        self._lines.append(line)
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self.notify)

    def take(self) -> tuple[RelayedLine, ...]:
        """Return the next lines for the driver."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        taken, size = list[RelayedLine](), 0
        while self._lines:
            size += len(self._lines[0].content)
            if taken and size > REPLY_BYTES:
                self.notify()
                break
            taken.append(self._lines.popleft())
        return tuple(taken)


class RelayedWriter:
    """The journal of such a worker in the driver's process, and its publisher.

    Args:
        publisher: makes it.
    """

    def __init__(
        self, journal: JournalWriter, publisher: Callable[[JournalWriter], Publisher]
    ) -> None:
        self._journal = journal
        self._publisher = publisher(journal)
        self._publishing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create the journal. Raises: StoreError, DiskFull."""
        with convert_os_errors(self._journal.run_dir.path):
            await self._journal.__aenter__()
        self._publishing = asyncio.create_task(self._publisher.run())

    async def take(self, lines: Sequence[RelayedLine]) -> tuple[Receipt, ...]:
        """Write lines of the worker. Returns the receipts of attempts whose rows are durable.

        Raises: DiskFull, StoreError, OSError, also of publishing.
        """
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()
        return tuple(await self._journal.take(lines)) if lines else ()

    async def drain(self) -> None:
        """Publish all rows. Raises: as `Publisher.drain`."""
        await self._publisher.drain()

    async def aclose(self) -> None:
        """Close the journal; rows that are not published are left to recovery. Idempotent."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait((self._publishing,), timeout=STOP_S)
        await self._journal.aclose()
