"""System prompts, and what the harness says to the model in a run. Nothing volatile stands in
them: no date, host, path or user name."""

from __future__ import annotations

from collections.abc import Collection

from hermes_rl.tools.text import cut_middle

_TOOLS = (
    "You are an agent that works on a Linux machine with tools. Do what the user asks by calling "
    "tools, one step after another, and look at each result before the next step. "
    "Check that the work is really done. Then answer in a few words what you did or found, "
    "without calling a tool."
)
_NO_TOOLS = "You are a helpful assistant. Answer what the user asks."
_ASK = " Nobody can answer questions while you work: decide what is not said, and go on."

SUMMARY_REQUEST = (
    "No further tool calls are possible. Say briefly what has been done, what was found, and what "
    "is still open."
)
"""Asked at the turn limit; recorded as synthetic, like all that follows."""

CUT_TEXT = (
    "Your answer was cut off at the output limit. Go on exactly where it stopped. Repeat nothing, "
    "and do not begin anew."
)
CUT_STREAM = (
    "The connection broke while you were answering, and only the text above arrived. Go on exactly "
    "where it stopped. Repeat nothing, and do not begin anew."
)
CUT_CALL = (
    "Your last tool call was cut off before it was complete, and was not run. Do the same in "
    "several smaller calls of at most about eight thousand tokens each; write a long file in parts."
)
EMPTY = "(empty)"
"""Stands for an empty answer, which no provider takes back."""
NUDGE = (
    "Your answer was empty. Look at the tool results above and go on: call the next tool, or give "
    "your answer."
)
_THOUGHTS = (
    "You have thought, but neither answered nor called a tool. Go on from your thoughts now."
)
_QUOTED = " They were:\n\n"
_THOUGHT_CHARS = 16_000

TEXTS = (SUMMARY_REQUEST, CUT_TEXT, CUT_STREAM, CUT_CALL, EMPTY, NUDGE, _THOUGHTS, _QUOTED)
"""All that the harness may say in a run: a run's configuration covers them."""


def system_prompt(preset: str, tools: Collection[str]) -> str:
    """The system prompt of a preset.

    Args:
        tools: names of the offered tools.
    """
    if not tools:
        return _NO_TOOLS
    return _TOOLS if preset == "interactive" else _TOOLS + _ASK


def steer_note(texts: Collection[str]) -> str:
    """What the user said while tools ran, as it is put behind a tool's result."""
    return "\n\n[The user says meanwhile: " + "\n".join(texts) + "]"


def thoughts_note(reasoning: str | None) -> str:
    """Asks the model to go on from its thoughts. They are quoted, since most providers do not take
    an answer of thoughts alone back."""
    if not reasoning or not reasoning.strip():
        return _THOUGHTS
    return _THOUGHTS + _QUOTED + cut_middle(reasoning.strip(), _THOUGHT_CHARS)
