"""What a conversation knows of its tokens: each prompt continues what was sampled, exactly.

The first prompt of a conversation is rendered. A later one is the prompt of the last call, the ids
that were sampled, and the template's glue. A message of the history that this conversation did not
sample (few-shot turns, what a harness wrote itself) is rendered. The same conversation gives the
same prompt however often it is asked: failed calls leave no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hermes_rl.events import ForkReason, TokenSource
from hermes_rl.messages import AssistantMessage, Message
from hermes_rl.models.tokens.bridge import Bridged, History

Tools = Sequence[Mapping[str, Any]]

KEPT = 4
"""Earlier calls whose tokens are kept. A conversation goes on from its last one; the others are for
answers that were thrown away, and turns that were taken back."""
SIDE_BY_SIDE = 256
"""Answers to one prompt that are kept: any of them may be the one that is gone on with. They share
their prompt's ids."""

_REASONING = "reasoning"
"""Stands in the reason of a bridge that cannot be because earlier reasoning is not shown."""


class Renders(Protocol):
    """What is needed of a `Renderer`."""

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Sequence[int]:
        """The prompt of a conversation."""
        ...

    def bridge(
        self,
        history: History,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Bridged:
        """The prompt after a call."""
        ...


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt, and where they are from."""

    ids: tuple[int, ...]
    source: TokenSource = "engine"
    """`bridged`: it continues sampled ids. `engine`: rendered whole, and read by the engine as it
    is."""
    fork_reason: ForkReason | None = None
    """Why it does not continue the last call."""
    told: str | None = None
    """The same in words."""


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
        """The prompt of the conversation as it stands.

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
        """Note what was sampled for a prompt.

        Args:
            messages: the conversation that the prompt stands for, the answer not included.
        """
        history = History(messages=tuple(messages), prompt_ids=prompt.ids, answer=answer)
        self._calls.append(_Call(history, sampled, tools, prompt))
        self._answered += 1
        length = len(history.messages)
        beside = [call for call in self._calls if len(call.history.messages) == length]
        if len(self._calls) > KEPT:
            others = [call for call in self._calls if len(call.history.messages) != length]
            self._calls = [*others[-KEPT:], *beside[-SIDE_BY_SIDE:]]

    def _find(self, renderer: Renders, messages: Sequence[Message], tools: Tools) -> Prompt:
        for call in reversed(self._calls):
            if self._same(call.history.messages, messages) and _alike(call.tools, tools):
                return replace(call.prompt, fork_reason="retry")  # its answer was thrown away
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
        """The call that this conversation goes on from. Where two gave equal answers (one text,
        sampled twice), it is the one whose very answer was kept, else the newest."""
        fitting = [call for call in reversed(self._calls) if self._goes_on(call, messages, tools)]
        longest = max((len(call.history.messages) for call in fitting), default=0)
        fitting = [call for call in fitting if len(call.history.messages) == longest]
        kept = (c for c in fitting if messages[longest] is c.history.answer)
        return next(kept, fitting[0] if fitting else None)

    def _goes_on(self, call: _Call, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether this conversation holds the call's answer behind what it was asked."""
        before = call.history.messages
        place = len(before)
        if len(messages) <= place or not _alike(call.tools, tools):
            return False
        answer = call.history.answer
        return self._equal(answer, messages[place]) and self._same(before, messages[:place])

    def _same(self, before: Sequence[Message], now: Sequence[Message]) -> bool:
        return len(before) == len(now) and all(map(self._equal, before, now))

    def _equal(self, one: Message, other: Message) -> bool:
        """Whether the one stands for the other. Two answers of one text were sampled apart, and
        each is itself alone; a copy of an answer is as good as it."""
        if one is other or one != other:
            return one is other
        return not any(call.history.answer is other for call in self._calls)


def _rendered(renderer: Renders, messages: Sequence[Message], tools: Tools, told: str) -> Prompt:
    reason: ForkReason = "dropped_reasoning" if _REASONING in told else "template"
    return Prompt(tuple(renderer.render(messages, tools)), "engine", reason, told)


def _alike(one: Tools, other: Tools) -> bool:
    return one is other or one == other
