"""One answer of the model, over as many calls as the policy allows.

An answer that cannot be used (cut, empty, with calls that cannot be parsed) is retried, continued
or ends the run; the policy's switches decide. With all switches off every answer is taken, or ends
the run with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes_rl.agent.context import present_context
from hermes_rl.agent.parts import Finish, KnowsWindow, RunState
from hermes_rl.agent.prompt import EMPTY
from hermes_rl.errors import ContextOverflow, ModelError, PayloadTooLarge
from hermes_rl.events import Event, MessageAdded
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Completion, ModelRequest, Sampling
from hermes_rl.models.wire import AnswerInterrupted


@dataclass(frozen=True)
class Take:
    """The answer is usable: it joins the conversation and is acted on."""

    message: AssistantMessage


@dataclass(frozen=True)
class AskAgain:
    """Throw the answer away and send the same messages again, within the same turn."""

    why: str
    """A few words for the record."""


@dataclass(frozen=True)
class GoOn:
    """Both messages join the conversation, and the next turn continues from there."""

    answer: AssistantMessage
    prompt: str
    """What the harness says; synthetic."""
    instead_of: str | None = None
    """Set when `answer` is written by the harness: why the model's own answer is thrown away."""


@dataclass(frozen=True)
class End:
    """The answer joins the conversation, and the run ends."""

    end_reason: str
    message: AssistantMessage
    final_response: str | None = None
    """The run's answer, where it is not this message's text."""


Verdict = Take | AskAgain | GoOn | End


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
                numbered = run.with_unique_ids(message)
                _take(run, numbered)
                return replace(completion, message=numbered)
            case AskAgain(why):
                run.discard(why)
                run.tries.again += 1
                run.check_tokens()
            case GoOn():
                _go_on(run, verdict)
            case End():
                run.add(run.with_unique_ids(verdict.message))
                run.final_response = verdict.final_response
                raise Finish(verdict.end_reason)


async def _ask(run: RunState) -> Completion:
    """One call, in a context that is not full. Raises: Finish, ModelError."""
    while _context_is_full(run) and await _compress(run):
        run.check_tokens()
    while True:
        try:
            completion = await run.parts.caller.call(_request(run), turn=run.turn)
            break
        except (ContextOverflow, PayloadTooLarge) as error:
            if await _compress(run, error):
                run.check_tokens()
                continue
            if not run.answers:  # nothing was sampled yet: it is the prompt that does not fit
                error.cause = "task"
                raise
            raise Finish("context_overflow") from error
        except AnswerInterrupted as error:
            completion = partial_completion(error)
            break
    run.answers += 1
    run.count(completion.usage)
    run.measure(completion.usage)
    return completion


def _request(run: RunState) -> ModelRequest:
    request, sampling = run.request, _sampling(run)
    if sampling is not request.sampling:
        request = replace(request, sampling=sampling)
    if request.stream and may_continue_streams(run):
        request = replace(request, continuable=True)
    return request


def _context_is_full(run: RunState) -> bool:
    """Whether the next prompt reaches the threshold of a compression."""
    parts, caller = run.parts.context, run.parts.caller
    if parts is None:
        return False
    window = run.context.window or parts.window
    if window is None and isinstance(caller, KnowsWindow):
        window = caller.window
    if window is None:
        return False
    from hermes_rl.agent.compression import is_full  # only where the window is known

    return is_full(run, window)


async def _compress(run: RunState, error: ModelError | None = None) -> bool:
    """Compress the context, where the policy does. False when nothing was gained."""
    if run.parts.context is None:
        return False
    from hermes_rl.agent.compression import compress  # only long runs need it

    return await compress(run, error)


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
    """Decide what to do with an answer."""
    message, reason = completion.message, completion.finish_reason
    if reason in CUT:
        return judge_cut(run, completion)
    if reason == REFUSAL:
        return Take(message)
    if message.tool_calls:
        answers = run.answered_by(message.tool_calls)
        return Take(message) if answers else judge_calls(run, completion)
    if not message.content.strip():
        return judge_empty(run, message)
    return Take(message)


def _take(run: RunState, message: AssistantMessage) -> None:
    parts = run.tries.parts
    if message.tool_calls:
        parts.clear()  # text on the way to a call is not an answer
    elif parts:
        parts.append(message.content)
    run.add(message)


def _go_on(run: RunState, verdict: GoOn) -> None:
    """Raises: Finish at a limit, before the harness says anything."""
    if verdict.instead_of is None:
        run.add(verdict.answer)
        run.check_limits()
    else:
        run.discard(verdict.instead_of)
        run.check_limits()
        run.add(verdict.answer, synthetic=True)
    run.add(UserMessage(content=verdict.prompt), synthetic=True)
    run.turn += 1


AT_LIMIT = "length"
"""Finish reason of an answer that was cut off at its output limit."""
BROKEN = "broken"
"""The finish reason of a streamed text whose connection broke."""
BROKEN_CALL = "broken_call"
"""The same within a tool call, which is lost."""

CUT = (AT_LIMIT, BROKEN, BROKEN_CALL)

MAX_CONTINUATIONS = 3
MAX_CUT_CALLS = 4
BASE_TOKENS = 4096
"""Output limit that is doubled where none was requested."""
MOST_TOKENS = 32_768
"""Upper bound of doubling; a higher requested limit is kept."""


def may_continue_streams(run: RunState) -> bool:
    """Whether the text of a broken stream would be continued."""
    return run.parts.policy.continue_cut_streams and run.tries.continued < MAX_CONTINUATIONS


def partial_completion(error: AnswerInterrupted) -> Completion:
    """What was received of an answer, as an answer that was cut off."""
    return Completion(
        message=AssistantMessage(content=error.text),
        finish_reason=BROKEN_CALL if error.in_call else BROKEN,
        usage=None,
    )


def judge_cut(run: RunState, completion: Completion) -> Verdict:
    """Decide what to do with an answer that was cut off."""
    message = completion.message
    if completion.finish_reason != AT_LIMIT:
        in_call = completion.finish_reason == BROKEN_CALL
        return _continue(run, message, run.texts.cut_call if in_call else run.texts.cut_stream)
    if message.tool_calls:
        return cut_call(run, completion)
    if not message.content.strip():
        return _only_thoughts(run, completion)
    if not _may_continue(run):
        run.tries.parts.append(message.content)
        return End("output_truncated", message)
    raise_limit(run, completion)
    return _continue(run, message, run.texts.cut_text)


def cut_call(run: RunState, completion: Completion) -> Verdict:
    """Never run a call that was cut off: ask again with a higher limit, then for smaller calls."""
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
        return _continue(run, msgspec.structs.replace(message, tool_calls=()), run.texts.cut_call)
    return _continue(
        run, AssistantMessage(content=EMPTY), run.texts.cut_call, instead_of="cut tool call"
    )


def raise_limit(run: RunState, completion: Completion) -> None:
    """Double the output limit of the next call."""
    used = completion.usage.output_tokens if completion.usage else None
    requested = run.request.sampling.max_tokens or max(BASE_TOKENS, used or 0)
    limit = run.tries.max_tokens or requested
    run.tries.max_tokens = max(limit, min(2 * limit, MOST_TOKENS))


def _only_thoughts(run: RunState, completion: Completion) -> Verdict:
    """The output limit went into reasoning: the run ends, but for an incomplete response of the
    Responses API, which may stop between two items. Its reasoning item cannot be sent back without
    the item that ought to follow, so what its summary says is quoted."""
    message = completion.message
    if _may_continue(run) and _is_response(message.reasoning_details):
        raise_limit(run, completion)
        return _continue(run, message, run.texts.thoughts_note(message.reasoning_content))
    run.note("thinking_budget_exhausted")
    return End("output_truncated", message)


def _is_response(details: Any) -> bool:
    """Whether the opaque reasoning is an item of the Responses API."""
    blocks: Iterable[Any] = details if isinstance(details, list) else ()
    return any(isinstance(b, dict) and b.get("type") == "reasoning" for b in blocks)


def _may_continue(run: RunState) -> bool:
    return run.parts.policy.continue_output and run.tries.continued < MAX_CONTINUATIONS


def _continue(
    run: RunState, answer: AssistantMessage, prompt: str, instead_of: str | None = None
) -> Verdict:
    run.tries.continued += 1
    run.note("continued_answers")
    if instead_of is None and answer.content.strip():
        run.tries.parts.append(answer.content)
    return GoOn(answer, prompt, instead_of)


HOUSEKEEPING = frozenset({"memory", "todo", "skill_manage", "session_search"})
"""Tools that only manage the agent's own state: they do not change its answer."""

MAX_PREFILLS = 2
MAX_RETRIES = 3

EmptyStep = Callable[[RunState, AssistantMessage], Verdict | None]


def judge_empty(run: RunState, message: AssistantMessage) -> Verdict:
    """Take the first step that applies; when none does, the run ends as `empty_response`."""
    for step in _EMPTY_STEPS:
        verdict = step(run, message)
        if verdict is not None:
            return verdict
    return End("empty_response", message)


def _given_text(run: RunState, message: AssistantMessage) -> Verdict | None:
    """The model was asked for the rest of a cut answer and has nothing to add."""
    if run.parts.policy.keep_given_text and run.tries.parts:
        return End("answered", message)
    return None


def _prior_text(run: RunState, message: AssistantMessage) -> Verdict | None:
    """The model answered first and then only managed its own state."""
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
    while place >= run.prompt_length and isinstance(conversation[place], ToolMessage):
        place -= 1
    before = conversation[place]
    results = place < len(conversation) - 1
    return before if results and isinstance(before, AssistantMessage) else None


def _nudge(run: RunState, message: AssistantMessage) -> Verdict | None:
    if not run.parts.policy.nudge_empty or run.tries.nudged or _turn_before(run) is None:
        return None
    run.tries.nudged = True
    run.note("nudges")
    return GoOn(AssistantMessage(content=EMPTY), run.texts.nudge, instead_of="empty answer")


def _prefill(run: RunState, message: AssistantMessage) -> Verdict | None:
    thought = message.reasoning_content or message.reasoning_details
    if not run.parts.policy.prefill_reasoning or not thought:
        return None
    if run.tries.prefilled >= MAX_PREFILLS:
        return None
    run.tries.prefilled += 1
    run.note("nudges")
    return GoOn(message, run.texts.thoughts_note(message.reasoning_content))


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


_EMPTY_STEPS: tuple[EmptyStep, ...] = (
    _given_text,
    _prior_text,
    _nudge,
    _prefill,
    _retry,
    _fall_back,
)


MAX_BAD_ARGUMENTS = 2


def judge_calls(run: RunState, completion: Completion) -> Verdict:
    """Check the calls of a complete answer before they are run."""
    policy, message = run.parts.policy, completion.message
    if policy.reask_arguments or policy.reask_cut_calls:
        unread = [call.arguments for call in message.tool_calls if not _is_json(call.arguments)]
        if policy.reask_cut_calls and any(map(is_cut, unread)):
            return cut_call(run, completion)
        if policy.reask_arguments and unread and run.tries.bad_arguments < MAX_BAD_ARGUMENTS:
            run.tries.bad_arguments += 1
            return AskAgain("tool call without JSON arguments")
    return Take(_without_duplicates(run, message) if policy.drop_duplicate_calls else message)


def is_cut(arguments: str) -> bool:
    """Whether invalid JSON looks as if it had been cut off. A higher limit would not help text that
    never was JSON."""
    text = arguments.strip()
    return text.startswith(("{", "[")) and not text.endswith(("}", "]"))


def _is_json(text: str) -> bool:
    """Whether arguments can be parsed; empty text means no arguments."""
    if not text.strip():
        return True
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _without_duplicates(run: RunState, message: AssistantMessage) -> AssistantMessage:
    kept = _first_of_each(message.tool_calls)
    dropped = len(message.tool_calls) - len(kept)
    if not dropped:
        return message
    run.note("duplicate_calls", dropped)
    return msgspec.structs.replace(message, tool_calls=kept)


def _first_of_each(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    first: dict[tuple[str, str], ToolCall] = {}
    for call in calls:
        first.setdefault((call.name, call.arguments), call)
    return tuple(first.values())


def without_scaffolding(
    added: Iterable[MessageAdded], *, compressed: bool = False
) -> list[Message]:
    """The messages of a run without what the harness wrote, for a conversation that continues: no
    nudges and no requests for the rest of an answer, whose parts become one message.

    Results of calls that could not run stay, since each call needs one.

    Args:
        compressed: keep the digests and summaries that replace earlier messages; for messages of
            one context.
    """
    kept: list[Message] = []
    between = False
    for event in added:
        message, last = event.message, kept[-1] if kept else None
        if event.compressed:
            if compressed:
                kept.append(message)
            continue
        if event.synthetic and not isinstance(message, ToolMessage):
            between = True
            continue
        if (
            between
            and isinstance(message, AssistantMessage)
            and isinstance(last, AssistantMessage)
            and not last.tool_calls
        ):
            kept[-1] = _joined(last, message)
        else:
            kept.append(message)
        between = False
    return kept


def continued_context(events: Iterable[Event]) -> list[Message]:
    """The conversation as it continues after a run: its last context, without what the harness
    wrote but the summaries and digests of a compression."""
    return without_scaffolding(present_context(events), compressed=True)


def whole_conversation(
    added: Sequence[MessageAdded], before: Sequence[Message] | None
) -> list[Message]:
    """The conversation after a run, with the messages that compressed contexts left out.

    Args:
        added: of the run.
        before: the whole conversation before it, where its prompt was a compressed one; None where
            the prompt was the whole conversation.
    """
    if before is None:
        return without_scaffolding(added)
    prompt = [event for event in added if not event.turn]
    system = [e.message for e in prompt if isinstance(e.message, SystemMessage)]
    earlier = [message for message in before if not isinstance(message, SystemMessage)]
    if earlier and isinstance(earlier[-1], UserMessage):
        earlier.pop()  # the prompt's last message has its text too
    return [*system, *earlier, *without_scaffolding(added[max(0, len(prompt) - 1) :])]


def _joined(first: AssistantMessage, rest: AssistantMessage) -> AssistantMessage:
    """Two parts of one answer. Opaque reasoning says where in its text it was, so only that of the
    first text is kept."""
    thoughts = [m.reasoning_content for m in (first, rest) if m.reasoning_content]
    return msgspec.structs.replace(
        rest,
        content=first.content + rest.content,
        raw_content=None,
        reasoning_content="\n\n".join(thoughts) or None,
        reasoning_details=(first if first.content else rest).reasoning_details,
    )
