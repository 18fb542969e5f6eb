"""verl's MultiTurnSFTDataset: `messages` and `tools` as structs, since it decodes no JSON.

It trains on every assistant message, so a context is cut before one that must not be trained on.
Arguments are the JSON text of the object, spaced as templates space it. A struct has the keys of
all: absent ones are null. So the tool schemas stand in `tools_json` too, exactly, for readers that
decode it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from hermes_rl.export.base import Format, Row
from hermes_rl.export.losses import count_sample
from hermes_rl.export.samples import Message, before_untrained, said, without_tail
from hermes_rl.export.source import Source

_text = msgspec.json.Encoder().encode


def rows(source: Source) -> Iterator[Row]:
    """One row per context."""
    kind = tools_type(source)
    for whole in source.samples():
        sample = without_tail(before_untrained(whole))
        if not any(sample.trained):
            source.losses.leave_out("untrained_before")
            continue
        losses = source.losses
        losses.lose("cut_before_untrained", sum(whole.trained) > sum(sample.trained))
        count_sample(losses, sample)
        losses.lose("results_in_a_row", _side_by_side(sample.messages))
        losses.trained += sum(sample.trained)
        row: Row = {
            "messages": [_message(m) for m in sample.messages],
            "enable_thinking": any("reasoning_content" in m for m in sample.messages),
            "reward": sample.row["reward"],
            "trajectory_id": sample.row["trajectory_id"],
            "tools_json": _text(sample.row["tools"]).decode(),
        }
        if kind is None:
            losses.lose("tools", bool(sample.row["tools"]))
            yield row
        else:
            tools = _held(sample.row["tools"])
            losses.lose("null_keys", _text(_as_read(tools, kind)).decode() != row["tools_json"])
            yield {**row, "tools": tools}


def schema(source: Source) -> Any:
    """Structs; that of the tools is found in a pass over all schemas."""
    import pyarrow as pa

    text, kind = pa.string(), tools_type(source)
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    message = pa.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", pa.list_(pa.field("element", call))),
            ("tool_call_id", text),
            ("name", text),
        ]
    )
    columns = [
        ("messages", pa.list_(pa.field("element", message))),
        ("enable_thinking", pa.bool_()),
        ("reward", pa.float64()),
        ("trajectory_id", text),
        ("tools_json", text),
    ]
    return pa.schema([*columns, *([] if kind is None else [("tools", kind)])])


def tools_type(source: Source) -> Any:
    """The Arrow type of all tool schemas of a run; None when there are none, or when it cannot hold
    them: one key has values of several types, or an integer of more than 64 bits."""
    import pyarrow as pa

    known = {_text(tools): tools for tools in source.tools() if tools}
    try:
        return pa.array([_held(tools) for tools in known.values()]).type if known else None
    except (pa.ArrowException, OverflowError):
        return None


def _held(value: Any) -> Any:
    """A value without empty objects, which Parquet cannot hold."""
    if isinstance(value, dict):
        return {k: _held(v) for k, v in value.items() if v != {}}
    return [_held(v) for v in value] if isinstance(value, list) else value


def _as_read(tools: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array([tools], type=kind).to_pylist()[0]


def _side_by_side(messages: list[Message]) -> bool:
    return any(a["role"] == b["role"] == "tool" for a, b in pairwise(messages))


def _message(message: Message) -> Row:
    out = {**message, "content": said(message["content"])}
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


FORMAT = Format(
    name="verl",
    about="verl MultiTurnSFTDataset, with ignore_input_ids_mismatch off",
    suffix=".parquet",
    unit="messages",
    rows=rows,
    schema=schema,
    holds=frozenset({"reasoning", "rewards"}),
)
