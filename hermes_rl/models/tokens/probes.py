"""Whether a chat template only ever adds at the end, asked of the template itself at the start.

Each probe is a short conversation: a prompt, an answer, and what follows it. A template that keeps
its prefix renders the first two as the beginning of all three, so that turns of one conversation
share their tokens. Many do not, and say so here instead of in a training run: they drop the
reasoning of earlier turns, move the tools behind the last question, write a date.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens.bridge import (
    REASONING,
    Fork,
    History,
    rewritten,
    seam,
    without_empty_reasoning,
)
from hermes_rl.models.tokens.forms import PROBE_TOOL
from hermes_rl.models.tokens.template import DATE, TemplateRefused
from hermes_rl.models.tokens.tokenizer import Tokenizer
from hermes_rl.models.tokens.typeset import Typesetter

Outcome = Literal["identical", "bridged", "forks", "refused"]
"""identical: the bridged prompt is what the template renders. bridged: it continues what was
sampled, but the template itself would write the earlier turn in another way. forks: the next call
begins a new branch. refused: the template does not render such a conversation."""


_ONE = "the template writes one call a turn; what was sampled stays, and renders as several turns"
_NEVER = "the template never shows reasoning; what was sampled stays"


@dataclass(frozen=True)
class Case:
    """What the template does with one probe."""

    name: str
    outcome: Outcome
    why: str = ""
    """One line, where it is not identical."""


@dataclass(frozen=True)
class Finding:
    """What the probes found."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    """What to know beside: a date that was fixed, reasoning that is never shown."""

    @property
    def preserved(self) -> bool:
        """Every probe that the template renders extends its prompt, as the template itself does."""
        return all(case.outcome in ("identical", "refused") for case in self.cases)

    @property
    def forks(self) -> tuple[Case, ...]:
        """The probes after which a conversation goes on as a new branch."""
        return tuple(case for case in self.cases if case.outcome == "forks")

    def noting(self, note: str) -> Finding:
        """The same with one more note."""
        return Finding(self.cases, (*self.notes, note))

    def lines(self) -> list[str]:
        """For people: each case that is not identical, then the notes."""
        told = [f"{c.name}: {c.outcome}: {c.why}" for c in self.cases if c.outcome != "identical"]
        return [*told, *self.notes]


@dataclass(frozen=True)
class _Probe:
    name: str
    base: tuple[Message, ...]
    answer: AssistantMessage
    new: tuple[Message, ...]
    tools: bool = False


def find(setter: Typesetter, tokenizer: Tokenizer, end_ids: frozenset[int]) -> Finding:
    """Renders all probes."""
    cases = tuple(_case(probe, setter, tokenizer, end_ids) for probe in _probes())
    return Finding(cases, tuple(_notes(setter)))


def _case(probe: _Probe, setter: Typesetter, tokenizer: Tokenizer, end_ids: frozenset[int]) -> Case:
    tools = [PROBE_TOOL] if probe.tools else []
    if probe.answer.tool_calls and not setter.form.writes_calls:
        return Case(probe.name, "refused", "the template writes no tool calls")
    history = History(messages=probe.base, prompt_ids=(), answer=probe.answer)
    base = setter.fitted(probe.base)
    try:
        sheet = setter.sheet(setter.fitted([*base, probe.answer, *probe.new]), tools)
        prompt = sheet.text(len(base), generation_prompt=True)
        after = sheet.text(generation_prompt=True)
        found = seam(setter, tokenizer, end_ids, history, probe.new, tools)
    except TemplateRefused as error:
        return Case(probe.name, "refused", str(error))
    if isinstance(found, Fork):
        return Case(probe.name, "forks", found.why)
    if not after.startswith(prompt):
        asked = sheet.text(len(base), generation_prompt=False)
        return Case(probe.name, "bridged", _unlike(asked, prompt, after))
    if setter.form.one_call and len(probe.answer.tool_calls) > 1:
        return Case(probe.name, "bridged", _ONE)
    if probe.answer.reasoning_content and REASONING not in after:
        return Case(probe.name, "bridged", _NEVER)
    return Case(probe.name, "identical")


def _unlike(asked: str, prompt: str, after: str) -> str:
    """Why a prompt does not stand at the beginning of what comes after it.

    Args:
        asked: the prompt without its opening of the assistant's turn.
    """
    bare = without_empty_reasoning(after)
    if bare.startswith(without_empty_reasoning(prompt)):
        return "the template leaves empty reasoning out of earlier turns; what was sampled stays"
    if bare.startswith(without_empty_reasoning(asked)):
        opening = prompt[len(asked) :] if prompt.startswith(asked) else prompt[-40:]
        return f"the template does not open such a turn with {opening!r} later; the prompt stays"
    return f"{rewritten(prompt, after).why}; what was sent stays"


def _notes(setter: Typesetter) -> list[str]:
    ask = (UserMessage(content="What day is it?"),)
    another = datetime.date(2031, 1, 2)
    moved = Typesetter(setter.template.dated(another), setter.form, setter.shield)
    try:
        texts = [s.sheet(ask, []).text(generation_prompt=True) for s in (setter, moved)]
    except TemplateRefused as error:
        return [f"a single question: {error}"]
    if texts[0] == texts[1]:
        return []
    fixed = setter.template.date
    told = f"the template writes the day; every prompt says {fixed.isoformat()}"
    return [told if fixed == DATE else f"{told}, as configured"]


def _probes() -> Sequence[_Probe]:
    system = SystemMessage(content="You are an assistant.")
    ask, go_on = UserMessage(content="First question?"), UserMessage(content="Second question?")
    said = AssistantMessage(content="An answer.")
    one, two = _call(1), _call(2)
    thought = AssistantMessage(content="An answer.", reasoning_content=REASONING)
    called = AssistantMessage(tool_calls=(one,))
    spoke = AssistantMessage(content="Looking.", tool_calls=(one,))
    reasoned = AssistantMessage(tool_calls=(one,), reasoning_content=REASONING)
    result, second = _result(one), _result(two)
    return (
        _Probe("a question after an answer", (system, ask), said, (go_on,)),
        _Probe("without a system message", (ask,), said, (go_on,)),
        _Probe("a question after an answer, tools offered", (system, ask), said, (go_on,), True),
        _Probe("a tool call", (system, ask), called, (result,), True),
        _Probe("text and a tool call", (system, ask), spoke, (result,), True),
        _Probe(
            "several tool calls",
            (system, ask),
            AssistantMessage(tool_calls=(one, two)),
            (result, second),
            True,
        ),
        _Probe(
            "a second round of tools",
            (system, ask, called, result),
            AssistantMessage(tool_calls=(two,)),
            (second,),
            True,
        ),
        _Probe("a question after tools", (system, ask, called, result), said, (go_on,), True),
        _Probe("reasoning before a tool call", (system, ask), reasoned, (result,), True),
        _Probe("reasoning before an answer", (system, ask), thought, (go_on,)),
    )


def _call(number: int) -> ToolCall:
    arguments = f'{{"subject": "subject {number}"}}'
    return ToolCall(id=f"probe{number:04}", name="look_up", arguments=arguments)


def _result(call: ToolCall) -> ToolMessage:
    return ToolMessage(tool_call_id=call.id, name=call.name, content="A result.")
