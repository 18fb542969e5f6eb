"""Moves a row that must not be final from `trajectories` to `failures`.

The one case in which published parts are written anew. The order (segments, failures, trajectories,
commit) lets it be killed and repeated: until the commit is rewritten the unit still counts as done
twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.errors import CAUSES, end_reason_of
from hermes_rl.events import AttemptKey
from hermes_rl.identity import trajectory_id
from hermes_rl.store.commit import Commit, Keys, Part, read_commit, write_commit
from hermes_rl.store.disk import disk_errors
from hermes_rl.store.parts import file_sha256
from hermes_rl.store.rundir import RunDir, part_name
from hermes_rl.store.schema import schema_of, storage_schema
from hermes_rl.store.summary import Summary

CAUSE = "duplicate"


def move_to_failures(run_dir: RunDir, stem: str, key: AttemptKey) -> None:
    """Take one attempt's row out of `trajectories`. Blocking. Raises: DiskFull."""
    finals, failures = _rows(run_dir, "trajectories", stem), _rows(run_dir, "failures", stem)
    mine = [r for r in finals if (r["unit_id"], r["attempt"]) == (key.unit_id, key.attempt)]
    known = {r["trajectory_id"] for r in failures}
    failures += [_duplicate(r) for r in mine if r["trajectory_id"] not in known]
    finals = [r for r in finals if r not in mine]
    own = trajectory_id(key.unit_id, key.epoch, key.attempt)
    segments = [
        _untrained(s) if s["trajectory_id"] == own else s for s in _rows(run_dir, "segments", stem)
    ]
    tables = {"segments": segments, "failures": failures, "trajectories": finals}
    parts = [part for name, rows in tables.items() if (part := _rewrite(run_dir, name, stem, rows))]
    before = read_commit(run_dir, stem)
    summary = Summary()
    for table, rows in (("failures", failures), ("trajectories", finals)):
        for row in rows:
            metrics = {m["name"]: m["value"] for m in row["metrics"]}
            summary.add({**row, "metrics": metrics}, table)
    for segment in segments:
        summary.add_segment(segment)
    others = [p for p in before.parts if p.table not in tables]
    after = msgspec.structs.replace(
        before, keys=_moved(before, key), parts=others + parts, summary=summary
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


def _untrained(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment of a row that is a failure now."""
    return {**segment, "reward": None, "trainable": False, "exclude_reason": "failed"}


def _moved(commit: Commit, key: AttemptKey) -> Keys:
    keys = commit.keys
    names = [*keys.names]
    for name in (end_reason_of(CAUSE), CAUSE):
        if name not in names:
            names.append(name)
    wanted = (key.unit_id, key.epoch, key.attempt)
    every = zip(keys.unit_id, keys.epoch, keys.attempt, strict=True)
    mine = [found == wanted for found in every]

    def changed(old: list[int], name: str) -> list[int]:
        return [names.index(name) if m else o for m, o in zip(mine, old, strict=True)]

    return msgspec.structs.replace(
        keys,
        table="".join("f" if m else t for m, t in zip(mine, keys.table, strict=True)),
        end=changed(keys.end, end_reason_of(CAUSE)),
        cause=changed(keys.cause, CAUSE),
        names=names,
    )


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
    part = _part(table, len(rows), local)
    run_dir.storage.put_file(part_name(table, stem), local)
    return part


def _part(table: str, rows: int, path: Path) -> Part:
    return Part(table=table, rows=rows, size=path.stat().st_size, sha256=file_sha256(path))
