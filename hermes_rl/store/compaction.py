"""Merges the parts of small batches into large ones; see `snapshots` for the switch.

Merged parts are written while batches are committed. Only the switch needs the tables unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import StoreError
from hermes_rl.store.commit import part_fault, read_commit
from hermes_rl.store.files import add_digest, file_sha256
from hermes_rl.store.rundir import COMPACTED_VERSION, RETIRED, TABLES, RunDir, order_of, stem_of
from hermes_rl.store.snapshots import (
    OLD_FILES_S,
    Merged,
    Part,
    complete_switches,
    drop_unrecorded,
    exchange_tables,
    first_merge_of,
    read_compactions,
    stage,
)

SMALL = 128 * 1024 * 1024
"""Batches of fewer bytes of Parquet, over all tables, are merged."""

TARGET = 256 * 1024 * 1024
"""Bytes of small batches that make a merged one."""


@dataclass(frozen=True)
class Compacted:
    """What was merged."""

    before: int
    """Files of all tables."""
    after: int
    size: int
    """Bytes of Parquet after it."""


def merge_batches(
    run_dir: RunDir,
    *,
    grace_s: float = OLD_FILES_S,
    small: int = SMALL,
    target: int = TARGET,
) -> Compacted:
    """Merge small batches. The caller holds LOCK, and nothing commits meanwhile.

    Arguments and errors: as `repair.compact_run`.
    """
    before = _count(run_dir)
    complete_switches(run_dir, grace_s=grace_s)
    merge = write_merged(run_dir, small=small, target=target)
    if merge is not None:
        switch_tables(run_dir, merge, grace_s=grace_s)
    return Compacted(before, _count(run_dir), sum(_sizes(run_dir).values()))


@dataclass(frozen=True)
class Merge:
    """Merged parts that wait in tmp/ for the switch."""

    number: int
    merged: list[Merged]
    written: dict[str, Path]
    """Final name -> file."""
    replaced: set[str]
    """The stems of the parts that they replace."""

    def remove(self) -> None:
        """Remove the files that no switch has moved."""
        for path in self.written.values():
            path.unlink(missing_ok=True)


class _Ended(Exception):
    """The merge shall end."""


def write_merged(
    run_dir: RunDir,
    *,
    small: int = SMALL,
    target: int = TARGET,
    most: int | None = None,
    ends: Callable[[], bool] = lambda: False,
) -> Merge | None:
    """Write the merged parts of small batches to tmp/. The caller holds LOCK; batches may be
    committed meanwhile. Blocking.

    Args:
        small, target: as `repair.compact_run`.
        most: merged batches; None for all.
        ends: whether the merge shall end without a result.

    Returns None when there is nothing to merge. Errors: as `repair.compact_run`.
    """
    older = {one.stem: one for c in read_compactions(run_dir) for one in c.merged}
    committed = {*run_dir.commit_stems(), *older}
    sizes = {stem: size for stem, size in _sizes(run_dir).items() if stem in committed}
    groups = _groups(sizes, small, target)[:most]
    if not groups:
        return None
    _try_exchange(run_dir)
    _mark(run_dir)
    used = [c.number for c in read_compactions(run_dir)]
    used += [int(n) for n in run_dir.storage.names(RETIRED) if n.isdigit()]
    # By epoch: no other driver ever makes parts of the same names, see `mirror`.
    number = max([*used, first_merge_of(run_dir.last_epoch()) - 1]) + 1
    merge = Merge(number, [], {}, {stem for group in groups for stem in group})
    try:
        for group in groups:
            stem = f"{_without_number(group[-1])}.{number}"
            of = [s for one in group for s in (older[one].of if one in older else [one])]
            parts = list(_merge_tables(run_dir, group, stem, older, merge.written, ends))
            gone = [*group, *(s for one in group if one in older for s in older[one].replaced)]
            merge.merged.append(Merged(stem=stem, of=of, parts=parts, replaced=gone))
        run_dir.crash("compact-1-written")
    except _Ended:
        merge.remove()
        return None
    except BaseException:
        merge.remove()
        raise
    return merge


def switch_tables(run_dir: RunDir, merge: Merge, *, grace_s: float = OLD_FILES_S) -> None:
    """Replace the small parts in the tables. The caller holds LOCK, and nothing commits meanwhile;
    parts that were committed since stay. Blocking.

    Arguments and errors: as `repair.compact_run`.
    """
    try:
        stage(run_dir, merge.number, merge.merged, merge.written, merge.replaced)
    except BaseException:
        drop_unrecorded(run_dir, merge.number)  # recursive globs would find its files
        raise
    finally:
        merge.remove()
    complete_switches(run_dir, grace_s=grace_s)


def _count(run_dir: RunDir) -> int:
    return sum(len(run_dir.parts(table)) for table in TABLES)


def _sizes(run_dir: RunDir) -> dict[str, int]:
    """Stem of a batch or merged batch -> bytes over all tables, in the order of writing."""
    sizes: dict[str, int] = {}
    for table in TABLES:
        for part in run_dir.parts(table):
            sizes[stem_of(part)] = sizes.get(stem_of(part), 0) + part.stat().st_size
    return {stem: sizes[stem] for stem in sorted(sizes, key=order_of)}


def _groups(sizes: Mapping[str, int], small: int, target: int) -> list[list[str]]:
    """Neighbours that are merged, so that the order of rows stays."""
    groups: list[list[str]] = [[]]
    total = 0
    for stem, size in sizes.items():
        if total >= target or size >= small:
            groups.append([])
            total = 0
        if size < small:
            groups[-1].append(stem)
            total += size
    return [group for group in groups if len(group) > 1]


def _without_number(stem: str) -> str:
    head, _, sequence = stem.rpartition("-")
    return f"{head}-{sequence.partition('.')[0]}"


def _try_exchange(run_dir: RunDir) -> None:
    """Raises: StoreError before any work when the switch would fail."""
    folders = [run_dir.path / "tmp" / f"exchange-{n}" for n in (1, 2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    try:
        exchange_tables(*folders)
    finally:
        for folder in folders:
            folder.rmdir()


def _mark(run_dir: RunDir) -> None:
    """Keep versions out that do not know merged parts."""
    epoch = run_dir.epoch(run_dir.epochs()[-1])
    marked = msgspec.structs.replace(epoch, schema_version=COMPACTED_VERSION)
    if marked != epoch:
        data = add_digest(msgspec.json.encode(marked))
        run_dir.storage.put(f"epochs/{epoch.epoch}.json", data)


def _merge_tables(
    run_dir: RunDir,
    group: Sequence[str],
    stem: str,
    older: Mapping[str, Merged],
    written: dict[str, Path],
    ends: Callable[[], bool],
) -> Iterator[Part]:
    """Write the merged parts of a group to tmp/, one for each table that has rows."""
    records = [older.get(one) or read_commit(run_dir, one) for one in group]
    known = {(record.stem, part.table): part for record in records for part in record.parts}
    for table in TABLES:
        paths = [run_dir.part_path(table, one) for one in group]
        sources = [(p, known.get((one, table))) for p, one in zip(paths, group, strict=True)]
        for path, part in sources:
            if part is None and path.exists():
                raise StoreError(f"{path} is not in the commit of its batch. Move it away first")
            if part is not None and (
                fault := part_fault(run_dir, stem_of(path), part, content=True)
            ):
                raise StoreError(
                    f"{path} {fault}. Nothing was merged; see `hermes-rl check {run_dir.path}`"
                )
        parts = [(path, part) for path, part in sources if part is not None]
        if parts:
            name = f"{table}/part-{stem}.parquet"
            written[name] = local = run_dir.storage.temporary(name)
            rows = _write(table, [path for path, _ in parts], local, ends)
            if rows != sum(part.rows for _, part in parts):
                raise StoreError(
                    f"{run_dir.path}: {table} of {stem} lacks rows; nothing was merged"
                )
            run_dir.storage.sync_path(local)
            size = local.stat().st_size
            yield Part(table=table, rows=rows, size=size, sha256=file_sha256(local))


def _write(table: str, parts: Sequence[Path], local: Path, ends: Callable[[], bool]) -> int:
    """Write the rows of some parts to one file, in row groups of `ROW_GROUP_BYTES`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hermes_rl.store.parts import ROW_GROUP_BYTES
    from hermes_rl.store.schema import schema_of

    schema, rows, held = schema_of(table), 0, 0
    waiting: list[Any] = []
    with pq.ParquetWriter(local, schema, compression="zstd", compression_level=3) as writer:

        def flush() -> None:
            if waiting:
                whole = pa.concat_tables(waiting)
                writer.write_table(whole, row_group_size=whole.num_rows)
                waiting.clear()

        for found in _row_groups(parts):
            if ends():
                raise _Ended
            # Parts of an older version lack columns that came later.
            columns = [
                found[f.name] if f.name in found.column_names else pa.nulls(found.num_rows, f.type)
                for f in schema
            ]
            if held + found.nbytes > ROW_GROUP_BYTES:
                flush()
                held = 0
            waiting.append(pa.Table.from_arrays(columns, schema=schema))
            held += found.nbytes
            rows += found.num_rows
        flush()
    return rows


def _row_groups(parts: Sequence[Path]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for part in parts:
        with pq.ParquetFile(part) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number)
