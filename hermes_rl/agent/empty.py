"""Answers with neither text nor a call: what is tried, rung by rung, before the run ends."""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl.agent.parts import RunState
from hermes_rl.agent.prompt import EMPTY, NUDGE, thoughts_note
from hermes_rl.agent.verdicts import AskAgain, End, GoOn, Verdict
from hermes_rl.messages import AssistantMessage, ToolMessage

HOUSEKEEPING = frozenset({"memory", "todo", "skill_manage", "session_search"})
"""Tools by which an agent keeps its own things in order: they do not change its answer."""

MAX_PREFILLS = 2
MAX_RETRIES = 3

Rung = Callable[[RunState, AssistantMessage], Verdict | None]


def climb(run: RunState, message: AssistantMessage) -> Verdict:
    """The first rung that holds; at the top the run ends as `empty_response`."""
    for rung in _RUNGS:
        verdict = rung(run, message)
        if verdict is not None:
            return verdict
    return End("empty_response", message)


def _given_text(run: RunState, message: AssistantMessage) -> Verdict | None:
    """Asked for the rest of a cut answer, the model has nothing to add."""
    if run.parts.policy.keep_given_text and run.tries.parts:
        return End("answered", message)
    return None


def _prior_text(run: RunState, message: AssistantMessage) -> Verdict | None:
    """It answered first, and then only kept its things in order."""
    if not run.parts.policy.reuse_prior_text:
        return None
    before = _turn_before(run)
    if before is None or not before.content.strip():
        return None
    if all(call.name in HOUSEKEEPING for call in before.tool_calls):
        return End("answered", message, final_response=before.content)
    return None


def _turn_before(run: RunState) -> AssistantMessage | None:
    """The message whose tool results stand last; None when no results do."""
    conversation = run.conversation
    place = len(conversation) - 1
    while place >= run.given and isinstance(conversation[place], ToolMessage):
        place -= 1
    before = conversation[place]
    results = place < len(conversation) - 1
    return before if results and isinstance(before, AssistantMessage) else None


def _nudge(run: RunState, message: AssistantMessage) -> Verdict | None:
    if not run.parts.policy.nudge_empty or run.tries.nudged or _turn_before(run) is None:
        return None
    run.tries.nudged = True
    run.note("nudges")
    return GoOn(AssistantMessage(content=EMPTY), NUDGE, instead_of="empty answer")


def _prefill(run: RunState, message: AssistantMessage) -> Verdict | None:
    thought = message.reasoning_content or message.reasoning_details
    if not run.parts.policy.prefill_reasoning or not thought:
        return None
    if run.tries.prefilled >= MAX_PREFILLS:
        return None
    run.tries.prefilled += 1
    run.note("nudges")
    return GoOn(message, thoughts_note(message.reasoning_content))


def _retry(run: RunState, message: AssistantMessage) -> Verdict | None:
    if not run.parts.policy.retry_empty or run.tries.retried >= MAX_RETRIES:
        return None
    run.tries.retried += 1
    return AskAgain("empty answer")


def _fall_back(run: RunState, message: AssistantMessage) -> Verdict | None:
    if not run.parts.policy.fall_back_when_empty or not run.fall_back():
        return None
    run.tries.retried = 0
    return AskAgain("empty answer")


_RUNGS: tuple[Rung, ...] = (_given_text, _prior_text, _nudge, _prefill, _retry, _fall_back)
