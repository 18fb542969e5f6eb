"""Rows that a driver makes from rows of its run: grades and groups. A kill loses none of them.

Finished rows go the way of attempts: a line of a `done` file, durable at once, and published with
others. Calls that a kill cuts are recorded too: attempts have `live` files for that, grades and
groups have `asked` files. These hold each row as it would be if its work came to nothing, and then
the events of that work. They are read after a kill alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from hermes_rl.events import CallStarted, Ended, Event
from hermes_rl.store.files import AppendFile, payloads
from hermes_rl.store.journal import (
    PUBLISH_EVERY_S,
    EventFiles,
    JournalWriter,
    Publisher,
    decoded,
    encode,
)
from hermes_rl.store.rows import Derived, Grade, Group
from hermes_rl.store.rundir import RunDir
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import fold

FILE_BYTES = 16 * 1024 * 1024
"""Size from which a new `asked` file is begun."""


class PendingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an `asked` file: of each pending row the row first, then its events."""

    n: int
    """Number of the row in this journal."""
    row: Derived | None = None
    e: Event | None = None


_decode = msgspec.json.Decoder(PendingLine).decode


class PendingRow:
    """Takes the events of the work for one row (a `ports.Recorder`); they outlive a kill."""

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
    """Writes derived rows, and notes before them what is under way; see `open_derived_writer`."""

    def __init__(self, journal: JournalWriter) -> None:
        run_dir = journal.run_dir
        self._journal = journal
        self.pending = EventFiles(
            run_dir.writer_path(journal.writer), "asked", run_dir.crash, "derived-asked"
        )

    def begin(self, row: Derived) -> PendingRow:
        """Begin the work for a row.

        Args:
            row: what is recorded, with the calls that were made, when a kill cuts the work.

        Raises: DiskFull.
        """
        begun = PendingRow(self.pending, row)
        if begun.file.size >= FILE_BYTES:
            self.pending.rotate()
        return begun

    async def add(self, rows: Derived | None, pending: PendingRow | None = None) -> None:
        """Write rows; they are durable on return.

        Args:
            rows: None when nothing came of the work.
            pending: the work that ends with them.

        Raises: DiskFull.
        """
        if rows is not None:
            await self._journal.finish(rows)
        for path in self.pending.end([pending]):
            path.unlink()


@asynccontextmanager
async def open_derived_writer(
    run_dir: RunDir, epoch: int, *, every_s: float = PUBLISH_EVERY_S
) -> AsyncIterator[DerivedWriter]:
    """A writer of derived rows; all of them are published when it is left.

    Args:
        epoch: of the driver, which holds LOCK.
        every_s: a row is published when it is this old, with those that came since.

    Raises: DiskFull, also when it is left: what was written is published by the next start.
    """
    async with JournalWriter(run_dir, epoch, _free_name(run_dir, epoch)) as journal:
        publisher = Publisher(journal, every_s=every_s)
        writer = DerivedWriter(journal)
        publishing = asyncio.create_task(publisher.run())
        clean = False
        try:
            yield writer
            clean = True
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)  # drain meets a full disk too
            try:
                await publisher.drain()
            finally:
                writer.pending.close(keep_open=not clean)


def _free_name(run_dir: RunDir, epoch: int) -> str:
    """A writer's name that this epoch has not used: stems name their rows for ever."""
    names = (f"derived{number}" for number in itertools.count())
    return next(
        name
        for name in names
        if not run_dir.committed(f"{epoch}-{name}-0")
        and not run_dir.writer_path(f"{epoch}-{name}").exists()
    )


def cut_rows(run_dir: RunDir, writer: str, *, sound: bool = True) -> list[Derived]:
    """The pending rows of a dead writer for which calls were made. Blocking.

    Its finished rows must be published: calls that they hold are left out.

    Raises: DamagedFile, when `sound`.
    """
    found: list[Derived] = []
    for _, path in run_dir.journals("asked", writer):
        rows: dict[int, Derived] = {}
        events: dict[int, list[Event]] = {}
        for line in decoded(payloads(path, sound=sound), _decode):
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
