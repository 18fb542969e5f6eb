"""OpenAI's fine-tuning file: messages with `weight`, arguments as the text that the model wrote.

It has no place for reasoning. An assistant message that must not be trained on has weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hermes_rl.export.base import Format, Row
from hermes_rl.export.losses import count_sample
from hermes_rl.export.samples import Message, without_tail
from hermes_rl.export.source import Source


def rows(source: Source) -> Iterator[Row]:
    """One line per context."""
    for whole in source.samples():
        sample = without_tail(whole)
        source.losses.lose("tail", len(whole.messages) - len(sample.messages))
        count_sample(source.losses, sample)
        parts = zip(sample.messages, sample.infos, sample.trained, strict=True)
        messages = [_said(message, info, trained) for message, info, trained in parts]
        source.losses.trained += sum(sample.trained)
        line: Row = {"messages": messages}
        if sample.row["tools"]:
            line["tools"] = sample.row["tools"]
        yield line


def _said(message: Message, info: Mapping[str, Any], trained: bool) -> Message:
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


FORMAT = Format(
    name="openai",
    about="OpenAI fine-tuning JSONL, and what else takes that form",
    suffix=".jsonl",
    unit="messages",
    rows=rows,
    holds=frozenset({"unparsed_arguments", "images"}),
)
