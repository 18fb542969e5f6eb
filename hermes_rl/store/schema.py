"""The Arrow schemas of all tables, derived from the structs that declare their columns.

Free-form JSON has the Arrow type `arrow.json`: Parquet's JSON, plain text to readers that do not
know it. `metrics` is a list of pairs and not an Arrow map: Hugging Face `datasets` reads no maps.
"""

from __future__ import annotations

from typing import Any

import msgspec
import msgspec.inspect as mi
import pyarrow as pa

from hermes_rl.record import Segment, Trajectory
from hermes_rl.store.rows import Delivery, Grade, Group, Metric
from hermes_rl.store.rundir import SCHEMA_VERSION

VERSION_KEY = "hermes_rl.schema_version"
"""Key in the metadata of every Parquet file."""

LATER = {"groups": ("reward_parts", "reward_metrics")}
"""Columns that were added later; parts of older runs lack them and are read with nulls."""

_ANNOTATED = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "json": pa.json_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Arrow types of the annotations in `record`."""
_PLAIN: dict[type, Any] = {
    mi.StrType: pa.string(),
    mi.BoolType: pa.bool_(),
    mi.BytesType: pa.binary(),
    mi.IntType: pa.int32(),
    mi.FloatType: pa.float64(),
}


def _arrow_type(kind: mi.Type) -> Any:
    """The Arrow type of a field; every column may hold nulls."""
    match kind:
        case mi.Metadata():
            return _ANNOTATED[(kind.extra or {})["arrow"]]
        case mi.UnionType():
            return _arrow_type(next(t for t in kind.types if not isinstance(t, mi.NoneType)))
        case mi.ListType():
            return pa.list_(pa.field("element", _arrow_type(kind.item_type)))
        case mi.DictType():
            return pa.list_(pa.field("element", pa.struct(_fields_of(Metric))))
        case mi.StructType():
            return pa.struct(_fields_of(kind.cls))
    return _PLAIN[type(kind)]


def _fields_of(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    info = mi.type_info(struct)
    assert isinstance(info, mi.StructType)
    return [(field.name, _arrow_type(field.type)) for field in info.fields]


def _schema(struct: type[msgspec.Struct]) -> Any:
    return pa.schema(_fields_of(struct), metadata={VERSION_KEY: str(SCHEMA_VERSION)})


TRAJECTORIES = _schema(Trajectory)
SEGMENTS = _schema(Segment)
GROUPS = _schema(Group)
GRADES = _schema(Grade)
DELIVERIES = _schema(Delivery)

_OTHERS = {"segments": SEGMENTS, "groups": GROUPS, "grades": GRADES, "deliveries": DELIVERIES}


def schema_of(table: str) -> Any:
    """The declared schema of a table."""
    return _OTHERS.get(table, TRAJECTORIES)


def storage_type(kind: Any) -> Any:
    """An Arrow type with `arrow.json` replaced by text: pyarrow builds such arrays from Python."""
    if isinstance(kind, pa.JsonType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(storage_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(storage_type(f.type)) for f in kind])
    return kind


def storage_schema(schema: Any) -> Any:
    """A schema with all `arrow.json` replaced by text."""
    fields = [f.with_type(storage_type(f.type)) for f in schema]
    return pa.schema(fields, metadata=schema.metadata)


def empty_table(schema: Any) -> Any:
    """A table of a schema without rows (pyarrow's own cannot make `arrow.json` columns)."""
    return storage_schema(schema).empty_table().cast(schema)
