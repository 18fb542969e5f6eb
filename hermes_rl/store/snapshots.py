"""Snapshots of the tables: small parts replaced by merged ones, in one step per table.

Each table is a folder. A switch exchanges it with a folder that has the merged parts and hard links
of all others, which the file system does at once: a glob sees every row once, before and after.
The record is durable before the first switch, and each start completes what a kill interrupted.
Old files are kept for a while, hidden, for readers that listed them.

Order: merged parts, `.compact/N/TABLE` folders, record, exchanges, removal after the grace period.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.locks import exchange
from hermes_rl.store.files import add_digest, check_digest
from hermes_rl.store.rundir import RETIRED, TABLES, RunDir, part_name, stem_of


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One published Parquet file."""

    table: str
    rows: int
    size: int
    """Bytes."""
    sha256: str


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """Several batches whose parts were merged, one per table; see `compaction`."""

    stem: str
    """Of the merged parts."""
    of: list[str]
    """The stems of the batches."""
    parts: list[Part]
    replaced: list[str] = []
    """The stems of all parts that had these rows before, also merged ones, whose records are
    removed with their parts."""


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """The content of compacted/N.json: a new snapshot of the tables."""

    number: int
    merged: list[Merged]


_decode_compaction = msgspec.json.Decoder(Compaction).decode

_PER_EPOCH = 1_000_000
"""Snapshots that one driver may make."""


def first_merge_of(epoch: int) -> int:
    """The number of the first snapshot that a driver makes: two drivers at a URL, of which one was
    replaced and does not know it, never make parts of the same name."""
    return epoch * _PER_EPOCH


def epoch_of_merge(number: int) -> int:
    """The epoch in the number of a snapshot. Earlier versions made one snapshot per epoch, whose
    number is at least that."""
    return number // _PER_EPOCH or number


def read_compactions(run_dir: RunDir) -> list[Compaction]:
    """All snapshots, oldest first. A damaged one is read from its copy.

    Raises: StoreError when both are damaged.
    """
    names = run_dir.storage.names("compacted")
    found = {int(n[:-5]) for n in names if re.fullmatch(r"\d+\.(json|copy)", n)}
    known = run_dir.compactions
    run_dir.compactions = {
        number: known.get(number) or read
        for number in sorted(found)
        if (read := known.get(number) or _read_present(run_dir, number))
    }
    return [*run_dir.compactions.values()]


def _read_present(run_dir: RunDir, number: int) -> Compaction | None:
    """One snapshot; None when it was superseded since it was listed."""
    try:
        return read_compaction(run_dir, number)
    except StoreError:
        if any((run_dir.path / name).exists() for name in compaction_names(number)):
            raise
        return None


def read_compaction(run_dir: RunDir, number: int) -> Compaction:
    """One snapshot, or its copy. Raises: StoreError when both are damaged."""
    names = compaction_names(number)
    try:
        return _read_compaction(run_dir, names[0])
    except StoreError as error:
        try:
            return _read_compaction(run_dir, names[1])
        except StoreError:
            raise error from None


def _read_compaction(run_dir: RunDir, name: str) -> Compaction:
    return run_dir.read(name, lambda data: _decode_compaction(check_digest(data)))


def compaction_fault(run_dir: RunDir, name: str) -> str | None:
    """What is wrong with one file of a snapshot; None for nothing."""
    try:
        _read_compaction(run_dir, name)
    except StoreError as error:
        return str(error).removeprefix(f"{run_dir.path}/{name} ")
    return None


def _restore(run_dir: RunDir) -> None:
    """Write the damaged files of snapshots again, from their copies."""
    for compaction in read_compactions(run_dir):
        for name in compaction_names(compaction.number):
            if compaction_fault(run_dir, name):
                run_dir.storage.put(name, add_digest(msgspec.json.encode(compaction)))


def compaction_names(number: int) -> tuple[str, str]:
    """The file of a snapshot, and its copy."""
    return f"compacted/{number}.json", f"compacted/{number}.copy"


def merged_by_stem(run_dir: RunDir) -> dict[str, list[Merged]]:
    """Stem of a batch -> where its rows may have been merged into, newest first."""
    names = tuple(run_dir.storage.names("compacted"))
    if run_dir.merged is None or run_dir.merged[0] != names:
        found: dict[str, list[Merged]] = {}
        for compaction in read_compactions(run_dir):
            for merged in compaction.merged:
                for stem in merged.of:
                    found.setdefault(stem, []).insert(0, merged)
        run_dir.merged = names, found
    return run_dir.merged[1]


def find_part(run_dir: RunDir, stem: str, part: Part) -> tuple[Path, Part]:
    """The file that has the rows of a part, and what was committed for it."""
    first = run_dir.part_path(part.table, stem)
    merged = [
        (run_dir.part_path(part.table, one.stem), whole)
        for one in merged_by_stem(run_dir).get(stem, ())
        for whole in one.parts
        if whole.table == part.table
    ]
    # Before the switch, and after a kill before it, the rows are still in their first file.
    there = (place for place in [*merged, (first, part)] if os.path.lexists(place[0]))
    return next(there, merged[0] if merged else (first, part))


def file_of(run_dir: RunDir, table: str, stem: str) -> Path:
    """The file of a table that has the rows of a batch now, or those of a merged one. It may have
    those of others, too, and is missing if there are none."""
    first = run_dir.part_path(table, stem)
    merged = [
        run_dir.part_path(table, one.stem)
        for compaction in reversed(read_compactions(run_dir))
        for one in compaction.merged
        if stem in one.of or stem in one.replaced
    ]
    return next((path for path in [first, *merged] if path.exists()), first)


def snapshot_of(run_dir: RunDir) -> object:
    """What differs after a merge has replaced files or records."""
    folders = [run_dir.path / table for table in TABLES]
    inodes = [folder.stat().st_ino for folder in folders if folder.is_dir()]
    return inodes, run_dir.storage.names("compacted")


def replaced_stems(run_dir: RunDir, parts: list[Path]) -> set[str]:
    """The stems of batches, and of merged parts, whose rows are in merged parts of a list."""
    listed = {stem_of(part) for part in parts}
    found = set[str]()
    for compaction in read_compactions(run_dir):
        if any(one.stem in listed for one in compaction.merged):
            found |= _replaced(run_dir, compaction)
    return found


def stage(
    run_dir: RunDir,
    number: int,
    merged: list[Merged],
    written: dict[str, Path],
    replaced: set[str],
) -> None:
    """Make the folders that will be the tables, then the record.

    Args:
        written: merged parts in tmp/, by their final names.
        replaced: the stems of the parts that they replace.

    Raises: StoreError for a folder within a table; OSError without hard links; DiskFull.
    """
    for table in TABLES:
        new = [Path(name) for name in written if name.startswith(f"{table}/")]
        if not new:
            continue
        folder = _folder(run_dir, number, table)
        folder.mkdir(parents=True)
        gone = {Path(part_name(table, stem)).name for stem in replaced}
        for file in (run_dir.path / table).iterdir():
            if not file.is_file():
                raise StoreError(f"{file} is not a file. Move it away first")
            if file.name not in gone:
                os.link(file, folder / file.name)
        for path in new:
            os.rename(written[f"{table}/{path.name}"], folder / path.name)
        run_dir.storage.sync_path(folder)
    run_dir.storage.sync_path(run_dir.path / RETIRED / str(number))
    run_dir.storage.sync_path(run_dir.path / RETIRED)
    run_dir.crash("compact-2-staged")
    (run_dir.path / "compacted").mkdir(exist_ok=True)
    run_dir.storage.sync_path(run_dir.path)
    record = add_digest(msgspec.json.encode(Compaction(number=number, merged=merged)))
    for name in compaction_names(number):  # one is enough
        run_dir.storage.put(name, record)
    run_dir.crash("compact-3-recorded")


def drop_unrecorded(run_dir: RunDir, number: int) -> bool:
    """Remove the folders of a snapshot without a record. Returns whether it has none."""
    if any((run_dir.path / name).exists() for name in compaction_names(number)):
        return False
    shutil.rmtree(run_dir.path / RETIRED / str(number), ignore_errors=True)
    return True


OLD_FILES_S = 600.0
"""Time for which replaced files are kept."""


def complete_switches(run_dir: RunDir, *, grace_s: float = OLD_FILES_S) -> None:
    """Exchange every table that waits for it, drop what a kill left half made, and remove old files
    that are older than the grace period in seconds. May be killed and repeated."""
    _restore(run_dir)
    numbers = [n for n in run_dir.storage.names(RETIRED) if n.isdigit()]
    for number in sorted(map(int, numbers)):
        place = run_dir.path / RETIRED / str(number)
        if drop_unrecorded(run_dir, number):
            continue
        compaction = read_compaction(run_dir, number)
        merged, replaced = {one.stem for one in compaction.merged}, _replaced(run_dir, compaction)
        for table in TABLES:
            waits = _folder(run_dir, number, table)
            if waits.is_dir() and any(stem_of(p) in merged for p in waits.iterdir()):
                _link_others(run_dir, run_dir.path / table, waits, replaced)
                run_dir.crash("compact-4-due")
                exchange_tables(run_dir.storage.gated(waits), run_dir.path / table)
                run_dir.crash("compact-4-exchanged")
                run_dir.storage.sync_path(place)
                run_dir.storage.sync_path(run_dir.path)
            if waits.is_dir():
                _link_others(run_dir, waits, run_dir.path / table, replaced)
            for old in waits.glob("*.parquet"):  # recursive globs of some readers look here, too
                old.rename(f"{old}.old")
        run_dir.crash("compact-5-switched")
        if time.time() - place.stat().st_mtime >= grace_s:
            shutil.rmtree(place)
            run_dir.crash("compact-6-removed")
    _forget_superseded(run_dir)


def _replaced(run_dir: RunDir, compaction: Compaction) -> set[str]:
    """The stems of batches, and of merged parts, whose rows are in the parts of a snapshot."""
    number, merged = compaction.number, compaction.merged
    batches = {stem for one in merged for stem in one.of}
    # Earlier versions did not record the merged ones among these.
    older = [m for c in read_compactions(run_dir) if c.number < number for m in c.merged]
    found = batches | {one.stem for one in older if batches.issuperset(one.of)}
    return found.union(*(one.replaced for one in merged))


def _link_others(run_dir: RunDir, source: Path, target: Path, replaced: set[str]) -> None:
    """Link the files that a snapshot does not replace and that the other folder lacks: a writer
    that could not be fenced published them after the staging. Before the exchange, so that readers
    never miss them, and after it for the time between."""
    there = set(os.listdir(target))
    late = [f for f in source.glob("*.parquet") if f.name not in there]
    late = [f for f in late if stem_of(f) not in replaced]
    for file in late:
        os.link(file, target / file.name)
    if late:
        run_dir.storage.sync_path(target)


def _forget_superseded(run_dir: RunDir) -> None:
    """Remove the records of parts that were merged again."""
    stems = {stem_of(part) for table in TABLES for part in run_dir.parts(table)}
    for compaction in read_compactions(run_dir):
        retired = (run_dir.path / RETIRED / str(compaction.number)).exists()
        if retired or any(one.stem in stems for one in compaction.merged):
            continue
        newer = [c for c in read_compactions(run_dir) if c.number > compaction.number]
        known = {stem for c in newer for one in c.merged for stem in one.of}
        if known >= {stem for one in compaction.merged for stem in one.of}:
            for name in compaction_names(compaction.number):
                (run_dir.path / name).unlink(missing_ok=True)


def _folder(run_dir: RunDir, number: int, table: str) -> Path:
    return run_dir.path / RETIRED / str(number) / table


def exchange_tables(one: Path, other: Path) -> None:
    """Exchange two folders at once. Raises: StoreError where the file system cannot, or where the
    gate of this driver is closed."""
    try:
        exchange(one, other)
    except FileNotFoundError:
        if one.parent.is_dir():
            raise
        raise StoreError(f"{other.parent} was taken over by another driver") from None
    except OSError as error:
        raise StoreError(
            f"the file system of {other} cannot exchange two folders ({error.strerror}), which "
            "merging needs. Copy the run to a local disk and merge it there"
        ) from None
