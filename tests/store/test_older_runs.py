"""Runs whose files were written before a column was added are read, and found to be whole."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scripted_rows

from hermes_rl.cli import faults_of
from hermes_rl.store import LATER, load_run, open_run, schema_of, to_arrow


def faults(run_path: Path) -> list[str]:
    return [line for line in faults_of(run_path) if "belongs to no commit" not in line]


@pytest.mark.parametrize("table", LATER)
async def test_a_part_without_a_later_column(run_path: Path, table: str) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG):
        pass
    rows = [{"group_id": name, "created_at": 1} for name in ("one", "two")]
    new = to_arrow(rows[1:], schema_of(table))
    old = to_arrow(rows[:1], schema_of(table)).drop_columns(list(LATER[table]))
    parts = [run_path / table / f"part-1-driver-{n}.parquet" for n in (0, 1)]
    for part, content in zip(parts, (old, new), strict=True):
        pq.write_table(content, part)
    assert faults(run_path) == []
    assert load_run(run_path).frame(table)["group_id"].tolist() == ["one", "two"]
    pq.write_table(old.drop_columns(["created_at"]), parts[0])
    assert faults(run_path) == [f"{parts[0]}: does not have the declared schema of {table}"]
    pq.write_table(old.append_column("own", pa.array(["x"])), parts[0])
    assert len(faults(run_path)) == 1
