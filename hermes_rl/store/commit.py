"""Publishes a sealed batch: a writer prepares its parts in tmp/, and the driver commits them.

A redo writes the same rows under the same names, so it may be killed and repeated.
"""

from __future__ import annotations

import itertools
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey
from hermes_rl.store.files import (
    add_digest,
    check_digest,
    disk_errors,
    file_sha256,
    read_payloads,
)
from hermes_rl.store.rundir import SCHEMA_VERSION, TABLES, RunDir, part_name
from hermes_rl.store.snapshots import Part, find_part
from hermes_rl.store.summary import Summary
from hermes_rl.text import SECRETS

if TYPE_CHECKING:
    from hermes_rl.store.parts import PartWriter


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended."""

    key: AttemptKey
    done: bool
    """Its row is in `trajectories`."""
    end_reason: str
    cause: str | None
    fatal_command: str | None = None
    """The tool call during which its sandbox died."""


class Unit(NamedTuple):
    """The history of one unit."""

    done: int
    """Its rows in `trajectories`; more than one means that the run is damaged."""
    cause: int
    """Code of the last attempt's cause."""
    counted: int
    """Failures that count against `max_attempts`."""
    lost: int
    """Workers that died under it."""
    attempts: int
    """Number of the next attempt."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of a batch, as columns; `end` and `cause` are indices into the names."""

    unit_id: list[str]
    epoch: list[int]
    attempt: list[int]
    table: str
    """One letter per attempt: `t` for trajectories, `f` for failures. Derived rows (groups, grades,
    deliveries) belong to no attempt and have no key."""
    end: list[int]
    cause: list[int]
    """-1 for none."""
    names: list[str]
    fatal_commands: dict[int, str] = {}
    """By position of the attempt in these columns."""

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[Outcome]) -> Keys:
        """The columns of some attempts."""
        ended = list(outcomes)
        names: dict[str, int] = {}

        def index(name: str | None) -> int:
            return -1 if name is None else names.setdefault(name, len(names))

        return cls(
            unit_id=[o.key.unit_id for o in ended],
            epoch=[o.key.epoch for o in ended],
            attempt=[o.key.attempt for o in ended],
            table="".join("t" if o.done else "f" for o in ended),
            end=[index(o.end_reason) for o in ended],
            cause=[index(o.cause) for o in ended],
            names=list(names),
            fatal_commands={n: o.fatal_command for n, o in enumerate(ended) if o.fatal_command},
        )

    def outcomes(self) -> Iterator[Outcome]:
        """All attempts, in order. Raises: ValueError or IndexError for damaged columns."""
        columns = (self.unit_id, self.epoch, self.attempt, self.table, self.end, self.cause)
        for n, (unit, epoch, attempt, table, end, cause) in enumerate(zip(*columns, strict=True)):
            yield Outcome(
                key=AttemptKey(unit_id=unit, epoch=epoch, attempt=attempt),
                done=table == "t",
                end_reason=self.names[end],
                cause=None if cause < 0 else self.names[cause],
                fatal_command=self.fatal_commands.get(n),
            )


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The content of commits/STEM.json, which makes the batch exist."""

    stem: str
    schema_version: int
    committed_at: float
    """Unix time, seconds."""
    keys: Keys
    parts: list[Part]
    summary: Summary


class _PartsOnly(msgspec.Struct):
    parts: list[Part]


_decode_commit = msgspec.json.Decoder(Commit).decode
_decode_parts = msgspec.json.Decoder(_PartsOnly).decode


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A batch whose parts are complete in tmp/. It exists once the driver commits it."""

    commit: Commit
    files: list[str]
    """Names in tmp/, which no other process can have: one for each part, in order."""

    @property
    def writer(self) -> str:
        """EPOCH-WORKER."""
        return self.commit.stem.rpartition("-")[0]


class BatchSummary:
    """Collects the keys and the summary of a batch row by row."""

    def __init__(self) -> None:
        self._summary = Summary()
        self._ended: list[Outcome] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a `done` line, except for derived rows."""
        if "row" not in line:
            return
        row = line["row"]
        self._summary.add(row, _table(row))
        for segment in line.get("segments", ()):
            self._summary.add_segment(segment)
        self._ended.append(
            Outcome(
                key=AttemptKey(**line["key"]),
                done=row["status"] == "ok",
                end_reason=row["end_reason"],
                cause=row["cause"],
                fatal_command=line.get("fatal_command"),
            )
        )

    def commit(self, stem: str, parts: Iterable[Part] = (), committed_at: float = 0.0) -> Commit:
        """The commit of the batch."""
        return Commit(
            stem=stem,
            schema_version=SCHEMA_VERSION,
            committed_at=committed_at,
            keys=Keys.from_outcomes(self._ended),
            parts=list(parts),
            summary=self._summary,
        )


def publish_batch(run_dir: RunDir, done: Path, stem: str, *, strict: bool = True) -> Commit | None:
    """Publish the rows of a sealed `done` file, then unlink it. For recovery, which holds LOCK.
    Blocking: for threads.

    Args: as `prepare_batch`.

    Returns None when there is nothing to publish: no rows, or committed already.
    Raises: DiskFull (the `done` file stays), DamagedFile, StoreError when published parts differ
    from what was written.
    """
    prepared = None
    if not _is_published(run_dir, stem):
        prepared = prepare_batch(run_dir, done, stem, strict=strict)
    else:  # the name may not be durable yet
        run_dir.storage.sync_path(run_dir.path / "commits")
    if prepared is not None:
        return commit_batch(run_dir, prepared, done)
    done.unlink(missing_ok=True)
    run_dir.crash("publish-9-done")
    return None


def prepare_batch(
    run_dir: RunDir, done: Path, stem: str, *, strict: bool = True
) -> Prepared | None:
    """Write the parts of a batch to tmp/, durably. Blocking: for threads.

    Args:
        done: the sealed file with the rows.
        stem: EPOCH-WORKER-SEQ.
        strict: False skips damaged lines (repair).

    Returns None when there are no rows. Raises: DiskFull, DamagedFile.
    """
    from hermes_rl.store.parts import PartWriter
    from hermes_rl.store.schema import schema_of

    tally, writers = BatchSummary(), dict[str, PartWriter]()
    try:
        for payload in read_payloads(done, strict=strict):
            line = msgspec.json.decode(payload)
            for table, row in rows_of(line):
                if table not in writers:
                    path = run_dir.storage.temporary(part_name(table, stem))
                    writers[table] = PartWriter(path, schema_of(table))
                writers[table].add(row, len(payload))
            tally.add(line)
        for writer in writers.values():
            writer.close(run_dir.crash)
        written = [(table, writers[table]) for table in TABLES if table in writers]
        parts = [describe_part(run_dir, writer, table) for table, writer in written]
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    run_dir.crash("publish-7-prepared")
    if not written:
        return None
    files = [writer.path.name for _, writer in written]
    return Prepared(commit=tally.commit(stem, parts), files=files)


def commit_batch(run_dir: RunDir, prepared: Prepared, done: Path | None = None) -> Commit:
    """Give the parts of a batch their final names, write its commit, and unlink its `done` file.
    The caller holds LOCK. Blocking: for threads.

    Args:
        done: its `done` file; None for the one in the journal of its writer.

    Raises: DiskFull; StoreError when a part differs from what was prepared. The `done` file stays.
    """
    commit = msgspec.structs.replace(prepared.commit, committed_at=time.time())
    writer, _, sequence = commit.stem.rpartition("-")
    done = done or run_dir.writer_path(writer) / f"done-{sequence}.jsonl"
    files = [run_dir.path / "tmp" / name for name in prepared.files]
    try:
        if not _is_published(run_dir, commit.stem):
            for part, file in zip(commit.parts, files, strict=True):
                name = part_name(part.table, commit.stem)
                run_dir.storage.put_file(name, file, point="publish-7")
            write_commit(run_dir, commit)
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    for part in commit.parts:
        if fault := part_fault(run_dir, commit.stem, part):
            path = run_dir.part_path(part.table, commit.stem)
            raise StoreError(f"{path} {fault}; {done} is kept")
    done.unlink(missing_ok=True)
    run_dir.crash("publish-9-done")
    return commit


def part_fault(run_dir: RunDir, stem: str, part: Part, *, content: bool = False) -> str | None:
    """How a part differs from the file that was committed; None when it does not.

    Args:
        content: also compare the digest, which reads the whole file.
    """
    path, part = find_part(run_dir, stem, part)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file, but its batch is committed"
        if status.st_size != part.size:
            return f"has {status.st_size} bytes, but {part.size} were committed"
        if content and file_sha256(path) != part.sha256:
            return "is not the file that was committed: its sha256 differs"
    except FileNotFoundError:
        return "is missing, but its batch is committed"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def size_fault(
    run_dir: RunDir, known: dict[str, list[Part]], skip: Callable[[str], bool] = lambda _: False
) -> str | None:
    """Name the first part that is missing or has another size than was committed; None without one.
    Reads no part, so that it is quick.

    Args:
        known: stem -> the parts of commits that were read before; extended.
        skip: whether to leave out a commit, such as `Ledger.covers`: a checkpoint is opened only if
            no file of its commits has such a fault.

    Raises: StoreError for a commit that cannot be read.
    """
    for stem in (stem for stem in run_dir.commit_stems() if not skip(stem)):
        if stem not in known:
            known[stem] = run_dir.read(
                f"commits/{stem}.json", lambda data: _decode_parts(check_digest(data)).parts
            )
        for part in known[stem]:
            if fault := part_fault(run_dir, stem, part):
                place = find_part(run_dir, stem, part)[0]
                return f"{place} {fault}. See hermes-rl check {run_dir.path}"
    return None


def part_faults(run_dir: RunDir, commit: Commit, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the parts of a commit that are not what was committed, by their digests.

    Args:
        seen: parts to skip, since a merged part has the rows of many batches; extended.
    """
    for part in commit.parts:
        place, _ = find_part(run_dir, commit.stem, part)
        if place not in seen and (fault := part_fault(run_dir, commit.stem, part, content=True)):
            yield place, fault
        seen.add(place)


def _is_published(run_dir: RunDir, stem: str) -> bool:
    """Whether a batch is committed and its parts are intact."""
    if not run_dir.committed(stem):
        return False
    try:
        commit = read_commit(run_dir, stem)
    except StoreError:
        return False  # the rows are written again
    return not any(part_fault(run_dir, stem, part, content=True) for part in commit.parts)


def read_commits(
    run_dir: RunDir, skip: Callable[[str], bool] = lambda _: False
) -> Iterator[Commit]:
    """Yield all commits but those of some stems. Units whose rows are missing are not done in them.

    Raises: StoreError when one cannot be read.
    """
    for stem in itertools.filterfalse(skip, run_dir.commit_stems()):
        yield _without_missing_rows(run_dir, read_commit(run_dir, stem))


def _without_missing_rows(run_dir: RunDir, commit: Commit) -> Commit:
    """A commit without the finished units whose rows are missing from its part: their attempts
    count as `driver_lost`."""
    part = next((p for p in commit.parts if p.table == "trajectories"), None)
    if part is None or part_fault(run_dir, commit.stem, part) is None:
        return commit
    present = _read_part_keys(find_part(run_dir, commit.stem, part)[0])
    found = [
        msgspec.structs.replace(o, done=False, cause="driver_lost")
        if o.done and (o.key.unit_id, o.key.attempt) not in present
        else o
        for o in commit.keys.outcomes()
    ]
    summary = commit.summary if present else Summary()
    return msgspec.structs.replace(commit, keys=Keys.from_outcomes(found), summary=summary)


def _read_part_keys(part: Path) -> set[tuple[str, int]]:
    """Unit and attempt of all rows of a part; empty when it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(part) as file:
            rows = file.read(columns=["unit_id", "attempt"])
    except (OSError, pa.ArrowException, ValueError, KeyError):
        return set()
    return set(zip(rows["unit_id"].to_pylist(), rows["attempt"].to_pylist(), strict=True))


def read_commit(run_dir: RunDir, stem: str) -> Commit:
    """One commit. Raises: StoreError when it cannot be read."""
    return run_dir.read(f"commits/{stem}.json", lambda data: _decode_commit(check_digest(data)))


def write_commit(run_dir: RunDir, commit: Commit) -> None:
    """Step 8."""
    data = add_digest(SECRETS.scrub_bytes(msgspec.json.encode(commit)))
    run_dir.storage.put(f"commits/{commit.stem}.json", data, point="publish-8")


def describe_part(run_dir: RunDir, writer: PartWriter, table: str) -> Part:
    """Sync a complete part that is in tmp/, and describe it. Raises: DiskFull."""
    with disk_errors():
        run_dir.storage.sync_path(writer.path)
    digest, size = file_sha256(writer.path), writer.path.stat().st_size
    return Part(table=table, rows=writer.rows, size=size, sha256=digest)


def rows_of(line: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one `done` line with their tables."""
    if "row" in line:
        yield _table(line["row"]), line["row"]
    for table in ("subagents", "segments", "grades", "groups", "deliveries"):
        for row in line.get(table, ()):
            yield table, row


def _table(row: Mapping[str, Any]) -> str:
    return "trajectories" if row["status"] == "ok" else "failures"
