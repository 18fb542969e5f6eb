"""Checks each file of a run directory. `repair` repairs what is found."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.store.commit import part_faults, read_commit
from hermes_rl.store.files import read_payloads
from hermes_rl.store.reader import find_driver, load_run
from hermes_rl.store.recovery import (
    foreign_parts,
    quarantined,
)
from hermes_rl.store.rundir import FOLDERS, TABLES, RunDir, order_of, stem_of
from hermes_rl.store.snapshots import (
    compaction_fault,
    compaction_names,
    file_of,
    merged_by_stem,
    read_compactions,
)

Fault = tuple[Path, str]

FOREIGN = "belongs to no commit"

_JOURNAL = ("done", "live", "asked", "dispatch")


def special_files(folder: Path) -> Iterator[Path]:
    """Named pipes and devices below a folder, at which a reader would wait for ever."""
    for path in folder.rglob("*"):
        try:
            kind = path.lstat().st_mode
        except OSError:
            continue  # removed meanwhile
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            yield path


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
    for stem in sorted({*merged_by_stem(run_dir)} - {*run_dir.commit_stems()}):
        yield run_dir.path / "commits" / f"{stem}.json", "is missing, but its rows were merged"
    # In this order: a batch that is published meanwhile has a `done` file, or a commit later.
    parts = [part for table in TABLES for part in run_dir.parts(table)]
    waiting = {stem for stem, _ in run_dir.journals("done")}
    seen: set[Path] = set()
    for stem in run_dir.commit_stems():
        yield from _commit_faults(run_dir, stem, seen)
    foreign = [run_dir.path / name for name in foreign_parts(run_dir)]
    yield from ((path, FOREIGN) for path in foreign)
    for path in parts:
        known = path in seen or path in foreign or stem_of(path) in waiting
        if not known and path.exists():  # merges remove some
            yield path, "is not in the commit of its batch"
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
                yield run_dir.path / name, f"{fault} (the next start restores it from its copy)"


def _commit_faults(run_dir: RunDir, stem: str, seen: set[Path]) -> Iterator[Fault]:
    place = run_dir.path / "commits" / f"{stem}.json"
    try:
        commit = read_commit(run_dir, stem)
        list(commit.keys.outcomes())
    except (StoreError, ValueError, IndexError) as error:
        fault = _error_text(place, error)
    else:
        fault = "" if commit.stem == stem else f"is the commit of {commit.stem}"
    if fault:
        yield place, fault
        seen.update(file_of(run_dir, table, stem) for table in TABLES)  # nothing lists them
        return
    yield from part_faults(run_dir, commit, seen)


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
