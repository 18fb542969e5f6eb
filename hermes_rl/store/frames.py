"""Frames at other grains than a trajectory: one row per model call, per message, per run.

Pure functions over Arrow tables and statistics; `Run` in reader.py offers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

WHOSE = ("task_id", "repeat", "attempt", "status", "unit_id", "trajectory_id")
"""Columns of its trajectory that each call and each message carries."""

_TEXTS = ("content", "reasoning_content", "tool_calls", "tool_call_id")


def call_frame(tables: Sequence[pa.Table]) -> pd.DataFrame:
    """One row per model call, in order of happening within its trajectory."""
    return _exploded(tables, "calls")


def message_frame(tables: Sequence[pa.Table]) -> pd.DataFrame:
    """One row per message: `message_info` beside the message's own parts.

    `position` counts from 0 within the trajectory.
    """
    frame = _exploded(tables, "message_info")
    frame.insert(len(WHOSE), "position", frame.groupby("trajectory_id").cumcount())
    decode = msgspec.json.decode
    rows = [row for table in tables for row in table.column("messages").to_pylist()]
    messages = [decode(text) for row in rows for text in row]
    for name in _TEXTS:
        frame[name] = [message.get(name) for message in messages]
    return frame


def run_frame(path: str, facts: Mapping[str, Any], stats: Mapping[str, Any]) -> pd.DataFrame:
    """One row for the run, so that the rows of several runs can be put below one another.

    Args:
        facts: the first trajectory's columns; empty where there is none.
        stats: as stats.json holds them.
    """
    import pandas as pd

    unpriced = stats["calls"]["unpriced"]
    row = {
        "run": path,
        "run_id": facts.get("run_id"),
        "model": facts.get("model"),
        "units": stats["plan"].get("units"),
        **{name: stats["units"][name] for name in ("done", "given_up")},
        "graded": stats["reward"]["graded"],
        "solved": stats["reward"]["solved"],
        "mean_reward": stats["reward"]["mean"],
        "failed_attempts": stats["attempts"]["failed"],
        "turns": stats["turns"],
        "calls": stats["calls"]["total"],
        "unknown_calls": stats["calls"]["unknown"],
        **{name: stats["tokens"][name] for name in ("input_tokens", "output_tokens")},
        "cost_usd": stats["cost_usd"],
        "unpriced_calls": unpriced,
    }
    return pd.DataFrame([row])


def _exploded(tables: Sequence[pa.Table], column: str) -> pd.DataFrame:
    """A list of structs as rows, each with the columns `WHOSE` of its trajectory."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    frames = []
    for table in tables:
        lists = table.column(column).combine_chunks()
        items = pa.Table.from_struct_array(pc.list_flatten(lists))
        owners = table.select(list(WHOSE)).take(pc.list_parent_indices(lists))
        frames.append(pd.concat([owners.to_pandas(), items.to_pandas()], axis=1))
    exploded: pd.DataFrame = pd.concat(frames, ignore_index=True)
    return exploded
