"""Axolotl and TRL, and the columns of token segments that verl shares.

TRL has no mark for a single assistant message, so its samples are prompts with completions in which
every assistant message is to be trained on (`samples.pieces`); `assistant_only_loss=True` keeps
tool results out of the loss. Axolotl's messages have a `training` mark each, and its token rows the
three columns by which it skips tokenization. In rows for RL, the completion (or response) begins
with the first trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hermes_rl.export.samples import Sample, encode_json, opening, pieces, with_text_content
from hermes_rl.export.source import IDS, JSON_LIST, Format, Row, Source
from hermes_rl.export.tokens import TokenItem

Column = tuple[Any, Callable[[TokenItem], Any]]
"""Type (see `source.Columns`) and value of a column."""

_COMPLETION_IDS: Column = (IDS, lambda item: item.ids[item.start :])
_LOGPROBS: Column = (
    ["float32"],
    lambda item: None if (known := item.logprobs(0.0)) is None else known[item.start :],
)
_MASK: Column = (["int8"], lambda item: item.mask)
_REWARD: Column = ("float64", lambda item: item.reward)
_GROUP: Column = ("string", lambda item: item.row["group_id"])

_SEGMENTS: dict[str, Column] = {
    "input_ids": (IDS, lambda item: item.ids),
    "attention_mask": (["int8"], lambda item: [1] * len(item.ids)),
    "labels": (IDS, lambda item: item.labels),
    "data_source": ("string", lambda item: item.row["env_name"] or "hermes_rl"),
    "prompt": (JSON_LIST, lambda item: [encode_json(m) for m in opening(item.row)]),
    "prompt_ids": (IDS, lambda item: item.ids[: item.start]),
    "completion_ids": _COMPLETION_IDS,
    "response_ids": _COMPLETION_IDS,
    "env_mask": _MASK,
    "response_mask": _MASK,
    "logprobs": _LOGPROBS,
    "response_logprobs": _LOGPROBS,
    "reward": _REWARD,
    "reward_score": _REWARD,
    "advantage": ("float64", lambda item: item.advantage),
    "group_id": _GROUP,
    "uid": _GROUP,
    "trajectory_id": ("string", lambda item: item.row["trajectory_id"]),
    "branch_index": ("int32", lambda item: item.segment["branch_index"]),
    "turn_rewards": (["float64"], lambda item: item.turn_rewards),
    "policy_version_min": ("string", lambda item: item.segment["policy_version_min"]),
    "policy_version_max": ("string", lambda item: item.segment["policy_version_max"]),
}


def segment_columns(*names: str, more: Mapping[str, Column] | None = None) -> dict[str, Column]:
    """Select columns by name, in this order. Args: more: columns of only one format."""
    known = {**_SEGMENTS, **(more or {})}
    return {name: known[name] for name in names}


def segment_rows(source: Source, columns: Mapping[str, Column]) -> Iterator[tuple[TokenItem, Row]]:
    """Yield the segments with their rows."""
    for items in source.token_rollouts():
        for item in items:
            yield item, {name: value(item) for name, (_, value) in columns.items()}


def types_of(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the types of columns."""
    return {name: kind for name, (kind, _) in columns.items()}


def _tokens(name: str, about: str, *names: str, **more: Any) -> Format:
    columns = segment_columns(*names)
    return Format(
        name=name,
        about=about,
        suffix=".parquet",
        unit="tokens",
        rows=lambda source: (row for _, row in segment_rows(source, columns)),
        columns=types_of(columns),
        **more,
    )


_OF_SAMPLE = {
    "tools": "json",
    "reward": "float64",
    "trajectory_id": "string",
    "context": "int32",
}


def _of_sample(sample: Sample) -> Row:
    return {
        "tools": encode_json(sample.row["tools"]),
        "reward": sample.row["reward"],
        "trajectory_id": sample.row["trajectory_id"],
        "context": sample.context,
    }


def _marked(source: Source) -> Iterator[Row]:
    for sample in source.samples_without_tail():
        marked = zip(sample.messages, sample.trained, strict=True)
        messages = [encode_json({**with_text_content(m), "training": t}) for m, t in marked]
        yield {"messages": messages, **_of_sample(sample)}


def _pieces(source: Source) -> Iterator[Row]:
    for sample in source.samples_without_tail():
        shared = _of_sample(sample)
        for piece in pieces(sample):
            yield {
                "prompt": [encode_json(with_text_content(m)) for m in piece.prompt],
                "completion": [encode_json(with_text_content(m)) for m in piece.completion],
                **shared,
            }


AXOLOTL = Format(
    name="axolotl",
    about="Axolotl `type: chat_template` with `message_field_training: training`",
    suffix=".parquet",
    unit="messages",
    rows=_marked,
    columns={"messages": JSON_LIST, **_OF_SAMPLE},
    supports=frozenset({"reasoning", "rewards"}),
)

AXOLOTL_TOKENS = _tokens(
    "axolotl-tokens",
    "Axolotl, exact tokens: a dataset without `type`",
    *("input_ids", "attention_mask", "labels"),
)

TRL = Format(
    name="trl",
    about="TRL SFTTrainer, conversations: SFTConfig(assistant_only_loss=True)",
    suffix=".parquet",
    unit="messages",
    rows=_pieces,
    columns={"prompt": JSON_LIST, "completion": JSON_LIST, **_OF_SAMPLE},
    supports=frozenset({"reasoning", "rewards"}),
)

TRL_TOKENS = _tokens(
    "trl-tokens",
    "TRL SFTTrainer, exact tokens: input_ids, and labels that are -100 where nothing is learnt (set"
    " max_length, or it cuts)",
    *("input_ids", "labels", "reward", "trajectory_id", "branch_index"),
    supports=frozenset({"rewards"}),
)

TRL_GRPO = _tokens(
    "trl-grpo",
    "TRL GRPOTrainer: the fields that a rollout_func returns",
    *("prompt", "prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "advantage"),
    *("group_id", "trajectory_id", "branch_index"),
    *("turn_rewards", "policy_version_min", "policy_version_max"),
    rl=True,
    supports=frozenset({"rewards", "turn_rewards"}),
)
"""A rollout_func finds its rows by `prompt`, the messages of the task."""
