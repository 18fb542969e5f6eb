"""The form in which a chat template reads messages; families differ, so each template is asked.

Some read the arguments of a call as an object, some as text; some want no content beside calls to
be None, some an empty text; some take only ids of nine letters. `form_of` renders a small
conversation in each way and takes the first whose call comes out whole.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from hermes_rl.models.tokens.tokenizer import clean

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
"""A tool for conversations that only ask how a template behaves."""


@dataclass(frozen=True)
class Form:
    """How a template reads an assistant's turn."""

    arguments: Literal["object", "text"] = "object"
    """Of a tool call. As objects, text that is none stands under `messages.UNPARSED`: templates
    walk over what they take for an object."""
    empty_content: Literal["", "none"] = ""
    """What stands for no content beside tool calls."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""
    parts: bool = False
    """Content is a list of parts, as templates of models that see want it."""
    one_call: bool = False
    """A turn has one call at most (`turns`)."""
    writes_calls: bool = True
    """Whether calls come out at all."""


def message_form(message: Message, form: Form) -> dict[str, Any]:
    """A message as the template reads it. Raises: UserError for images, which have no ids here."""
    out = _message_form(message, form)
    if form.parts and isinstance(out["content"], str):
        out["content"] = [{"type": "text", "text": out["content"]}] if out["content"] else []
    return out


def _message_form(message: Message, form: Form) -> dict[str, Any]:
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": message.content}
    if isinstance(message, UserMessage):
        return {"role": "user", "content": _said(message)}
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
    if message.reasoning_content:  # under both names that templates read, as transformers does
        out["reasoning_content"] = out["thinking"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [_call_form(call, form) for call in message.tool_calls]
    return out


def _call_form(call: ToolCall, form: Form) -> dict[str, Any]:
    arguments: Any = call.arguments
    if form.arguments == "object":
        value = parse_arguments(clean(arguments))
        arguments = {UNPARSED: arguments} if value is None else value
    told = {"name": call.name, "arguments": arguments}
    return {"id": _id(call.id, form), "type": "function", "function": told}


def _said(message: UserMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(part.get("type") != "text" for part in message.content):
        raise UserError("exact tokens are for text: a message has a part that is none (an image?)")
    return "\n".join(str(part.get("text", "")) for part in message.content)


def _id(call_id: str, form: Form) -> str:
    """The id as the template takes it: nine letters by its hash, where those are asked for."""
    if not form.short_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_LETTERS[number // 62**place % 62] for place in range(9))


def form_of(template: Template) -> Form:
    """The form that this template reads: the first in which a call with an argument comes out, else
    the first in which words do."""
    arguments: tuple[Literal["object", "text"], ...] = ("object", "text")
    contents: tuple[Literal["", "none"], ...] = ("", "none")
    either = (False, True)
    for parts, short, argument, content in itertools.product(either, either, arguments, contents):
        form = Form(arguments=argument, empty_content=content, short_ids=short, parts=parts)
        if _calls_come_out(template, form, 1):
            return replace(form, one_call=not _calls_come_out(template, form, 2))
    plain = (Form(writes_calls=False, parts=parts) for parts in either)
    return next((f for f in plain if _words_come_out(template, f)), Form(writes_calls=False))


def _calls_come_out(template: Template, form: Form, number: int) -> bool:
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


def _words_come_out(template: Template, form: Form) -> bool:
    said: list[Message] = [
        UserMessage(content="Good evening."),
        AssistantMessage(content="Good night."),
    ]
    try:
        text = template.render([message_form(message, form) for message in said])
    except TemplateRefused:
        return False
    return "evening." in text and "night." in text and "'type'" not in text
