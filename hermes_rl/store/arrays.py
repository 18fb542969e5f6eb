"""Arrow arrays from plain values, made from buffers.

pyarrow's own conversion of Python objects imports pandas first: 0.2 s of CPU and 30 MB in every
worker. This one takes about as long per value and knows only what our schemas hold. It is strict:
whatever it does not know, or does not fit, is refused, and the caller takes pyarrow's way. In one
thing it takes more than that: a whole number in a column of floats becomes the nearest one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

_NUMBERS = {"int32": "i", "int64": "q", "timestamp[us, tz=UTC]": "q", "float": "f", "double": "d"}
"""Type codes of `array`, by the name of the Arrow type."""


def table_of(rows: Sequence[dict[str, Any]], schema: Any) -> Any:
    """A table of a schema from its rows; what a row lacks is null.

    Raises: TypeError, ValueError or OverflowError for what does not fit a column.
    """
    return pa.Table.from_arrays(_fields_of(rows, schema), schema=schema)


def array_of(values: Sequence[Any], kind: Any) -> Any:
    """One array. Times are microseconds since 1970. Raises: as `table_of`."""
    if isinstance(kind, pa.JsonType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pa.types.is_struct(kind):
        _only(values, dict)
        there: list[dict[str, Any]] = [{} if v is None else v for v in values]
        return _made(kind, values, [], _fields_of(there, kind))
    if pa.types.is_list(kind):
        _only(values, list, tuple)
        children = [array_of([*chain.from_iterable(v for v in values if v)], kind.value_type)]
        return _made(kind, values, [_offsets(values)], children)
    return _made(kind, values, _content(values, kind))


def _fields_of(rows: Sequence[dict[str, Any]], fields: Any) -> list[Any]:
    """One array for each field."""
    named = [(field.name, field.type) for field in fields]
    return [array_of([row.get(name) for row in rows], kind) for name, kind in named]


def _content(values: Sequence[Any], kind: Any) -> list[Any]:
    """The buffers of a type without children, its validity left out."""
    if kind == pa.string():
        _only(values, str)
        texts = [b"" if v is None else v.encode() for v in values]
        return [_offsets(texts), pa.py_buffer(b"".join(texts))]
    if kind == pa.binary():
        _only(values, bytes)
        return [_offsets(values), pa.py_buffer(b"".join(v for v in values if v))]
    if kind == pa.bool_():
        _only(values, bool)
        return [_bits(values)]
    code = _NUMBERS.get(str(kind))
    if code is None:
        raise TypeError(f"no way to make an array of {kind}")
    _only(values, *((int, float) if code in "fd" else (int,)))
    return [pa.py_buffer(array(code, [0 if v is None else v for v in values]))]


def _made(
    kind: Any, values: Sequence[Any], buffers: list[Any], children: list[Any] | None = None
) -> Any:
    validity = _bits([v is not None for v in values]) if None in values else None
    return pa.Array.from_buffers(kind, len(values), [validity, *buffers], children=children)


def _only(values: Sequence[Any], *kinds: type) -> None:
    """Raises: TypeError for a value of another type, None apart."""
    strange = {*map(type, values)} - {*kinds, type(None)}
    if strange:
        raise TypeError(f"{strange.pop().__name__} where {kinds[0].__name__} belongs")


def _offsets(values: Sequence[Any]) -> Any:
    """Where each value begins and the last one ends."""
    lengths = (len(v) if v else 0 for v in values)
    return pa.py_buffer(array("i", accumulate(lengths, initial=0)))


def _bits(values: Sequence[Any]) -> Any:
    """One bit a value, the first one lowest."""
    digits = "".join(["1" if v else "0" for v in reversed(values)])
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(values) + 7) // 8, "little"))
