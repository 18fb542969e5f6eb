"""Recovery, R2 to R5 of the commit protocol: at each start, and for a worker that died.

Every step may be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey, Begun, Ended, Event, ToolsOffered
from hermes_rl.ports import Receipt
from hermes_rl.store.commit import Commit, part_fault, publish_batch, read_commit, read_commits
from hermes_rl.store.derived import recover_pending_rows
from hermes_rl.store.files import AppendFile, DamagedFile, read_payloads
from hermes_rl.store.journal import (
    Dispatched,
    LiveLine,
    SameTools,
    decode_lines,
    tools_digest,
)
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
    stem_of,
)
from hermes_rl.store.snapshots import complete_switches, find_part, merged_by_stem, read_compactions
from hermes_rl.trajectory import fold, fold_subagents

_decode_live = msgspec.json.Decoder(LiveLine).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode

LOST_ROWS_PER_BATCH = 1000


@dataclass
class RecoveryReport:
    """The results of recovery."""

    batches: int = 0
    """Batches of finished attempts that were published."""
    lost: list[AttemptKey] = field(default_factory=list)
    """Attempts that were interrupted."""
    foreign: list[str] = field(default_factory=list)
    """Parts without a commit; they are kept."""
    duplicates: list[str] = field(default_factory=list)
    """Units with more than one row in `trajectories`; the run must stop."""
    damaged: list[str] = field(default_factory=list)
    """Parts that differ from their commits, and how. Units without rows are open."""
    epochs_lost: int = 0
    """Earlier starts that are missing from epochs/."""

    def notes(self) -> list[str]:
        """Lines that warn the user before the run continues."""
        found = []
        if self.damaged:
            found.append(
                f"{len(self.damaged)} published files are missing or damaged (first: "
                f"{self.damaged[0]}). Units whose rows are gone run again; if you have the files, "
                "stop (Ctrl-C) and restore them"
            )
        if self.foreign:
            found.append(
                f"{len(self.foreign)} files belong to no batch of this run (first: "
                f"{self.foreign[0]}). They are kept; move them away, or readers count them"
            )
        if self.epochs_lost:
            found.append(
                f"epochs/ lacks {self.epochs_lost} earlier starts: "
                "their configuration could not be compared"
            )
        return found


class Recovery:
    """Recovery by one driver. All methods block: for threads.

    Args:
        run_dir: the run directory; its LOCK is held.
        epoch: of this driver.
        strict: False skips damaged lines (repair).
    """

    def __init__(self, run_dir: RunDir, epoch: Epoch, *, strict: bool = True) -> None:
        self.run_dir = run_dir
        self.report = RecoveryReport()
        self._epoch = epoch
        self._driver = f"{epoch.epoch}-driver"
        self._sequence = itertools.count()
        self._strict = strict

    def recover_writers(self, ledger: Ledger, *, grace_s: float = GRACE_S) -> RecoveryReport:
        """R2 to R5 for all writers of older epochs; fills the ledger.

        Raises: StoreError for damage (the file is quarantined); DiskFull.
        """
        crash = self.run_dir.crash
        old = [w for w in self.run_dir.writers() if epoch_of(w) < self._epoch.epoch]
        deadline = time.monotonic() + grace_s  # one for all, since they end concurrently
        for writer in old:
            fence(self.run_dir, writer, grace_s=max(0.0, deadline - time.monotonic()))
        crash("recover-2-fenced")
        complete_switches(self.run_dir)  # before new parts come into the tables
        for writer in old:
            self._publish_finished(writer)
        self.report.duplicates = ledger.load(self._commits(ledger.covers))
        crash("recover-5-loaded")
        lost = self._lost(
            old, lambda key: key.attempt < ledger.next_attempt(key.unit_id), "driver_lost"
        )
        for commit in self._publish_lost(lost):
            ledger.load([commit])
        for writer in old:
            self._publish_pending_rows(writer)
            self._remove(writer)
        self._delete_temporary("")
        crash("recover-5-emptied")
        self.report.foreign = foreign_parts(self.run_dir)
        return self.report

    def recover_worker(
        self, writer: str, cause: str, sent: Mapping[AttemptKey, Dispatched]
    ) -> dict[AttemptKey, Receipt]:
        """Recover a fenced worker: publish its finished attempts, and write a row with this cause
        for each interrupted one.

        Args:
            sent: its attempts without a receipt.

        Returns the receipts of these. Raises: StoreError for damage; DiskFull.
        """
        self._publish_finished(writer)
        receipts = self._receipts(writer, sent)
        lost = list(self._lost([writer], lambda key: key in receipts or key not in sent, cause))
        begun = receipts.keys() | {row.key for row in lost}
        lost += [
            self._row_of_unstarted(line, cause) for key, line in sent.items() if key not in begun
        ]
        for _ in self._publish_lost(lost):
            pass
        self._remove(writer)
        return receipts | {row.key: receipt_of(row, writer) for row in lost}

    def publish_directly(self, batch: Sequence[Finished | Derived]) -> Commit | None:
        """Write rows to a `done` file of the driver and publish it. Raises: DiskFull."""
        folder = self.run_dir.writer_path(self._driver)
        stem = f"{self._driver}-{next(self._sequence)}"
        folder.mkdir(exist_ok=True)
        self.run_dir.storage.sync_path(folder.parent)
        done = folder / f"done-{stem.rpartition('-')[2]}.jsonl"
        name, storage = done.relative_to(self.run_dir.path).as_posix(), self.run_dir.storage
        local = storage.temporary(name)
        local.unlink()
        file = AppendFile(local, self.run_dir.crash, "attempt-3-done")
        try:
            for line in batch:
                file.append(msgspec.json.encode(without_secrets(line)))
        finally:
            file.close()
        storage.put_file(name, local)
        self.run_dir.crash("recover-4-written")
        commit = publish_batch(self.run_dir, done, stem)
        self.run_dir.crash("recover-4-published")
        return commit

    def _publish_finished(self, writer: str) -> None:
        """R3: publish (or only unlink) the `done` files of one fenced writer."""
        for stem, done in self.run_dir.journals("done", writer):
            with self._quarantine(writer):
                commit = publish_batch(self.run_dir, done, stem, strict=self._strict)
            self.report.batches += commit is not None
            self.run_dir.crash("recover-3-batch")

    def _publish_lost(self, rows: Iterable[Finished]) -> Iterator[Commit]:
        """R4: write rows of lost attempts to `done` files of the driver and publish them."""
        stream = iter(rows)
        while batch := list(itertools.islice(stream, LOST_ROWS_PER_BATCH)):
            commit = self.publish_directly(batch)
            self.report.lost += [finished.key for finished in batch]
            if commit is not None:
                yield commit

    def _publish_pending_rows(self, writer: str) -> None:
        """R4 for derived rows: record interrupted calls of a driver."""
        with self._quarantine(writer):
            rows = recover_pending_rows(self.run_dir, writer, strict=self._strict)
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
                read = self._cut_attempts if kind == "live" else self._unstarted_attempts
                with self._quarantine(writer):
                    for row in read(path, is_lost, cause):
                        found.add(row.key)
                        yield row

    def _cut_attempts(
        self, path: Path, is_lost: Callable[[AttemptKey], bool], cause: str
    ) -> Iterator[Finished]:
        """The lost attempts of a live file. Without a `done` line an attempt counts as lost, even
        if it has an end."""
        at = path.stat().st_mtime
        attempts, tools = dict[int, list[Event]](), dict[str, ToolsOffered]()
        for line in decode_lines(read_payloads(path, strict=self._strict), _decode_live):
            event = tools.get(line.e.of) if isinstance(line.e, SameTools) else line.e
            if isinstance(event, ToolsOffered):
                tools[tools_digest(event)] = event
            if isinstance(event, Begun):
                if is_lost(event.key):
                    attempts[line.a] = [event]
            elif line.a in attempts and event is not None and not isinstance(event, Ended):
                attempts[line.a].append(event)
        for events in attempts.values():
            yield self._row(events, cause, at)

    def _unstarted_attempts(
        self, path: Path, is_lost: Callable[[AttemptKey], bool], cause: str
    ) -> Iterator[Finished]:
        """Attempts that were sent and have no live line."""
        for payload in read_payloads(path, strict=self._strict):
            line = _decode_dispatch(payload)
            if is_lost(line.key):
                yield self._row_of_unstarted(line, cause)

    def _row_of_unstarted(self, line: Dispatched, cause: str) -> Finished:
        """The row of an attempt that only has a dispatch."""
        begun = line.begun(self._epoch.run_id, str(self._epoch.meta.get("config_hash", "")))
        return self._row([begun], cause, line.at)

    def _row(self, events: list[Event], cause: str, at: float) -> Finished:
        from hermes_rl.segments import with_segments  # needed by few starts

        begun = events[0]
        assert isinstance(begun, Begun)
        row, segments = with_segments(events, fold(events, lost=cause, at=at))
        children = fold_subagents(events, row)
        return Finished(key=begun.key, row=row, subagents=children, segments=segments)

    def _receipts(
        self, writer: str, sent: Mapping[AttemptKey, Dispatched]
    ) -> dict[AttemptKey, Receipt]:
        """The receipts of published attempts."""
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
                receipt = make_receipt(key, row, writer, fatal)
                found[key] = msgspec.structs.replace(receipt, stem=stem)
        return found

    def _published(self, commit: Commit) -> dict[tuple[str, int], dict[str, Any]]:
        """(unit, attempt) -> the columns of a receipt, from the parts of a batch.

        Raises: StoreError when one cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns, rows = ["unit_id", "attempt", *RECEIPT_COLUMNS], []
        for part in commit.parts:
            if part.table in ("trajectories", "failures"):
                path, _ = find_part(self.run_dir, commit.stem, part)
                try:
                    rows += pq.read_table(path, columns=columns).to_pylist()
                except (OSError, pa.ArrowException) as error:
                    reason = str(error).partition("\n")[0]
                    raise StoreError(f"{path} cannot be read: {reason}") from error
        return {(row["unit_id"], row["attempt"]): row for row in rows}

    def _remove(self, writer: str) -> None:
        """Remove the files of a writer whose rows are published."""
        # Not those of a merge, whose stems end with a number: it may be running.
        self._delete_temporary(rf"(\w+\.part-|commits\.){re.escape(writer)}-\d+\.(parquet|json)\.")
        folder = self.run_dir.writer_path(writer)
        for kind in ("live", "dispatch", "asked"):
            for _, path in self.run_dir.journals(kind, writer):
                path.unlink()
                self.run_dir.crash("recover-4-unlinked")
        (folder / "alive").unlink(missing_ok=True)
        # A writer that ended regularly has removed its folder.
        with suppress(OSError):  # also where files that are still open somewhere stay
            folder.rmdir()

    def _commits(self, skip: Callable[[str], bool]) -> Iterator[Commit]:
        for commit in read_commits(self.run_dir, skip):
            for part in commit.parts:
                if fault := part_fault(self.run_dir, commit.stem, part):
                    path, _ = find_part(self.run_dir, commit.stem, part)
                    line = f"{path.relative_to(self.run_dir.path)} {fault}"
                    if line not in self.report.damaged[-1:]:  # many batches share a merged part
                        self.report.damaged.append(line)
            yield commit

    def _delete_temporary(self, beginning: str) -> None:
        """Delete the files in tmp/ whose names match a pattern from their start."""
        for path in (self.run_dir.path / "tmp").glob("*"):
            if re.match(beginning, path.name) and not path.is_dir():  # folders are not ours
                path.unlink(missing_ok=True)

    @contextmanager
    def _quarantine(self, writer: str) -> Iterator[None]:
        """Move a damaged journal file to quarantine, and report its path."""
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
    """Quarantined files that wait for a repair."""
    return sorted((run_dir.path / "quarantine").glob("*-*/*.jsonl"))


def foreign_parts(run_dir: RunDir) -> list[str]:
    """Parts without a commit and without a `done` file, as TABLE/NAME."""
    # Parts first: a batch that is published meanwhile is in one of the others.
    parts = [(table, part) for table in TABLES for part in run_dir.parts(table)]
    stems = {*(stem for stem, _ in run_dir.journals("done")), *run_dir.commit_stems()}
    stems |= {one.stem for c in read_compactions(run_dir) for one in c.merged}
    return [f"{table}/{part.name}" for table, part in parts if stem_of(part) not in stems]


def find_final_rows(run_dir: RunDir, unit_id: str) -> list[tuple[str, AttemptKey]]:
    """All (stem, key) of a unit in `trajectories`, earliest commit first."""
    merged = merged_by_stem(run_dir)  # they stay: their parts are shared
    found = [
        (commit.stem not in merged, commit.committed_at, commit.stem, outcome.key)
        for commit in read_commits(run_dir)
        for outcome in commit.keys.outcomes()
        if outcome.done and outcome.key.unit_id == unit_id
    ]
    return [(stem, key) for _, _, stem, key in sorted(found, key=lambda f: f[:3])]


def duplicate_message(run_dir: RunDir, unit_id: str) -> str:
    """The error message for a unit that is finished more than once."""
    keys = [
        f"epoch {k.epoch} attempt {k.attempt} ({s})" for s, k in find_final_rows(run_dir, unit_id)
    ]
    return (
        f"{run_dir.path}: unit {unit_id} is finished more than once: {' and '.join(keys)}. "
        f"`hermes-rl check {run_dir.path} --repair` moves the later one to failures"
    )
