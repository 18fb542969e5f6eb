"""Axolotl: `axolotl` (`type: chat_template`) and `axolotl-tokens` (already tokenized)."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.export.base import IDS, JSON_LIST, Format, Row
from hermes_rl.export.samples import encode_json, in_words
from hermes_rl.export.source import Source


def _conversations(source: Source) -> Iterator[Row]:
    """One row per context; each message has its own `training` mark."""
    for sample in source.samples_without_tail():
        marked = zip(sample.messages, sample.trained, strict=True)
        source.losses.trained += sum(sample.trained)
        yield {
            "messages": [encode_json({**in_words(m), "training": t}) for m, t in marked],
            "tools": encode_json(sample.row["tools"]),
            "reward": sample.row["reward"],
            "trajectory_id": sample.row["trajectory_id"],
            "context": sample.context,
        }


def _tokens(source: Source) -> Iterator[Row]:
    """One row per segment, with the three columns by which Axolotl skips tokenization."""
    for item in source.items():
        source.losses.trained += item.trained
        ids = item.ids
        yield {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": item.labels}


CONVERSATIONS = Format(
    name="axolotl",
    about="Axolotl `type: chat_template` with `message_field_training: training`",
    suffix=".parquet",
    unit="messages",
    rows=_conversations,
    columns={
        "messages": JSON_LIST,
        "tools": "json",
        "reward": "float64",
        "trajectory_id": "string",
        "context": "int32",
    },
    holds=frozenset({"reasoning", "rewards"}),
)

TOKENS = Format(
    name="axolotl-tokens",
    about="Axolotl, exact tokens: a dataset without `type`",
    suffix=".parquet",
    unit="tokens",
    rows=_tokens,
    columns={"input_ids": IDS, "attention_mask": ["int8"], "labels": IDS},
)
