"""How a template writes a tool call, and which parser reads it: asked of the template itself."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage, parse_arguments
from hermes_rl.models.tokens.forms import PROBE_TOOL
from hermes_rl.models.tokens.parsers import PARSERS, ToolCallParser
from hermes_rl.models.tokens.template import TemplateRefused
from hermes_rl.models.tokens.tokenizer import Tokenizer
from hermes_rl.models.tokens.typeset import Typesetter

_ARGUMENTS = {"subject": 'the "green" one'}
_CALL = ToolCall(id="probe0001", name="look_up", arguments=json.dumps(_ARGUMENTS))
_ASK = UserMessage(content="Look it up.")


@dataclass(frozen=True)
class Written:
    """A call as a template writes it."""

    text: str
    """The assistant's turn without the token that ends it; empty where it writes no calls."""
    parser: str | None
    """The name of the first parser that reads this very call from it."""


def written_call(setter: Typesetter, tokenizer: Tokenizer) -> Written:
    """Render a call, and try each parser on it."""
    try:
        sheet = setter.sheet([_ASK, AssistantMessage(tool_calls=(_CALL,))], [PROBE_TOOL])
        opened = sheet.text(1, generation_prompt=True)
        asked = sheet.text(1, generation_prompt=False)
        whole = sheet.text(generation_prompt=False)
    except TemplateRefused:
        return Written("", None)
    ends = sorted((t.text for t in tokenizer.added if t.special), key=len, reverse=True)
    # A template may open a turn otherwise than it writes it later (with an empty thought, or not).
    turns = [
        _without_end(whole.removeprefix(before).replace(sheet.mark, ""), ends)
        for before in (opened, asked)
        if whole.startswith(before)
    ]
    for name, parser in PARSERS.items():
        if any(_reads(parser, turn) for turn in turns):
            return Written(turns[0], name)
    return Written(turns[0] if turns else "", None)


def _without_end(turn: str, ends: list[str]) -> str:
    bare = turn.rstrip()
    while end := next((e for e in ends if bare.endswith(e)), None):
        bare = bare.removesuffix(end).rstrip()
    return bare


def _reads(parser: ToolCallParser, turn: str) -> bool:
    calls = parser.parse(turn, [PROBE_TOOL]).calls
    if len(calls) != 1 or calls[0].error is not None or calls[0].name != _CALL.name:
        return False
    return parse_arguments(calls[0].arguments_text) == _ARGUMENTS
