"""The renderer of one model: messages to ids, ids to text, bridges, and what its template does.

What a template does is found by rendering. Each probe is a short conversation: a prompt, an answer,
and what follows it. A template that preserves its prefix renders the first two as the beginning of
all three, so that turns of one conversation share their tokens. Many templates do not, which is
reported before a training run: they drop the reasoning of earlier turns, move the tools after the
last question, or write a date.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

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
    Bridged,
    Forked,
    History,
    bridge,
    rewritten,
    seam,
    without_empty_reasoning,
)
from hermes_rl.models.tokens.parsers import PARSERS, ToolCallParser
from hermes_rl.models.tokens.template import (
    DATE,
    PROBE_TOOL,
    Form,
    PromptWriter,
    Template,
    TemplateRefused,
    Tools,
)
from hermes_rl.models.tokens.tokenizer import Tokenizer, TokenizerFiles, folder_of, read_folder


class Renderer:
    """A tokenizer with its chat template.

    Args:
        tokenizer: encodes and decodes.
        template: writes a conversation as text.
        end_ids: ids that end a turn according to the model's files. The token with which the
        template ends an assistant's turn is added.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, *, end_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._file_end_ids = frozenset(end_ids)
        self._writer = PromptWriter.of(tokenizer, template)

    @property
    def form(self) -> Form:
        """The form in which the template reads messages."""
        return self._writer.form

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of tokenizer.json."""
        return self.tokenizer.sha256

    @property
    def template_hash(self) -> str:
        """SHA-256 of the template, its variables and its date."""
        return self.template.sha256

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an assistant's turn. Generation stops at these, never at a text."""
        found = (self._end_of(answer, tools) for answer, tools in _PLAIN_TURNS)
        return self._file_end_ids | {token_id for token_id in found if token_id is not None}

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the opening of the assistant's turn holds `<think>`, so that sampling begins
        inside reasoning."""
        try:
            text = self._writer.prompt([_ASK], ()).text(generation_prompt=True)
        except TemplateRefused:
            return False
        return text.rstrip().endswith("<think>")

    @property
    def parser_name(self) -> str:
        """The name of the tool-call parser that fits the template; `hermes` if none does."""
        return self._rendered_call.parser or "hermes"

    @property
    def parser_fits(self) -> bool:
        """Whether a parser reads calls as this template writes them. Also False if it writes none:
        calls and their results would be missing in the next prompt."""
        return self._writer.form.writes_calls and self._rendered_call.parser is not None

    @property
    def unread_calls(self) -> str:
        """Why no parser fits, and what to do: a message for users."""
        if not self._writer.form.writes_calls:
            return (
                "this model's chat template writes no tool calls: it could not show the model what "
                "was called. Put one that does into the folder of endpoint.tokenizer "
                "(chat_template.jinja), use endpoint.tokens=chat, or offer no tools"
            )
        return (
            f"no parser here reads tool calls as this model's template writes them: "
            f"{self._rendered_call.text!r} (the parsers are {', '.join(PARSERS)}). Use "
            "endpoint.tokens=chat, where the engine reads them, or a template in one of these forms"
        )

    @cached_property
    def _rendered_call(self) -> RenderedCall:
        return render_call(self._writer)

    def render(
        self, messages: Iterable[Message], tools: Tools = (), generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt of a conversation. Nothing in its messages becomes a control token.

        Args:
            tools: OpenAI function schemas.
            generation_prompt: end with the opening of the assistant's turn.

        Raises: TemplateRefused; UserError for images.
        """
        marked = self._writer.prompt(self._writer.fitted(messages), tools)
        return self.tokenizer.encode(marked.text(generation_prompt=generation_prompt), marked.mark)

    def text(
        self, messages: Iterable[Message], tools: Tools = (), generation_prompt: bool = True
    ) -> str:
        """Return the rendered text, for people. Raises: as `render`."""
        marked = self._writer.prompt(self._writer.fitted(messages), tools)
        return marked.text(generation_prompt=generation_prompt).replace(marked.mark, "")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens."""
        return self.tokenizer.decode(ids)

    def answer_text(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of an answer for a parser, without its end token."""
        ended = bool(sampled_ids) and sampled_ids[-1] in self.end_ids
        return self.decode(sampled_ids[:-1] if ended else sampled_ids)

    def bridge(
        self,
        history: History,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Bridged:
        """Return the next prompt: the last one, what was sampled, and what the template writes
        next.

        Args:
            history: the last call: its conversation, its prompt, and its answer as parsed.
            sampled_ids: every id of the answer in the order sampled, its end token included.
            new_messages: the messages after the answer.

        Raises: UserError for images.
        """
        return bridge(self._writer, self.end_ids, history, tuple(sampled_ids), new_messages, tools)

    def preserves_prefix(self) -> Finding:
        """Return whether the template only adds at the end, and what it rewrites otherwise."""
        return self._finding

    @cached_property
    def _finding(self) -> Finding:
        notes = _notes(self._writer)
        if not self.parser_fits:
            notes.append(self.unread_calls)
        cases = (_case(probe, self._writer, self.end_ids) for probe in _probes())
        return Finding(tuple(cases), tuple(notes))

    def _end_of(self, answer: AssistantMessage, tools: Tools) -> int | None:
        """Return the id with which the template ends such a turn."""
        new: list[Message] = [_result(call) for call in answer.tool_calls]
        history = History(messages=(_ASK,), prompt_ids=(), answer=answer)
        try:
            found = seam(self._writer, self._file_end_ids, history, new or [_ASK], tools)
        except TemplateRefused:
            return None
        return self.tokenizer.id_of(found.end)


def load_renderer(
    path_or_name: str | Path,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Renderer:
    """Return the renderer of a model.

    Args:
        path_or_name: a folder with tokenizer.json, or a model's name on the hub.
        template: the source of a chat template, in place of the model's own.
        variables: for the template, such as `enable_thinking`.
        revision: of the model on the hub.

    Raises: UserError when files are missing or unreadable, or the model has no template.
    """
    files = read_folder(folder_of(path_or_name, revision))
    return build_renderer(files, template=template, variables=variables)


def build_renderer(
    files: TokenizerFiles,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Renderer:
    """Return the renderer of files that were read. Raises: as `load_renderer`."""
    tokenizer = files.build()
    sources: Mapping[str, str] | str = files.templates if template is None else template
    chat_template = Template(sources, variables={**files.named, **(variables or {})})
    end = files.named.get("eos_token")
    end_id = tokenizer.any_id_of(end) if isinstance(end, str) else None
    ends = files.end_ids | ({end_id} if end_id is not None else set())
    return Renderer(tokenizer, chat_template, end_ids=ends)


# What a template does, found by rendering with it

_ARGUMENTS = {"subject": 'the "green" one'}
_CALL = ToolCall(id="probe0001", name="look_up", arguments=json.dumps(_ARGUMENTS))
_ASK = UserMessage(content="Look it up.")
_PLAIN_TURNS: tuple[tuple[AssistantMessage, Tools], ...] = (
    (AssistantMessage(content="An answer."), ()),
    (AssistantMessage(tool_calls=(_CALL,)), (PROBE_TOOL,)),
)


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
