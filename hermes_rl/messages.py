"""Messages: the internal form, and OpenAI's form in public interfaces.

Frozen structs tagged by `role`. A tool call keeps its arguments as the text that the model wrote:
what
cannot be parsed is still recorded exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.text import clean

UNPARSED = "_unparsed"
"""Key for text in a row that is not a JSON object, or one that common readers cannot decode."""

MAX_DEPTH = 200
"""Levels of nesting that a row holds as JSON."""

_NOT_IN_ID = re.compile(r"[^a-zA-Z0-9_-]")
"""Characters of ids that some providers take for one."""

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The form of Mistral's ids, which takes no other."""


TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Names of tools that every provider accepts."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """The model's text: usually a JSON object, but possibly anything."""


class SystemMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """Instructions, first in a conversation."""

    content: str


class UserMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """What the user (or, marked as synthetic in its event, the harness) says."""

    content: str | list[dict[str, Any]]
    """Text, or OpenAI content parts."""


class AssistantMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant", omit_defaults=True
):
    """The model's answer to one call."""

    content: str = ""
    reasoning_content: str | None = None
    """Reasoning text, whatever the provider calls it."""
    tool_calls: tuple[ToolCall, ...] = ()
    raw_content: str | None = None
    """The exact text where `content` tidied it (`<think>` taken out); None where they are equal."""
    reasoning_details: Any = None
    """Opaque or signed reasoning blocks as received: replayed verbatim, never trained on."""


class ToolMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="tool", omit_defaults=True
):
    """The result of one tool call."""

    tool_call_id: str
    name: str
    content: str


Message = SystemMessage | UserMessage | AssistantMessage | ToolMessage


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a tool call as an object; None when the text is not a JSON object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


def is_portable(value: Any, depth: int = 0) -> bool:
    """Whether common JSON readers can hold a value: integers of 64 bits, moderate nesting.

    The parser of Hugging Face `datasets` wraps or refuses larger integers, and stops at a depth of
    1,024; one such value would make the whole data set unreadable.
    """
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, dict):
        return depth < MAX_DEPTH and all(is_portable(v, depth + 1) for v in value.values())
    if isinstance(value, list):
        return depth < MAX_DEPTH and all(is_portable(v, depth + 1) for v in value)
    return True


def text_of(message: Message) -> str:
    """The plain text of a message; of content parts, the text parts joined by newlines."""
    if isinstance(message.content, str):
        return message.content
    parts = (str(p.get("text", "")) for p in message.content if p.get("type") == "text")
    return "\n".join(parts)


def to_openai(
    message: Message, *, parsed_arguments: bool = False, details: bool = False
) -> dict[str, Any]:
    """A message in OpenAI's chat form: `content` always there, no null keys.

    Args:
        parsed_arguments: convert `arguments` to an object, as in rows and chat templates, instead
        of
            the exact text, as on the wire. Text that does not parse becomes `{"_unparsed": text}`,
            since most templates iterate over the object and fail for a string.
        details: include `reasoning_details`, which some providers expect back in the next request.
    """
    if isinstance(message, SystemMessage | UserMessage):
        role = "system" if isinstance(message, SystemMessage) else "user"
        return {"role": role, "content": message.content}
    if isinstance(message, ToolMessage):
        form = {"role": "tool", "tool_call_id": message.tool_call_id, "name": message.name}
        return {**form, "content": message.content}
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content is not None:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [_call_to_openai(c, parsed_arguments) for c in message.tool_calls]
    if details and message.reasoning_details:
        out["reasoning_details"] = message.reasoning_details
    return out


def _call_to_openai(call: ToolCall, parsed: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if parsed:
        value = parse_arguments(call.arguments)
        kept = value is not None and is_portable(value)
        arguments = value if kept else {UNPARSED: call.arguments}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def from_openai(form: Mapping[str, Any]) -> Message:
    """A message from OpenAI's chat form.

    Raises: UserError when role or content is not of that form.
    """
    role = form.get("role")
    content = form.get("content")
    if role == "user":
        return UserMessage(content=_user_content(content))
    if role in ("system", "developer"):
        text = _text(content)
        if text is None:
            raise UserError(f"message of role {role}: 'content' must be text")
        return SystemMessage(content=text)
    if role == "tool":
        return ToolMessage(
            tool_call_id=str(form.get("tool_call_id") or ""),
            name=str(form.get("name") or ""),
            content=_text(content) or "",
        )
    if role == "assistant":
        reasoning, calls = form.get("reasoning_content"), form.get("tool_calls") or []
        if not isinstance(reasoning, str | None) or not isinstance(calls, list | tuple):
            raise UserError("assistant message: 'reasoning_content' is text, 'tool_calls' a list")
        return AssistantMessage(
            content=_text(content) or _text(form.get("refusal")) or "",
            reasoning_content=reasoning,
            tool_calls=tuple(_call_from_openai(c) for c in calls),
            reasoning_details=form.get("reasoning_details"),
        )
    raise UserError(f"message with role {role!r}: use system, user, assistant or tool")


def _user_content(content: Any) -> str | list[dict[str, Any]]:
    """Content of a user message. Raises: UserError when it is neither text nor parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError("message of role user: 'content' must be text")
    if not all(isinstance(part, Mapping) for part in content):
        raise UserError("message of role user: each content part must be an object")
    return content


def _text(content: Any) -> str | None:
    """Text, or the joined texts of parts; None for other content."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part for part in content if isinstance(part, Mapping)]
    texts = (part.get("text", part.get("refusal")) for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _call_from_openai(form: Mapping[str, Any]) -> ToolCall:
    function = form.get("function") if isinstance(form, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("tool call without a name: use {'function': {'name', 'arguments'}}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(id=str(form.get("id") or ""), name=function["name"], arguments=arguments)


def check_prompt(messages: Sequence[Message]) -> None:
    """Refuse what no repair can make a prompt of; see `models.prepare` for the repairs.

    Raises: UserError unless the messages end with the user's, of which one has content, and system
        messages come first.
    """
    if messages and not isinstance(messages[-1], UserMessage):
        role = role_of(messages[-1])
        raise UserError(f"the prompt must end with a user message, not one of role {role}")
    if not any(has_content(m) for m in messages if isinstance(m, UserMessage)):
        raise UserError("the prompt is empty; it must have a user message")
    for place, (before, message) in enumerate(pairwise(messages), 2):
        if isinstance(message, SystemMessage) and not isinstance(before, SystemMessage):
            raise UserError(
                f"message {place} is a system message behind one of role {role_of(before)}; "
                "put it first"
            )


def has_content(message: UserMessage) -> bool:
    """Whether a user message has a text that is not blank, or a part of another kind."""
    if isinstance(message.content, str):
        return bool(message.content.strip())
    return any(
        not isinstance(part.get("text"), str) or part["text"].strip() for part in message.content
    )


def role_of(message: Message) -> str:
    """The role of a message, as OpenAI's form names it."""
    return str(message.__struct_config__.tag)


def conversation_from_openai(forms: Iterable[Mapping[str, Any]]) -> list[Message]:
    """All messages of a conversation; see `from_openai`. Half surrogates, which can be neither sent
    nor stored, become U+FFFD, and each tool call has an id of its own
    (`with_unique_ids`).

    Raises: UserError, also for what is not JSON-serializable.
    """
    messages = [from_openai(_plain(form, place)) for place, form in enumerate(forms, 1)]
    return with_unique_ids(messages)


def with_unique_ids(messages: Iterable[Message]) -> list[Message]:
    """The messages, each tool call (and its result) with an id that no other has.

    Strict providers refuse a conversation that has an id twice, or an empty one. So it is with what
    was written by hand, and with servers that count their calls from 0 in each answer. The first
    call with an id keeps it; the same messages always get the same ids.
    """
    listed = list(messages)
    known, calls = call_ids(listed), sum(len(_calls_of(m)) for m in listed)
    if len(known) == calls and "" not in known:
        return listed
    out: list[Message] = []
    seen: set[str] = set()
    waiting: list[tuple[str, str]] = []  # of the last calls: the id as it was, and as it is
    for message in listed:
        if isinstance(message, AssistantMessage) and message.tool_calls:
            now = tuple(_with_unique_id(c, seen, known) for c in message.tool_calls)
            pairs = zip(message.tool_calls, now, strict=True)
            waiting = [(old.id, new.id) for old, new in pairs]
            out.append(msgspec.structs.replace(message, tool_calls=now))
        elif isinstance(message, ToolMessage):
            found = next((w for w in waiting if w[0] == message.tool_call_id), None)
            if found is not None:
                waiting.remove(found)
                message = msgspec.structs.replace(message, tool_call_id=found[1])
            out.append(message)
        else:
            out.append(message)
    return out


def with_new_ids(message: AssistantMessage, known: set[str]) -> AssistantMessage:
    """An answer, each of its calls with an id that is not in `known`, where all of them are then
    added; see `with_unique_ids`.

    Args:
        known: `call_ids` of the messages before it.
    """
    calls = tuple(_with_unique_id(call, known, known) for call in message.tool_calls)
    if all(a is b for a, b in zip(calls, message.tool_calls, strict=True)):
        return message
    return msgspec.structs.replace(message, tool_calls=calls)


def call_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all tool calls, as the strictest provider spells them."""
    return {_plain_id(call.id) for message in messages for call in _calls_of(message)}


def _calls_of(message: Message) -> tuple[ToolCall, ...]:
    return message.tool_calls if isinstance(message, AssistantMessage) else ()


def _with_unique_id(call: ToolCall, seen: set[str], known: set[str]) -> ToolCall:
    """The call with an id that is not in `seen`, where it is then added; a new one is not in
    `known` either."""
    plain = _plain_id(call.id)
    if plain and plain not in seen:
        seen.add(plain)
        return call
    place = 1
    while (made := _made_id(call, place)) in known or made in seen:
        place += 1
    seen.add(made)
    return msgspec.structs.replace(call, id=made)


def _made_id(call: ToolCall, place: int) -> str:
    text = f"{place}\0{call.id}\0{call.name}\0{call.arguments}"
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return digest[:9] if _SHORT_ID.fullmatch(call.id) else f"call_{digest[:24]}"


def _plain_id(text: str) -> str:
    return _NOT_IN_ID.sub("_", text)


def _plain(form: Any, place: int) -> Mapping[str, Any]:
    if not isinstance(form, Mapping):
        raise UserError(f"message {place} is {form!r}: write an object with role and content")
    try:
        msgspec.json.encode(form)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(form), ensure_ascii=False)
        plain: Mapping[str, Any] = json.loads(clean(text))
        return plain
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"message {place} is not JSON-serializable: {error}") from None
    return form
