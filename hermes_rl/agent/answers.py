"""One answer of the model, over as many calls as the policy allows.

An answer that is none (cut, empty, with calls that cannot be read) is judged by `continuation`,
`empty` and `repair`; the policy's switches decide what they may do. With all switches off every
answer is taken, or ends the run with its reason.
"""

from __future__ import annotations

from dataclasses import replace

from hermes_rl.agent import continuation, empty, repair
from hermes_rl.agent.parts import Finish, RunState
from hermes_rl.agent.verdicts import AskAgain, End, GoOn, Take, Verdict
from hermes_rl.errors import ContextOverflow, PayloadTooLarge
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models.base import Completion, Sampling
from hermes_rl.models.calls.beginnings import BrokenOff

REFUSAL = "refusal"
"""Finish reason by which a server says that the model refused in its own words."""
_SEEDS = 0x7FFFFFFF
"""31 bits, which every engine takes."""


async def answer(run: RunState) -> Completion:
    """The next answer that can be acted on; it has joined the conversation.

    Raises: Finish when there is none; ModelError.
    """
    run.turn += 1
    while True:
        completion = await _ask(run)
        verdict = _judge(run, completion)
        match verdict:
            case Take(message):
                own = run.own_ids(message)
                _take(run, own)
                return replace(completion, message=own)
            case AskAgain(why):
                run.discard(why)
                run.tries.again += 1
                run.check_tokens()
            case GoOn():
                _go_on(run, verdict)
            case End():
                run.add(run.own_ids(verdict.message))
                run.final_response = verdict.final_response
                raise Finish(verdict.end_reason)


async def _ask(run: RunState) -> Completion:
    """One call. Raises: Finish, ModelError."""
    request, sampling = run.request, _sampling(run)
    if sampling is not request.sampling:
        request = replace(request, sampling=sampling)
    if request.stream and continuation.may_continue_streams(run):
        request = replace(request, continuable=True)
    try:
        completion = await run.parts.caller.call(request, turn=run.turn)
    except (ContextOverflow, PayloadTooLarge) as error:
        if not run.answers:  # nothing was sampled yet: it is the prompt that does not fit
            error.cause = "task"
            raise
        raise Finish("context_overflow") from error
    except BrokenOff as error:
        completion = continuation.beginning(error)
    run.answers += 1
    run.count(completion.usage)
    return completion


def _sampling(run: RunState) -> Sampling:
    """The run's sampling, with more room where an answer was cut, and for each answer that was
    thrown away another seed: with the same one an engine gives the same answer again."""
    sampling, tries = run.request.sampling, run.tries
    if tries.max_tokens is not None:
        sampling = replace(sampling, max_tokens=tries.max_tokens)
    if tries.again and sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + tries.again) & _SEEDS)
    return sampling


def _judge(run: RunState, completion: Completion) -> Verdict:
    """What to do with an answer."""
    message, reason = completion.message, completion.finish_reason
    if reason in continuation.CUT:
        return continuation.cut(run, completion)
    if reason == REFUSAL:
        return Take(message)
    if message.tool_calls:
        return repair.checked(run, completion)
    if not message.content.strip():
        return empty.climb(run, message)
    return Take(message)


def _take(run: RunState, message: AssistantMessage) -> None:
    parts = run.tries.parts
    if message.tool_calls:
        parts.clear()  # what was said on the way to a call is no answer
    elif parts:
        parts.append(message.content)
    run.add(message)


def _go_on(run: RunState, verdict: GoOn) -> None:
    """Raises: Finish at a limit, before the harness says anything."""
    if verdict.instead_of is None:
        run.add(verdict.said)
        run.check_limits()
    else:
        run.discard(verdict.instead_of)
        run.check_limits()
        run.add(verdict.said, synthetic=True)
    run.add(UserMessage(content=verdict.prompt), synthetic=True)
    run.turn += 1
