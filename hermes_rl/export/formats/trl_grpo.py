"""TRL's GRPOTrainer: what a `rollout_func` returns, one row per segment.

`prompt` holds the messages that the task began with, by which a rollout_func finds its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hermes_rl.export.base import Format, Row
from hermes_rl.export.samples import opening
from hermes_rl.export.source import Source

_text = msgspec.json.Encoder().encode


def rows(source: Source) -> Iterator[Row]:
    """One row per segment; prompt and completion part where the first trained token stands."""
    for item in source.items():
        source.losses.trained += item.trained
        source.losses.lose("no_advantage", item.advantage is None)
        ids, start, logprobs = item.ids, item.start, item.logprobs(0.0)
        yield {
            "prompt": [_text(m).decode() for m in opening(item.row)],
            "prompt_ids": ids[:start],
            "completion_ids": ids[start:],
            "logprobs": None if logprobs is None else logprobs[start:],
            "env_mask": item.mask,
            "reward": item.reward,
            "advantage": item.advantage,
            "group_id": item.row["group_id"],
            "trajectory_id": item.row["trajectory_id"],
            "branch_index": item.segment["branch_index"],
        }


def schema(source: Source) -> Any:
    """The Arrow schema."""
    import pyarrow as pa

    ids = pa.list_(pa.field("element", pa.int32()))
    return pa.schema(
        [
            ("prompt", pa.list_(pa.field("element", pa.json_()))),
            ("prompt_ids", ids),
            ("completion_ids", ids),
            ("logprobs", pa.list_(pa.field("element", pa.float32()))),
            ("env_mask", pa.list_(pa.field("element", pa.int8()))),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("branch_index", pa.int32()),
        ]
    )


FORMAT = Format(
    name="trl-grpo",
    about="TRL GRPOTrainer: the fields that a rollout_func returns",
    suffix=".parquet",
    unit="tokens",
    rows=rows,
    schema=schema,
    rl=True,
    holds=frozenset({"rewards"}),
)
