"""The next prompt of a conversation: what was sampled, exactly, and what the template writes after
it.

    next prompt = previous prompt + sampled ids + glue

The first prompt of a conversation is rendered. A later one is bridged: the glue is what the
template writes after an assistant's turn: its end, the new messages, and the opening of the next
turn. It is found with a placeholder in place of the answer, rendered once with what follows and
once without. Nothing that the model wrote is rendered or tokenized again. Where the template does
not allow that (it rewrites earlier turns, or the seam between sampled text and glue would be
tokenized differently), there is no bridge, and the next prompt is a fork, with the reason.

A message of the history that this conversation did not sample (few-shot turns, turns that a harness
wrote) is rendered. The same conversation gives the same prompt however often it is requested:
failed calls leave no trace.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec

from hermes_rl.events import ForkReason, TokenSource
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens.rendering import PromptWriter
from hermes_rl.models.tokens.template import TemplateRefused
from hermes_rl.models.tokens.tokenizer import Tokenizer, lookalikes

_EDGE = 120
"""Number of characters that are kept at both ends of a text."""
_LAST = 6
"""Number of last messages that are all kept."""


def abridged(messages: Sequence[Message]) -> list[Message]:
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


@dataclass(frozen=True)
class Fork:
    """The reason why there is no bridge, in one line."""

    why: str
    drops_reasoning: bool = False


def bridge(
    writer: PromptWriter,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    history: History,
    sampled_ids: Sequence[int],
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> Bridged:
    """Return the next prompt after a call.

    Args:
        sampled_ids: all ids of the answer in the order sampled, the end token included if it was.
        new_messages: what was added to the conversation after the answer.

    Raises: UserError for images.
    """
    try:
        found = seam(writer, tokenizer, end_ids, history, new_messages, tools)
    except TemplateRefused as error:
        return Bridged(None, str(error))
    if isinstance(found, Fork):
        return Bridged(None, found.why, drops_reasoning=found.drops_reasoning)
    sampled = tuple(sampled_ids)
    ended = bool(sampled) and sampled[-1] in end_ids
    glue = _glue(tokenizer, found, sampled, ended)
    if isinstance(glue, Fork):
        return Bridged(None, glue.why)
    kept = (*history.prompt_ids, *sampled)
    return Bridged(ids=(*kept, *glue), glue_start=len(kept), closed=bool(found.end) and not ended)


def seam(
    writer: PromptWriter,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    history: History,
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> Seam | Fork:
    """Return what the template writes after the answer. Raises: TemplateRefused; UserError for
    images."""
    before = writer.fitted(abridged(history.messages))
    name = _unused_name([before, new_messages, tools])
    turn = [*before, placeholder(history.answer, name, 1 if writer.form.one_call else None)]
    marked = writer.prompt([*turn, *new_messages], tools)
    alone = marked.text(len(turn), generation_prompt=False)
    whole = marked.text(generation_prompt=True)
    place = alone.rfind(name)
    if place < 0:
        return Fork("the template does not write the assistant's turn")
    called = alone.startswith(_IN_CALL, place + len(name))
    length = len(name) + (len(_IN_CALL) if called else 0)
    start, there = place + length, _nth(whole, name, alone.count(name)) + length
    if without_empty_reasoning(alone[:start]) != without_empty_reasoning(whole[:there]):
        return rewritten(alone, whole)
    behind, rest = alone[start:], whole[there:]
    known = _Controls(tokenizer, end_ids, marked.mark)
    closing = len(behind.rstrip()) if called else 0
    found = _seam_between(behind, rest, closing, known)
    return rewritten(alone, whole) if found is None else found


def _seam_between(behind: str, rest: str, closing: int, known: _Controls) -> Seam | None:
    """Compare what the template writes after an answer at the end of a conversation and inside one.
    None if the two differ before the answer's turn has ended.

    Args:
        closing: how many characters close the placeholder's call; for a real call they were
        sampled.
    """
    within = known.ends_in(behind[: _first_difference(behind, rest)])
    end = next((end for end in within if end.known), None)
    follows = rest.startswith(behind)
    if end is None and follows:  # some templates write the end of a turn with the next one
        left = rest[closing:]
        first = next(iter(known.ends_in(left)), None)
        if first is not None and first.known and not left[: first.start].strip():
            return Seam(left[first.start : first.end], left[first.end :], known.mark, opens=True)
    if end is None and within:
        end = within[-1]
    if end is not None:
        return Seam(rest[end.start : end.end], rest[end.end :], known.mark)
    return Seam("", rest[closing:], known.mark) if follows else None


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


def placeholder(
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


def rewritten(before: str, after: str) -> Fork:
    """Explain why one text is not the beginning of the other."""
    place = _first_difference(before, after)
    was, now = before[place : place + 40], after[place : place + 40]
    dropped = any(before.count(sign) > after.count(sign) for sign in (REASONING, "</think>"))
    what = "drops the reasoning of earlier turns"
    if not dropped:
        what = "rewrites what comes before the new messages"
    why = f"the template {what}: {was!r} becomes {now!r} at character {place}"
    return Fork(why, drops_reasoning=dropped)


def _first_difference(one: str, other: str) -> int:
    """Return the index of the first character at which two texts differ."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class _Control(NamedTuple):
    """A control token in a text."""

    start: int
    end: int
    known: bool
    """The model is known to end turns with it."""


@dataclass(frozen=True)
class _Controls:
    """Finds control tokens in what a template wrote."""

    tokenizer: Tokenizer
    end_ids: frozenset[int]
    mark: str

    def ends_in(self, text: str) -> list[_Control]:
        """Return the control tokens in a text, in order: each may be the end of a turn."""
        ids = {t.text: t.id for t in self.tokenizer.added if t.special or t.id in self.end_ids}
        return [
            _Control(*match.span(), ids[match.group()] in self.end_ids)
            for match in lookalikes(ids, after=self.mark).finditer(text)
        ]


def _glue(
    tokenizer: Tokenizer, found: Seam, sampled: tuple[int, ...], ended: bool
) -> list[int] | Fork:
    """Return the ids of the glue, or why the seam is not clean.

    What comes before and after a control token is tokenized separately in any case. So the glue is
    tokenized alone after (or from) one; without one, together with the sampled text.
    """
    if ended and found.opens and tokenizer.text_of(sampled[-1]) != found.end:
        end = tokenizer.text_of(sampled[-1])
        return Fork(
            f"the answer ended with {end!r}, and the conversation continues with {found.end!r}"
        )
    anchor = found.end or (tokenizer.text_of(sampled[-1]) if ended else None)
    if anchor:
        ids = tokenizer.encode(anchor + found.after, found.mark)
        if not ids or tokenizer.text_of(ids[0]) != anchor:
            return Fork(f"the tokenizer does not read {anchor!r} as one token")
        return ids[1:] if ended else ids
    first = tokenizer.encode(found.after, found.mark)
    if first and tokenizer.text_of(first[0]) is not None:
        return first
    text = tokenizer.decode(sampled)
    alone, joint = tokenizer.encode(text), tokenizer.encode(text + found.after, found.mark)
    if joint[: len(alone)] != alone:
        return Fork(_NO_SEAM)
    return joint[len(alone) :]


Tools = Sequence[Mapping[str, Any]]

KEPT = 4
"""Number of earlier calls whose tokens are kept. A conversation continues its last call; the others
serve answers that were discarded and turns that were undone."""
PARALLEL_ANSWERS = 256
"""Number of answers to one prompt that are kept: the conversation may continue any of them. They
share the ids of their prompt."""

_REASONING = "reasoning"
"""Part of the reason of a fork when the template does not show earlier reasoning."""


class Renders(Protocol):
    """The methods of `Renderer` that are used here."""

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Sequence[int]:
        """Return the prompt of a conversation."""
        ...

    def bridge(
        self,
        history: History,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Bridged:
        """Return the prompt after a call."""
        ...


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt and their source."""

    ids: tuple[int, ...]
    source: TokenSource = "engine"
    """`bridged`: it continues sampled ids. `engine`: it is rendered as a whole."""
    fork_reason: ForkReason | None = None
    """The reason why it does not continue the last call."""
    explanation: str | None = None
    """The same as a text."""


@dataclass(frozen=True)
class _Call:
    """One answered call."""

    history: History
    sampled: tuple[int, ...]
    tools: Tools
    prompt: Prompt


class TokenState:
    """The tokens of one conversation. Not for threads; safe between tasks, as nothing awaits."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._last: tuple[Sequence[Message], Tools, int, Prompt] | None = None
        self._answered = 0

    def prompt(self, renderer: Renders, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """Return the prompt of the conversation as it is now.

        Raises: TemplateRefused; UserError for images.
        """
        last = self._last
        known = last is not None and last[2] == self._answered and last[1] is tools
        if last is not None and known and self._same(last[0], messages):
            return last[3]
        found = self._find(renderer, messages, tools)
        self._last = (list(messages), tools, self._answered, found)
        return found

    def answered(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        tools: Tools,
        answer: AssistantMessage,
        sampled: tuple[int, ...],
    ) -> None:
        """Record what was sampled for a prompt.

        Args:
            messages: the conversation that the prompt represents, without the answer.
        """
        history = History(messages=tuple(messages), prompt_ids=prompt.ids, answer=answer)
        self._calls.append(_Call(history, sampled, tools, prompt))
        self._answered += 1
        length = len(history.messages)
        beside = [call for call in self._calls if len(call.history.messages) == length]
        if len(self._calls) > KEPT:
            others = [call for call in self._calls if len(call.history.messages) != length]
            self._calls = [*others[-KEPT:], *beside[-PARALLEL_ANSWERS:]]

    def _find(self, renderer: Renders, messages: Sequence[Message], tools: Tools) -> Prompt:
        for call in reversed(self._calls):
            if self._same(call.history.messages, messages) and _alike(call.tools, tools):
                return replace(call.prompt, fork_reason="retry")  # its answer was discarded
        before = self._before(messages, tools)
        if before is None:
            ids = tuple(renderer.render(messages, tools))
            return Prompt(ids, fork_reason="edited_history" if self._calls else None)
        new = messages[len(before.history.messages) + 1 :]
        found = renderer.bridge(before.history, before.sampled, new, tools)
        if found.ids is None:
            return _rendered(renderer, messages, tools, found.fork_reason or "no bridge")
        newest = before is self._calls[-1]
        return Prompt(found.ids, "bridged", None if newest else "edited_history")

    def _before(self, messages: Sequence[Message], tools: Tools) -> _Call | None:
        """Return the call that this conversation continues. If two have equal answers (one text,
        sampled twice), it is the one whose answer object was kept, else the newest."""
        fitting = [call for call in reversed(self._calls) if self._continues(call, messages, tools)]
        longest = max((len(call.history.messages) for call in fitting), default=0)
        fitting = [call for call in fitting if len(call.history.messages) == longest]
        kept = (c for c in fitting if messages[longest] is c.history.answer)
        return next(kept, fitting[0] if fitting else None)

    def _continues(self, call: _Call, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether this conversation holds the call's messages and then its answer."""
        before = call.history.messages
        place = len(before)
        if len(messages) <= place or not _alike(call.tools, tools):
            return False
        answer = call.history.answer
        return self._equal(answer, messages[place]) and self._same(before, messages[:place])

    def _same(self, before: Sequence[Message], now: Sequence[Message]) -> bool:
        return len(before) == len(now) and all(map(self._equal, before, now))

    def _equal(self, one: Message, other: Message) -> bool:
        """Return whether a message represents another. Two answers with the same text were sampled
        separately, and neither represents the other; a copy of an answer does."""
        if one is other or one != other:
            return one is other
        return not any(call.history.answer is other for call in self._calls)


def _rendered(renderer: Renders, messages: Sequence[Message], tools: Tools, why: str) -> Prompt:
    reason: ForkReason = "dropped_reasoning" if _REASONING in why else "template"
    return Prompt(tuple(renderer.render(messages, tools)), "engine", reason, why)


def _alike(one: Tools, other: Tools) -> bool:
    return one is other or one == other
