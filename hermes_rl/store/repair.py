"""Repairs what recovery does not decide on its own: damaged journals, commits, epochs and parts.

Damaged files are kept in `quarantine/saved`. The intact lines of damaged journals are recovered. A
commit that is damaged or missing is made again from its parts, an epoch from another one or from
manifest.json. Parts that cannot be read leave their commit, so that their units run again. When a
unit is finished twice, the later row moves to `failures` with cause `duplicate`; only then are
published parts rewritten. Their order (segments, failures, trajectories, commit) allows it to be
killed and repeated: until the commit is rewritten the unit counts as finished twice.

`compact_run` merges the small parts of a run that nothing drives."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.errors import CAUSES, StoreError, end_reason_of
from hermes_rl.events import AttemptKey
from hermes_rl.identity import trajectory_id
from hermes_rl.store.commit import (
    Commit,
    Keys,
    Outcome,
    part_fault,
    read_commit,
    write_commit,
)
from hermes_rl.store.compaction import SMALL, TARGET, Compacted, merge_batches
from hermes_rl.store.driver import begin_epoch
from hermes_rl.store.files import add_digest, convert_os_errors, disk_errors, file_sha256
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.reader import decode_metrics, decode_row
from hermes_rl.store.recovery import (
    Recovery,
    RecoveryReport,
    duplicate_message,
    find_final_rows,
    foreign_parts,
    quarantined,
)
from hermes_rl.store.rundir import (
    COMPACTED_VERSION,
    GRACE_S,
    SCHEMA_VERSION,
    TABLES,
    Epoch,
    NewerRun,
    RunDir,
    order_of,
    part_name,
    stem_of,
)
from hermes_rl.store.schema import schema_of, storage_schema
from hermes_rl.store.snapshots import (
    OLD_FILES_S,
    Part,
    find_part,
    merged_by_stem,
    read_compactions,
)
from hermes_rl.store.summary import Summary


@dataclass
class RepairReport:
    """The results of a repair."""

    recovery: RecoveryReport
    saved: list[str] = field(default_factory=list)
    """Where damaged files with recovered lines are kept."""
    lost: list[str] = field(default_factory=list)
    """Published files that are missing, as TABLE/NAME. The units of their rows run again."""
    duplicates: list[str] = field(default_factory=list)
    """Units that were finished twice."""


def repair_run(path: str | Path, *, grace_s: float = GRACE_S, first_epoch: int = 1) -> RepairReport:
    """Repair a run directory; a new driver can open it afterwards. Blocking. May be repeated.

    Args:
        first_epoch: the lowest epoch that may be used.

    Raises: StoreError when the run is in use or newer; DiskFull.
    """
    run_dir = RunDir(path)
    lock = run_dir.lock()
    try:
        run_dir.create()
        with convert_os_errors(run_dir.path):
            return _repair(run_dir, grace_s, first_epoch)
    finally:
        run_dir.close_gate()
        lock.release()


def _repair(run_dir: RunDir, grace_s: float, first_epoch: int) -> RepairReport:
    saved = restore_epochs(run_dir)
    epoch = begin_epoch(run_dir, None, {"repair": True}, at_least=first_epoch)
    saved += [_restore_quarantined(run_dir, damaged) for damaged in quarantined(run_dir)]
    rebuilt, lost = rebuild_commits(run_dir)
    recovery = Recovery(run_dir, epoch, strict=False)
    report = recovery.recover_writers(Ledger(), grace_s=grace_s)
    for unit_id in report.duplicates:
        for stem, key in find_final_rows(run_dir, unit_id)[1:]:
            move_to_failures(run_dir, stem, key)
    return RepairReport(report, saved + rebuilt, lost, report.duplicates)


def _keep(run_dir: RunDir, damaged: Path) -> str:
    """Move a damaged file of any folder to `saved`."""
    kept = _place_of(run_dir, damaged)
    kept.parent.mkdir(parents=True, exist_ok=True)
    damaged.rename(kept)
    run_dir.storage.sync_path(kept.parent)
    return str(kept)


def _place_of(run_dir: RunDir, damaged: Path) -> Path:
    """Where a damaged file is kept."""
    name = str(damaged.relative_to(run_dir.path)).replace("/", ".")
    return run_dir.path / "quarantine" / "saved" / name


def restore_epochs(run_dir: RunDir) -> list[str]:
    """Write damaged and missing epochs again, from another one or manifest.json.

    Raises: NewerRun; StoreError when nothing names the run's configuration.
    """
    good: dict[int, Epoch] = {}
    for number in run_dir.epochs():
        try:
            good[number] = run_dir.epoch(number)
        except NewerRun:
            raise
        except StoreError:
            pass
    bad = {*range(1, run_dir.last_epoch() + 1)} - {n for n, e in good.items() if e.epoch == n}
    if not bad:
        return []
    run_ids = Counter(epoch.run_id for epoch in good.values())
    source = next((e for e in good.values() if e.run_id == run_ids.most_common(1)[0][0]), None)
    source = source or _epoch_of_manifest(run_dir)
    saved = []
    for number in sorted(bad):
        name = f"epochs/{number}.json"
        if os.path.lexists(run_dir.path / name):
            saved.append(_keep(run_dir, run_dir.path / name))
        epoch = msgspec.structs.replace(source, epoch=number, meta={"repair": True})
        run_dir.storage.put(name, add_digest(msgspec.json.encode(epoch)))
    return saved


def _epoch_of_manifest(run_dir: RunDir) -> Epoch:
    try:
        manifest = json.loads((run_dir.path / "manifest.json").read_bytes())
        return Epoch(
            epoch=1,
            schema_version=COMPACTED_VERSION if read_compactions(run_dir) else SCHEMA_VERSION,
            run_id=manifest["run_id"],
            identity=manifest["identity"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{run_dir.path}: epochs/ and manifest.json are damaged or missing, so nothing names "
            "the configuration of this run. Restore one of them, or export what is there"
        ) from error


def rebuild_commits(run_dir: RunDir) -> tuple[list[str], list[str]]:
    """Make commits again from their parts when they are damaged or missing, or when a part is
    missing, cannot be read, or is back after a repair without it. Returns the damaged files that
    were kept, and the missing ones."""
    stems = {*run_dir.commit_stems(), *merged_by_stem(run_dir)}
    good = {stem: _intact_commit(run_dir, stem) for stem in stems}
    unreadable = {
        path: None
        for stem, commit in good.items()
        for part in (commit.parts if commit is not None else ())
        if part_fault(run_dir, stem, part, content=True)
        and (path := find_part(run_dir, stem, part)[0]).is_file()
        and not _is_readable(path)
    }

    places = {
        stem: [find_part(run_dir, stem, part)[0] for part in commit.parts]
        for stem, commit in good.items()
        if commit is not None
    }
    waiting = {stem for stem, _ in run_dir.journals("done")}  # recovery publishes these again
    lost = {p for s, paths in places.items() if s not in waiting for p in paths if not p.exists()}
    returned = _unlisted(run_dir, {path for paths in places.values() for path in paths})
    bad = {
        stem: commit
        for stem, commit in good.items()
        if commit is None or stem in returned or not {*unreadable, *lost}.isdisjoint(places[stem])
    }
    # A repair that was killed may have moved a file to where it is kept.
    lost = {path for path in lost if not _place_of(run_dir, path).exists()}
    saved = [_keep(run_dir, path) for path in unreadable]
    known = {
        outcome.key
        for stem, commit in good.items()
        if commit is not None and stem not in bad
        for outcome in commit.keys.outcomes()
    }
    foreign = {stem_of(Path(name)) for name in foreign_parts(run_dir)}
    for stem in sorted({*bad, *foreign} - waiting, key=order_of):
        made = _commit_of_parts(run_dir, stem, bad.get(stem), known)
        if stem not in bad and not _belongs_here(made, known):
            continue  # a part of another run, or a copy
        known |= {outcome.key for outcome in made.keys.outcomes()}
        damaged = run_dir.path / "commits" / f"{stem}.json"
        if bad.get(stem) is None and os.path.lexists(damaged):
            saved.append(_keep(run_dir, damaged))
        write_commit(run_dir, made)
    return saved, sorted(path.relative_to(run_dir.path).as_posix() for path in lost)


def _unlisted(run_dir: RunDir, listed: set[Path]) -> set[str]:
    """The stems of batches that may have rows in parts that no commit lists."""
    paths = {path for table in TABLES for path in run_dir.parts(table)} - listed
    stems = {stem_of(path) for path in paths}
    merged = [one for found in merged_by_stem(run_dir).values() for one in found]
    return stems.union(*(one.of for one in merged if one.stem in stems))


def _intact_commit(run_dir: RunDir, stem: str) -> Commit | None:
    try:
        commit = read_commit(run_dir, stem)
        list(commit.keys.outcomes())
    except (StoreError, ValueError, IndexError):
        return None
    return commit if commit.stem == stem else None


def _belongs_here(made: Commit, known: set[AttemptKey]) -> bool:
    """Whether parts without a commit are of this run, and of no other commit."""
    keys = {outcome.key for outcome in made.keys.outcomes()}
    rows = sum(part.rows for part in made.parts if part.table in ("trajectories", "failures"))
    return len(keys) == rows > 0 and not keys & known


def _is_readable(path: Path) -> bool:
    """Whether readers accept a part: all its columns, with their declared types and lengths, and
    the JSON in them."""
    try:
        with pq.ParquetFile(path) as file:
            found = pq.read_table(path, schema=schema_of(path.parent.name))
            found.validate(full=True)
            rows: int = file.metadata.num_rows
            for batch in found.to_batches(max_chunksize=100):
                for row in batch.to_pylist():
                    decode_row(row)
    except (OSError, pa.ArrowException, msgspec.DecodeError, ValueError):
        return False
    return bool(found.num_rows == rows)


_TEXTS = {"messages", "message_info", "tools", "image_data", "contexts", "metadata"}
"""Large columns that a commit does not need."""


def _commit_of_parts(
    run_dir: RunDir, stem: str, before: Commit | None, known: set[AttemptKey]
) -> Commit:
    """The commit of what is in the parts of a batch. Attempts of the earlier commit whose rows are
    gone count as `driver_lost`.

    Args:
        known: the attempts of all other commits. Of a merged part, the rows that are in none.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    parts: list[Part] = []
    for table in TABLES:
        path, _ = find_part(run_dir, stem, Part(table=table, rows=0, size=0, sha256=""))
        if path.is_file() and _is_readable(path):
            columns = [name for name in schema_of(table).names if name not in _TEXTS]
            rows[table] = pq.read_table(path, schema=schema_of(table), columns=columns).to_pylist()
            size, count = path.stat().st_size, len(rows[table])
            parts.append(Part(table=table, rows=count, size=size, sha256=file_sha256(path)))
    ended = [row for table in ("failures", "trajectories") for row in rows.get(table, ())]
    epochs = range(1, run_dir.last_epoch() + 1)
    keys = {row["trajectory_id"]: key for row in ended if (key := _key_of(row, epochs))}
    if stem in merged_by_stem(run_dir):
        mine = {outcome.key for outcome in before.keys.outcomes()} if before is not None else None
        keys = {i: k for i, k in keys.items() if k not in known and (mine is None or k in mine)}
    taken = [row for row in ended if row["trajectory_id"] in keys]
    outcomes = [
        Outcome(
            key=keys[row["trajectory_id"]],
            done=row["status"] == "ok",
            end_reason=row["end_reason"],
            cause=row["cause"],
        )
        for row in taken
    ]
    lost = {"done": False, "end_reason": end_reason_of("driver_lost"), "cause": "driver_lost"}
    for outcome in before.keys.outcomes() if before is not None else ():
        if outcome.key not in keys.values():
            gone = msgspec.structs.replace(outcome, **lost) if outcome.done else outcome
            outcomes.append(gone)
    segments = [row for row in rows.get("segments", ()) if row["trajectory_id"] in keys]
    return Commit(
        stem=stem,
        schema_version=SCHEMA_VERSION,
        committed_at=before.committed_at if before is not None else time.time(),
        keys=Keys.from_outcomes(outcomes),
        parts=parts,
        summary=_sum_up(taken, segments),
    )


def _key_of(row: dict[str, Any], epochs: Iterable[int]) -> AttemptKey | None:
    """The attempt of a row; None when its id is not of this run's epochs."""
    unit, attempt = row["unit_id"], row["attempt"]
    found = (e for e in epochs if trajectory_id(unit, e, attempt) == row["trajectory_id"])
    epoch = next(found, None)
    return None if epoch is None else AttemptKey(unit_id=unit, epoch=epoch, attempt=attempt)


def _sum_up(rows: Iterable[dict[str, Any]], segments: Iterable[dict[str, Any]]) -> Summary:
    """The summary of the rows of some parts."""
    summary = Summary()
    for row in rows:
        table = "trajectories" if row["status"] == "ok" else "failures"
        summary.add({**row, "metrics": decode_metrics(row["metrics"])}, table)
    for segment in segments:
        summary.add_segment(segment)
    return summary


def _restore_quarantined(run_dir: RunDir, damaged: Path) -> str:
    """Link a quarantined file to `saved`, and move it back to the journal for recovery."""
    kept = run_dir.path / "quarantine" / "saved" / f"{damaged.parent.name}.{damaged.name}"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        os.link(damaged, kept)
        run_dir.storage.sync_path(kept.parent)
    folder = run_dir.writer_path(damaged.parent.name)
    folder.mkdir(exist_ok=True)
    os.rename(damaged, folder / damaged.name)
    return str(kept)


CAUSE = "duplicate"


def move_to_failures(run_dir: RunDir, stem: str, key: AttemptKey) -> None:
    """Move the row of one attempt from `trajectories` to `failures`. Blocking. Raises: DiskFull."""
    read = {name: _rows(run_dir, name, stem) for name in ("segments", "failures", "trajectories")}
    segments, failures, finals = read.values()
    mine = [r for r in finals if (r["unit_id"], r["attempt"]) == (key.unit_id, key.attempt)]
    known = {r["trajectory_id"] for r in failures}
    failures += [_duplicate(r) for r in mine if r["trajectory_id"] not in known]
    finals = [r for r in finals if r not in mine]
    row_id = trajectory_id(key.unit_id, key.epoch, key.attempt)
    segments = [_without_training(s) if s["trajectory_id"] == row_id else s for s in segments]
    tables = {"segments": segments, "failures": failures, "trajectories": finals}
    parts = [part for name, rows in tables.items() if (part := _rewrite(run_dir, name, stem, rows))]
    summary = _sum_up(failures + finals, segments)
    before = read_commit(run_dir, stem)
    failed = {"done": False, "end_reason": end_reason_of(CAUSE), "cause": CAUSE}
    outcomes = (
        msgspec.structs.replace(outcome, **failed) if outcome.key == key else outcome
        for outcome in before.keys.outcomes()
    )
    others = [p for p in before.parts if p.table not in tables]
    after = msgspec.structs.replace(
        before, keys=Keys.from_outcomes(outcomes), parts=others + parts, summary=summary
    )
    write_commit(run_dir, after)


def _duplicate(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "status": "failed",
        "reward": None,
        "end_reason": end_reason_of(CAUSE),
        "truncated": False,
        "owner": CAUSES[CAUSE].owner,
        "cause": CAUSE,
        "error": f"{CAUSE}: another row of this unit is final",
    }


def _without_training(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment of a row that is now a failure."""
    return {**segment, "reward": None, "trainable": False, "exclude_reason": "failed"}


def _rows(run_dir: RunDir, table: str, stem: str) -> list[dict[str, Any]]:
    path = run_dir.part_path(table, stem)
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []
    return rows


def _rewrite(run_dir: RunDir, table: str, stem: str, rows: list[dict[str, Any]]) -> Part | None:
    final = run_dir.part_path(table, stem)
    if not rows:
        final.unlink(missing_ok=True)
        return None
    local = run_dir.storage.temporary(part_name(table, stem))
    schema = schema_of(table)
    content = pa.Table.from_pylist(rows, schema=storage_schema(schema)).cast(schema)
    with disk_errors():
        pq.write_table(content, local, compression="zstd", compression_level=3)
    run_dir.storage.put_file(part_name(table, stem), local)
    size = final.stat().st_size
    return Part(table=table, rows=len(rows), size=size, sha256=file_sha256(final))


def compact_run(
    path: str | Path,
    *,
    grace_s: float = OLD_FILES_S,
    small: int = SMALL,
    target: int = TARGET,
    first_epoch: int = 1,
) -> Compacted:
    """Merge the small parts of a run that nothing drives. What a killed driver left is published
    first. Blocking; may be killed and repeated.

    Args:
        path: the run directory.
        grace_s: seconds for which replaced files are kept for readers that listed them. The next
            start or `compact` after that removes them.
        small: batches of fewer bytes are merged.
        target: bytes of a merged batch, about.
        first_epoch: the lowest epoch that may be used.

    Raises: StoreError when the run is in use, damaged or newer, or its file system cannot exchange
    folders; DiskFull.
    """
    run_dir = RunDir(path)
    lock = run_dir.lock()
    try:
        with convert_os_errors(run_dir.path), disk_errors():
            epoch = begin_epoch(run_dir, None, {"compact": True}, at_least=first_epoch)
            recovery = Recovery(run_dir, epoch)
            report = recovery.recover_writers(Ledger())
            if report.duplicates:
                raise StoreError(duplicate_message(run_dir, report.duplicates[0]))
            return merge_batches(run_dir, grace_s=grace_s, small=small, target=target)
    finally:
        run_dir.close_gate()
        lock.release()
