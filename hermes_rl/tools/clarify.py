"""The tool `clarify`: ask the user a question."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import clean, one_line, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool

CLARIFY = "clarify"
MAX_CHOICES = 4
MAX_QUESTION_CHARS = 2_000


@tool(name=CLARIFY, **schema(CLARIFY), toolset=CLARIFY)
async def _clarify(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {question, answer}."""
    ask = ctx.services.clarify
    question = clean(args["question"]).strip()
    choices = [one_line(clean(choice)) for choice in args.get("choices") or ()]
    if not question or len(question) > MAX_QUESTION_CHARS:
        raise ToolError(f"question must have 1 to {MAX_QUESTION_CHARS:,} characters")
    if len(choices) > MAX_CHOICES or not all(choices):
        raise ToolError(f"give at most {MAX_CHOICES} choices, and none of them empty")
    if ask is None:
        raise ToolError("no user can answer here; make a reasonable decision and continue")
    answer = await asyncio.to_thread(ask, question, choices)
    if inspect.isawaitable(answer):
        answer = await answer
    if answer is None or not (text := clean(str(answer)).strip()):
        raise ToolError("the user gave no answer; make a reasonable decision and continue")
    fields = {"question": question, "answer": text}
    return ToolResult(text=to_json(fields), data=fields)


clarify = replace(_clarify, needs_sandbox=False)
