"""From messages to the text that a chat template renders.

Families of templates differ. Some read the arguments of a call as an object, some as text; some
want None as the content of a message with calls, some an empty text; some take only ids of nine
letters. `detect_form` renders a short conversation in each form and takes the first whose call
comes out complete. Where a template writes one call a turn, a turn with several calls becomes
several turns.

What messages contain must not become a control token, so lookalikes in them are marked: the control
tokens of the tokenizer everywhere; and in messages of users and tools, and in arguments of calls,
also the markup that the template itself writes, such as `</tool_response>`. An assistant's own text
keeps its markup: the model wrote it as tokens. What a template writes as ordinary text
(`### User:`) cannot be told apart from the text of a message.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import msgspec

from hermes_rl.errors import UserError
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
from hermes_rl.models.tokens.template import Template, TemplateRefused
from hermes_rl.models.tokens.tokenizer import AddedToken, Tokenizer, clean, lookalikes

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
    out = _message_form(message, form)
    if form.parts and isinstance(out["content"], str):
        out["content"] = [{"type": "text", "text": out["content"]}] if out["content"] else []
    return out


def _message_form(message: Message, form: Form) -> dict[str, Any]:
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": message.content}
    if isinstance(message, UserMessage):
        return {"role": "user", "content": _user_text(message)}
    if isinstance(message, ToolMessage):
        return {
            "role": "tool",
            "tool_call_id": _id(message.tool_call_id, form),
            "name": message.name,
            "content": message.content,
        }
    return _assistant_form(message, form)


def _assistant_form(message: AssistantMessage, form: Form) -> dict[str, Any]:
    content: str | None = message.content
    if not content and message.tool_calls and form.empty_content == "none":
        content = None
    out: dict[str, Any] = {"role": "assistant", "content": content}
    if message.reasoning_content:  # under both names that templates read
        out["reasoning_content"] = out["thinking"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [_call_form(call, form) for call in message.tool_calls]
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
    arguments = '{"subject": "gr\\"een"}'
    calls = tuple(
        ToolCall(id=f"call_probe_{n}", name="look_up", arguments=arguments) for n in range(number)
    )
    conversation: list[Message] = [
        UserMessage(content="Look it up."),
        AssistantMessage(tool_calls=calls),
        *(ToolMessage(tool_call_id=c.id, name=c.name, content="Found.") for c in calls),
    ]
    try:
        text = template.render([message_form(m, form) for m in conversation], [PROBE_TOOL])
    except TemplateRefused:
        return False
    turn = text.rpartition("Look it up.")[2]  # the schema before it names the argument too
    broken = ("{'subject'", '\\"subject\\"', '\\\\"een')
    whole = turn.count("subject") >= number and turn.count("een") >= number
    return whole and not any(piece in text for piece in broken)


def _renders_text(template: Template, form: Form) -> bool:
    messages: list[Message] = [
        UserMessage(content="Good evening."),
        AssistantMessage(content="Good night."),
    ]
    try:
        text = template.render([message_form(message, form) for message in messages])
    except TemplateRefused:
        return False
    return "evening." in text and "night." in text and "'type'" not in text


def one_call_each(messages: Sequence[Message]) -> list[Message]:
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


Tools = Sequence[Mapping[str, Any]]


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
        return one_call_each(list(messages)) if self.form.one_call else list(messages)

    def prompt(self, messages: Iterable[Message], tools: Tools) -> MarkedPrompt:
        """Mark (fitted) messages for rendering. Raises: UserError for images."""
        forms = [message_form(message, self.form) for message in messages]
        mark = mark_for([forms, list(tools)])
        marked = [self.marker.message(form, mark) for form in forms]
        offered = [self.marker.marked(dict(tool), mark, strict=False) for tool in tools]
        return MarkedPrompt(self.template, marked, offered, mark)
