"""What a chat template does with tool calls and earlier turns, found by rendering with it.

Each probe of the prefix is a short conversation: a prompt, an answer, and what follows it. A
template that preserves its prefix renders the first two as the beginning of all three, so that
turns of one conversation share their tokens. Many templates do not, which is reported before a
training run: they drop the reasoning of earlier turns, move the tools after the last question, or
write a date.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    parse_arguments,
)
from hermes_rl.models.tokens.bridge import (
    REASONING,
    Forked,
    History,
    rewritten,
    seam,
    without_empty_reasoning,
)
from hermes_rl.models.tokens.parsers import PARSERS, ToolCallParser
from hermes_rl.models.tokens.rendering import PROBE_TOOL, PromptWriter
from hermes_rl.models.tokens.template import DATE, TemplateRefused

_ARGUMENTS = {"subject": 'the "green" one'}
_CALL = ToolCall(id="probe0001", name="look_up", arguments=json.dumps(_ARGUMENTS))
_ASK = UserMessage(content="Look it up.")


@dataclass(frozen=True)
class RenderedCall:
    """A tool call as a template writes it."""

    text: str
    """The assistant's turn without its end token; empty if the template writes no calls."""
    parser: str | None
    """The name of the first parser that reads the same call from it; None if none does."""


def render_call(writer: PromptWriter) -> RenderedCall:
    """Render a call, and try each parser on the text."""
    try:
        marked = writer.prompt([_ASK, AssistantMessage(tool_calls=(_CALL,))], [PROBE_TOOL])
        opened = marked.text(1, generation_prompt=True)
        bare = marked.text(1, generation_prompt=False)
        whole = marked.text(generation_prompt=False)
    except TemplateRefused:
        return RenderedCall("", None)
    ends = sorted((t.text for t in writer.tokenizer.added if t.special), key=len, reverse=True)
    # A template may open a turn differently than it writes it later (with empty reasoning).
    turns = [
        _without_end(whole.removeprefix(before).replace(marked.mark, ""), ends)
        for before in (opened, bare)
        if whole.startswith(before)
    ]
    for name, parser in PARSERS.items():
        if any(_reads(parser, turn) for turn in turns):
            return RenderedCall(turns[0], name)
    return RenderedCall(turns[0] if turns else "", None)


def _without_end(turn: str, ends: list[str]) -> str:
    bare = turn.rstrip()
    while end := next((e for e in ends if bare.endswith(e)), None):
        bare = bare.removesuffix(end).rstrip()
    return bare


def _reads(parser: ToolCallParser, turn: str) -> bool:
    calls = parser.parse(turn, [PROBE_TOOL]).calls
    if len(calls) != 1 or calls[0].error is not None or calls[0].name != _CALL.name:
        return False
    return parse_arguments(calls[0].arguments_text) == _ARGUMENTS


Outcome = Literal["identical", "bridged", "forks", "refused"]
"""`identical`: the bridged prompt is what the template renders. `bridged`: it continues what was
sampled, but the template would render the earlier turn differently. `forks`: the next call begins a
new branch. `refused`: the template does not render such a conversation."""


_ONE = "the template writes one call a turn; what was sampled stays, and renders as several turns"
_NEVER = "the template never shows reasoning; what was sampled stays"


@dataclass(frozen=True)
class Case:
    """The result of one probe."""

    name: str
    outcome: Outcome
    why: str = ""
    """One line, unless it is identical."""


@dataclass(frozen=True)
class Finding:
    """The results of all probes."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    """Further facts: a date that was fixed, reasoning that is never shown."""

    @property
    def preserved(self) -> bool:
        """Whether every probe that the template renders extends its prompt."""
        return all(case.outcome in ("identical", "refused") for case in self.cases)

    @property
    def forks(self) -> tuple[Case, ...]:
        """The probes after which a conversation continues as a new branch."""
        return tuple(case for case in self.cases if case.outcome == "forks")

    def with_note(self, note: str) -> Finding:
        """Return the same with one more note."""
        return Finding(self.cases, (*self.notes, note))

    def lines(self) -> list[str]:
        """Return text lines: each case that is not identical, then the notes."""
        lines = [f"{c.name}: {c.outcome}: {c.why}" for c in self.cases if c.outcome != "identical"]
        return [*lines, *self.notes]


@dataclass(frozen=True)
class _Probe:
    name: str
    base: tuple[Message, ...]
    answer: AssistantMessage
    new: tuple[Message, ...]
    tools: bool = False


def check_prefix(writer: PromptWriter, end_ids: frozenset[int]) -> Finding:
    """Render all probes."""
    cases = tuple(_case(probe, writer, end_ids) for probe in _probes())
    return Finding(cases, tuple(_notes(writer)))


def _case(probe: _Probe, writer: PromptWriter, end_ids: frozenset[int]) -> Case:
    tools = [PROBE_TOOL] if probe.tools else []
    if probe.answer.tool_calls and not writer.form.writes_calls:
        return Case(probe.name, "refused", "the template writes no tool calls")
    history = History(messages=probe.base, prompt_ids=(), answer=probe.answer)
    base = writer.fitted(probe.base)
    try:
        marked = writer.prompt(writer.fitted([*base, probe.answer, *probe.new]), tools)
        prompt = marked.text(len(base), generation_prompt=True)
        after = marked.text(generation_prompt=True)
        seam(writer, end_ids, history, probe.new, tools)
    except Forked as error:
        return Case(probe.name, "forks", str(error))
    except TemplateRefused as error:
        return Case(probe.name, "refused", str(error))
    if not after.startswith(prompt):
        without_opening = marked.text(len(base), generation_prompt=False)
        return Case(probe.name, "bridged", _explain_difference(without_opening, prompt, after))
    if writer.form.one_call and len(probe.answer.tool_calls) > 1:
        return Case(probe.name, "bridged", _ONE)
    if probe.answer.reasoning_content and REASONING not in after:
        return Case(probe.name, "bridged", _NEVER)
    return Case(probe.name, "identical")


def _explain_difference(without_opening: str, prompt: str, after: str) -> str:
    """Explain why a later rendering does not begin with the prompt.

    Args:
        without_opening: the prompt without the opening of the assistant's turn.
    """
    bare = without_empty_reasoning(after)
    if bare.startswith(without_empty_reasoning(prompt)):
        return "the template leaves empty reasoning out of earlier turns; what was sampled stays"
    if bare.startswith(without_empty_reasoning(without_opening)):
        opening = (
            prompt[len(without_opening) :] if prompt.startswith(without_opening) else prompt[-40:]
        )
        return f"the template does not open such a turn with {opening!r} later; the prompt stays"
    return f"{rewritten(prompt, after)}; what was sent stays"


def _notes(writer: PromptWriter) -> list[str]:
    ask = (UserMessage(content="What day is it?"),)
    another = datetime.date(2031, 1, 2)
    moved = replace(writer, template=writer.template.dated(another))
    try:
        texts = [s.prompt(ask, []).text(generation_prompt=True) for s in (writer, moved)]
    except TemplateRefused as error:
        return [f"a single question: {error}"]
    if texts[0] == texts[1]:
        return []
    fixed = writer.template.date
    note = f"the template writes the day; every prompt says {fixed.isoformat()}"
    return [note if fixed == DATE else f"{note}, as configured"]


def _probes() -> Sequence[_Probe]:
    system = SystemMessage(content="You are an assistant.")
    ask, then = UserMessage(content="First question?"), UserMessage(content="Second question?")
    answer, one, two = "An answer.", _call(1), _call(2)
    called, result = AssistantMessage(tool_calls=(one,)), _result(one)
    start, used = (system, ask), (system, ask, called, result)

    def turn(text: str, *calls: ToolCall, thought: bool = False) -> AssistantMessage:
        reasoning = REASONING if thought else None
        return AssistantMessage(content=text, tool_calls=calls, reasoning_content=reasoning)

    return (
        _Probe("a question after an answer", start, turn(answer), (then,)),
        _Probe("without a system message", (ask,), turn(answer), (then,)),
        _Probe("a question after an answer, tools offered", start, turn(answer), (then,), True),
        _Probe("a tool call", start, called, (result,), True),
        _Probe("text and a tool call", start, turn("Looking.", one), (result,), True),
        _Probe("several tool calls", start, turn("", one, two), (result, _result(two)), True),
        _Probe("a second round of tools", used, turn("", two), (_result(two),), True),
        _Probe("a question after tools", used, turn(answer), (then,), True),
        _Probe("reasoning before a tool call", start, turn("", one, thought=True), (result,), True),
        _Probe("reasoning before an answer", start, turn(answer, thought=True), (then,)),
    )


def _call(number: int) -> ToolCall:
    arguments = f'{{"subject": "subject {number}"}}'
    return ToolCall(id=f"probe{number:04}", name="look_up", arguments=arguments)


def _result(call: ToolCall) -> ToolMessage:
    return ToolMessage(tool_call_id=call.id, name=call.name, content="A result.")
