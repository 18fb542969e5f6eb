"""# base: What every parser of tool calls gives, and what they share.

A parser reads; it never edits. Ids and raw text are recorded apart from what it makes of them, so
the worst that a wrong reading can do is to answer the model wrongly, never to change a token.

# reasoning: `<think> ... </think>` at the beginning of an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.unparsed import Tools, looks_unparsed


@dataclass(frozen=True)
class ParsedCall:
    """One tool call, well-formed or not."""

    name: str
    """Empty where none can be read."""
    arguments_text: str
    """A JSON object; what the model wrote, exactly, where that cannot be read."""
    start: int
    """First character of the call in the parsed text, its opening tag included."""
    end: int
    """Behind its last character, its closing tag included."""
    id: str
    """A hash of the call's place and text: the same text gives the same id, always."""
    error: str | None = None
    """What is wrong with its form, for the model; None when nothing is."""


@dataclass(frozen=True)
class Parsed:
    """An answer, taken apart."""

    content: str
    """What stands outside of reasoning and calls, before, between and behind them."""
    reasoning: str | None = None
    """What stands in `<think>`; None where there is no such block."""
    calls: tuple[ParsedCall, ...] = ()
    suspected_unparsed: bool = False
    """The model may have meant a call that nobody runs: see `models.unparsed`."""

    @classmethod
    def of(
        cls, content: str, reasoning: str | None, calls: Sequence[ParsedCall], tools: Tools
    ) -> Self:
        """The parts of an answer, looked at once more for calls that were left in its text."""
        parsed = cls(content, reasoning, tuple(calls))
        return replace(parsed, suspected_unparsed=looks_unparsed(parsed.message(content), tools))

    def message(self, text: str) -> AssistantMessage:
        """The message of an answer.

        Args:
            text: what was parsed; kept as `raw_content` where `content` is not all of it.
        """
        calls = tuple(
            ToolCall(id=c.id, name=_sendable(c.name), arguments=_sendable(c.arguments_text))
            for c in self.calls
        )
        return AssistantMessage(
            content=self.content,
            reasoning_content=self.reasoning or None,
            tool_calls=calls,
            raw_content=None if text == self.content else text,
        )


def _sendable(text: str) -> str:
    """The text without lone surrogates, which a JSON escape can make and nothing can store. The
    raw text and the ids keep what was sampled."""
    return text.encode("utf-8", "replace").decode()


class ToolCallParser(Protocol):
    """Reads the tool calls of one family of models."""

    name: str

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """Takes an answer apart. Never raises: what cannot be read is a call with an error, or
        stays in the content.

        Args:
            text: the decoded answer without its end token.
            tools: OpenAI function schemas; they tell the types of arguments.
            opened: the prompt already opened `<think>`.
            salt: goes into the ids of calls, so that equal calls of two turns differ.
        """
        ...


def call_id(position: int, text: str, salt: str) -> str:
    """The id of a call: a hash of its position among the calls of the answer, and its text."""
    told = json.dumps([salt, position, text])
    return f"call_{hashlib.sha256(told.encode()).hexdigest()[:24]}"


def parameters(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def outside(text: str, start: int, calls: Sequence[ParsedCall]) -> str:
    """The text from `start` on without its calls. The blank space around calls goes with them."""
    pieces, place = [], start
    for call in calls:
        pieces.append(text[place : call.start])
        place = call.end
    pieces.append(text[place:])
    if len(pieces) == 1:
        return pieces[0]
    kept = [piece.strip() for piece in pieces]
    return "\n".join(piece for piece in kept if piece)


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
