"""One assistant message as the output items of the Responses API, and back.

A response is a list of items: reasoning, messages and function calls. Ours is one message with its
text, its calls and `reasoning_details`. The usual order (reasoning, one message, calls) needs no
note. Any other, and a message's `phase`, is noted in `reasoning_details` beside the reasoning
items, so that a replay has the items as they came:

    {"type": "message", "phase": "commentary", "chars": 12}     text of so many characters
    {"type": "function_call", "call_id": "call_1"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.prepare.content import blocks_of
from hermes_rl.models.prepare.structure import says_something

REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"
SEPARATOR = "\n\n"
"""Between the texts of several messages."""


class Piece(NamedTuple):
    """One item of a message."""

    kind: str
    block: Mapping[str, Any] = {}
    """The reasoning item as it came."""
    text: str = ""
    phase: str | None = None
    call: ToolCall | None = None


def pieces_of(message: AssistantMessage) -> list[Piece]:
    """The items of a message in their order: as noted, where the notes still fit it."""
    blocks = [b for b in blocks_of(message) if b.get("type") in (REASONING, MESSAGE, CALL)]
    reasoning = [Piece(REASONING, block=b) for b in blocks if b["type"] == REASONING]
    notes = [b for b in blocks if b["type"] != REASONING]
    if notes:
        noted = _as_noted(message, blocks)
        if noted is not None:
            return noted
    text = [Piece(MESSAGE, text=message.content)] if message.content else []
    return [*reasoning, *text, *(Piece(CALL, call=call) for call in message.tool_calls)]


def details_of(pieces: Iterable[Piece]) -> list[dict[str, Any]] | None:
    """The `reasoning_details` of a message that came as these items; None when there is nothing to
    replay and nothing to note."""
    listed = list(pieces)
    kinds = [(REASONING, MESSAGE, CALL).index(p.kind) for p in listed]
    usual = kinds == sorted(kinds) and kinds.count(1) <= 1 and not any(p.phase for p in listed)
    if usual:
        return [
            dict(p.block) for p in listed if p.kind == REASONING and is_replayable(p.block)
        ] or None
    return [note for p in listed if (note := _note(p)) is not None] or None


def is_replayable(item: Mapping[str, Any]) -> bool:
    """Whether a reasoning item means something to a server that stores nothing."""
    return bool(item.get("encrypted_content") or item.get("content"))


def reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: of its content, else of its summary."""
    for name in ("content", "summary"):
        listed = item.get(name)
        if isinstance(listed, list):
            texts = [p["text"] for p in listed if isinstance(p, Mapping) and _has_text(p)]
            if texts:
                return SEPARATOR.join(texts)
    return ""


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str) and bool(part["text"])


def _note(piece: Piece) -> dict[str, Any] | None:
    if piece.kind == REASONING:
        return dict(piece.block) if is_replayable(piece.block) else None
    if piece.call is not None:
        return {"type": CALL, "call_id": piece.call.id}
    note: dict[str, Any] = {"type": MESSAGE, "chars": len(piece.text)}
    return {**note, "phase": piece.phase} if piece.phase else note


def _as_noted(message: AssistantMessage, blocks: list[dict[str, Any]]) -> list[Piece] | None:
    """None when the notes do not fit the message (any more)."""
    if not says_something(message):
        return None
    calls = {call.id: call for call in message.tool_calls}
    out: list[Piece] = []
    at = 0
    for block in blocks:
        if block["type"] == REASONING:
            out.append(Piece(REASONING, block=block))
        elif block["type"] == CALL:
            call = calls.pop(str(block.get("call_id")), None)
            if call is None:
                return None
            out.append(Piece(CALL, call=call))
        else:
            chars, phase = block.get("chars"), block.get("phase")
            if not isinstance(chars, int) or chars <= 0:
                return None
            text = message.content[at : at + chars]
            out.append(Piece(MESSAGE, text=text, phase=phase if isinstance(phase, str) else None))
            at += chars + len(SEPARATOR)
    texts = SEPARATOR.join(p.text for p in out if p.kind == MESSAGE)
    whole = texts == message.content and not calls and len(message.tool_calls) == _calls(out)
    return out if whole else None


def _calls(pieces: list[Piece]) -> int:
    return sum(piece.kind == CALL for piece in pieces)
