"""Checks each file of a run directory, and repairs what recovery does not decide on its own.

Repair recovers the valid lines of damaged journal files and keeps the files in `quarantine/saved`.
When a unit is finished twice, it moves the later row to `failures` with cause `duplicate`. Only
then are published parts rewritten. Their order (segments, failures, trajectories, commit) allows it
to be killed and repeated: until the commit is rewritten the unit counts as finished twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.errors import CAUSES, StoreError, end_reason_of
from hermes_rl.events import AttemptKey
from hermes_rl.identity import trajectory_id
from hermes_rl.store.commit import Keys, part_fault, read_commit, write_commit
from hermes_rl.store.driver import begin_epoch
from hermes_rl.store.files import convert_os_errors, disk_errors, file_sha256, read_payloads
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.reader import decode_metrics, find_driver, load_run
from hermes_rl.store.recovery import (
    Recovery,
    RecoveryReport,
    find_final_rows,
    foreign_parts,
    quarantined,
)
from hermes_rl.store.rundir import FOLDERS, GRACE_S, TABLES, RunDir, order_of, part_name
from hermes_rl.store.schema import schema_of, storage_schema
from hermes_rl.store.snapshots import (
    Part,
    compaction_fault,
    compaction_names,
    find_part,
    read_compactions,
    restore_compactions,
)
from hermes_rl.store.summary import Summary

Fault = tuple[Path, str]

FOREIGN = "belongs to no commit"

_JOURNAL = ("done", "live", "asked", "dispatch")


def file_faults(run_dir: RunDir) -> Iterator[Fault]:
    """Yield every damaged or missing file, and the fault."""
    for folder in FOLDERS:
        path = run_dir.path / folder
        # A run of an older version lacks tables that came later; commits name what must be there.
        if not path.is_dir() and (folder not in TABLES or path.exists()):
            yield path, "is missing, or not a folder"
    yield from _epoch_faults(run_dir)
    try:
        yield from _snapshot_faults(run_dir)
    except StoreError as error:
        yield run_dir.path / "compacted", _error_text(run_dir.path / "compacted", error)
        return
    seen: set[Path] = set()
    for stem in run_dir.commit_stems():
        yield from _commit_faults(run_dir, stem, seen)
    for name in foreign_parts(run_dir):
        yield run_dir.path / name, FOREIGN
    yield from _journal_faults(run_dir)
    for path in quarantined(run_dir):
        yield path, "waits for --repair"
    yield from _document_faults(run_dir)


def _epoch_faults(run_dir: RunDir) -> Iterator[Fault]:
    known, run_ids = run_dir.epochs(), set()
    gone = run_dir.last_epoch() - len(known)
    if gone > 0:
        first = next(n for n in range(1, len(known) + 2) if n not in known)
        others = f", like {gone - 1} others" if gone > 1 else ""
        yield run_dir.path / "epochs" / f"{first}.json", f"is missing{others}"
    for number in known:
        place = run_dir.path / "epochs" / f"{number}.json"
        try:
            epoch = run_dir.epoch(number)
        except StoreError as error:
            yield place, _error_text(place, error)
            continue
        run_ids.add(epoch.run_id)
        if epoch.epoch != number or len(run_ids) > 1:
            yield place, f"belongs to another start: epoch {epoch.epoch} of run {epoch.run_id}"


def _snapshot_faults(run_dir: RunDir) -> Iterator[Fault]:
    for compaction in read_compactions(run_dir):
        for name in compaction_names(compaction.number):
            if fault := compaction_fault(run_dir, name):
                yield run_dir.path / name, f"{fault} (--repair restores it from its copy)"


def _commit_faults(run_dir: RunDir, stem: str, seen: set[Path]) -> Iterator[Fault]:
    place = run_dir.path / "commits" / f"{stem}.json"
    try:
        commit = read_commit(run_dir, stem)
        list(commit.keys.outcomes())
    except (StoreError, ValueError, IndexError) as error:
        yield place, _error_text(place, error)
        return
    if commit.stem != stem:
        yield place, f"is the commit of {commit.stem}"
        return
    for part in commit.parts:
        place, _ = find_part(run_dir, stem, part)
        if place in seen:
            continue  # a merged part, which has the rows of many batches
        seen.add(place)
        if fault := part_fault(run_dir, stem, part, content=True):
            yield place, fault


def _journal_faults(run_dir: RunDir) -> Iterator[Fault]:
    folder = run_dir.path / "journal"
    for name in run_dir.storage.names("journal"):
        if order_of(f"{name}-0")[0] and not (folder / name).is_dir():
            yield folder / name, "is not a folder"
    for path in (path for kind in _JOURNAL for _, path in run_dir.journals(kind)):
        try:
            for payload in read_payloads(path):
                msgspec.json.decode(payload)
        except FileNotFoundError:
            continue  # its writer has just published it
        except (OSError, StoreError, msgspec.DecodeError) as error:
            yield path, _error_text(path, error)


def _document_faults(run_dir: RunDir) -> Iterator[Fault]:
    """Faults of manifest.json and stats.json, which any start writes again."""
    found: dict[str, Any] = {}
    for name in ("manifest.json", "stats.json"):
        place = run_dir.path / name
        try:
            content = json.loads(place.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("is not a JSON object")
            found[name] = content
        except FileNotFoundError:
            if name == "manifest.json" and (run_dir.path / "run.yaml").exists():
                yield place, "is missing"
        except (OSError, ValueError, RecursionError) as error:
            yield place, _error_text(place, error)
    if "manifest.json" in found:
        yield from _manifest_faults(run_dir, found["manifest.json"], found.get("stats.json"))


def _manifest_faults(
    run_dir: RunDir, manifest: dict[str, Any], stats: dict[str, Any] | None
) -> Iterator[Fault]:
    try:
        first = run_dir.epoch(run_dir.epochs()[0])
        wanted = json.loads(json.dumps(load_run(run_dir.path, pending=False).stats))
    except (StoreError, IndexError, ValueError):
        return  # reported for the epochs or commits
    if (manifest.get("run_id"), manifest.get("identity")) != (first.run_id, first.identity):
        yield run_dir.path / "manifest.json", "does not belong to this run"
    # Only a start that ended regularly wrote a plan, and then the statistics.
    plan, place = manifest.get("plan"), run_dir.path / "stats.json"
    if not plan or find_driver(run_dir) is not None or run_dir.writers():
        return
    if stats is None:
        if not os.path.lexists(place):
            yield place, "is missing"
        return
    if stats.get("plan") != plan:
        yield place, "has a plan that differs from manifest.json"
    # `units` may differ: `--retry-failed` reopened units that were given up.
    differ = [
        n
        for n in wanted
        if n not in ("plan", "units") and not _equal_figures(stats.get(n), wanted[n])
    ]
    if stats.get("units", {}).get("done") != wanted["units"]["done"]:
        differ.append("units")
    if differ:
        yield place, f"differs from the sums of the commits ({', '.join(differ)})"


def _equal_figures(one: Any, other: Any) -> bool:
    """Equal except for the last digits of sums, which depend on the order of batches, and for zero
    figures that only one of two versions has."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        alone = [(one | other)[k] for k in one.keys() ^ other.keys()]
        return not any(alone) and all(_equal_figures(one[k], other[k]) for k in both)
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return bool(one == other)


def _error_text(place: Path, error: Exception) -> str:
    """The first line of an error, without the place."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error).partition("\n")[0].removeprefix(f"{place}").lstrip(": ")


@dataclass
class RepairReport:
    """The results of a repair."""

    recovery: RecoveryReport
    saved: list[str] = field(default_factory=list)
    """Where damaged files with recovered lines are kept."""
    duplicates: list[str] = field(default_factory=list)
    """Units that were finished twice."""


def repair_run(path: str | Path, *, grace_s: float = GRACE_S) -> RepairReport:
    """Repair a run directory; a new driver can open it afterwards. Blocking. May be repeated.

    Raises: StoreError when the run is in use or newer; DiskFull.
    """
    run_dir = RunDir(path)
    lock = run_dir.lock()
    try:
        with convert_os_errors(run_dir.path):
            return _repair(run_dir, grace_s)
    finally:
        lock.release()


def _repair(run_dir: RunDir, grace_s: float) -> RepairReport:
    epoch = begin_epoch(run_dir, None, {"repair": True})
    saved = [_restore_quarantined(run_dir, damaged) for damaged in quarantined(run_dir)]
    saved += restore_compactions(run_dir)
    recovery = Recovery(run_dir, epoch, strict=False)
    report = recovery.recover_writers(Ledger(), grace_s=grace_s)
    for unit_id in report.duplicates:
        for stem, key in find_final_rows(run_dir, unit_id)[1:]:
            move_to_failures(run_dir, stem, key)
    return RepairReport(report, saved, report.duplicates)


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
    summary = Summary()
    for table in ("failures", "trajectories"):
        for row in tables[table]:
            summary.add({**row, "metrics": decode_metrics(row["metrics"])}, table)
    for segment in segments:
        summary.add_segment(segment)
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
