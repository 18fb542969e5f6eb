"""Arrays built from buffers equal those of pyarrow's own conversion."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.store import (
    GRADES,
    GROUPS,
    SEGMENTS,
    TRAJECTORIES,
    array_of,
    storage_schema,
    table_of,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an Arrow type, None and absent fields among them."""
    if isinstance(kind, pa.JsonType) or kind == pa.string():
        return st.none() | TEXT
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries(
            {}, optional={f.name: values_of(f.type) for f in kind}
        )
    if pa.types.is_list(kind):
        return st.none() | st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_timestamp(kind) or pa.types.is_integer(kind):
        most = 2 ** (min(kind.bit_width, 62) - 1) - 1
        return st.none() | st.integers(-most - 1, most)
    width = 32 if kind == pa.float32() else 64
    simple = {pa.bool_(): st.booleans(), pa.binary(): st.binary(max_size=6)}
    return st.none() | simple.get(
        kind, st.floats(width=width, allow_nan=False) | st.integers(-9, 9)
    )


def fields() -> list[Any]:
    """All columns of all tables, one of each type."""
    every = [f for schema in (TRAJECTORIES, SEGMENTS, GROUPS, GRADES) for f in schema]
    return list({str(f.type): f for f in every}.values())


@pytest.mark.parametrize("field", fields(), ids=lambda f: f.name)
@settings(max_examples=30)
@given(data=st.data())
def test_arrays_equal_the_conversion_of_pyarrow(field: Any, data: st.DataObject) -> None:
    values = data.draw(st.lists(values_of(field.type), max_size=10))
    schema = pa.schema([field])
    rows = [{field.name: value} for value in values]
    made = table_of(rows, schema)
    made.validate(full=True)
    assert made.equals(pa.Table.from_pylist(rows, schema=storage_schema(schema)).cast(schema))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, pa.string()),
        ("ab", pa.list_(pa.string())),
        ([], pa.struct([("a", pa.int32())])),
        (1.0, pa.int64()),
        (True, pa.int64()),
        (2**31, pa.int32()),
        (2**63, pa.int64()),
        (10**400, pa.float64()),
        ("\ud800", pa.string()),
        (1, pa.date32()),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused(value: Any, kind: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        array_of([None, value], kind)
