"""Publishing a sealed batch: steps 7 to 9 of the commit protocol, the same for writer and
recovery.

A redo gives the same rows under the same names, so that it may be killed and repeated at will.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.store.files import check_digest, payloads, with_digest
from hermes_rl.store.rundir import SCHEMA_VERSION, TABLES, RunDir, part_name
from hermes_rl.store.summary import Summary

if TYPE_CHECKING:
    from hermes_rl.store.parts import PartWriter


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of a batch, as columns; `end` and `cause` are indices into the names."""

    unit_id: list[str]
    epoch: list[int]
    attempt: list[int]
    table: str
    """One letter per attempt: `t` for trajectories, `f` for failures. What is made from other rows
    (groups, grades) is no attempt and has no key."""
    end: list[int]
    cause: list[int]
    """-1 for none."""
    names: list[str]
    fatal_commands: dict[int, str] = {}
    """Place of an attempt in these columns -> the tool call under which its sandbox died."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One published Parquet file."""

    table: str
    rows: int
    size: int
    """Bytes."""
    sha256: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The content of commits/STEM.json: the batch exists from this file on."""

    stem: str
    schema_version: int
    committed_at: float
    """Unix time, seconds."""
    keys: Keys
    parts: list[Part]
    summary: Summary


_decode_commit = msgspec.json.Decoder(Commit).decode


def publish_batch(run_dir: RunDir, done: Path, stem: str, *, sound: bool = True) -> Commit | None:
    """Publish the rows of a sealed `done` file, then unlink it. Blocking: for threads.

    Args:
        run_dir: the run directory.
        done: the sealed file.
        stem: EPOCH-WORKER-SEQ.
        sound: False passes over damaged lines (repair).

    Returns None when there is nothing to publish: no rows, or committed already.
    Raises: DiskFull (the `done` file stays), DamagedFile, StoreError when what was published is
    not what was written.
    """
    commit = None
    if _published(run_dir, stem):  # maybe by a writer that was killed before the name was on disk
        run_dir.storage.sync_path(run_dir.path / "commits")
    else:
        commit = _commit(run_dir, payloads(done, sound=sound), stem)
    for part in commit.parts if commit is not None else ():
        if fault := part_fault(run_dir, stem, part):
            raise StoreError(f"{run_dir.part_path(part.table, stem)} {fault}; {done} is kept")
    done.unlink(missing_ok=True)
    run_dir.crash("publish-9-done")
    return commit


def part_fault(run_dir: RunDir, stem: str, part: Part, *, content: bool = False) -> str | None:
    """Why a part is not the file that was committed; None when it is.

    Args:
        content: also compare the digest, which reads the whole file.
    """
    path = run_dir.part_path(part.table, stem)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is no file, but its batch is committed"
        if status.st_size != part.size:
            return f"has {status.st_size} bytes, committed were {part.size}"
        if content:
            from hermes_rl.store.parts import file_sha256

            if file_sha256(path) != part.sha256:
                return "is not the file that was committed: its sha256 is another"
    except FileNotFoundError:
        return "is missing, but its batch is committed"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _published(run_dir: RunDir, stem: str) -> bool:
    """Whether a batch is committed, and its parts hold what was committed."""
    if not run_dir.committed(stem):
        return False
    try:
        commit = read_commit(run_dir, stem)
    except StoreError:
        return False  # the rows are at hand: they are written again
    return not any(part_fault(run_dir, stem, part, content=True) for part in commit.parts)


def read_commits(run_dir: RunDir) -> Iterator[Commit]:
    """All commits, one in memory at a time. Units whose rows are gone are not done in them.

    Raises: StoreError when one cannot be read.
    """
    for stem in run_dir.commit_stems():
        yield _as_found(run_dir, read_commit(run_dir, stem))


def _as_found(run_dir: RunDir, commit: Commit) -> Commit:
    """A commit without the finished units whose rows its part no longer holds: their attempts
    count as lost with their driver."""
    part = next((p for p in commit.parts if p.table == "trajectories"), None)
    if part is None or part_fault(run_dir, commit.stem, part) is None:
        return commit
    keys = commit.keys
    held = _keys_in(run_dir.part_path(part.table, commit.stem))
    attempts = zip(keys.unit_id, keys.attempt, keys.table, strict=True)
    gone = {n for n, (u, a, t) in enumerate(attempts) if t == "t" and (u, a) not in held}
    names = [*keys.names, "driver_lost"]
    found = msgspec.structs.replace(
        keys,
        table="".join("f" if n in gone else t for n, t in enumerate(keys.table)),
        cause=[len(names) - 1 if n in gone else c for n, c in enumerate(keys.cause)],
        names=names,
    )
    summary = commit.summary if held else Summary()
    return msgspec.structs.replace(commit, keys=found, summary=summary)


def _keys_in(part: Path) -> set[tuple[str, int]]:
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
    data = with_digest(msgspec.json.encode(commit))
    run_dir.storage.put(f"commits/{commit.stem}.json", data, point="publish-8")


def _commit(run_dir: RunDir, lines: Iterable[bytes], stem: str) -> Commit | None:
    tally = Tally()
    writers = _write_tables(run_dir, lines, stem, tally)
    if not writers:
        return None
    parts = []
    try:
        for table in TABLES:
            if table in writers:
                parts.append(publish_part(run_dir, writers[table], table, stem))
    finally:
        for writer in writers.values():
            writer.path.unlink(missing_ok=True)  # what a full disk kept from its final name
    commit = Commit(
        stem=stem,
        schema_version=SCHEMA_VERSION,
        committed_at=time.time(),
        keys=tally.keys(),
        parts=parts,
        summary=tally.summary,
    )
    write_commit(run_dir, commit)
    return commit


def publish_part(run_dir: RunDir, writer: PartWriter, table: str, stem: str) -> Part:
    """Step 7 for one table."""
    from hermes_rl.store.parts import file_sha256

    digest, size = file_sha256(writer.path), writer.path.stat().st_size
    run_dir.storage.put_file(part_name(table, stem), writer.path, point="publish-7")
    return Part(table=table, rows=writer.rows, size=size, sha256=digest)


def _write_tables(
    run_dir: RunDir, lines: Iterable[bytes], stem: str, tally: Tally
) -> dict[str, PartWriter]:
    from hermes_rl.store.parts import PartWriter

    writers: dict[str, PartWriter] = {}
    try:
        for payload in lines:
            line = msgspec.json.decode(payload)
            for table, row in rows_of(line):
                if table not in writers:
                    path = run_dir.storage.temporary(part_name(table, stem))
                    writers[table] = PartWriter(path, table, run_dir.crash)
                writers[table].add(row, len(payload))
            if "row" in line:
                tally.add(line)
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    return writers


def rows_of(line: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one `done` line with their tables."""
    if "row" in line:
        yield _table(line["row"]), line["row"]
    for table in ("subagents", "segments", "grades", "groups"):
        for row in line.get(table, ()):
            yield table, row


def _table(row: dict[str, Any]) -> str:
    return "trajectories" if row["status"] == "ok" else "failures"


class Tally:
    """Collects keys and summary of a batch while its rows pass by."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("unit_id", "epoch", "attempt", "end", "cause")
        }
        self._table = ""
        self._names: dict[str, int] = {}
        self._fatal_commands: dict[int, str] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Count one finished attempt."""
        key, row = line["key"], line["row"]
        table = _table(row)
        self.summary.add(row, table)
        for segment in line.get("segments", ()):
            self.summary.add_segment(segment)
        if line.get("fatal_command"):
            self._fatal_commands[len(self._table)] = line["fatal_command"]
        self._table += table[0]
        for name in ("unit_id", "epoch", "attempt"):
            self._columns[name].append(key[name])
        self._columns["end"].append(self._index(row["end_reason"]))
        cause = row["cause"]
        self._columns["cause"].append(-1 if cause is None else self._index(cause))

    def _index(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def keys(self) -> Keys:
        """The keys of all attempts, in order."""
        return Keys(
            **self._columns,
            table=self._table,
            names=list(self._names),
            fatal_commands=self._fatal_commands,
        )
