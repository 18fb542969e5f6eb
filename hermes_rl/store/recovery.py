"""Recovery, R2 to R5 of the commit protocol: at each start, and for a worker that died.

Every step may be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey, Begun, Ended, Event
from hermes_rl.ports import Receipt
from hermes_rl.store.commit import Commit, part_fault, publish_batch, read_commit, read_commits
from hermes_rl.store.derived import cut_rows
from hermes_rl.store.files import AppendFile, DamagedFile, payloads
from hermes_rl.store.journal import Dispatched, LiveLine, decoded
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.rows import (
    RECEIPT_COLUMNS,
    Derived,
    Finished,
    make_receipt,
    receipt_of,
    without_secrets,
)
from hermes_rl.store.rundir import (
    GRACE_S,
    TABLES,
    Epoch,
    RunDir,
    epoch_of,
    fence,
    part_name,
    stem_of,
)
from hermes_rl.trajectory import fold

_decode_live = msgspec.json.Decoder(LiveLine).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode

LOST_ROWS_PER_BATCH = 1000


@dataclass
class Report:
    """What recovery found."""

    batches: int = 0
    """Batches of finished attempts that were still to be published."""
    lost: list[AttemptKey] = field(default_factory=list)
    """Attempts that were cut."""
    foreign: list[str] = field(default_factory=list)
    """Parts that no commit knows: left alone."""
    twice: list[str] = field(default_factory=list)
    """Units that stand in `trajectories` more than once: the run must not go on."""
    damaged: list[str] = field(default_factory=list)
    """Parts that are not what was committed, and why. Units whose rows are gone are open."""
    epochs_lost: int = 0
    """Earlier starts that epochs/ does not know any more."""

    def notes(self) -> list[str]:
        """What a user should know before the run goes on, one line each."""
        found = []
        if self.damaged:
            found.append(
                f"{len(self.damaged)} published files are missing or damaged (first: "
                f"{self.damaged[0]}). Units whose rows are gone run again; if you have the files, "
                "stop (Ctrl-C) and put them back"
            )
        if self.foreign:
            found.append(
                f"{len(self.foreign)} files belong to no batch of this run (first: "
                f"{self.foreign[0]}). They are left alone; take them away, or readers count them"
            )
        if self.epochs_lost:
            found.append(
                f"epochs/ lacks {self.epochs_lost} earlier starts: whether the configuration is "
                "theirs could not be compared with them"
            )
        return found


class Recovery:
    """Recovery by one driver. All methods block: for threads.

    Args:
        run_dir: the run directory; its LOCK is held.
        epoch: of this driver.
        sound: False takes damaged lines for absent (repair).
    """

    def __init__(self, run_dir: RunDir, epoch: Epoch, *, sound: bool = True) -> None:
        self.run_dir = run_dir
        self.report = Report()
        self._epoch = epoch
        self._driver = f"{epoch.epoch}-driver"
        self._sequence = itertools.count()
        self._sound = sound

    def at_start(self, ledger: Ledger, *, grace_s: float = GRACE_S) -> Report:
        """R2 to R5 over all that older epochs left; fills the ledger.

        Raises: StoreError for damage (the file is quarantined); DiskFull.
        """
        crash = self.run_dir.crash
        old = [w for w in self.run_dir.writers() if epoch_of(w) < self._epoch.epoch]
        deadline = time.monotonic() + grace_s  # one for all: they end side by side
        for writer in old:
            fence(self.run_dir, writer, grace_s=max(0.0, deadline - time.monotonic()))
        crash("recover-2-fenced")
        for writer in old:
            self._publish_finished(writer)
        self.report.twice = ledger.load(self._commits())
        crash("recover-5-loaded")
        lost = self._lost(
            old, lambda key: key.attempt < ledger.next_attempt(key.unit_id), "driver_lost"
        )
        for commit in self._publish_lost(lost):
            ledger.load([commit])
        for writer in old:
            self._publish_cut(writer)
            self._remove(writer)
        self._delete_temporary("")
        crash("recover-5-emptied")
        self.report.foreign = foreign_parts(self.run_dir)
        return self.report

    def of_worker(
        self, writer: str, cause: str, sent: Mapping[AttemptKey, Dispatched]
    ) -> dict[AttemptKey, Receipt]:
        """Take over from a fenced worker: publish what it finished, and give each attempt that was
        cut a row with this cause.

        Args:
            sent: its attempts without a receipt.

        Returns the receipts of these. Raises: StoreError for damage; DiskFull.
        """
        self._publish_finished(writer)
        receipts = self._receipts(writer, sent)
        lost = list(self._lost([writer], lambda key: key in receipts or key not in sent, cause))
        begun = receipts.keys() | {row.key for row in lost}
        lost += [self._never_begun(line, cause) for key, line in sent.items() if key not in begun]
        for _ in self._publish_lost(lost):
            pass
        self._remove(writer)
        return receipts | {row.key: receipt_of(row, writer) for row in lost}

    def publish_directly(self, batch: Sequence[Finished | Derived]) -> Commit | None:
        """Write rows to a `done` file of the driver's own, and publish it. Raises: DiskFull."""
        folder = self.run_dir.writer_path(self._driver)
        stem = f"{self._driver}-{next(self._sequence)}"
        folder.mkdir(exist_ok=True)
        self.run_dir.storage.sync_path(folder.parent)
        done = folder / f"done-{stem.rpartition('-')[2]}.jsonl"
        file = AppendFile(done, self.run_dir.crash, "attempt-3-done")
        try:
            self.run_dir.storage.sync_path(folder)
            for line in batch:
                file.append(msgspec.json.encode(without_secrets(line)))
            self.run_dir.storage.sync(file.fileno())
        finally:
            file.close()
        self.run_dir.crash("recover-4-written")
        commit = publish_batch(self.run_dir, done, stem)
        self.run_dir.crash("recover-4-published")
        return commit

    def _publish_finished(self, writer: str) -> None:
        """R3: publish (or only unlink) the `done` files of one fenced writer."""
        for stem, done in self.run_dir.journals("done", writer):
            with self._quarantine(writer):
                commit = publish_batch(self.run_dir, done, stem, sound=self._sound)
            self.report.batches += commit is not None
            self.run_dir.crash("recover-3-batch")

    def _publish_lost(self, rows: Iterable[Finished]) -> Iterator[Commit]:
        """R4: write rows of lost attempts to the driver's own `done` files and publish them."""
        stream = iter(rows)
        while batch := list(itertools.islice(stream, LOST_ROWS_PER_BATCH)):
            commit = self.publish_directly(batch)
            self.report.lost += [finished.key for finished in batch]
            if commit is not None:
                yield commit

    def _publish_cut(self, writer: str) -> None:
        """R4 for what is no attempt: rows for the calls of a driver's own that were cut."""
        with self._quarantine(writer):
            rows = cut_rows(self.run_dir, writer, sound=self._sound)
        if rows:
            self.publish_directly(rows)

    def _lost(
        self, writers: Sequence[str], recorded: Callable[[AttemptKey], bool], cause: str
    ) -> Iterator[Finished]:
        """One row for each lost attempt of some fenced writers.

        Args:
            recorded: whether an attempt already has its row.
            cause: `driver_lost` or `worker_lost`.
        """
        found: set[AttemptKey] = set()

        def is_lost(key: AttemptKey) -> bool:
            return key not in found and not recorded(key)

        journals = [(w, kind) for kind in ("live", "dispatch") for w in writers]
        for writer, kind in journals:
            for _, path in self.run_dir.journals(kind, writer):
                read = self._cut_attempts if kind == "live" else self._unbegun
                with self._quarantine(writer):
                    for row in read(path, is_lost, cause):
                        found.add(row.key)
                        yield row

    def _cut_attempts(
        self, path: Path, is_lost: Callable[[AttemptKey], bool], cause: str
    ) -> Iterator[Finished]:
        """The lost attempts of a live file. An end without its `done` line was never reported: the
        attempt counts as cut."""
        at = path.stat().st_mtime
        attempts: dict[int, list[Event]] = {}
        for line in decoded(payloads(path, sound=self._sound), _decode_live):
            if isinstance(line.e, Begun):
                if is_lost(line.e.key):
                    attempts[line.a] = [line.e]
            elif line.a in attempts and not isinstance(line.e, Ended):
                attempts[line.a].append(line.e)
        for events in attempts.values():
            yield self._row(events, cause, at)

    def _unbegun(
        self, path: Path, is_lost: Callable[[AttemptKey], bool], cause: str
    ) -> Iterator[Finished]:
        """Attempts that were sent and left no live line."""
        for payload in payloads(path, sound=self._sound):
            line = _decode_dispatch(payload)
            if is_lost(line.key):
                yield self._never_begun(line, cause)

    def _never_begun(self, line: Dispatched, cause: str) -> Finished:
        """The row of an attempt of which only the dispatch is known."""
        begun = line.begun(self._epoch.run_id, str(self._epoch.meta.get("config_hash", "")))
        return self._row([begun], cause, line.at)

    def _row(self, events: list[Event], cause: str, at: float) -> Finished:
        from hermes_rl.segments import with_segments  # few starts have such a row to make

        begun = events[0]
        assert isinstance(begun, Begun)
        row, segments = with_segments(events, fold(events, lost=cause, at=at))
        return Finished(key=begun.key, row=row, segments=segments)

    def _receipts(
        self, writer: str, sent: Mapping[AttemptKey, Dispatched]
    ) -> dict[AttemptKey, Receipt]:
        """The receipts of those of the attempts that are published."""
        found: dict[AttemptKey, Receipt] = {}
        for stem in self.run_dir.commit_stems():
            if stem.rpartition("-")[0] != writer:
                continue
            commit = read_commit(self.run_dir, stem)
            ended = [outcome for outcome in commit.keys.outcomes() if outcome.key in sent]
            rows = self._published(commit) if ended else {}
            for outcome in ended:
                key, fatal = outcome.key, outcome.fatal_command
                row = rows.get((key.unit_id, key.attempt))
                if row is None:
                    raise StoreError(f"{self.run_dir.path}: batch {stem} lacks rows of its commit")
                found[key] = make_receipt(key, row, writer, fatal)
        return found

    def _published(self, commit: Commit) -> dict[tuple[str, int], dict[str, Any]]:
        """(unit, attempt) -> what a receipt is made of, from the parts of a batch.

        Raises: StoreError when one cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns, rows = ["unit_id", "attempt", *RECEIPT_COLUMNS], []
        for part in commit.parts:
            if part.table in ("trajectories", "failures"):
                path = self.run_dir.part_path(part.table, commit.stem)
                try:
                    rows += pq.read_table(path, columns=columns).to_pylist()
                except (OSError, pa.ArrowException) as error:
                    reason = str(error).partition("\n")[0]
                    raise StoreError(f"{path} cannot be read: {reason}") from error
        return {(row["unit_id"], row["attempt"]): row for row in rows}

    def _remove(self, writer: str) -> None:
        """Unlink what a writer left, once its rows are published."""
        self._delete_temporary(rf"(\w+\.part-|commits\.){re.escape(writer)}-\d+\.")
        folder = self.run_dir.writer_path(writer)
        for kind in ("live", "dispatch", "asked"):
            for _, path in self.run_dir.journals(kind, writer):
                path.unlink()
                self.run_dir.crash("recover-4-unlinked")
        (folder / "alive").unlink(missing_ok=True)
        # A writer that stopped by itself with nothing to leave has removed its folder.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def _commits(self) -> Iterator[Commit]:
        for commit in read_commits(self.run_dir):
            for part in commit.parts:
                if fault := part_fault(self.run_dir, commit.stem, part):
                    name = part_name(part.table, commit.stem)
                    self.report.damaged.append(f"{name} {fault}")
            yield commit

    def _delete_temporary(self, beginning: str) -> None:
        """Delete the files in tmp/ whose names begin so (a pattern)."""
        for path in (self.run_dir.path / "tmp").glob("*"):
            if re.match(beginning, path.name) and not path.is_dir():  # we make no folders there
                path.unlink(missing_ok=True)

    @contextmanager
    def _quarantine(self, writer: str) -> Iterator[None]:
        """Move a damaged journal file aside, and report where it is."""
        try:
            yield
        except DamagedFile as error:
            folder = self.run_dir.path / "quarantine" / writer
            folder.mkdir(parents=True, exist_ok=True)
            os.rename(error.path, folder / error.path.name)
            self.run_dir.storage.sync_path(folder)
            raise StoreError(
                f"{error}. It was moved to {folder / error.path.name}; "
                f"`hermes-rl check {self.run_dir.path} --repair` saves its good lines"
            ) from error


def quarantined(run_dir: RunDir) -> list[Path]:
    """Damaged files that wait for a repair."""
    return sorted((run_dir.path / "quarantine").glob("*-*/*.jsonl"))


def foreign_parts(run_dir: RunDir) -> list[str]:
    """Parts whose stem neither a commit nor a `done` file names, as TABLE/NAME."""
    # Parts are listed first: a batch that is published meanwhile is found in one of the others.
    parts = [(table, part) for table in TABLES for part in run_dir.parts(table)]
    stems = {*(stem for stem, _ in run_dir.journals("done")), *run_dir.commit_stems()}
    return [f"{table}/{part.name}" for table, part in parts if stem_of(part) not in stems]


def finals(run_dir: RunDir, unit_id: str) -> list[tuple[str, AttemptKey]]:
    """All (stem, key) under which a unit stands in `trajectories`, earliest commit first."""
    found = [
        (commit.committed_at, commit.stem, outcome.key)
        for commit in read_commits(run_dir)
        for outcome in commit.keys.outcomes()
        if outcome.done and outcome.key.unit_id == unit_id
    ]
    return [(stem, key) for _, stem, key in sorted(found, key=lambda f: f[:2])]


def twice_message(run_dir: RunDir, unit_id: str) -> str:
    """The line for a unit that is finished more than once: both keys and what to do."""
    keys = [f"epoch {k.epoch} attempt {k.attempt} ({s})" for s, k in finals(run_dir, unit_id)]
    return (
        f"{run_dir.path}: unit {unit_id} is finished more than once: {' and '.join(keys)}. "
        f"`hermes-rl check {run_dir.path} --repair` moves the later one to failures"
    )
