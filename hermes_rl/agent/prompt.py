"""System prompts. Nothing volatile stands in them: no date, host, path or user name."""

from __future__ import annotations

from collections.abc import Collection

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
"""Asked at the turn limit; recorded as synthetic."""


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
