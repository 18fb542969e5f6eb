"""The next prompt of a conversation: what was sampled, exactly, and what the template writes after
it.

    next prompt = previous prompt + sampled ids + glue

The first prompt of a conversation is rendered. A later one is bridged: the glue is what the
template writes after an assistant's turn: its end, the new messages, and the opening of the next
turn. It is found with a placeholder in place of the answer, rendered once with what follows and
once without. Nothing that the model wrote is rendered or tokenized again. Where the template does
not allow that (it rewrites earlier turns, or the seam between sampled text and glue would be
tokenized differently), there is no bridge, and the next prompt is a fork, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens.template import PromptWriter, TemplateRefused, Tools
from hermes_rl.models.tokens.tokenizer import lookalikes

_EDGE = 120
"""Number of characters that are kept at both ends of a text."""
_LAST = 6
"""Number of last messages that are all kept."""


def abridge_messages(messages: Sequence[Message]) -> list[Message]:
    """Shorten a conversation without changing what the template writes after its last turn.

    That depends on roles, calls, reasoning, and how a message begins and ends; not on the middle of
    a tool's output, and not on the fortieth round of calls with the structure of the third. Long
    texts are cut in their middle, and between two questions one round of calls of each structure is
    kept. Otherwise each turn of a long conversation would render all turns before it.
    """
    out: list[Message] = []
    seen: set[Hashable] = set()
    last = len(messages) - _LAST
    place = 0
    while place < len(messages):
        end = _round_end(messages, place)
        structure = tuple(_structure(message) for message in messages[place:end])
        if isinstance(messages[place], UserMessage):
            seen = set()
        if structure not in seen or end > last or not isinstance(messages[place], AssistantMessage):
            out += [_short(message) for message in messages[place:end]]
        seen.add(structure)
        place = end
    return out


def _round_end(messages: Sequence[Message], start: int) -> int:
    """Return the index after the message and the results of its calls."""
    end = start + 1
    calls = isinstance(messages[start], AssistantMessage)
    while calls and end < len(messages) and isinstance(messages[end], ToolMessage):
        end += 1
    return end


def _structure(message: Message) -> Hashable:
    if isinstance(message, AssistantMessage):
        reasons = bool(message.reasoning_content), "<think>" in message.content
        return "assistant", bool(message.content), len(message.tool_calls), reasons
    return type(message).__name__, bool(message.content)


def _short(message: Message) -> Message:
    if isinstance(message, AssistantMessage) or not isinstance(message.content, str):
        return message
    if len(message.content) <= 3 * _EDGE:
        return message
    content = f"{message.content[:_EDGE]}\n{message.content[-_EDGE:]}"
    if isinstance(message, SystemMessage):
        return SystemMessage(content=content)
    return msgspec.structs.replace(message, content=content)


REASONING = "placeholder0reasoning"
_IN_CALL = "0called"
"""Follows the placeholder inside a call: what comes after it closes the call."""
_NO_SEAM = "no control token separates the answer from what follows it, and they share a token"
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class History:
    """One call of the model: its conversation, its prompt, and its parsed answer."""

    messages: Sequence[Message]
    """The conversation that the prompt represents, without the answer."""
    prompt_ids: Sequence[int]
    """The prompt as it was sent, rendered or bridged."""
    answer: AssistantMessage
    """The parsed answer: how many calls, their names, and whether it has reasoning."""


@dataclass(frozen=True)
class Bridged:
    """The prompt that continues the last call, or the reason why there is none."""

    ids: tuple[int, ...] | None
    """Previous prompt, sampled ids, glue; None for a fork."""
    fork_reason: str | None = None
    glue_start: int = 0
    """Index in `ids` at which the glue begins. Its tokens were not sampled, so none is trained."""
    closed: bool = False
    """The sampled ids did not end the turn (a limit, a stop text): the glue begins with the end
    token."""
    drops_reasoning: bool = False
    """It is a fork because the template does not show the reasoning of earlier turns."""

    @property
    def glue(self) -> tuple[int, ...]:
        """Return the ids that the template added."""
        return () if self.ids is None else self.ids[self.glue_start :]


@dataclass(frozen=True)
class Seam:
    """What the template writes after the text of an assistant's turn."""

    end: str
    """The end token; empty if the template has none."""
    after: str
    """What follows it, up to the opening of the next turn."""
    mark: str
    """The character that marks lookalikes in it."""
    opens: bool = False
    """The end token also opens the next turn (GLM ends a turn with `<|user|>`)."""


class Forked(TemplateRefused):
    """There is no bridge; the message is the reason, in one line.

    Args:
        drops_reasoning: the template does not show the reasoning of earlier turns.
    """

    def __init__(self, why: str, *, drops_reasoning: bool = False) -> None:
        super().__init__(why)
        self.drops_reasoning = drops_reasoning


def bridge(
    writer: PromptWriter,
    end_ids: frozenset[int],
    history: History,
    sampled: tuple[int, ...],
    new_messages: Sequence[Message],
    tools: Tools,
) -> Bridged:
    """Return the next prompt after a call.

    Args:
        sampled: all ids of the answer in the order sampled, the end token included if it was.
        new_messages: what was added to the conversation after the answer.

    Raises: UserError for images.
    """
    ended = bool(sampled) and sampled[-1] in end_ids
    try:
        found = seam(writer, end_ids, history, new_messages, tools)
        glue = _glue(writer, found, sampled, ended)
    except TemplateRefused as error:
        dropped = isinstance(error, Forked) and error.drops_reasoning
        return Bridged(None, str(error), drops_reasoning=dropped)
    kept = (*history.prompt_ids, *sampled)
    return Bridged(ids=(*kept, *glue), glue_start=len(kept), closed=bool(found.end) and not ended)


def seam(
    writer: PromptWriter,
    end_ids: frozenset[int],
    history: History,
    new_messages: Sequence[Message],
    tools: Tools,
) -> Seam:
    """Return what the template writes after the answer. Raises: Forked; TemplateRefused; UserError
    for images."""
    before = writer.fitted(abridge_messages(history.messages))
    name = _unused_name([before, new_messages, tools])
    turn = [*before, _placeholder(history.answer, name, 1 if writer.form.one_call else None)]
    marked = writer.prompt([*turn, *new_messages], tools)
    alone = marked.text(len(turn), generation_prompt=False)
    whole = marked.text(generation_prompt=True)
    place = alone.rfind(name)
    if place < 0:
        raise Forked("the template does not write the assistant's turn")
    called = alone.startswith(_IN_CALL, place + len(name))
    length = len(name) + (len(_IN_CALL) if called else 0)
    start, there = place + length, _nth(whole, name, alone.count(name)) + length
    if without_empty_reasoning(alone[:start]) != without_empty_reasoning(whole[:there]):
        raise rewritten(alone, whole)
    behind, rest = alone[start:], whole[there:]
    ids = {t.text: t.id for t in writer.tokenizer.added if t.special or t.id in end_ids}
    known = {text for text, token_id in ids.items() if token_id in end_ids}
    control = lookalikes(ids, after=marked.mark)
    closing = len(behind.rstrip()) if called else 0
    found = _seam_between(behind, rest, closing, _Controls(control, known, marked.mark))
    if found is None:
        raise rewritten(alone, whole)
    return found


class _Controls(NamedTuple):
    """Finds control tokens in what a template wrote: each may be the end of a turn."""

    pattern: re.Pattern[str]
    known: set[str]
    """Those that the model is known to end turns with."""
    mark: str


def _seam_between(behind: str, rest: str, closing: int, controls: _Controls) -> Seam | None:
    """Compare what the template writes after an answer at the end of a conversation and inside one.
    None if the two differ before the answer's turn has ended.

    Args:
        closing: how many characters close the placeholder's call; for a real call they were
        sampled.
    """
    mark = controls.mark
    within = list(controls.pattern.finditer(behind[: _first_difference(behind, rest)]))
    end = next((end for end in within if end.group() in controls.known), None)
    follows = rest.startswith(behind)
    if end is None and follows:  # some templates write the end of a turn with the next one
        left = rest[closing:]
        first = controls.pattern.search(left)
        if first and first.group() in controls.known and not left[: first.start()].strip():
            return Seam(first.group(), left[first.end() :], mark, opens=True)
    if end is None and within:
        end = within[-1]
    if end is not None:
        return Seam(end.group(), rest[end.end() :], mark)
    return Seam("", rest[closing:], mark) if follows else None


def without_empty_reasoning(text: str) -> str:
    """Return the text without empty reasoning blocks. Qwen 3 writes such a block into the last turn
    and not into earlier ones, and nothing that the model sampled depends on it."""
    return _EMPTY_REASONING.sub("", text)


def _unused_name(values: Sequence[Any]) -> str:
    """Return a placeholder that occurs nowhere in these values."""
    text, number = repr(values), 0
    while f"placeholder{number}answer" in text:
        number += 1
    return f"placeholder{number}answer"


def _nth(text: str, name: str, number: int) -> int:
    """Return the index of the n-th occurrence; 0 if there are fewer."""
    place = -1
    for _ in range(number):
        place = text.find(name, place + 1)
        if place < 0:
            return 0
    return place


def _placeholder(
    answer: AssistantMessage, name: str, most_calls: int | None = None
) -> AssistantMessage:
    """Return an answer of the same structure: as many calls of the same names, reasoning if there
    was some, and `name` in place of every text.

    Args:
        most_calls: the number of calls that the template can write in a turn.
    """
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=f'{{"text": "{name}{_IN_CALL}"}}')
        for call in answer.tool_calls[:most_calls]
    )
    return AssistantMessage(
        content=name if answer.content or not calls else "",
        reasoning_content=REASONING if answer.reasoning_content else None,
        tool_calls=calls,
    )


def rewritten(before: str, after: str) -> Forked:
    """Explain why one text is not the beginning of the other."""
    place = _first_difference(before, after)
    was, now = before[place : place + 40], after[place : place + 40]
    dropped = any(before.count(sign) > after.count(sign) for sign in (REASONING, "</think>"))
    what = "drops the reasoning of earlier turns"
    if not dropped:
        what = "rewrites what comes before the new messages"
    why = f"the template {what}: {was!r} becomes {now!r} at character {place}"
    return Forked(why, drops_reasoning=dropped)


def _first_difference(one: str, other: str) -> int:
    """Return the index of the first character at which two texts differ."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _glue(
    writer: PromptWriter, found: Seam, sampled: tuple[int, ...], ended: bool
) -> Sequence[int]:
    """Return the ids of the glue. Raises: Forked if the seam is not clean.

    What comes before and after a control token is tokenized separately in any case. So the glue is
    tokenized alone after (or from) one; without one, together with the sampled text.
    """
    tokenizer = writer.tokenizer
    last = tokenizer.text_of(sampled[-1]) if ended else None
    if ended and found.opens and last != found.end:
        raise Forked(
            f"the answer ended with {last!r}, and the conversation continues with {found.end!r}"
        )
    if anchor := found.end or last:
        ids = tokenizer.encode(anchor + found.after, found.mark)
        if not ids or tokenizer.text_of(ids[0]) != anchor:
            raise Forked(f"the tokenizer does not read {anchor!r} as one token")
        return ids[1:] if ended else ids
    first = tokenizer.encode(found.after, found.mark)
    if first and tokenizer.text_of(first[0]) is not None:
        return first
    text = tokenizer.decode(sampled)
    alone, joint = tokenizer.encode(text), tokenizer.encode(text + found.after, found.mark)
    if joint[: len(alone)] != alone:
        raise Forked(_NO_SEAM)
    return joint[len(alone) :]
