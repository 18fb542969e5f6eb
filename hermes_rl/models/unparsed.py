"""Answers that look like a tool call which nobody parsed.

A server without a parser for its model's calls, or with the parser of another family, gives them as
text: the agent then takes for an answer what was meant as a call, and the run looks done. What is
here decides for every model and engine, whoever read the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.messages import AssistantMessage

Tools = Sequence[Mapping[str, Any]]

_MARKUP = re.compile(
    r"</?tool_calls?\b"  # Hermes, Qwen, GLM
    r"|<\|?(?:tool_call|python_tag)"  # Llama, Kimi, Gemma
    r"|<｜tool▁call"  # DeepSeek
    r"|\[TOOL_CALLS\]"  # Mistral
    r"|<function=|</function>|<parameter="  # Qwen coder
)
_NAMED = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:')


def looks_unparsed(message: AssistantMessage, tools: Tools) -> bool:
    """Whether an answer may hold a call that nobody runs.

    Looked at is its text; of one that has neither text nor calls, its reasoning, which then was
    never closed or holds the call itself. A call in a thought behind which the model said or did
    something is a thought.

    Args:
        tools: OpenAI function schemas of the tools that were offered.
    """
    said = message.content
    if not said.strip() and not message.tool_calls:
        said += message.reasoning_content or ""
    if _MARKUP.search(said):
        return True
    offered = names(tools)
    return any(found.group(1) in offered for found in _NAMED.finditer(said))


def names(tools: Tools) -> set[str]:
    """The names of the offered tools."""
    functions = (tool.get("function") for tool in tools)
    return {str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f}
