"""Answers that were cut: at the output limit, or because their connection broke."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hermes_rl.agent.parts import RunState
from hermes_rl.agent.prompt import CUT_CALL, CUT_STREAM, CUT_TEXT, EMPTY, thoughts_note
from hermes_rl.agent.verdicts import AskAgain, End, GoOn, Verdict
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion
from hermes_rl.models.calls.beginnings import BrokenOff

AT_LIMIT = "length"
"""Finish reason of an answer that was cut at its output limit."""
BROKEN = "broken"
"""Stands for the finish reason of a streamed text whose connection broke."""
BROKEN_CALL = "broken_call"
"""The same within a tool call, which is lost."""

CUT = (AT_LIMIT, BROKEN, BROKEN_CALL)

MAX_CONTINUATIONS = 3
MAX_CUT_CALLS = 4
BASE_TOKENS = 4096
"""Output limit that is doubled where none was asked for."""
MOST_TOKENS = 32_768
"""Doubling ends here; what was asked for is never lowered."""


def may_continue_streams(run: RunState) -> bool:
    """Whether the beginning of a broken stream would be gone on from."""
    return run.parts.policy.continue_cut_streams and run.tries.continued < MAX_CONTINUATIONS


def beginning(error: BrokenOff) -> Completion:
    """What had arrived of an answer, as an answer that was cut."""
    return Completion(
        message=AssistantMessage(content=error.text),
        finish_reason=BROKEN_CALL if error.in_call else BROKEN,
        usage=None,
    )


def cut(run: RunState, completion: Completion) -> Verdict:
    """What to do with an answer that was cut."""
    message = completion.message
    if completion.finish_reason != AT_LIMIT:
        in_call = completion.finish_reason == BROKEN_CALL
        return _go_on(run, message, CUT_CALL if in_call else CUT_STREAM)
    if message.tool_calls:
        return cut_call(run, completion)
    if not message.content.strip():
        return _only_thoughts(run, completion)
    if not _may_continue(run):
        run.tries.parts.append(message.content)
        return End("output_truncated", message)
    raise_limit(run, completion)
    return _go_on(run, message, CUT_TEXT)


def cut_call(run: RunState, completion: Completion) -> Verdict:
    """A call that was cut is never run: ask again with more room, then for smaller calls."""
    tries, message = run.tries, completion.message
    if not run.parts.policy.reask_cut_calls:
        return End("output_truncated", message)
    if tries.cut_calls < MAX_CUT_CALLS:
        tries.cut_calls += 1
        raise_limit(run, completion)
        return AskAgain("cut tool call")
    if not _may_continue(run):
        return End("output_truncated", message)
    if message.content.strip():
        return _go_on(run, msgspec.structs.replace(message, tool_calls=()), CUT_CALL)
    return _go_on(run, AssistantMessage(content=EMPTY), CUT_CALL, instead_of="cut tool call")


def raise_limit(run: RunState, completion: Completion) -> None:
    """Double the output limit of the next call."""
    used = completion.usage.output_tokens if completion.usage else None
    asked = run.request.sampling.max_tokens or max(BASE_TOKENS, used or 0)
    limit = run.tries.max_tokens or asked
    run.tries.max_tokens = max(limit, min(2 * limit, MOST_TOKENS))


def _only_thoughts(run: RunState, completion: Completion) -> Verdict:
    """The output limit went into reasoning: the run ends, but for an incomplete response of the
    Responses API, which may stop between two items. Its reasoning item cannot be sent back without
    the item that ought to follow, so what its summary says is quoted."""
    message = completion.message
    if _may_continue(run) and _is_response(message.reasoning_details):
        raise_limit(run, completion)
        return _go_on(run, message, thoughts_note(message.reasoning_content))
    run.note("thinking_budget_exhausted")
    return End("output_truncated", message)


def _is_response(details: Any) -> bool:
    """Whether the opaque reasoning is an item of the Responses API."""
    blocks: Iterable[Any] = details if isinstance(details, list) else ()
    return any(isinstance(b, dict) and b.get("type") == "reasoning" for b in blocks)


def _may_continue(run: RunState) -> bool:
    return run.parts.policy.continue_output and run.tries.continued < MAX_CONTINUATIONS


def _go_on(
    run: RunState, said: AssistantMessage, prompt: str, instead_of: str | None = None
) -> Verdict:
    run.tries.continued += 1
    run.note("continued_answers")
    if instead_of is None and said.content.strip():
        run.tries.parts.append(said.content)
    return GoOn(said, prompt, instead_of)
