"""The bridge: the next prompt is what was sampled, exactly, and the template's words after it.

    next prompt = previous prompt + sampled ids + glue

The glue is what the template writes behind an assistant's turn: its end, the new messages, and
the opening of the next turn. It is found with a placeholder in the place of the answer, rendered
once with what follows and once without; nothing that the model wrote is rendered or tokenised
again. Where the template does not allow that (it rewrites earlier turns, or the seam between
sampled text and glue would be tokenised in another way), there is no bridge and the next prompt is
a fork, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hermes_rl.messages import AssistantMessage, Message, ToolCall
from hermes_rl.models.tokens.abridge import abridged
from hermes_rl.models.tokens.template import TemplateRefused
from hermes_rl.models.tokens.tokenizer import Tokenizer, lookalikes
from hermes_rl.models.tokens.typeset import Typesetter

REASONING = "placeholder0reasoning"
_IN_CALL = "0called"
"""Stands behind the word where it stands in a call: what follows closes the call."""
_NO_SEAM = "no control token parts the answer from what follows it, and both share a token"
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class History:
    """One call of the model: what it was asked, and what was read from its answer."""

    messages: Sequence[Message]
    """The conversation that the prompt stands for, the answer not included."""
    prompt_ids: Sequence[int]
    """The prompt as it was sent; rendered, or bridged in its turn."""
    answer: AssistantMessage
    """The answer as it was parsed: how many calls, of what names, and whether it reasoned."""


@dataclass(frozen=True)
class Bridged:
    """A next prompt that continues the last call, or why there is none."""

    ids: tuple[int, ...] | None
    """Previous prompt, sampled ids, glue; None for a fork."""
    fork_reason: str | None = None
    glue_start: int = 0
    """Where the glue begins in `ids`. No token of it was sampled: none is trained."""
    closed: bool = False
    """The sample did not end its turn (cut by a limit, stopped by a text): the glue begins with
    the end token."""
    drops_reasoning: bool = False
    """It is a fork because the template does not show the reasoning of earlier turns."""

    @property
    def glue(self) -> tuple[int, ...]:
        """The ids that the template added."""
        return () if self.ids is None else self.ids[self.glue_start :]


@dataclass(frozen=True)
class Seam:
    """What the template writes behind the text of an assistant's turn."""

    end: str
    """The end token; empty where the template has none."""
    after: str
    """What follows it, up to the opening of the next turn."""
    mark: str
    """What marks lookalikes in it."""
    opens: bool = False
    """The end token is the opening of the next turn (GLM ends a turn with `<|user|>`)."""


@dataclass(frozen=True)
class Fork:
    """Why there is no bridge, in one line."""

    why: str
    drops_reasoning: bool = False


def bridge(
    setter: Typesetter,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    history: History,
    sampled_ids: Sequence[int],
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> Bridged:
    """The next prompt after a call.

    Args:
        sampled_ids: all ids of the answer in the order sampled, the end token included if it was.
        new_messages: what was added to the conversation behind the answer.

    Raises: UserError for images.
    """
    try:
        found = seam(setter, tokenizer, end_ids, history, new_messages, tools)
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
    setter: Typesetter,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    history: History,
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> Seam | Fork:
    """What stands behind the answer. Raises: TemplateRefused; UserError for images."""
    before = setter.fitted(abridged(history.messages))
    word = _word([before, new_messages, tools])
    turn = [*before, placeholder(history.answer, word, 1 if setter.form.one_call else None)]
    sheet = setter.sheet([*turn, *new_messages], tools)
    alone = sheet.text(len(turn), generation_prompt=False)
    whole = sheet.text(generation_prompt=True)
    place = alone.rfind(word)
    if place < 0:
        return Fork("the template does not write the assistant's turn")
    called = alone.startswith(_IN_CALL, place + len(word))
    length = len(word) + (len(_IN_CALL) if called else 0)
    start, there = place + length, _nth(whole, word, alone.count(word)) + length
    if without_empty_reasoning(alone[:start]) != without_empty_reasoning(whole[:there]):
        return rewritten(alone, whole)
    behind, rest = alone[start:], whole[there:]
    known = _Controls(tokenizer, end_ids, sheet.mark)
    closing = len(behind.rstrip()) if called else 0
    found = _behind(behind, rest, closing, known)
    return rewritten(alone, whole) if found is None else found


def _behind(behind: str, rest: str, closing: int, known: _Controls) -> Seam | None:
    """What stands behind an answer, by what the template writes there without and with what
    follows; None where these differ before the answer's turn has ended.

    Args:
        closing: so much of it closes the placeholder's call: of the model's own, it was sampled.
    """
    within = known.ends_in(behind[: _parting(behind, rest)])
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
    """The text without reasoning blocks that hold none: Qwen 3 writes such a block into the last
    turn and not into earlier ones, and nothing that the model said depends on it."""
    return _EMPTY_REASONING.sub("", text)


def _word(values: Sequence[Any]) -> str:
    """A word that stands nowhere in these values."""
    told, number = repr(values), 0
    while f"placeholder{number}answer" in told:
        number += 1
    return f"placeholder{number}answer"


def _nth(text: str, word: str, number: int) -> int:
    """Where the word stands for the n-th time; 0 when it stands there less often."""
    place = -1
    for _ in range(number):
        place = text.find(word, place + 1)
        if place < 0:
            return 0
    return place


def placeholder(
    answer: AssistantMessage, word: str, most_calls: int | None = None
) -> AssistantMessage:
    """An answer of the same build, which no tokenizer has to read: as many calls of the same names,
    reasoning where there was some, and the word in the place of every text.

    Args:
        most_calls: as many as the template can write in a turn.
    """
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=f'{{"text": "{word}{_IN_CALL}"}}')
        for call in answer.tool_calls[:most_calls]
    )
    return AssistantMessage(
        content=word if answer.content or not calls else "",
        reasoning_content=REASONING if answer.reasoning_content else None,
        tool_calls=calls,
    )


def rewritten(before: str, after: str) -> Fork:
    """Why the one is no beginning of the other."""
    place = _parting(before, after)
    was, now = before[place : place + 40], after[place : place + 40]
    dropped = any(before.count(sign) > after.count(sign) for sign in (REASONING, "</think>"))
    what = "drops the reasoning of earlier turns"
    if not dropped:
        what = "rewrites what stands before the new messages"
    told = f"the template {what}: {was!r} becomes {now!r} at character {place}"
    return Fork(told, drops_reasoning=dropped)


def _parting(one: str, other: str) -> int:
    """The first character at which two texts differ."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class _Control(NamedTuple):
    """A control token in a text."""

    start: int
    end: int
    known: bool
    """The model is known to end its turns with it."""


@dataclass(frozen=True)
class _Controls:
    """Finds control tokens in what a template wrote."""

    tokenizer: Tokenizer
    end_ids: frozenset[int]
    mark: str

    def ends_in(self, text: str) -> list[_Control]:
        """Those in this text, in order: each may be the end of a turn."""
        ids = {t.text: t.id for t in self.tokenizer.added if t.special or t.id in self.end_ids}
        return [
            _Control(*match.span(), ids[match.group()] in self.end_ids)
            for match in lookalikes(ids, after=self.mark).finditer(text)
        ]


def _glue(
    tokenizer: Tokenizer, found: Seam, sampled: tuple[int, ...], ended: bool
) -> list[int] | Fork:
    """The ids of the glue, or why its seam is not clean.

    A control token separates: what stands on its two sides is tokenised apart anyway. So the glue
    is tokenised alone behind (or from) one; without one, together with the sampled text.
    """
    if ended and found.opens and tokenizer.text_of(sampled[-1]) != found.end:
        said = tokenizer.text_of(sampled[-1])
        return Fork(
            f"the answer ended with {said!r}, and the conversation goes on with {found.end!r}"
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
    said = tokenizer.decode(sampled)
    alone, joint = tokenizer.encode(said), tokenizer.encode(said + found.after, found.mark)
    if joint[: len(alone)] != alone:
        return Fork(_NO_SEAM)
    return joint[len(alone) :]
