"""TRL's SFTTrainer, tokens: `input_ids` and `labels`, which it takes as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.export.base import Format, Row
from hermes_rl.export.source import Source


def rows(source: Source) -> Iterator[Row]:
    """One row per segment."""
    for item in source.items():
        source.losses.trained += item.trained
        yield {
            "input_ids": item.ids,
            "labels": item.labels,
            "reward": item.reward,
            "trajectory_id": item.segment["trajectory_id"],
            "branch_index": item.segment["branch_index"],
        }


def schema(source: Source) -> Any:
    """The Arrow schema."""
    import pyarrow as pa

    ids = pa.list_(pa.field("element", pa.int32()))
    return pa.schema(
        [
            ("input_ids", ids),
            ("labels", ids),
            ("reward", pa.float64()),
            ("trajectory_id", pa.string()),
            ("branch_index", pa.int32()),
        ]
    )


FORMAT = Format(
    name="trl-tokens",
    about="TRL SFTTrainer, exact tokens: input_ids, and labels that are -100 where nothing is"
    " learnt (set max_length, or it cuts)",
    suffix=".parquet",
    unit="tokens",
    rows=rows,
    schema=schema,
    holds=frozenset({"rewards"}),
)
