"""What a driver asks for rows of its own: the calls that a kill cuts are in the books all the same.

Attempts have `live` files; grades and groups have `asked` files. Of each question one holds the row
as it would be had nothing come of it, and then the events as they happen. They are read after a
kill alone.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from hermes_rl.events import CallStarted, Ended, Event
from hermes_rl.store.disk import AppendFile
from hermes_rl.store.journal import encode
from hermes_rl.store.lines import payloads
from hermes_rl.store.replay import journal_files
from hermes_rl.store.rows import Derived, Grade, Group
from hermes_rl.store.rundir import RunDir
from hermes_rl.trajectory import fold

FILE_BYTES = 16 * 1024 * 1024
"""From this size on a new file is begun."""

_DERIVED = ("grades", "groups")


class AskedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line: of each question the row first, then its events."""

    n: int
    """Number of the question in its file."""
    row: Derived | None = None
    e: Event | None = None


_decode = msgspec.json.Decoder(AskedLine).decode


class _File:
    def __init__(self, file: AppendFile) -> None:
        self.file = file
        self.asked = 0
        self.answered = 0


class Question:
    """Takes the events of one question (a `ports.Recorder`); they outlive a kill."""

    def __init__(self, file: _File) -> None:
        self.file = file
        file.asked += 1
        self._number = file.asked

    def begin(self, row: Derived) -> None:
        """The first line. Raises: DiskFull."""
        self.file.file.append(encode(AskedLine(n=self._number, row=row)))

    def record(self, event: Event) -> None:
        """See `ports.Recorder`."""
        self.file.file.append(encode(AskedLine(n=self._number, e=event)))


class AskedBook:
    """The questions of one writer.

    Args:
        folder: its journal folder.
    """

    def __init__(self, run_dir: RunDir, folder: Path) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._files: list[_File] = []
        self._made = 0

    def ask(self, row: Derived) -> Question:
        """Begin a question.

        Args:
            row: what is to be recorded if its answer never comes: a grade or a group.

        Raises: DiskFull.
        """
        if not self._files or self._files[-1].file.size >= FILE_BYTES:
            path = self._folder / f"asked-{self._made}.jsonl"
            self._made += 1
            self._files.append(_File(AppendFile(path, self._run_dir.crash, "derived-asked")))
        question = Question(self._files[-1])
        question.begin(row)
        return question

    def answered(self, question: Question) -> None:
        """Its rows are durable, or there was nothing to record."""
        question.file.answered += 1
        for file in self._files[:-1]:
            if file.answered == file.asked:
                self._end(file)

    def close(self, *, clean: bool) -> None:
        """Close all files. Blocking.

        Args:
            clean: all rows are published; else recovery looks.
        """
        for file in list(self._files):
            if clean:
                self._end(file)
            else:
                file.file.close()

    def _end(self, file: _File) -> None:
        self._files.remove(file)
        file.file.close()
        file.file.path.unlink()


def cut_questions(run_dir: RunDir, writer: str, *, sound: bool = True) -> list[Derived]:
    """Rows of the questions of a dead writer that were being answered. Blocking.

    Its finished rows must be published: what they hold is not told again.

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
    return [row for row in found if not known & {c.call_id for r in _rows(row) for c in r.calls}]


def _rows(derived: Derived) -> tuple[Grade | Group, ...]:
    return (*derived.grades, *derived.groups)


def _with_calls(derived: Derived, events: list[Event]) -> Derived:
    books = fold([*events, Ended(finished_at=time.time(), end_reason="answered")])
    columns = {
        "calls": books.calls,
        "usage": books.usage,
        "cost_usd": books.cost_usd,
        "metrics": books.metrics,
    }
    return Derived(
        grades=tuple(msgspec.structs.replace(row, **columns) for row in derived.grades),
        groups=tuple(msgspec.structs.replace(row, **columns) for row in derived.groups),
    )


def _known_calls(run_dir: RunDir) -> set[str]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    known: set[str] = set()
    for table in _DERIVED:
        for part in run_dir.parts(table):
            calls = pc.list_flatten(pq.read_table(part, columns=["calls"])["calls"])
            known |= set(pc.struct_field(calls, "call_id").to_pylist())
    return known
