"""Reasoning as providers spell it, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message (or delta) that may hold reasoning text; the first that does counts, because
servers in transition send the same text in two."""

_OPEN, _CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    """A text with its reasoning taken out."""

    content: str
    reasoning: str | None
    raw: str | None
    """The exact text, where taking out changed it."""


def reasoning_of(form: Mapping[str, Any]) -> str | None:
    """The reasoning text of a message or delta; None when it has none."""
    for name in FIELDS:
        value = form.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def split_think(text: str) -> Thought:
    """Take `<think>…</think>` out of a text's head.

    An opening tag may be missing (templates that write it into the prompt), and so may the closing
    one (an answer cut by its length): then all of the text is reasoning.
    """
    if _OPEN not in text and _CLOSE not in text:
        return Thought(text, None, None)
    head = text.lstrip()
    if head.startswith(_OPEN):
        inner, closed, rest = head[len(_OPEN) :].partition(_CLOSE)
        return Thought(rest.lstrip() if closed else "", inner.strip(), text)
    inner, closed, rest = text.partition(_CLOSE)
    if closed and _OPEN not in inner:
        return Thought(rest.lstrip(), inner.strip(), text)
    return Thought(text, None, None)


def flatten(content: Any) -> tuple[str, str | None]:
    """Text and reasoning of a content field: text, null, or a list of parts."""
    if isinstance(content, str):
        return content, None
    if not isinstance(content, list):
        return "", None
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "thinking":
            inner = part.get("thinking")
            thoughts.append(inner if isinstance(inner, str) else flatten(inner)[0])
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts), "".join(thoughts) or None


def merge_details(details: list[Any], more: Any) -> None:
    """Add the reasoning blocks of a stream's delta: pieces of one block are joined in place."""
    for block in more if isinstance(more, list) else ():
        last = details[-1] if details else None
        if last is not None and _same_block(last, block):
            for key, value in block.items():
                grows = key in ("text", "summary", "data") and isinstance(last.get(key), str)
                last[key] = last[key] + value if grows and isinstance(value, str) else value
        else:
            details.append(dict(block) if isinstance(block, dict) else block)


def _same_block(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict) or b.get("index") is None:
        return False
    return (a.get("type"), a.get("index")) == (b.get("type"), b.get("index"))
