"""Chat Completions of the token-exact fake engine: a template before it and a parser behind it.

As in real engines, the history that comes in is text. It is rendered and tokenised anew at every
turn, so a history that was sampled in another spelling does not continue what was sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl.messages import AssistantMessage, from_openai, to_openai
from hermes_rl.models.tokens.parsers import ToolCallParser, parser_named
from hermes_rl.models.tokens.renderer import Renderer, load_renderer


class RenderedChat:
    """See `exact_engine.ChatSide`."""

    def __init__(self, renderer: Renderer, parser: ToolCallParser) -> None:
        self._renderer, self._parser = renderer, parser

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> Sequence[int]:
        """See `ChatSide.prompt`."""
        return self._renderer.render([from_openai(form) for form in messages], tools)

    def message(self, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See `ChatSide.message`."""
        salt = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        parsed = self._parser.parse(
            text, tools, opened=self._renderer.opens_reasoning, salt=salt
        ).message(text)
        shown = AssistantMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=parsed.tool_calls,
        )
        return to_openai(shown)


def chat_of(folder: Path, parser: str | None = None) -> RenderedChat:
    """The chat side of a model's files.

    Args:
        parser: its name; None takes the one that fits the template.

    Raises: UserError.
    """
    renderer = load_renderer(folder)
    return RenderedChat(renderer, parser_named(parser or renderer.parser_name))
