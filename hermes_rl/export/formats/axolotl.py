"""Axolotl's `type: chat_template`: messages, each with its own `training` mark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hermes_rl.export.base import Format, Row
from hermes_rl.export.losses import count_sample
from hermes_rl.export.samples import in_words, without_tail
from hermes_rl.export.source import Source

_text = msgspec.json.Encoder().encode


def rows(source: Source) -> Iterator[Row]:
    """One row per context."""
    for whole in source.samples():
        sample = without_tail(whole)
        source.losses.lose("tail", len(whole.messages) - len(sample.messages))
        count_sample(source.losses, sample)
        pairs = zip(sample.messages, sample.trained, strict=True)
        messages = [_text({**in_words(m), "training": trained}).decode() for m, trained in pairs]
        source.losses.trained += sum(sample.trained)
        yield {
            "messages": messages,
            "tools": _text(sample.row["tools"]).decode(),
            "reward": sample.row["reward"],
            "trajectory_id": sample.row["trajectory_id"],
            "context": sample.context,
        }


def schema(source: Source) -> Any:
    """Messages and tools as Parquet JSON, which `datasets` 4.7 and newer decodes."""
    import pyarrow as pa

    return pa.schema(
        [
            ("messages", pa.list_(pa.field("element", pa.json_()))),
            ("tools", pa.json_()),
            ("reward", pa.float64()),
            ("trajectory_id", pa.string()),
            ("context", pa.int32()),
        ]
    )


FORMAT = Format(
    name="axolotl",
    about="Axolotl `type: chat_template` with `message_field_training: training`",
    suffix=".parquet",
    unit="messages",
    rows=rows,
    schema=schema,
    holds=frozenset({"reasoning", "rewards"}),
)
