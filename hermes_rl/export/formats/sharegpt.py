"""hermes-agent's own format: turns of `from` and `value`, with the rules of its batch rows.

Each gpt turn has a think block; calls and results are between tags, one JSON object per line;
results that follow one assistant turn share one turn. The system turn is a fixed instruction (with
our wording) that lists the tools, never the prompt that was used. Readers train on every gpt turn,
so a context is cut before an assistant message that must not be trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from hermes_rl.export.samples import Message, Sample, text_of_content
from hermes_rl.export.source import Format, Row, Source

SYSTEM = """\
You can call functions. The available functions are described as JSON inside <tools> tags. Call \
one or more of them whenever they help with the task. Never invent argument values.
<tools>
{tools}
</tools>
Before you act, you may reason inside <think> tags. Each call is a JSON object with this schema:
{{'title': 'FunctionCall', 'type': 'object', 'properties': {{'name': {{'title': 'Name', 'type': \
'string'}}, 'arguments': {{'title': 'Arguments', 'type': 'object'}}}}, 'required': ['name', \
'arguments']}}
Write each call inside tags, like this:
<tool_call>
{{'name': <function-name>, 'arguments': <arguments-object>}}
</tool_call>"""

EMPTY_THOUGHT = "<think>\n</think>\n"
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(r"<(?=/?(?:tool_call|tool_response|think)>)")


def _rows(source: Source) -> Iterator[Row]:
    """One line per context."""
    for sample in source.samples_before_untrained():
        source.losses.lose("prompts", sum(m["role"] == "system" for m in sample.messages))
        yield {
            "prompt_index": sample.row["row_index"],
            "conversations": conversation(sample.messages, sample.row["tools"]),
            **_statistics(sample),
        }


def conversation(messages: list[Message], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Convert messages to turns of `from` and `value`."""
    turns = [{"from": "system", "value": SYSTEM.format(tools=_json(_signatures(tools)))}]
    results: list[str] = []
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool":
            results.append(_result(message, names))
            continue
        if results:
            turns.append({"from": "tool", "value": "\n".join(results)})
            results = []
        if message["role"] == "user":
            turns.append({"from": "human", "value": text_of_content(message["content"])})
        elif message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            names.update({call["id"]: call["function"]["name"] for call in calls})
            turns.append({"from": "gpt", "value": _answer(message)})
    if results:
        turns.append({"from": "tool", "value": "\n".join(results)})
    return turns


def _signatures(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in tools]


def _answer(message: Message) -> str:
    reasoning: str = message.get("reasoning_content") or ""
    text: str = message["content"]
    text = text.replace("<REASONING_SCRATCHPAD>", "<think>")
    text = text.replace("</REASONING_SCRATCHPAD>", "</think>")
    thought = EMPTY_THOUGHT
    if reasoning.strip():
        thought = f"<think>\n{reasoning}\n</think>\n"
    elif _THOUGHT.search(text):
        thought = ""
    calls = [f"<tool_call>\n{_json(_call(c))}\n</tool_call>" for c in message.get("tool_calls", [])]
    if not calls:
        return (thought + text).strip()
    return (thought + "\n".join([text, *calls] if text.strip() else calls)).rstrip()


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}


def _result(message: Message, names: Mapping[str, str]) -> str:
    call_id = message["tool_call_id"]
    name = message["name"] or names.get(call_id, "")
    form = {"tool_call_id": call_id, "name": name, "content": _content(message["content"])}
    return f"<tool_response>\n{_json(form)}\n</tool_response>"


def _content(text: str) -> Any:
    """Return the value of a result that is a JSON object or list, else the text.

    Also the text if JSON cannot represent the value (lone surrogates, 1e999).
    """
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _json(value: Any) -> str:
    """Encode JSON in the spacing of the format, with an escaped `<` in tags inside strings."""
    return _TAG.sub(r"\\u003c", json.dumps(value, ensure_ascii=False))


def _statistics(sample: Sample) -> Row:
    row = sample.row
    used = {stat["tool"]: stat for stat in row["tool_stats"] or ()}
    offered = [tool["function"]["name"] for tool in row["tools"]]
    names = [*offered, *(name for name in used if name not in offered)]
    stats = {name: _stat(used.get(name)) for name in names}
    finished: datetime = row["finished_at"]
    return {
        "metadata": {
            "batch_num": 0,
            "timestamp": finished.replace(tzinfo=None).isoformat(),
            "model": row["model"],
        },
        "completed": row["end_reason"] == "answered",
        "partial": row["truncated"],
        "api_calls": row["turns"],
        "toolsets_used": row["toolsets"],
        "tool_stats": stats,
        "tool_error_counts": {name: stat["failure"] for name, stat in stats.items()},
    }


def _stat(used: Mapping[str, Any] | None) -> dict[str, int]:
    if used is None:
        return {"count": 0, "success": 0, "failure": 0}
    return {"count": used["calls"], "success": used["ok"], "failure": used["errors"]}


TURNS = Format(
    name="sharegpt",
    about="hermes-agent's from/value rows (trajectories.jsonl), Axolotl with field_messages",
    suffix=".jsonl",
    unit="messages",
    rows=_rows,
    supports=frozenset({"reasoning"}),
    needs=("tool_stats", "toolsets", "finished_at"),
)
