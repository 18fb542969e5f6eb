"""ATIF, harbor's Agent Trajectory Interchange Format: one document per context and line.

A step is a message; tool results are the observation of the step that called. A context after a
compaction repeats what it kept, marked as copied, and the document before it names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC
from typing import Any

from hermes_rl import __version__
from hermes_rl.export.base import Format, Row
from hermes_rl.export.losses import count_sample
from hermes_rl.export.samples import Message, Sample, said
from hermes_rl.export.source import Source

VERSION = "ATIF-v1.7"


def rows(source: Source) -> Iterator[Row]:
    """One document per context."""
    for sample in source.all_contexts():
        count_sample(source.losses, sample)
        source.losses.trained += sum(sample.trained)
        if sample.messages:
            yield document(sample)
        else:
            source.losses.leave_out("nothing_to_train")


def document(sample: Sample) -> Row:
    """One context as a document."""
    row = sample.row
    steps = _steps(sample)
    usage = row["usage"]
    out: Row = {
        "schema_version": VERSION,
        "session_id": row["trajectory_id"],
        "trajectory_id": _name(sample, sample.context),
        "agent": {
            "name": "hermes_rl",
            "version": __version__,
            "model_name": row["model"],
            "tool_definitions": row["tools"],
        },
        "steps": steps,
        "final_metrics": _present(
            total_prompt_tokens=usage["input_tokens"],
            total_completion_tokens=usage["output_tokens"],
            total_cached_tokens=usage["cache_read_tokens"],
            total_cost_usd=row["cost_usd"],
            total_steps=len(steps),
        ),
        "extra": _present(
            task_id=row["task_id"],
            run_id=row["run_id"],
            group_id=row["group_id"],
            member=row["member"],
            reward=row["reward"],
            rewards=row["rewards"] or None,
            end_reason=row["end_reason"],
            truncated=row["truncated"],
            metadata=row["metadata"] or None,
            started_at=row["started_at"].astimezone(UTC).isoformat(),
            finished_at=row["finished_at"].astimezone(UTC).isoformat(),
        ),
    }
    if sample.context + 1 < sample.contexts:
        out["continued_trajectory_ref"] = _name(sample, sample.context + 1)
    return out


def _name(sample: Sample, context: int) -> str:
    own = str(sample.row["trajectory_id"])
    return own if context == 0 else f"{own}-{context}"


def _steps(sample: Sample) -> list[Row]:
    steps: list[Row] = []
    calls = {c["turn"]: c for c in (sample.row["calls"] or ()) if c["purpose"] == "agent"}
    rows = zip(sample.messages, sample.infos, sample.trained, sample.copied, strict=True)
    for message, info, trained, copied in rows:
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        step: Row = {"step_id": len(steps) + 1, **_step(message)}
        if copied:
            step["is_copied_context"] = True
        elif trained:
            step.update(_metrics(calls.get(info["turn"])))
        if info["synthetic"]:
            step["extra"] = {"synthetic": True}
        steps.append(step)
    return steps


def _step(message: Message) -> Row:
    role = message["role"]
    if role == "tool":  # its call stands in no step of this context
        return {
            "source": "system",
            "message": "",
            "observation": {"results": [{"content": message["content"]}]},
        }
    if role != "assistant":
        return {"source": role, "message": said(message["content"])}
    step: Row = {"source": "agent", "message": message["content"]}
    if "reasoning_content" in message:
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in message["tool_calls"]
        ]
    return step


def _observe(step: Row, message: Message) -> None:
    called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result: Row = {"content": message["content"]}
    if message["tool_call_id"] in called:
        result["source_call_id"] = message["tool_call_id"]
    step.setdefault("observation", {"results": []})["results"].append(result)


def _metrics(call: Mapping[str, Any] | None) -> Row:
    """What the last call of a turn used: the one that wrote the message."""
    if call is None:
        return {}
    metrics = _present(
        prompt_tokens=call["input_tokens"],
        completion_tokens=call["output_tokens"],
        cached_tokens=call["cache_read_tokens"],
        cost_usd=call["cost_usd"],
    )
    started = call["started_at"].astimezone(UTC).isoformat()
    return {"timestamp": started, "model_name": call["model"], "metrics": metrics}


def _present(**fields: Any) -> Row:
    return {name: value for name, value in fields.items() if value is not None}


FORMAT = Format(
    name="atif",
    about="harbor's ATIF v1.7, one trajectory document per line",
    suffix=".jsonl",
    unit="messages",
    rows=rows,
    holds=frozenset({"reasoning", "rewards", "reward_parts"}),
    columns=("usage", "cost_usd", "started_at", "finished_at"),
)
