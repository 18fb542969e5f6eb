"""From messages to the text that a chat template renders, with nothing volatile in it.

Templates are rendered with jinja2 in a sandbox. The environment is the one that they are written
for: trimmed blocks, `break` and `continue`, a `generation` block, `raise_exception`, and a `tojson`
that keeps characters and does not escape HTML. A template that asks for today's date gets a fixed
one: a prompt that changes at midnight could neither be cached nor compared.

Families of templates differ. Some read the arguments of a call as an object, some as text; some
want None as the content of a message with calls, some an empty text; some take only ids of nine
letters. `detect_form` renders a short conversation in each form and takes the first whose call
comes out complete. Where a template writes one call a turn, a turn with several calls becomes
several turns.

What messages contain must not become a control token, so lookalikes in them are marked: the control
tokens of the tokenizer everywhere; and in messages of users and tools, and in arguments of calls,
also the markup that the template itself writes, such as `</tool_response>`. An assistant's own text
keeps its markup: the model wrote it as tokens. Markup that a template writes as ordinary text (`###
User:`) cannot be distinguished from message text.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from hermes_rl.errors import BadRequest, UserError
from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    parse_arguments,
)
from hermes_rl.models.tokens.tokenizer import EXTRA, AddedToken, Tokenizer, clean, lookalikes

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.parser import Parser

Tools = Sequence[Mapping[str, Any]]

DATE = datetime.date(2024, 7, 26)
"""The date of every prompt: the one that Llama's templates fall back to."""


class TemplateRefused(BadRequest):
    """The template does not render this conversation, such as two calls where it allows one."""


class Template:
    """The chat template of one model.

    Args:
        sources: jinja2 sources by name: `default`, and optionally `tool_use`, which is taken where
            tools are offered.
        variables: what every rendering gets beside the messages: `bos_token`, `enable_thinking`...
        date: what `strftime_now` returns.

    Raises:
        UserError: a source is not a valid template, or there is none.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date = DATE,
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables or {})
        self.date = date
        if not self.sources:
            raise UserError("the model has no chat template: give one with chat_template.jinja")
        environment = _environment(date)
        self._compiled = {
            name: _compiled(environment, name, source) for name, source in self.sources.items()
        }

    @property
    def sha256(self) -> str:
        """Of everything that a rendering depends on, the messages aside."""
        parts = [self.sources, self.variables, self.date.isoformat()]
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def dated(self, date: datetime.date) -> Template:
        """Return the same template on another day."""
        return Template(self.sources, variables=self.variables, date=date)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: in the form that the template reads (`Form`).
            tools: function schemas; the template gets None if there are none.
            generation_prompt: end with the opening of the assistant's turn.

        Raises: TemplateRefused.
        """
        template = self._compiled[self._name(bool(tools))]
        context = {**self.variables, "messages": list(messages), "tools": list(tools) or None}
        context |= {"documents": None, "add_generation_prompt": generation_prompt}
        try:
            return template.render(context)
        except RecursionError:
            raise TemplateRefused("the chat template recurses without end") from None
        except Exception as error:  # a template is a program of strangers: it raises anything
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TemplateRefused(f"the chat template refuses this conversation: {why}") from error

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))


def _environment(date: datetime.date) -> jinja2.Environment:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError(EXTRA) from None

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_block()],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _fixed(date)
    return environment


def _generation_block() -> type[Extension]:
    """Return the extension for `{% generation %} ... {% endgeneration %}`, which prints its body.

    Templates put the block around what the assistant writes, for trainers. Masks here come from
    sampled ids instead, so the block only has to be parsed.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 - the name and form that jinja2 requires

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _fixed(date: datetime.date) -> Callable[[str], str]:
    return lambda form: datetime.datetime.combine(date, datetime.time()).strftime(form)


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; jinja2's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _compiled(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"chat template {name!r}, line {error.lineno}: {error.message}") from None


# Messages in the form that a template reads

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"subject": {"type": "string", "description": "What to look up."}},
            "required": ["subject"],
        },
    },
}
"""A tool for conversations that test how a template behaves."""


@dataclass(frozen=True)
class Form:
    """The form in which a template reads messages."""

    arguments: Literal["object", "text"] = "object"
    """Of a tool call. Where objects are wanted, text that is not one is the value of
    `messages.UNPARSED`: templates iterate over what they take for an object."""
    empty_content: Literal["", "none"] = ""
    """The content of a message that has only tool calls."""
    short_ids: bool = False
    """Ids of calls have nine letters or digits."""
    parts: bool = False
    """Content is a list of parts, as templates of vision models want it."""
    one_call: bool = False
    """A turn has at most one call."""
    writes_calls: bool = True
    """Whether the template writes calls at all."""


def message_form(message: Message, form: Form) -> dict[str, Any]:
    """Convert a message to a template's form. Raises: UserError for images, which have no ids
    here."""
    out: dict[str, Any]
    if isinstance(message, AssistantMessage):
        empty = not message.content and message.tool_calls and form.empty_content == "none"
        out = {"role": "assistant", "content": None if empty else message.content}
        if message.reasoning_content:  # under both names that templates read
            out["reasoning_content"] = out["thinking"] = message.reasoning_content
        if message.tool_calls:
            out["tool_calls"] = [_call_form(call, form) for call in message.tool_calls]
    elif isinstance(message, ToolMessage):
        out = {"role": "tool", "tool_call_id": _id(message.tool_call_id, form)}
        out |= {"name": message.name, "content": message.content}
    elif isinstance(message, SystemMessage):
        out = {"role": "system", "content": message.content}
    else:
        out = {"role": "user", "content": _user_text(message)}
    if form.parts and isinstance(out["content"], str):
        out["content"] = [{"type": "text", "text": out["content"]}] if out["content"] else []
    return out


def _call_form(call: ToolCall, form: Form) -> dict[str, Any]:
    arguments: Any = call.arguments
    if form.arguments == "object":
        value = parse_arguments(clean(arguments))
        arguments = {UNPARSED: arguments} if value is None else value
    function = {"name": call.name, "arguments": arguments}
    return {"id": _id(call.id, form), "type": "function", "function": function}


def _user_text(message: UserMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(part.get("type") != "text" for part in message.content):
        raise UserError("exact tokens are for text only: a message has another part (an image?)")
    return "\n".join(str(part.get("text", "")) for part in message.content)


def _id(call_id: str, form: Form) -> str:
    """Return the id as the template takes it: nine letters from its hash if short ids are
    required."""
    if not form.short_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_LETTERS[number // 62**place % 62] for place in range(9))


def detect_form(template: Template) -> Form:
    """Return the form that a template reads: the first in which it renders a call with an argument,
    else the first in which it renders text."""
    arguments: tuple[Literal["object", "text"], ...] = ("object", "text")
    contents: tuple[Literal["", "none"], ...] = ("", "none")
    either = (False, True)
    for parts, short, argument, content in itertools.product(either, either, arguments, contents):
        form = Form(arguments=argument, empty_content=content, short_ids=short, parts=parts)
        if _renders_calls(template, form, 1):
            return replace(form, one_call=not _renders_calls(template, form, 2))
    plain = (Form(writes_calls=False, parts=parts) for parts in either)
    return next((f for f in plain if _renders_text(template, f)), Form(writes_calls=False))


def _renders_calls(template: Template, form: Form, number: int) -> bool:
    calls = tuple(
        ToolCall(id=f"call_probe_{n}", name="look_up", arguments='{"subject": "gr\\"een"}')
        for n in range(number)
    )
    results = [ToolMessage(tool_call_id=c.id, name=c.name, content="Found.") for c in calls]
    ask = UserMessage(content="Look it up.")
    text = _probed(
        template, form, [ask, AssistantMessage(tool_calls=calls), *results], [PROBE_TOOL]
    )
    turn = text.rpartition("Look it up.")[2]  # the schema before it names the argument too
    broken = ("{'subject'", '\\"subject\\"', '\\\\"een')
    whole = turn.count("subject") >= number and turn.count("een") >= number
    return whole and not any(piece in text for piece in broken)


def _renders_text(template: Template, form: Form) -> bool:
    turns = (UserMessage(content="Good evening."), AssistantMessage(content="Good night."))
    text = _probed(template, form, turns)
    return "evening." in text and "night." in text and "'type'" not in text


def _probed(template: Template, form: Form, messages: Sequence[Message], tools: Tools = ()) -> str:
    """Return the text of a conversation; empty if the template refuses it."""
    try:
        return template.render([message_form(message, form) for message in messages], tools)
    except TemplateRefused:
        return ""


def split_parallel_calls(messages: Sequence[Message]) -> list[Message]:
    """Rewrite a conversation to one call a turn, each followed by its result.

    A model of such a template may still sample two calls. What it sampled stays as it is; only a
    turn that must be rendered is rewritten.
    """
    out: list[Message] = []
    left: list[ToolMessage] = []
    for message in reversed(messages):  # the results before their calls
        if isinstance(message, ToolMessage):
            left.insert(0, message)
            continue
        turn: list[Message] = [message]
        if isinstance(message, AssistantMessage) and len(message.tool_calls) > 1:
            turn = []
            for call in message.tool_calls:
                turn.append(AssistantMessage(tool_calls=(call,)))
                found = next((r for r in left if r.tool_call_id == call.id), None)
                if found is not None:
                    left.remove(found)
                    turn.append(found)
            first = msgspec.structs.replace(
                message, tool_calls=message.tool_calls[:1], raw_content=None
            )
            turn[0] = first
        out = [*turn, *left, *out]
        left = []
    return [*left, *out]


_MARKS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0010, 0xF1000))]
"""Unicode noncharacters, which never occur in text, then some characters of private use."""


class LookalikeMarker:
    """Marks lookalikes of tokens in the contents of messages.

    Args:
        added: the added tokens of the tokenizer.
        template: the concatenated sources of the chat template.
    """

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        tokens = [token for token in added if token.text.strip()]
        self._control = [token.text for token in tokens if token.special]
        markup = [t.text for t in tokens if not t.special and _is_markup(t.text)]
        self._envelope = self._control + [text for text in markup if text in template]
        self._find_control = lookalikes(self._control)
        self._find_envelope = lookalikes(self._envelope)

    def message(self, form: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """Mark a message in its template's form, as its role requires."""
        strict = form["role"] in ("user", "tool")
        return {
            key: value
            if key in ("role", "type")
            else self.marked(value, mark, strict=strict or key == "tool_calls")
            for key, value in form.items()
        }

    def marked(self, value: Any, mark: str, *, strict: bool) -> Any:
        """Mark each lookalike in the strings and keys of a JSON value.

        Args:
            strict: also mark the template's markup.
        """
        if isinstance(value, str):
            return self._marked_text(clean(value), mark, strict=strict)
        if isinstance(value, dict):
            return {
                self.marked(key, mark, strict=strict): self.marked(inner, mark, strict=strict)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(inner, mark, strict=strict) for inner in value]
        return value

    def _marked_text(self, text: str, mark: str, *, strict: bool) -> str:
        if not any(token in text for token in (self._envelope if strict else self._control)):
            return text
        pattern = self._find_envelope if strict else self._find_control
        return pattern.sub(lambda found: "".join(mark + char for char in found.group()), text)


def mark_for(values: Iterable[Any]) -> str:
    """Return a character that occurs in none of these JSON values.

    Raises: UserError when all of 4,000 such characters occur in them.
    """
    texts = [text for text in _strings(values) if not text.isascii()]
    for mark in _MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise UserError("the messages hold every private character of Unicode: none is left as a mark")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _strings(value.values())
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _strings(inner)


def _is_markup(text: str) -> bool:
    return len(text) > 2 and not any(char.isspace() for char in text)


@dataclass(frozen=True)
class MarkedPrompt:
    """Messages and tools in the template's form, with lookalikes marked."""

    template: Template
    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    mark: str
    """The character before each character of a lookalike; it occurs nowhere else."""

    def text(self, count: int | None = None, *, generation_prompt: bool) -> str:
        """Render the first `count` messages, or all. Raises: TemplateRefused."""
        messages = self.messages if count is None else self.messages[:count]
        return self.template.render(messages, self.tools, generation_prompt=generation_prompt)


@dataclass(frozen=True)
class PromptWriter:
    """A tokenizer, its chat template, the form that it reads, and the marker of lookalikes."""

    tokenizer: Tokenizer
    template: Template
    form: Form
    marker: LookalikeMarker

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: Template) -> Self:
        """Find the form that the template reads."""
        marker = LookalikeMarker(tokenizer.added, "\n".join(template.sources.values()))
        return cls(tokenizer, template, detect_form(template), marker)

    def fitted(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages in turns that the template can write."""
        return split_parallel_calls(list(messages)) if self.form.one_call else list(messages)

    def prompt(self, messages: Iterable[Message], tools: Tools) -> MarkedPrompt:
        """Mark (fitted) messages for rendering. Raises: UserError for images."""
        forms = [message_form(message, self.form) for message in messages]
        mark = mark_for([forms, list(tools)])
        marked = [self.marker.message(form, mark) for form in forms]
        offered = [self.marker.marked(dict(tool), mark, strict=False) for tool in tools]
        return MarkedPrompt(self.template, marked, offered, mark)
