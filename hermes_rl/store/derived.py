"""Derived rows: grades and groups, which a driver makes from rows of its run. A kill loses none.

Finished rows are written like those of attempts: a durable line of a `done` file that is published
later. Calls that a kill interrupts are recorded, too: attempts have `live` files for that, derived
rows have `asked` files. These contain each row as it is recorded when its work is interrupted, and
the events of that work. They are only read after a kill.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from hermes_rl.events import CallStarted, Ended, Event
from hermes_rl.store.files import AppendFile, read_payloads
from hermes_rl.store.journal import (
    PUBLISH_EVERY_S,
    CommitBatch,
    EventFiles,
    JournalWriter,
    Publisher,
    decode_lines,
    encode,
)
from hermes_rl.store.rows import Derived, Grade, Group
from hermes_rl.store.rundir import RunDir
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import fold

FILE_BYTES = 16 * 1024 * 1024
"""Size from which a new `asked` file is started."""


class PendingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an `asked` file: a pending row, or an event of its work."""

    n: int
    """Number of the row in this journal."""
    row: Derived | None = None
    e: Event | None = None


_decode = msgspec.json.Decoder(PendingLine).decode


class PendingRow:
    """Records the events of the work for one row (a `ports.Recorder`), so that they survive a
    kill."""

    def __init__(self, files: EventFiles, row: Derived) -> None:
        self.file: AppendFile
        self.file, self._number = files.begin(self)
        line = SECRETS.scrub_record(PendingLine(n=self._number, row=row))
        self.file.append(encode(line))

    def record(self, event: Event) -> None:
        """See `ports.Recorder`."""
        line = SECRETS.scrub_record(PendingLine(n=self._number, e=event))
        self.file.append(encode(line))


class DerivedWriter:
    """Writes derived rows, and before them the pending work; see `open_derived_writer`."""

    def __init__(self, journal: JournalWriter) -> None:
        run_dir = journal.run_dir
        self._journal = journal
        self.pending = EventFiles(
            run_dir.writer_path(journal.writer), "asked", run_dir.crash, "derived-asked"
        )

    def begin(self, row: Derived) -> PendingRow:
        """Start the work for a row.

        Args:
            row: recorded with the calls so far when a kill interrupts the work.

        Raises: DiskFull.
        """
        begun = PendingRow(self.pending, row)
        if begun.file.size >= FILE_BYTES:
            self.pending.rotate()
        return begun

    async def add(self, rows: Derived | None, pending: PendingRow | None = None) -> None:
        """Write rows; they are durable on return.

        Args:
            rows: None when the work had no result.
            pending: the work that ends.

        Raises: DiskFull.
        """
        if rows is not None:
            await self._journal.finish(rows)
        for path in self.pending.end([pending]):
            path.unlink()


@asynccontextmanager
async def open_derived_writer(
    run_dir: RunDir,
    epoch: int,
    *,
    every_s: float = PUBLISH_EVERY_S,
    commit: CommitBatch | None = None,
) -> AsyncIterator[DerivedWriter]:
    """Open a writer of derived rows; all rows are published at the end.

    Args:
        epoch: of the driver, which holds LOCK.
        every_s: rows are published at this age.
        commit: see `Publisher`.

    Raises: DiskFull, also at the end; the next start then publishes the rows.
    """
    async with JournalWriter(run_dir, epoch, _unused_writer_name(run_dir, epoch)) as journal:
        publisher = Publisher(journal, every_s=every_s, commit=commit)
        writer = DerivedWriter(journal)
        publishing = asyncio.create_task(publisher.run())
        clean = False
        try:
            yield writer
            clean = True
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)  # drain raises for a full disk
            try:
                await publisher.drain()
            finally:
                writer.pending.close(keep_open=not clean)


def _unused_writer_name(run_dir: RunDir, epoch: int) -> str:
    """A writer name that this epoch has not used, since stems are never reused."""
    names = (f"derived{number}" for number in itertools.count())
    return next(
        name
        for name in names
        if not run_dir.committed(f"{epoch}-{name}-0")
        and not run_dir.writer_path(f"{epoch}-{name}").exists()
    )


def recover_pending_rows(run_dir: RunDir, writer: str, *, strict: bool = True) -> list[Derived]:
    """Return the pending rows of a dead writer for which calls were made. Blocking.

    Its finished rows must be published already: their calls are left out.

    Raises: DamagedFile, when `strict`.
    """
    found: list[Derived] = []
    for _, path in run_dir.journals("asked", writer):
        rows: dict[int, Derived] = {}
        events: dict[int, list[Event]] = {}
        for line in decode_lines(read_payloads(path, strict=strict), _decode):
            if line.row is not None:
                rows[line.n] = line.row
            elif line.e is not None:
                events.setdefault(line.n, []).append(line.e)
        paid = [n for n, es in events.items() if any(isinstance(e, CallStarted) for e in es)]
        found += [_with_calls(rows[n], events[n]) for n in paid if n in rows]
    known = _known_calls(run_dir) if found else set()
    return [cut for cut in found if not known & _call_ids(cut)]


def _call_ids(cut: Derived) -> set[str]:
    rows: list[Grade | Group] = [*cut.grades, *cut.groups]
    return {call.call_id for row in rows for call in row.calls}


def _with_calls(cut: Derived, events: list[Event]) -> Derived:
    made = fold([*events, Ended(finished_at=time.time(), end_reason="answered")])
    columns = {name: getattr(made, name) for name in ("calls", "usage", "cost_usd", "metrics")}
    return Derived(
        grades=tuple(msgspec.structs.replace(row, **columns) for row in cut.grades),
        groups=tuple(msgspec.structs.replace(row, **columns) for row in cut.groups),
    )


def _known_calls(run_dir: RunDir) -> set[str]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    known: set[str] = set()
    for part in (*run_dir.parts("grades"), *run_dir.parts("groups")):
        calls = pc.list_flatten(pq.read_table(part, columns=["calls"])["calls"])
        known |= set(pc.struct_field(calls, "call_id").to_pylist())
    return known
