"""Recovery, R2 to R5 of the commit protocol: at each start, and for a worker that died.

Every step may be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey, Begun, Ended, Event
from hermes_rl.ports import Receipt
from hermes_rl.store.commit import Commit, part_fault, publish_batch, read_commits
from hermes_rl.store.derived import cut_rows
from hermes_rl.store.files import AppendFile, DamagedFile, payloads
from hermes_rl.store.journal import Dispatched, LiveLine
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.rows import Derived, Finished, FinishedFigures, receipt_of
from hermes_rl.store.rundir import (
    GRACE_S,
    TABLES,
    Epoch,
    RunDir,
    epoch_of,
    fence,
    journal_files,
    part_name,
    sequence_of,
    stem_of,
)
from hermes_rl.trajectory import fold
from hermes_rl.usage import UsageTotal

_decode_live = msgspec.json.Decoder(LiveLine).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode


@dataclass
class Lost:
    """Finds the lost attempts in journal folders and makes one row of each.

    Args:
        recorded: whether an attempt already has its row.
        cause: `driver_lost` or `worker_lost`.
        run_id, config_hash: for rows of attempts that never began.
        sound: False takes damaged lines for absent (repair).
    """

    recorded: Callable[[AttemptKey], bool]
    cause: str
    run_id: str
    config_hash: str
    sound: bool = True
    found: set[AttemptKey] = field(default_factory=set)
    """Keys of all attempts that were given a row."""

    def live(self, path: Path) -> Iterator[Finished]:
        """Rows of the lost attempts of one live file. Raises: DamagedFile."""
        at = path.stat().st_mtime
        for events in self._attempts(path):
            begun = events[0]
            assert isinstance(begun, Begun)
            yield self._row(begun, events, at)

    def dispatched(self, path: Path) -> Iterator[Finished]:
        """Rows of attempts that were sent and left no live line. Raises: DamagedFile."""
        for payload in payloads(path, sound=self.sound):
            line = _decode_dispatch(payload)
            if line.key not in self.found and not self.recorded(line.key):
                yield self.never_begun(line)

    def never_begun(self, line: Dispatched) -> Finished:
        """The row of an attempt of which only the dispatch is known."""
        begun = line.begun(self.run_id, self.config_hash)
        return self._row(begun, [begun], line.at)

    def _row(self, begun: Begun, events: list[Event], at: float) -> Finished:
        from hermes_rl.segments import with_segments  # few starts have such a row to make

        self.found.add(begun.key)
        # An end without its `done` line was never reported: the attempt counts as cut.
        kept = [e for e in events if not isinstance(e, Ended)]
        row, segments = with_segments(kept, fold(kept, lost=self.cause, at=at))
        return Finished(key=begun.key, row=row, segments=segments)

    def _attempts(self, path: Path) -> Iterator[list[Event]]:
        attempts: dict[int, list[Event]] = {}
        for payload in payloads(path, sound=self.sound):
            try:
                line = _decode_live(payload)
            except msgspec.ValidationError:
                continue  # a sound line with a value that JSON cannot hold, such as NaN
            if isinstance(line.e, Begun):
                if line.e.key not in self.found and not self.recorded(line.e.key):
                    attempts[line.a] = [line.e]
            elif line.a in attempts:
                attempts[line.a].append(line.e)
        yield from attempts.values()


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
        sequence: numbers for the driver's own batches.
        sound: False takes damaged lines for absent (repair).
    """

    def __init__(
        self, run_dir: RunDir, epoch: Epoch, sequence: Iterator[int], *, sound: bool = True
    ) -> None:
        self.run_dir = run_dir
        self.report = Report()
        self._epoch = epoch
        self._driver = f"{epoch.epoch}-driver"
        self._sequence = sequence
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
            self.publish_finished(writer)
        self.report.twice = ledger.load(self._commits())
        crash("recover-5-loaded")
        for commit in self.publish_lost(self._lost_at_start(old, ledger)):
            _apply(ledger, commit)
        for writer in old:
            self.publish_cut(writer)
            self.remove(writer)
        self._delete_temporary("")
        self.run_dir.crash("recover-5-emptied")
        self.report.foreign = foreign_parts(self.run_dir)
        return self.report

    def publish_finished(self, writer: str) -> list[Commit]:
        """R3: publish (or only unlink) the `done` files of one fenced writer."""
        commits = []
        for done in journal_files(self.run_dir.writer_path(writer), "done"):
            stem = f"{writer}-{sequence_of(done)}"
            with self._quarantine(writer):
                commit = publish_batch(self.run_dir, done, stem, sound=self._sound)
            if commit is not None:
                self.report.batches += 1
                commits.append(commit)
            self.run_dir.crash("recover-3-batch")
        return commits

    def publish_lost(self, rows: Iterable[Finished]) -> Iterator[Commit]:
        """R4: write rows of lost attempts to the driver's own `done` files and publish them."""
        stream = iter(rows)
        while batch := list(itertools.islice(stream, LOST_ROWS_PER_BATCH)):
            commit = self.publish_own(batch)
            self.report.lost += [finished.key for finished in batch]
            if commit is not None:
                yield commit

    def publish_cut(self, writer: str) -> None:
        """R4 for what is no attempt: rows for the calls of a driver's own that were cut."""
        with self._quarantine(writer):
            rows = cut_rows(self.run_dir, writer, sound=self._sound)
        if rows:
            self.publish_own(rows)

    def publish_own(self, batch: Sequence[Finished | Derived]) -> Commit | None:
        """Write rows to a `done` file of the driver's own, and publish it. Raises: DiskFull."""
        folder = self.run_dir.writer_path(self._driver)
        sequence = next(self._sequence)
        folder.mkdir(exist_ok=True)
        self.run_dir.storage.sync_path(folder.parent)
        done = self._write_done(folder / f"done-{sequence}.jsonl", batch)
        self.run_dir.crash("recover-4-written")
        commit = publish_batch(self.run_dir, done, f"{self._driver}-{sequence}")
        self.run_dir.crash("recover-4-published")
        return commit

    def lost(self, writers: Iterable[str], attempts: Lost) -> Iterator[Finished]:
        """The rows of all lost attempts of some fenced writers."""
        kinds = (("live", attempts.live), ("dispatch", attempts.dispatched))
        folders = [(w, self.run_dir.writer_path(w)) for w in writers]
        for kind, read in kinds:
            for writer, folder in folders:
                for path in journal_files(folder, kind):
                    with self._quarantine(writer):
                        yield from read(path)

    def remove(self, writer: str) -> None:
        """Unlink what a writer left, once its rows are published."""
        self._delete_temporary(rf"(\w+\.part-|commits\.){re.escape(writer)}-\d+\.")
        folder = self.run_dir.writer_path(writer)
        for kind in ("live", "dispatch", "asked"):
            for path in journal_files(folder, kind):
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

    def _lost_at_start(self, old: list[str], ledger: Ledger) -> Iterator[Finished]:
        attempts = Lost(
            recorded=lambda key: key.attempt < ledger.next_attempt(key.unit_id),
            cause="driver_lost",
            run_id=self._epoch.run_id,
            config_hash=str(self._epoch.meta.get("config_hash", "")),
            sound=self._sound,
        )
        return self.lost(old, attempts)

    def _write_done(self, path: Path, batch: Sequence[Finished | Derived]) -> Path:
        file = AppendFile(path, self.run_dir.crash, "attempt-3-done")
        try:
            self.run_dir.storage.sync_path(path.parent)
            for line in batch:
                file.append(msgspec.json.encode(line))
            self.run_dir.storage.sync(file.fileno())
        finally:
            file.close()
        return path

    def _delete_temporary(self, beginning: str) -> None:
        """Delete the files in tmp/ whose names begin so (a pattern)."""
        for name in self.run_dir.storage.names("tmp"):
            # We make no folders there.
            if re.match(beginning, name) and not (self.run_dir.path / "tmp" / name).is_dir():
                self.run_dir.storage.delete(f"tmp/{name}")

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
    stems = {
        f"{writer}-{sequence_of(done)}"
        for writer in run_dir.writers()
        for done in journal_files(run_dir.writer_path(writer), "done")
    }
    stems.update(run_dir.commit_stems())
    return [f"{table}/{part.name}" for table, part in parts if stem_of(part) not in stems]


def _apply(ledger: Ledger, commit: Commit) -> None:
    ledger.summary.merge(commit.summary)
    for outcome in outcomes(commit):
        key = outcome.key
        ledger.apply(key.unit_id, key.attempt, done=outcome.done, cause=outcome.cause)


_decode_figures = msgspec.json.Decoder(FinishedFigures).decode


def unpublished_receipts(run_dir: RunDir, writer: str) -> dict[AttemptKey, Receipt]:
    """The receipts of a writer's finished attempts whose rows are not published yet."""
    lines = (
        _decode_figures(payload)
        for done in journal_files(run_dir.writer_path(writer), "done")
        for payload in payloads(done, sound=False)
    )
    return {line.key: receipt_of(line, writer) for line in lines}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended, as its commit says."""

    key: AttemptKey
    done: bool
    end_reason: str
    cause: str | None
    fatal_command: str | None = None

    def receipt(self, writer: str) -> Receipt:
        """A receipt where only the commit is at hand: its figures are in the table alone."""
        failed = "cancelled" if self.end_reason == self.cause else "failed"
        return Receipt(
            unit_id=self.key.unit_id,
            epoch=self.key.epoch,
            attempt=self.key.attempt,
            writer=writer,
            task_id="",
            repeat=0,
            status="ok" if self.done else failed,
            end_reason=self.end_reason,
            cause=self.cause,
            reward=None,
            turns=0,
            usage=UsageTotal(),
            cost_usd=None,
            unpriced_calls=0,
            seconds=0.0,
            fatal_command=self.fatal_command,
        )


def outcomes(commit: Commit) -> Iterator[Outcome]:
    """All attempts of a batch."""
    keys = commit.keys
    columns = zip(
        keys.unit_id, keys.epoch, keys.attempt, keys.table, keys.end, keys.cause, strict=True
    )
    for place, (unit_id, epoch, attempt, table, end, cause) in enumerate(columns):
        yield Outcome(
            key=AttemptKey(unit_id=unit_id, epoch=epoch, attempt=attempt),
            done=table == "t",
            end_reason=keys.names[end],
            cause=None if cause < 0 else keys.names[cause],
            fatal_command=keys.fatal_commands.get(place),
        )


def finals(run_dir: RunDir, unit_id: str) -> list[tuple[str, AttemptKey]]:
    """All (stem, key) under which a unit stands in `trajectories`, earliest commit first."""
    found = [
        (commit.committed_at, commit.stem, outcome.key)
        for commit in read_commits(run_dir)
        for outcome in outcomes(commit)
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
