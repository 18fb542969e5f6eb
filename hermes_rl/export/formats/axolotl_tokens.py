"""Axolotl, tokens: the three columns by which it knows that nothing is left to tokenise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.export.base import Format, Row
from hermes_rl.export.source import Source


def rows(source: Source) -> Iterator[Row]:
    """One row per segment."""
    for item in source.items():
        source.losses.trained += item.trained
        ids = item.ids
        yield {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": item.labels}


def schema(source: Source) -> Any:
    """The Arrow schema."""
    import pyarrow as pa

    ids = pa.list_(pa.field("element", pa.int32()))
    mask = pa.list_(pa.field("element", pa.int8()))
    return pa.schema([("input_ids", ids), ("attention_mask", mask), ("labels", ids)])


FORMAT = Format(
    name="axolotl-tokens",
    about="Axolotl, exact tokens: a dataset without `type`",
    suffix=".parquet",
    unit="tokens",
    rows=rows,
    schema=schema,
)
