"""Rows that a driver makes from rows of its run: grades and groups. A kill loses none of them.

Finished rows go the way of attempts: a line of a `done` file, durable at once, and published with
others. Calls that a kill cuts are recorded too: attempts have `live` files for that, grades and
groups have `asked` files. These hold each row as it would be if its work came to nothing, and then
the events of that work as they happen. They are read after a kill alone.
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
from hermes_rl.store.journal import PUBLISH_EVERY_S, JournalWriter, Publisher, encode
from hermes_rl.store.rows import Derived
from hermes_rl.store.rundir import RunDir, journal_files
from hermes_rl.trajectory import fold

FILE_BYTES = 16 * 1024 * 1024
"""Size from which a new `asked` file is begun."""


class PendingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an `asked` file: of each pending row the row first, then its events."""

    n: int
    """Number of the row in its file."""
    row: Derived | None = None
    e: Event | None = None


_decode = msgspec.json.Decoder(PendingLine).decode


class _PendingFile:
    def __init__(self, file: AppendFile) -> None:
        self.file = file
        self.begun = self.ended = 0


class PendingRow:
    """Takes the events of the work for one row (a `ports.Recorder`); they outlive a kill."""

    def __init__(self, file: _PendingFile, row: Derived) -> None:
        self.file = file
        file.begun += 1
        self._number = file.begun
        file.file.append(encode(PendingLine(n=self._number, row=row)))

    def record(self, event: Event) -> None:
        """See `ports.Recorder`."""
        self.file.file.append(encode(PendingLine(n=self._number, e=event)))


class DerivedWriter:
    """Writes derived rows, and notes before them what is under way; see `open_derived_writer`."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self._files: list[_PendingFile] = []
        self._made = 0

    def begin(self, row: Derived) -> PendingRow:
        """Begin the work for a row.

        Args:
            row: what is recorded, with the calls that were made, when a kill cuts the work.

        Raises: DiskFull.
        """
        if not self._files or self._files[-1].file.size >= FILE_BYTES:
            run_dir = self._journal.run_dir
            path = run_dir.writer_path(self._journal.writer) / f"asked-{self._made}.jsonl"
            self._made += 1
            self._files.append(_PendingFile(AppendFile(path, run_dir.crash, "derived-asked")))
        return PendingRow(self._files[-1], row)

    async def add(self, rows: Derived | None, pending: PendingRow | None = None) -> None:
        """Write rows; they are durable on return.

        Args:
            rows: None when nothing came of the work.
            pending: the work that ends with them.

        Raises: DiskFull.
        """
        if rows is not None:
            await self._journal.finish(rows)
        if pending is not None:
            pending.file.ended += 1
            for file in self._files[:-1]:
                if file.ended == file.begun:
                    self._delete(file)

    def close(self, *, clean: bool) -> None:
        """Close all `asked` files. Blocking.

        Args:
            clean: all rows are published; else recovery reads the files.
        """
        for file in list(self._files):
            if clean:
                self._delete(file)
            else:
                file.file.close()

    def _delete(self, file: _PendingFile) -> None:
        self._files.remove(file)
        file.file.close()
        file.file.path.unlink()


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
            await asyncio.wait((publishing,))
            if not publishing.cancelled():
                publishing.exception()  # seen: a full disk shows again in the next line
            try:
                await publisher.drain()
            finally:
                writer.close(clean=clean)


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
    for path in journal_files(run_dir.writer_path(writer), "asked"):
        rows: dict[int, Derived] = {}
        events: dict[int, list[Event]] = {}
        for payload in payloads(path, sound=sound):
            try:
                line = _decode(payload)
            except msgspec.ValidationError:
                continue  # a sound line with a value that JSON cannot hold, such as NaN
            if line.row is not None:
                rows[line.n] = line.row
            elif line.e is not None:
                events.setdefault(line.n, []).append(line.e)
        paid = [n for n, es in events.items() if any(isinstance(e, CallStarted) for e in es)]
        found += [_with_calls(rows[n], events[n]) for n in paid if n in rows]
    known = _known_calls(run_dir) if found else set()
    return [cut for cut in found if not known & _call_ids(cut)]


def _call_ids(cut: Derived) -> set[str]:
    grades = {call.call_id for row in cut.grades for call in row.calls}
    return grades | {call.call_id for row in cut.groups for call in row.calls}


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
    for table in ("grades", "groups"):
        for part in run_dir.parts(table):
            calls = pc.list_flatten(pq.read_table(part, columns=["calls"])["calls"])
            known |= set(pc.struct_field(calls, "call_id").to_pylist())
    return known
