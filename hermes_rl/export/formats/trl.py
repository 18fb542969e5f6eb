"""TRL's SFTTrainer, conversations: columns `prompt`, `completion` and `tools`.

TRL has no mark for a single assistant message, so a sample is one prompt with one completion in
which every assistant message is to be trained on (`samples.pieces`). `assistant_only_loss=True`
keeps tool results out of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hermes_rl.export.base import Format, Row
from hermes_rl.export.losses import count_sample
from hermes_rl.export.samples import in_words, pieces, without_tail
from hermes_rl.export.source import Source

_text = msgspec.json.Encoder().encode


def rows(source: Source) -> Iterator[Row]:
    """One row per piece of a context."""
    for whole in source.samples():
        sample = without_tail(whole)
        source.losses.lose("tail", len(whole.messages) - len(sample.messages))
        count_sample(source.losses, sample)
        tools = _text(sample.row["tools"]).decode()
        for piece in pieces(sample):
            source.losses.trained += piece.trained
            yield {
                "prompt": [_text(in_words(m)).decode() for m in piece.prompt],
                "completion": [_text(in_words(m)).decode() for m in piece.completion],
                "tools": tools,
                "reward": sample.row["reward"],
                "trajectory_id": sample.row["trajectory_id"],
                "context": sample.context,
            }


def schema(source: Source) -> Any:
    """Messages and tools as Parquet JSON, which `datasets` 4.7 and newer decodes."""
    import pyarrow as pa

    messages = pa.list_(pa.field("element", pa.json_()))
    return pa.schema(
        [
            ("prompt", messages),
            ("completion", messages),
            ("tools", pa.json_()),
            ("reward", pa.float64()),
            ("trajectory_id", pa.string()),
            ("context", pa.int32()),
        ]
    )


FORMAT = Format(
    name="trl",
    about="TRL SFTTrainer, conversations: SFTConfig(assistant_only_loss=True)",
    suffix=".parquet",
    unit="messages",
    rows=rows,
    schema=schema,
    holds=frozenset({"reasoning", "rewards"}),
)
