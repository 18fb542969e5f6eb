"""`<think> ... </think>` at the beginning of an answer."""

from __future__ import annotations

from typing import NamedTuple

_OPEN, _CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """An answer's reasoning, and where the rest begins."""

    reasoning: str | None
    start: int
    """First character behind the reasoning and the line breaks that end it."""
    closed: bool
    """False when the answer ends inside of its reasoning."""


def split_reasoning(text: str, *, opened: bool = False) -> Split:
    """Splits the reasoning off. Only a block at the beginning is one; tags later are text, since
    they may stand in an argument.

    Args:
        opened: the prompt already opened the block.
    """
    lead = len(text) - len(text.lstrip())
    begins = text.startswith(_OPEN, lead)
    close = text.find(_CLOSE)
    if not begins and not opened:
        return Split(None, 0, True)
    start = lead + len(_OPEN) if begins else 0
    if close < 0:
        return Split(text[start:].strip("\n"), len(text), False)
    behind = close + len(_CLOSE)
    behind += len(text) - behind - len(text[behind:].lstrip("\n"))
    return Split(text[start:close].strip("\n"), behind, True)
