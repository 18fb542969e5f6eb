"""OpenAI's fine-tuning file: messages with `weight`, arguments exactly as the model wrote them.

The format has no field for reasoning. Weight 0 marks assistant messages that are not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hermes_rl.export.samples import Message
from hermes_rl.export.source import Format, Row, Source


def _rows(source: Source) -> Iterator[Row]:
    """One line per context."""
    for sample in source.samples_without_tail():
        parts = zip(sample.messages, sample.infos, sample.trained, strict=True)
        messages = [_convert(message, info, trained) for message, info, trained in parts]
        line: Row = {"messages": messages}
        if sample.row["tools"]:
            line["tools"] = sample.row["tools"]
        yield line


def _convert(message: Message, info: Mapping[str, Any], trained: bool) -> Message:
    if message["role"] == "tool":
        return {k: message[k] for k in ("role", "tool_call_id", "content")}
    if message["role"] != "assistant":
        return message
    out: Message = {"role": "assistant", "content": message["content"]}
    if message.get("tool_calls"):
        out["content"] = message["content"] or None
        out["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": text}}
            for call, text in zip(message["tool_calls"], info["raw_arguments"], strict=True)
        ]
    if not trained:
        out["weight"] = 0
    return out


FINE_TUNING = Format(
    name="openai",
    about="OpenAI fine-tuning JSONL, and other readers of that format",
    suffix=".jsonl",
    unit="messages",
    rows=_rows,
    supports=frozenset({"unparsed_arguments", "images"}),
)
