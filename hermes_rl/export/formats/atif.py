"""ATIF, harbor's Agent Trajectory Interchange Format: one document per context and line.

A step is a message; tool results are the observation of the step that called. A context after a
compaction repeats what it kept, marked as copied, and the document before it names it. Assistant
messages that the policy did not write have that mark too: harbor's own reader (`harbor traces
export`) trains on each agent step without it. If table `segments` has the tokens of an answer, they
are in the metrics of its step, with the ids of the whole prompt, as harbor's own agents do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC
from typing import Any

from hermes_rl import __version__
from hermes_rl.export.losses import count_sample, is_of_policy
from hermes_rl.export.samples import Message, Sample, text_of_content
from hermes_rl.export.source import Format, Row, Source
from hermes_rl.export.tokens import Answer, answers_of

VERSION = "ATIF-v1.7"


def _rows(source: Source) -> Iterator[Row]:
    """One document per context."""
    for sample, segments in source.all_contexts():
        losses = source.losses
        count_sample(losses, sample)
        if not sample.messages:
            losses.leave_out("nothing_to_train")
            continue
        answers = answers_of(segments)
        written = document(sample, answers)
        if segments:
            exact = sum("completion_token_ids" in s.get("metrics", ()) for s in written["steps"])
            losses.lose("ids", sum(sample.trained) - exact)
        if not sample.context:
            calls = sample.row["calls"] or ()
            others = {c["call_id"] for c in calls if c["agent"] != "main"}
            losses.lose("texts", len(others & answers.keys()))
        yield written


def document(sample: Sample, answers: Mapping[str, Answer]) -> Row:
    """Make the document of one context. Args: answers: tokens by call id."""
    row = sample.row
    steps = _steps(sample, answers)
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
    row_id = str(sample.row["trajectory_id"])
    return row_id if context == 0 else f"{row_id}-{context}"


def _steps(sample: Sample, answers: Mapping[str, Answer]) -> list[Row]:
    steps: list[Row] = []
    calls = {c["turn"]: c for c in (sample.row["calls"] or ()) if is_of_policy(c)}
    rows = zip(sample.messages, sample.infos, sample.trained, sample.copied, strict=True)
    for message, info, trained, copied in rows:
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        step: Row = {"step_id": len(steps) + 1, **_step(message)}
        if copied or (message["role"] == "assistant" and not trained):
            step["is_copied_context"] = True
        elif trained and info["turn"] in calls:
            call = calls[info["turn"]]
            step.update(_call_fields(call), metrics=_metrics(call, answers.get(call["call_id"])))
        if info["synthetic"]:
            step["extra"] = {"synthetic": True}
        steps.append(step)
    return steps


def _step(message: Message) -> Row:
    role = message["role"]
    if role == "tool":  # its call is in no step of this context
        return {
            "source": "system",
            "message": "",
            "observation": {"results": [{"content": message["content"]}]},
        }
    if role != "assistant":
        return {"source": role, "message": text_of_content(message["content"])}
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


def _call_fields(call: Mapping[str, Any]) -> Row:
    """Describe the last call of a turn: when it was written, and to which model."""
    started = call["started_at"].astimezone(UTC).isoformat()
    return {"timestamp": started, "model_name": call["model"], "llm_call_count": 1}


def _metrics(call: Mapping[str, Any], answer: Answer | None) -> Row:
    """Return the usage of a call and the tokens that it sampled."""
    used = _present(
        prompt_tokens=call["input_tokens"],
        completion_tokens=call["output_tokens"],
        cached_tokens=call["cache_read_tokens"],
        cost_usd=call["cost_usd"],
    )
    if answer is None:
        return used
    segment = answer.segment
    tokens = _present(
        prompt_token_ids=answer.prompt_ids,
        completion_token_ids=answer.ids,
        logprobs=answer.logprobs,
    )
    names = ("logprobs_kind", "token_source", "tokenizer_hash", "template_hash")
    return {**used, **tokens, "extra": _present(**{name: segment[name] for name in names})}


def _present(**fields: Any) -> Row:
    return {name: value for name, value in fields.items() if value is not None}


DOCUMENTS = Format(
    name="atif",
    about="harbor's ATIF v1.7 with token ids, one trajectory document per line",
    suffix=".jsonl",
    unit="messages",
    rows=_rows,
    supports=frozenset({"reasoning", "rewards", "reward_parts", "turn_rewards"}),
    needs=("usage", "cost_usd", "started_at", "finished_at"),
)
