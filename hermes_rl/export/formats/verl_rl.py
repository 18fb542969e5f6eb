"""verl, RL: the columns of its RL data set and the fields of an AgentLoopOutput in one row.

One row per segment. `uid` is the group; rows of one group are compared with each other. verl's
agent loops take tools from its configuration: those that were offered stand in `tools_json`, as in
the rows of format `verl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hermes_rl.export.base import Format, Row
from hermes_rl.export.samples import opening, said
from hermes_rl.export.source import Source

_text = msgspec.json.Encoder().encode


def rows(source: Source) -> Iterator[Row]:
    """One row per segment; prompt and response part where the first trained token stands."""
    for number, item in enumerate(source.items()):
        row, segment = item.row, item.segment
        source.losses.trained += item.trained
        source.losses.lose("no_advantage", item.advantage is None)
        source.losses.lose("quoted", _quoted(row))
        ids, start, logprobs = item.ids, item.start, item.logprobs(0.0)
        yield {
            "data_source": row["env_name"] or "hermes_rl",
            "prompt": [{"role": m["role"], "content": said(m["content"])} for m in opening(row)],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {
                "index": number,
                "split": row["split"] or "train",
                "task_id": row["task_id"],
                "trajectory_id": row["trajectory_id"],
                "branch_index": segment["branch_index"],
                "end_reason": row["end_reason"],
            },
            "uid": row["group_id"],
            "prompt_ids": ids[:start],
            "response_ids": ids[start:],
            "response_mask": item.mask,
            "response_logprobs": None if logprobs is None else logprobs[start:],
            "reward_score": item.reward,
            "num_turns": len(row["messages"]),
            "advantage": item.advantage,
            "tools_json": _text(row["tools"]).decode(),
        }


def _quoted(row: Mapping[str, Any]) -> int:
    """Calls, and results of calls, that the task's prompt quotes."""
    return sum(len(m.get("tool_calls") or ()) + (m["role"] == "tool") for m in opening(row))


def schema(source: Source) -> Any:
    """The Arrow schema."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int32()
    ids = pa.list_(pa.field("element", whole))
    message = pa.struct([("role", text), ("content", text)])
    extra = [("index", pa.int64()), ("split", text), ("task_id", text), ("trajectory_id", text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.field("element", message))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([*extra, ("branch_index", whole), ("end_reason", text)])),
            ("uid", text),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("response_mask", pa.list_(pa.field("element", pa.int8()))),
            ("response_logprobs", pa.list_(pa.field("element", pa.float32()))),
            ("reward_score", pa.float64()),
            ("num_turns", whole),
            ("advantage", pa.float64()),
            ("tools_json", text),
        ]
    )


FORMAT = Format(
    name="verl-rl",
    about="verl: RL data set columns and AgentLoopOutput fields, one row per segment",
    suffix=".parquet",
    unit="tokens",
    rows=rows,
    schema=schema,
    rl=True,
    holds=frozenset({"rewards"}),
)
