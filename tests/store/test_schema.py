"""The Arrow schemas, and rows that do or do not fit them."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scripted_rows

from hermes_rl.errors import StoreError
from hermes_rl.record import Segment, Trajectory
from hermes_rl.store import (
    GRADES,
    GROUPS,
    SEGMENTS,
    TRAJECTORIES,
    VERSION_KEY,
    Grade,
    Group,
    PartWriter,
    empty_table,
    schema_of,
    to_arrow,
)


def test_columns_are_the_fields_of_the_structs() -> None:
    """That their types stay is shown by the check of a run of version 0.1.0."""
    for schema, struct in (
        (TRAJECTORIES, Trajectory), (SEGMENTS, Segment), (GROUPS, Group), (GRADES, Grade),
    ):  # fmt: skip
        assert schema.names == list(struct.__struct_fields__)


def test_json_columns() -> None:
    json_columns = [f.name for f in TRAJECTORIES if isinstance(f.type, pa.JsonType)]
    assert json_columns == ["tools", "sampling", "metadata"]
    assert TRAJECTORIES.field("messages").type.value_type == pa.json_()
    assert TRAJECTORIES.metadata[VERSION_KEY.encode()] == b"1"
    assert SEGMENTS.metadata[VERSION_KEY.encode()] == b"1"


def test_column_names_have_no_meaning_for_trainers() -> None:
    """Trainers guess the form of a data set from such names; ours follows from `messages`."""
    taken = {"prompt", "completion", "chosen", "rejected", "text", "images", "image", "label"}
    assert not taken & set(TRAJECTORIES.names)


@pytest.mark.parametrize("table", ["trajectories", "segments"])
def test_the_schema_does_not_depend_on_the_rows(tmp_path: Path, table: str) -> None:
    bare = scripted_rows.make_finished(0)
    full = scripted_rows.make_finished(5, cause="model_timeout")
    rows = {
        "trajectories": [msgspec.to_builtins(f.row) for f in (bare, full)],
        "segments": [msgspec.to_builtins(f.segments[0]) for f in (bare, full)],
    }[table]
    for number, row in enumerate(rows):
        writer = PartWriter(tmp_path / f"{number}.parquet", schema_of(table))
        writer.add(row, 100)
        writer.close()
    pq.write_table(empty_table(schema_of(table)), tmp_path / "none.parquet")
    schemas = {pq.read_schema(p) for p in tmp_path.iterdir()}
    assert schemas == {schema_of(table)}


def test_row_groups_stay_small(tmp_path: Path) -> None:
    row = msgspec.to_builtins(scripted_rows.make_row(1))
    row["final_response"] = "x" * 3_000_000
    writer = PartWriter(tmp_path / "p.parquet", TRAJECTORIES)
    for _ in range(50):
        writer.add(dict(row), 3_000_000)
    writer.close()
    groups = pq.ParquetFile(tmp_path / "p.parquet").metadata
    sizes = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
    assert groups.num_rows == 50
    assert groups.num_row_groups > 1
    assert pq.read_table(tmp_path / "p.parquet")["final_response"].to_pylist()[-1][:3] == "xxx"
    assert all(size <= 64 * 1024 * 1024 for size in sizes)


def test_a_value_that_does_not_fit_becomes_null_with_an_error() -> None:
    good, bad = (msgspec.to_builtins(scripted_rows.make_row(n)) for n in (1, 2))
    bad["usage"]["input_tokens"] = 10**30
    bad["row_index"] = 2**70
    rows = to_arrow([good, bad], TRAJECTORIES).to_pylist()
    assert rows[0]["row_index"] == 0
    assert rows[0]["error"] is None
    assert rows[1]["row_index"] is None
    assert rows[1]["usage"] is None
    assert rows[1]["error"] == "store: usage, row_index did not fit the column"
    assert rows[1]["unit_id"] == scripted_rows.unit_id(2)


def test_other_rows_keep_their_values_when_one_does_not_fit() -> None:
    """A metric may be a whole number that no float is equal to."""
    plain = dict.fromkeys(TRAJECTORIES.names)
    large = {**plain, "metrics": {"seen": 2**60 + 1, "half": 0.5}}
    strange = {**plain, "metrics": {}, "seed": 2**70}
    rows = to_arrow([large, strange], TRAJECTORIES).to_pylist()
    assert rows[0]["metrics"] == [
        {"name": "seen", "value": float(2**60)},
        {"name": "half", "value": 0.5},
    ]
    assert [row["seed"] for row in rows] == [None, None]
    assert [row["error"] for row in rows] == [None, "store: seed did not fit the column"]


def test_booleans_and_empty_images_fit() -> None:
    """As JSON has them: an environment's metrics may be truth values, an image may be empty."""
    image = [{"bytes": "", "path": "0.png"}]
    rows = [{"metrics": {"solved": True}, "error": None}, {"image_data": image, "error": None}]
    stored = to_arrow(rows, TRAJECTORIES).to_pylist()
    assert [row["error"] for row in stored] == [None, None]
    assert stored[0]["metrics"] == [{"name": "solved", "value": 1.0}]
    assert stored[1]["image_data"] == [{"bytes": b"", "path": "0.png"}]


def test_strict_writers_refuse_values_that_do_not_fit(tmp_path: Path) -> None:
    """As exports have none: a null would be a silent loss."""
    schema = pa.schema([("ids", pa.list_(pa.int32()))])
    writer = PartWriter(tmp_path / "x.parquet", schema, strict=True)
    writer.add({"ids": [1.5]}, 10)
    with pytest.raises(StoreError, match="does not fit its column: ids"):
        writer.close()
