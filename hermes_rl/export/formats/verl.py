"""verl: `verl` (MultiTurnSFTDataset) and `verl-rl` (its RL dataset and AgentLoopOutput).

verl decodes no JSON, so `messages` and `tools` are structs. It trains on every assistant message,
so a context is cut before one that must not be trained on. Arguments are the JSON text of the
object, spaced as templates space it. A struct has the union of all keys; absent ones are null. So
the exact tool schemas are in `tools_json` too, for readers that decode it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from hermes_rl.export.formats.columns import segment_columns, segment_rows, types_of
from hermes_rl.export.samples import (
    Message,
    encode_json,
    opening,
    text_of_content,
    without_tail,
)
from hermes_rl.export.source import Columns, Format, Row, Source


def _conversations(source: Source) -> Iterator[Row]:
    """One row per context."""
    kind = _tools_type(source)
    losses = source.losses
    for sample in map(without_tail, source.samples_before_untrained()):
        losses.lose("results_in_a_row", _has_consecutive_results(sample.messages))
        row: Row = {
            "messages": [_message(m) for m in sample.messages],
            "enable_thinking": any("reasoning_content" in m for m in sample.messages),
            "reward": sample.row["reward"],
            "trajectory_id": sample.row["trajectory_id"],
            "tools_json": encode_json(sample.row["tools"]),
        }
        if kind is None:
            losses.lose("tools", bool(sample.row["tools"]))
            yield row
        else:
            tools = _without_empty(sample.row["tools"])
            losses.lose("null_keys", encode_json(_as_read(tools, kind)) != row["tools_json"])
            yield {**row, "tools": tools}


def _columns(source: Source) -> Columns:
    """Return the columns; the struct of `tools` takes a pass over all schemas."""
    message = dict.fromkeys(("role", "content", "reasoning_content"), "string")
    call = {"id": "string", "type": "string"}
    function = {"name": "string", "arguments": "string"}
    columns: dict[str, Any] = {
        "messages": [
            {
                **message,
                "tool_calls": [{**call, "function": function}],
                "tool_call_id": "string",
                "name": "string",
            }
        ],
        "enable_thinking": "bool",
        "reward": "float64",
        "trajectory_id": "string",
        "tools_json": "string",
    }
    kind = _tools_type(source)
    return columns if kind is None else {**columns, "tools": kind}


def _tools_type(source: Source) -> Any:
    """Return the Arrow type of all tool schemas of a run.

    None when there are none, or when no struct can hold them: one key has values of several types,
    or an integer needs more than 64 bits.
    """
    import pyarrow as pa

    known = {encode_json(tools): tools for tools in source.tools() if tools}
    try:
        return pa.array([_without_empty(tools) for tools in known.values()]).type if known else None
    except (pa.ArrowException, OverflowError):
        return None


def _without_empty(value: Any) -> Any:
    """Return a value without empty objects, which Parquet cannot hold."""
    if isinstance(value, dict):
        return {k: _without_empty(v) for k, v in value.items() if v != {}}
    return [_without_empty(v) for v in value] if isinstance(value, list) else value


def _as_read(tools: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array([tools], type=kind).to_pylist()[0]


def _has_consecutive_results(messages: list[Message]) -> bool:
    return any(a["role"] == b["role"] == "tool" for a, b in pairwise(messages))


def _message(message: Message) -> Row:
    out = {**message, "content": text_of_content(message["content"])}
    if "tool_calls" in out:
        out["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in out["tool_calls"]
        ]
    return out


_RL = segment_columns(
    "data_source",
    "prompt",
    "ability",
    "reward_model",
    "extra_info",
    "uid",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
    "reward_score",
    "num_turns",
    "advantage",
    "tools_json",
    "turn_rewards",
    "policy_version_min",
    "policy_version_max",
    more={
        "prompt": (
            [{"role": "string", "content": "string"}],
            lambda item: [
                {"role": m["role"], "content": text_of_content(m["content"])}
                for m in opening(item.row)
            ],
        ),
        "ability": ("string", lambda item: "agent"),
        "reward_model": (
            {"style": "string", "ground_truth": "string"},
            lambda item: {"style": "rule", "ground_truth": ""},
        ),
        "extra_info": (
            {
                "index": "int64",
                "split": "string",
                "task_id": "string",
                "trajectory_id": "string",
                "branch_index": "int32",
                "end_reason": "string",
            },
            lambda item: {
                "split": item.row["split"] or "train",
                "branch_index": item.segment["branch_index"],
                **{n: item.row[n] for n in ("task_id", "trajectory_id", "end_reason")},
            },
        ),
        "num_turns": ("int32", lambda item: len(item.row["messages"])),
        "tools_json": ("string", lambda item: encode_json(item.row["tools"])),
    },
)
"""`uid` is the group. verl's agent loops take tools from its configuration; those that were offered
are in `tools_json`."""


def _rl(source: Source) -> Iterator[Row]:
    """One row per segment."""
    for number, (item, row) in enumerate(segment_rows(source, _RL)):
        source.losses.lose("quoted", _quoted(item.row))
        row["extra_info"]["index"] = number
        yield row


def _quoted(row: Mapping[str, Any]) -> int:
    """Count the calls, and the results of calls, that the task's prompt quotes."""
    return sum(len(m.get("tool_calls") or ()) + (m["role"] == "tool") for m in opening(row))


CONVERSATIONS = Format(
    name="verl",
    about="verl MultiTurnSFTDataset, with ignore_input_ids_mismatch off",
    suffix=".parquet",
    unit="messages",
    rows=_conversations,
    columns=_columns,
    supports=frozenset({"reasoning", "rewards"}),
)

RL = Format(
    name="verl-rl",
    about="verl: RL data set columns and AgentLoopOutput fields, one row per segment",
    suffix=".parquet",
    unit="tokens",
    rows=_rl,
    columns=types_of(_RL),
    rl=True,
    supports=frozenset({"rewards", "turn_rewards"}),
)
