"""Messages of the internal form as content blocks of the Messages API."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    ToolCall,
    ToolMessage,
    parse_arguments,
)

AT = "_at"
"""Key of a thinking block that did not stand first in its answer: [characters of text, tool calls]
before it. It is ours and never sent."""

THINKING = ("thinking", "redacted_thinking")
"""Types of the opaque blocks of this wire."""

NO_CONTENT = "(no content)"
"""Stands for a user message without any text: the API refuses a message without content."""

_NOT_IN_ID = re.compile(r"[^a-zA-Z0-9_-]")

Block = dict[str, Any]


def text_block(text: str) -> Block:
    """A block of text."""
    return {"type": "text", "text": text}


def blocks_of(message: Message) -> list[Block]:
    """The content blocks of one message."""
    if isinstance(message, AssistantMessage):
        return assistant_blocks(message, _tool_use)
    if isinstance(message, ToolMessage):
        result: Block = {"type": "tool_result", "tool_use_id": _id(message.tool_call_id)}
        return [{**result, "content": message.content} if message.content else result]
    parts = message.content
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    blocks = [block for part in parts if (block := _part(part)) is not None]
    return blocks or [text_block(NO_CONTENT)]


def _part(part: Mapping[str, Any]) -> Block | None:
    """One of OpenAI's content parts; what is none of them is passed on. None for a blank text."""
    if isinstance(part.get("text"), str):
        return text_block(part["text"]) if part["text"].strip() else None
    if part.get("type") != "image_url":
        return dict(part)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return {"type": "image", "source": _source(url if isinstance(url, str) else "")}


def _source(url: str) -> dict[str, str]:
    """Where an image comes from: a `data:` URL is unpacked, any other stays one."""
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    kind, _, data = url[len("data:") :].partition(",")
    media_type, *options = kind.split(";")
    if "base64" not in options:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return {"type": "base64", "media_type": media_type or "image/png", "data": data}


def assistant_blocks(
    message: AssistantMessage, tool_use: Callable[[ToolCall], Block]
) -> list[Block]:
    """Thinking where it stood, text, and calls."""
    text, calls = message.content, message.tool_calls
    out: list[Block] = []
    said = made = 0
    for block in _thoughts(message.reasoning_details):
        chars, before = block.get(AT) or (0, 0)
        _add_text(out, text[said:chars])
        out += map(tool_use, calls[made:before])
        said, made = max(said, chars), max(made, before)
        out.append({k: v for k, v in block.items() if k != AT})
    _add_text(out, text[said:])
    return [*out, *map(tool_use, calls[made:])]


def _add_text(out: list[Block], text: str) -> None:
    if text.strip():
        out.append(text_block(text))


def _thoughts(details: Any) -> list[Block]:
    """The opaque blocks of this wire; a thought without a signature would be refused."""
    listed = details if isinstance(details, list) else []
    return [
        block
        for block in listed
        if isinstance(block, dict)
        and block.get("type") in THINKING
        and ("signature" in block or "data" in block)
    ]


def _tool_use(call: ToolCall) -> Block:
    return {
        "type": "tool_use",
        "id": _id(call.id),
        "name": tool_name(call.name),
        "input": input_of(call.arguments),
    }


def input_of(arguments: str) -> Any:
    """The arguments as an object, in the text's own spelling."""
    if parse_arguments(arguments) is not None:
        return msgspec.Raw(arguments.encode())
    return {UNPARSED: arguments} if arguments.strip() else {}


def _id(given: str) -> str:
    """An id (or name) with the characters that this API takes; ids of other providers may have
    more."""
    return _NOT_IN_ID.sub("_", given)


def tool_name(given: str) -> str:
    """A tool's name with the characters and length that this API takes."""
    return _id(given)[:128] or "unknown"
