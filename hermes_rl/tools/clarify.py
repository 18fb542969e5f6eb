"""The tool `clarify`: ask the user a question."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hermes_rl.errors import NoAnswer, ToolError
from hermes_rl.text import clean, one_line, to_json
from hermes_rl.tools.base import Clarify, ToolContext, ToolResult, schema, tool

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
        raise NoAnswer("no user can answer here", "no_user")
    try:
        async with asyncio.timeout(ctx.max_timeout_s):
            answer = await _answer(ask, question, choices)
    except TimeoutError:
        raise NoAnswer(f"no answer within {ctx.max_timeout_s:.0f} s", "timeout") from None
    if answer is None or not (text := clean(str(answer)).strip()):
        raise NoAnswer("the user gave no answer")
    fields = {"question": question, "answer": text}
    return ToolResult(text=to_json(fields), data=fields)


async def _answer(ask: Clarify, question: str, choices: Sequence[str]) -> Any:
    """What a callback returns. One that does not end must keep neither the run nor the program:
    it has a thread of its own, which the program does not wait for."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(ask(question, choices))
        except BaseException as error:  # raised where it is awaited
            future.set_exception(error)

    threading.Thread(target=call, name="clarify", daemon=True).start()
    answer = await asyncio.shield(asyncio.wrap_future(future))
    return await answer if inspect.isawaitable(answer) else answer


clarify = replace(_clarify, needs_sandbox=False)
