"""Steps that change messages: the order of roles, the pairing of results, the content of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.text import clean

NO_IMAGE = "[image left out: the model takes none]"
"""Stands for an image that is not sent."""

IMAGE_TOKENS = 5_000
"""The most that an image costs with OpenAI's models and open ones (2026-11): its address says
nothing of its size, and few bytes may be many tokens."""
_DEAR = ("4o-mini", 50_000)
"""One model counts 33 times as much for an image, at a price per token that makes up for it."""

_IMAGES = ("image_url", "image", "input_image")
_SIGNED = ("thinking", "redacted_thinking")

NO_RESULT = "No result: the call was interrupted."
"""Stands for the result of a call that has none."""


def alternate(messages: list[Message]) -> list[Message]:
    """Neighbouring user messages become one, and so do neighbouring assistant messages, unless the
    first has tool calls (its results are then missing: see `pair_results`) or one of them says
    nothing (see `drop_thinking_only`)."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            out[-1] = UserMessage(content=_joined(last.content, message.content))
        elif (
            isinstance(message, AssistantMessage)
            and isinstance(last, AssistantMessage)
            and not last.tool_calls
            and says_something(last)
            and says_something(message)
        ):
            out[-1] = _one_assistant(last, message)
        else:
            out.append(message)
    return out


def pair_results(messages: list[Message]) -> list[Message]:
    """Each tool result follows the message with its call: results without a call are left out, a
    call without a result gets `NO_RESULT`."""
    out: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            found = next((w for w in waiting if w[0] == message.tool_call_id), None)
            if found is not None:
                waiting.remove(found)
                out.append(message)
            continue
        out += _stubs(waiting)
        waiting = []
        if isinstance(message, AssistantMessage):
            waiting = [(call.id, call.name) for call in message.tool_calls]
        out.append(message)
    return out + _stubs(waiting)


def drop_thinking_only(messages: list[Message]) -> list[Message]:
    """Assistant messages without text and calls are left out: providers refuse them."""
    return [m for m in messages if not isinstance(m, AssistantMessage) or says_something(m)]


def says_something(message: AssistantMessage) -> bool:
    """Whether a message has a text or a call."""
    return bool(message.tool_calls) or bool(message.content.strip())


def cut(messages: list[Message], start: int) -> int:
    """The last place before an assistant message at which the steps of this file (and all that look
    at one message only) never look across: what stands before it is a user message, or an
    assistant message with calls (and its results)."""
    for place in range(len(messages) - 1, start, -1):
        here = messages[place]
        speaks = isinstance(here, AssistantMessage) and says_something(here)
        if speaks and _is_closed(messages, start, place):
            return place
    return start


def _is_closed(messages: list[Message], start: int, place: int) -> bool:
    for index in range(place - 1, start - 1, -1):
        before = messages[index]
        if isinstance(before, UserMessage | SystemMessage):
            return True
        if isinstance(before, AssistantMessage) and says_something(before):
            return bool(before.tool_calls)
    return False


def _stubs(waiting: list[tuple[str, str]]) -> list[Message]:
    return [ToolMessage(tool_call_id=i, name=name, content=NO_RESULT) for i, name in waiting]


def _joined(
    first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if isinstance(first, str) and isinstance(second, str):
        return join_texts(first, second)
    return _as_parts(first) + _as_parts(second)


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def join_texts(first: str, second: str) -> str:
    """Two texts with an empty line between them, if both are there."""
    return f"{first}\n\n{second}" if first and second else first or second


def _one_assistant(first: AssistantMessage, second: AssistantMessage) -> AssistantMessage:
    thoughts = join_texts(first.reasoning_content or "", second.reasoning_content or "")
    details: list[Any] = []
    for given in (first.reasoning_details, second.reasoning_details):
        details += given if isinstance(given, list) else [] if given is None else [given]
    return msgspec.structs.replace(
        second,
        content=join_texts(first.content, second.content),
        reasoning_content=thoughts or None,
        raw_content=None,
        reasoning_details=details or None,
    )


def drop_internal(messages: list[Message]) -> list[Message]:
    """Parts lose the keys that begin with an underscore: they are ours. (Other internal fields are
    fields of our structs, which no dialect writes.)"""
    return [parts_of(m, _without_own_keys) for m in messages]


def clean_surrogates(messages: list[Message]) -> list[Message]:
    """Half surrogates, which no wire can carry, become U+FFFD."""
    return [_cleaned(m) for m in messages]


def without_images(messages: list[Message]) -> list[Message]:
    """Adaptation `no_images`: a text stands for each image. (`images` makes them smaller.)"""
    return [parts_of(m, _no_image) for m in messages]


def text_only(messages: list[Message]) -> list[Message]:
    """Adaptation `text_only`: content in parts becomes one text."""
    return [_as_text(m) for m in messages]


def without_signatures(messages: list[Message]) -> list[Message]:
    """Adaptation `no_signatures`: signed and redacted thinking is not replayed, and no blocks of
    aggregators (`reasoning.text` and the like)."""
    return [_without_blocks(m, _is_signed) for m in messages]


def without_encrypted(messages: list[Message]) -> list[Message]:
    """Adaptation `no_encrypted_reasoning`: encrypted reasoning is not replayed."""
    return [_without_blocks(m, _is_encrypted) for m in messages]


def images_in(message: Message) -> int:
    """How many images a message holds."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return 0
    return sum(part.get("type") in _IMAGES for part in message.content)


def tokens_of_images(count: int, model: str) -> int:
    """An upper bound on the tokens of so many images."""
    return count * (_DEAR[1] if _DEAR[0] in model else IMAGE_TOKENS)


def blocks_of(message: AssistantMessage) -> list[dict[str, Any]]:
    """The opaque reasoning blocks of a message, in order."""
    details = message.reasoning_details
    listed = details if isinstance(details, list) else [details]
    return [block for block in listed if isinstance(block, dict)]


def _is_signed(block: dict[str, Any]) -> bool:
    kind = str(block.get("type"))
    return kind in _SIGNED or kind.startswith("reasoning.") or "signature" in block


def _is_encrypted(block: dict[str, Any]) -> bool:
    return block.get("type") in ("reasoning", "reasoning.encrypted")


def _without_blocks(message: Message, drop: Callable[[Any], bool]) -> Message:
    if not isinstance(message, AssistantMessage) or not isinstance(message.reasoning_details, list):
        return message
    kept = [b for b in message.reasoning_details if not (isinstance(b, dict) and drop(b))]
    if len(kept) == len(message.reasoning_details):
        return message
    return msgspec.structs.replace(message, reasoning_details=kept or None)


def parts_of(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """The message, `change` applied to each part of its content; itself where nothing changes."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    parts = [change(part) for part in message.content]
    if all(a is b for a, b in zip(parts, message.content, strict=True)):
        return message
    return UserMessage(content=parts)


def _no_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": NO_IMAGE} if part.get("type") in _IMAGES else part


def _as_text(message: Message) -> Message:
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    texts = [_no_image(part).get("text") for part in message.content]
    return UserMessage(content="\n".join(t for t in texts if isinstance(t, str)))


def _without_own_keys(part: dict[str, Any]) -> dict[str, Any]:
    if not any(key.startswith("_") for key in part):
        return part
    return {k: v for k, v in part.items() if not k.startswith("_")}


def _cleaned(message: Message) -> Message:
    if isinstance(message, UserMessage) and not isinstance(message.content, str):
        return parts_of(message, _clean_part)
    assert isinstance(message.content, str)
    changed: dict[str, Any] = {"content": clean(message.content)}
    if isinstance(message, AssistantMessage):
        calls = message.tool_calls
        if any(clean(call.arguments) is not call.arguments for call in calls):
            calls = tuple(
                msgspec.structs.replace(call, arguments=clean(call.arguments)) for call in calls
            )
        thought = message.reasoning_content
        changed |= {"reasoning_content": thought and clean(thought), "tool_calls": calls}
    if all(getattr(message, name) is value for name, value in changed.items()):
        return message
    return msgspec.structs.replace(message, **changed)


def _clean_part(part: dict[str, Any]) -> dict[str, Any]:
    text = part.get("text")
    if not isinstance(text, str) or clean(text) is text:
        return part
    return {**part, "text": clean(text)}
