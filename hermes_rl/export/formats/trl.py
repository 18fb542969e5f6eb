"""TRL: `trl` (SFTTrainer, conversations), `trl-tokens` (SFTTrainer) and `trl-grpo` (GRPOTrainer).

TRL has no mark for a single assistant message, so a sample is one prompt with one completion in
which every assistant message is to be trained on (`samples.pieces`). `assistant_only_loss=True`
keeps tool results out of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.export.base import IDS, JSON_LIST, Format, Row
from hermes_rl.export.samples import encode_json, in_words, opening, pieces
from hermes_rl.export.source import Source


def _conversations(source: Source) -> Iterator[Row]:
    """One row per piece of a context."""
    for sample in source.samples_without_tail():
        tools = encode_json(sample.row["tools"])
        for piece in pieces(sample):
            source.losses.trained += piece.trained
            yield {
                "prompt": [encode_json(in_words(m)) for m in piece.prompt],
                "completion": [encode_json(in_words(m)) for m in piece.completion],
                "tools": tools,
                "reward": sample.row["reward"],
                "trajectory_id": sample.row["trajectory_id"],
                "context": sample.context,
            }


def _tokens(source: Source) -> Iterator[Row]:
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


def _grpo(source: Source) -> Iterator[Row]:
    """One row per segment; the completion begins with the first trained token.

    `prompt` holds the messages of the task, by which a rollout_func finds its rows.
    """
    for item in source.items():
        source.losses.trained += item.trained
        source.losses.lose("no_advantage", item.advantage is None)
        ids, start, logprobs = item.ids, item.start, item.logprobs(0.0)
        yield {
            "prompt": [encode_json(m) for m in opening(item.row)],
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


CONVERSATIONS = Format(
    name="trl",
    about="TRL SFTTrainer, conversations: SFTConfig(assistant_only_loss=True)",
    suffix=".parquet",
    unit="messages",
    rows=_conversations,
    columns={
        "prompt": JSON_LIST,
        "completion": JSON_LIST,
        "tools": "json",
        "reward": "float64",
        "trajectory_id": "string",
        "context": "int32",
    },
    holds=frozenset({"reasoning", "rewards"}),
)

TOKENS = Format(
    name="trl-tokens",
    about="TRL SFTTrainer, exact tokens: input_ids, and labels that are -100 where nothing is"
    " learnt (set max_length, or it cuts)",
    suffix=".parquet",
    unit="tokens",
    rows=_tokens,
    columns={
        "input_ids": IDS,
        "labels": IDS,
        "reward": "float64",
        "trajectory_id": "string",
        "branch_index": "int32",
    },
    holds=frozenset({"rewards"}),
)

GRPO = Format(
    name="trl-grpo",
    about="TRL GRPOTrainer: the fields that a rollout_func returns",
    suffix=".parquet",
    unit="tokens",
    rows=_grpo,
    columns={
        "prompt": JSON_LIST,
        "prompt_ids": IDS,
        "completion_ids": IDS,
        "logprobs": ["float32"],
        "env_mask": ["int8"],
        "reward": "float64",
        "advantage": "float64",
        "group_id": "string",
        "trajectory_id": "string",
        "branch_index": "int32",
    },
    rl=True,
    holds=frozenset({"rewards"}),
)
