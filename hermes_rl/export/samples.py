"""Samples for supervised training: one per context, each assistant message trained once.

A row of `trajectories` has a conversation in chronological order. Its column `contexts` has the
messages that the model saw after each compaction: first the kept ones, in the order of the list,
then the new ones. An assistant message is trained in the context in which it was written. It
is not trained in later contexts, nor if the harness wrote it, the task's prompt quotes it, or a
format cannot hold it: a tool call whose arguments are not valid JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes_rl.messages import UNPARSED

_encoder = msgspec.json.Encoder()

Message = dict[str, Any]
"""One message of a row (DESIGN 5.4), never changed here."""


@dataclass(frozen=True)
class Sample:
    """The messages of one context, and which of them are to be trained on."""

    row: Mapping[str, Any]
    """The row of `trajectories`, decoded."""
    context: int
    """0-based."""
    contexts: int
    messages: list[Message]
    infos: list[Mapping[str, Any]]
    """`message_info`, parallel to the messages."""
    trained: list[bool]
    """Parallel to the messages: an assistant message of the policy, new in this context."""
    copied: list[bool]
    """Parallel to the messages: seen in an earlier context already."""

    def cut(self, end: int) -> Sample:
        """Return the sample without the messages from index `end` on."""
        return replace(
            self,
            messages=self.messages[:end],
            infos=self.infos[:end],
            trained=self.trained[:end],
            copied=self.copied[:end],
        )


@dataclass(frozen=True)
class Piece:
    """A part of a sample that a trainer may train on whole: all its assistant messages are."""

    prompt: list[Message]
    completion: list[Message]


def samples_of(row: Mapping[str, Any], *, raw_arguments: bool = False) -> Iterator[Sample]:
    """Yield one sample per context of a row.

    Args:
        raw_arguments: the format writes arguments that are not a JSON object exactly as sampled.
    """
    messages, infos, contexts = row["messages"], row["message_info"], row["contexts"]
    ends = [c["start"] for c in contexts[1:]] + [len(messages)]
    for number, (context, end) in enumerate(zip(contexts, ends, strict=True)):
        start, kept = context["start"], list(context["kept"])
        summary = context["summary_index"]
        if summary is not None and summary < start and summary not in kept:
            kept.append(summary)
        held = set(kept)
        # Digests and the summary of the next context are recorded before it begins.
        new = (i for i in range(start, end) if (infos[i].get("context") or 0) <= number)
        shown = [*kept, *(i for i in new if i not in held)]
        yield Sample(
            row=row,
            context=number,
            contexts=len(contexts),
            messages=[messages[i] for i in shown],
            infos=[infos[i] for i in shown],
            trained=[
                i >= start and _by_policy(infos[i]) and (raw_arguments or not unparsed(messages[i]))
                for i in shown
            ],
            copied=[i < start for i in shown],
        )


def _by_policy(info: Mapping[str, Any]) -> bool:
    """Whether the policy wrote a message (turn 0 is the task's prompt)."""
    return info["role"] == "assistant" and info["turn"] > 0 and not info["synthetic"]


def unparsed(message: Mapping[str, Any]) -> int:
    """Count the tool calls of a message whose arguments are not a JSON object."""
    calls = message.get("tool_calls") or ()
    return sum(set(call["function"]["arguments"]) == {UNPARSED} for call in calls)


def opening(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages before the first turn: the system prompt and the task's."""
    pairs = zip(row["messages"], row["message_info"], strict=True)
    return [message for message, info in pairs if info["turn"] == 0]


def encode_json(value: Any) -> str:
    """Encode a value as JSON text."""
    return _encoder.encode(value).decode()


def text_of_content(content: str | list[dict[str, Any]]) -> str:
    """Return content as text: one part per line, other parts than text as `[type]`."""
    if isinstance(content, str):
        return content
    return "\n".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in content
    )


def with_text_content(message: Message) -> Message:
    """Return a message with its content as text, for readers without images in messages."""
    return {**message, "content": text_of_content(message["content"])}


def without_tail(sample: Sample) -> Sample:
    """Cut a sample after its last trained message."""
    last = max((i for i, trained in enumerate(sample.trained) if trained), default=-1)
    return sample.cut(last + 1)


def before_untrained(sample: Sample) -> Sample:
    """Cut a sample before its first assistant message that must not be trained on.

    For formats whose readers train on every assistant message.
    """
    for index, (message, trained) in enumerate(zip(sample.messages, sample.trained, strict=True)):
        if message["role"] == "assistant" and not trained:
            return without_tail(sample.cut(index))
    return sample


def pieces(sample: Sample) -> Iterator[Piece]:
    """Split a sample into prompts with completions whose assistant messages are all trained.

    Each assistant message is in one completion. One piece, unless one that must not be trained on
    is between others.
    """
    start = last = -1
    for index, (message, trained) in enumerate(zip(sample.messages, sample.trained, strict=True)):
        if trained:
            start = index if start < 0 else start
            last = index
        elif message["role"] == "assistant" and start >= 0:
            yield Piece(sample.messages[:start], sample.messages[start : last + 1])
            start = -1
    if start >= 0:
        yield Piece(sample.messages[:start], sample.messages[start : last + 1])


def fingerprint(sample: Sample) -> bytes:
    """Hash what a sample teaches to 16 bytes: messages, tools and marks, without call ids."""
    places: dict[str, int] = {}
    plain = [_without_ids(message, places) for message in sample.messages]
    hashed = [plain, sample.trained, sample.row["tools"]]
    return hashlib.sha256(msgspec.json.encode(hashed, order="sorted")).digest()[:16]


def _without_ids(message: Message, places: dict[str, int]) -> Message:
    plain = dict(message)
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        plain["tool_calls"] = [{**c, "id": places.setdefault(c["id"], len(places))} for c in calls]
    if "tool_call_id" in plain:
        plain["tool_call_id"] = places.setdefault(plain["tool_call_id"], len(places))
    return plain
