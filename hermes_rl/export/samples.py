"""Samples for supervised training: one per context, each assistant message trained once.

A row of `trajectories` holds a conversation in order of happening; its column `contexts` says what
the model saw after each compaction. A context shows the messages that it kept, in the order of its
list, then those that were new in it. An assistant message is trained in the context in which it was
written, as context only in later ones, and never when the harness wrote it, the task's prompt
quotes it, or a format cannot hold what the model said: a call whose arguments are no JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes_rl.messages import UNPARSED

Message = dict[str, Any]
"""One message as a row holds it (DESIGN 5.4), never changed here."""


@dataclass(frozen=True)
class Sample:
    """What one context showed, and which of its messages are to be trained on."""

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
        """The sample without the messages from index `end` on."""
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
    trained: int
    """Assistant messages in the completion."""


def samples_of(row: Mapping[str, Any], *, raw_arguments: bool = False) -> Iterator[Sample]:
    """One sample per context of a row.

    Args:
        raw_arguments: the format writes arguments that are no JSON object as they were sampled.
    """
    messages, infos, contexts = row["messages"], row["message_info"], row["contexts"]
    ends = [c["start"] for c in contexts[1:]] + [len(messages)]
    for number, (context, end) in enumerate(zip(contexts, ends, strict=True)):
        start, kept = context["start"], list(context["kept"])
        summary = context["summary_index"]
        if summary is not None and summary < start and summary not in kept:
            kept.append(summary)
        shown = [*kept, *(i for i in range(start, end) if i not in set(kept))]
        yield Sample(
            row=row,
            context=number,
            contexts=len(contexts),
            messages=[messages[i] for i in shown],
            infos=[infos[i] for i in shown],
            trained=[
                i >= start and _own(infos[i]) and (raw_arguments or not unparsed(messages[i]))
                for i in shown
            ],
            copied=[i < start for i in shown],
        )


def _own(info: Mapping[str, Any]) -> bool:
    """Whether the policy wrote a message. Turn 0 is the task's prompt."""
    return info["role"] == "assistant" and info["turn"] > 0 and not info["synthetic"]


def unparsed(message: Mapping[str, Any]) -> int:
    """Tool calls of a message whose arguments are no JSON object: the row's form is nobody's."""
    calls = message.get("tool_calls") or ()
    return sum(set(call["function"]["arguments"]) == {UNPARSED} for call in calls)


def opening(row: Mapping[str, Any]) -> list[Message]:
    """The messages that a rollout began with: the system prompt and the task's."""
    pairs = zip(row["messages"], row["message_info"], strict=True)
    return [message for message, info in pairs if info["turn"] == 0]


def said(content: str | list[dict[str, Any]]) -> str:
    """Content as text: parts by line, in the place of what is no text its kind in brackets."""
    if isinstance(content, str):
        return content
    return "\n".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in content
    )


def in_words(message: Message) -> Message:
    """A message whose content is text (`said`), for readers that find images elsewhere or not."""
    return {**message, "content": said(message["content"])}


def without_tail(sample: Sample) -> Sample:
    """A sample that ends with its last trained message: what follows teaches nothing."""
    last = max((i for i, trained in enumerate(sample.trained) if trained), default=-1)
    return sample.cut(last + 1)


def before_untrained(sample: Sample) -> Sample:
    """A sample cut before its first assistant message that must not be trained on, for formats
    whose readers train on every one."""
    for index, (message, trained) in enumerate(zip(sample.messages, sample.trained, strict=True)):
        if message["role"] == "assistant" and not trained:
            return without_tail(sample.cut(index))
    return sample


def pieces(sample: Sample) -> Iterator[Piece]:
    """A sample as prompts with completions, such that every assistant message of a completion is to
    be trained on, and each is in one completion only.

    One piece, unless an assistant message that must not be trained on stands between others.
    """
    start, last, count = -1, -1, 0
    for index, (message, trained) in enumerate(zip(sample.messages, sample.trained, strict=True)):
        if trained:
            start = index if start < 0 else start
            last, count = index, count + 1
        elif message["role"] == "assistant" and start >= 0:
            yield _piece(sample.messages, start, last, count)
            start, last, count = -1, -1, 0
    if start >= 0:
        yield _piece(sample.messages, start, last, count)


def _piece(messages: list[Message], start: int, last: int, count: int) -> Piece:
    return Piece(prompt=messages[:start], completion=messages[start : last + 1], trained=count)


def fingerprint(sample: Sample) -> bytes:
    """16 bytes that are equal for samples that teach the same: whose messages, tools and what is
    trained differ in nothing but the ids of tool calls."""
    places: dict[str, int] = {}
    plain = [_without_ids(message, places) for message in sample.messages]
    told = [plain, sample.trained, sample.row["tools"]]
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).digest()[:16]


def _without_ids(message: Message, places: dict[str, int]) -> Message:
    plain = dict(message)
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        plain["tool_calls"] = [{**c, "id": places.setdefault(c["id"], len(places))} for c in calls]
    if "tool_call_id" in plain:
        plain["tool_call_id"] = places.setdefault(plain["tool_call_id"], len(places))
    return plain
