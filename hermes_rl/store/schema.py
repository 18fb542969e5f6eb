"""The Arrow schemas of all tables, declared once and never inferred.

Free-form JSON has the Arrow type `arrow.json`: Parquet's JSON, plain text to readers that do not
know it. `metrics` is a list of pairs and not an Arrow map: Hugging Face `datasets` reads no maps.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from hermes_rl.store.version import SCHEMA_VERSION

VERSION_KEY = "hermes_rl.schema_version"
"""Key in the metadata of every Parquet file."""

SEGMENTS_VERSION = 1
"""Of table `segments`."""

_text, _flag, _real = pa.string(), pa.bool_(), pa.float64()
_short, _long, _json = pa.int32(), pa.int64(), pa.json_()
_moment = pa.timestamp("us", tz="UTC")


def _list(item: Any) -> Any:
    return pa.list_(pa.field("element", item))


_message_info = [
    ("role", _text),
    ("turn", _short),
    ("context", _short),
    ("synthetic", _flag),
    ("tool_name", _text),
    ("tool_ok", _flag),
    ("chars", _short),
    ("raw_content", _text),
    ("raw_arguments", _list(_text)),
    ("reasoning_details", _text),
]

_usage = [
    ("input_tokens", _long),
    ("cache_read_tokens", _long),
    ("cache_write_tokens", _long),
    ("output_tokens", _long),
    ("reasoning_tokens", _long),
    ("total_tokens", _long),
    ("unknown_calls", _short),
]

_reward_part = [
    ("name", _text),
    ("score", _real),
    ("weight", _real),
    ("turn", _short),
    ("detail", _text),
]

_call = [
    ("call_id", _text),
    ("turn", _short),
    ("purpose", _text),
    ("agent", _text),
    ("model", _text),
    ("finish_reason", _text),
    ("input_tokens", _long),
    ("cache_read_tokens", _long),
    ("cache_write_tokens", _long),
    ("output_tokens", _long),
    ("reasoning_tokens", _long),
    ("cost_usd", _real),
    ("latency_s", _real),
    ("retries", _short),
    ("request_id", _text),
    ("outcome", _text),
    ("error", _text),
    ("started_at", _moment),
    ("policy_version", _text),
    ("usage_raw", _text),
]

_tool_stat = [
    ("tool", _text),
    ("calls", _short),
    ("ok", _short),
    ("errors", _short),
    ("seconds", _real),
]

_timing = [
    (name, _real)
    for name in ("queued_s", "sandbox_s", "model_s", "tool_s", "waiting_s", "verify_s", "total_s")
]

_context = [
    ("start", _short),
    ("kept", _list(_short)),
    ("summary_index", _short),
    ("reason", _text),
]

_metric = [("name", _text), ("value", _real)]

_image = [("bytes", pa.binary()), ("path", _text)]

_sandbox = [("backend", _text), ("image", _text), ("digest", _text), ("limits", _json)]

_trajectories = [
    ("task_id", _text),
    ("repeat", _short),
    ("status", _text),
    ("reward", _real),
    ("end_reason", _text),
    ("truncated", _flag),
    ("turns", _short),
    ("task_prompt", _text),
    ("final_response", _text),
    ("messages", _list(_json)),
    ("message_info", _list(pa.struct(_message_info))),
    ("tools", _json),
    ("usage", pa.struct(_usage)),
    ("cost_usd", _real),
    ("unpriced_calls", _short),
    ("rewards", _list(pa.struct(_reward_part))),
    ("metrics", _list(pa.struct(_metric))),
    ("calls", _list(pa.struct(_call))),
    ("tool_call_count", _short),
    ("tool_stats", _list(pa.struct(_tool_stat))),
    ("timing", pa.struct(_timing)),
    ("error", _text),
    ("owner", _text),
    ("cause", _text),
    ("contexts", _list(pa.struct(_context))),
    ("image_data", _list(pa.struct(_image))),
    ("model", _text),
    ("served_models", _list(_text)),
    ("api_mode", _text),
    ("endpoint", _text),
    ("toolsets", _list(_text)),
    ("sampling", _json),
    ("seed", _long),
    ("sandbox", pa.struct(_sandbox)),
    ("started_at", _moment),
    ("finished_at", _moment),
    ("split", _text),
    ("env_name", _text),
    ("metadata", _json),
    ("trajectory_id", _text),
    ("unit_id", _text),
    ("group_id", _text),
    ("member", _short),
    ("attempt", _short),
    ("run_id", _text),
    ("task_hash", _text),
    ("config_hash", _text),
    ("row_index", _long),
    ("root_trajectory_id", _text),
    ("parent_trajectory_id", _text),
    ("parent_call_id", _text),
    ("prompt_sha256", _text),
]

_segments = [
    ("trajectory_id", _text),
    ("unit_id", _text),
    ("run_id", _text),
    ("task_id", _text),
    ("group_id", _text),
    ("member", _short),
    ("env_name", _text),
    ("agent_name", _text),
    ("branch_index", _short),
    ("n_branches", _short),
    ("branch_kind", _text),
    ("parent_branch", _short),
    ("fork_reason", _text),
    ("input_ids", _list(_short)),
    ("loss_mask", _list(_flag)),
    ("sampled_mask", _list(_flag)),
    ("logprobs", _list(pa.float32())),
    ("logprobs_kind", _text),
    ("turn_ids", _list(_short)),
    ("version_ids", _list(_short)),
    ("prompt_len", _short),
    ("n_sampled", _short),
    ("temperature", _real),
    ("top_p", _real),
    ("top_k", _short),
    ("min_p", _real),
    ("finish_reasons", _list(_text)),
    ("truncated", _flag),
    ("reward", _real),
    ("policy_version_min", _text),
    ("policy_version_max", _text),
    ("token_source", _text),
    ("tokenizer_hash", _text),
    ("template_hash", _text),
    ("model", _text),
    ("trainable", _flag),
    ("exclude_reason", _text),
    ("call_ids", _list(_text)),
    ("call_starts", _list(_short)),
]

_groups = [
    ("group_id", _text),
    ("run_id", _text),
    ("task_id", _text),
    ("task_hash", _text),
    ("env_name", _text),
    ("split", _text),
    ("size", _short),
    ("n_valid", _short),
    ("members", _list(_short)),
    ("unit_ids", _list(_text)),
    ("trajectory_ids", _list(_text)),
    ("rewards", _list(_real)),
    ("reward_parts", _list(_list(pa.struct(_reward_part)))),
    ("reward_metrics", _list(_list(pa.struct(_metric)))),
    ("valid", _list(_flag)),
    ("why_invalid", _list(_text)),
    ("mean", _real),
    ("std", _real),
    ("equal_scores", _flag),
    ("sendable", _flag),
    ("grpo", _list(_real)),
    ("rloo", _list(_real)),
    ("dr_grpo", _list(_real)),
    ("scored_by", _text),
    ("grade_id", _text),
    ("calls", _list(pa.struct(_call))),
    ("usage", pa.struct(_usage)),
    ("cost_usd", _real),
    ("metrics", _list(pa.struct(_metric))),
    ("error", _text),
    ("created_at", _moment),
]

_grades = [
    ("trajectory_id", _text),
    ("unit_id", _text),
    ("group_id", _text),
    ("run_id", _text),
    ("task_id", _text),
    ("env_name", _text),
    ("grade_id", _text),
    ("reward", _real),
    ("rewards", _list(pa.struct(_reward_part))),
    ("metrics", _list(pa.struct(_metric))),
    ("error", _text),
    ("calls", _list(pa.struct(_call))),
    ("usage", pa.struct(_usage)),
    ("cost_usd", _real),
    ("seconds", _real),
    ("graded_at", _moment),
]

LATER = {"groups": ("reward_parts", "reward_metrics")}
"""Columns that came after the first files of this version: those of older runs lack them, and are
read with nulls there."""
TRAJECTORIES = pa.schema(_trajectories, metadata={VERSION_KEY: str(SCHEMA_VERSION)})
SEGMENTS = pa.schema(_segments, metadata={VERSION_KEY: str(SEGMENTS_VERSION)})

GROUPS = pa.schema(_groups, metadata={VERSION_KEY: str(SCHEMA_VERSION)})
GRADES = pa.schema(_grades, metadata={VERSION_KEY: str(SCHEMA_VERSION)})

_OF_THEIR_OWN = {"segments": SEGMENTS, "groups": GROUPS, "grades": GRADES}


def schema_of(table: str) -> Any:
    """The declared schema of a table."""
    return _OF_THEIR_OWN.get(table, TRAJECTORIES)


def storage_type(kind: Any) -> Any:
    """An Arrow type with `arrow.json` replaced by text: pyarrow builds such arrays from Python."""
    if isinstance(kind, pa.JsonType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(storage_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(storage_type(f.type)) for f in kind])
    return kind


def storage_schema(schema: Any) -> Any:
    """A schema with all `arrow.json` replaced by text."""
    fields = [f.with_type(storage_type(f.type)) for f in schema]
    return pa.schema(fields, metadata=schema.metadata)


def empty_table(schema: Any) -> Any:
    """A table of a schema without rows (pyarrow's own cannot make `arrow.json` columns)."""
    return storage_schema(schema).empty_table().cast(schema)
