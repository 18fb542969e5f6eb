"""Compresses the context of a run: calls its engine, checks the result, records the next context.

Nothing that an engine or a model does here ends a run: a result that breaks a rule, an exception
and a missed deadline lead to the default engine's digest, and a result that gains too little is
not used. Every call for a summary is recorded and counted, also when its answer is thrown away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hermes_rl.agent.context import (
    ContextState,
    ContextView,
    NextContext,
    message_tokens,
    text_tokens,
)
from hermes_rl.agent.parts import AuxiliaryModel, ContextParts, RunState
from hermes_rl.agent.summaries import SummaryEngine
from hermes_rl.errors import CostLimit, DiskFull, ModelError, UnitCostLimit, UserError
from hermes_rl.events import ContextStarted, MessageAdded
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Conversation, ModelRequest

_log = logging.getLogger(__name__)

MIN_GAIN = 0.1
"""A compression that leaves out a smaller share of the tokens is not used."""
MAX_PER_ANSWER = 3
GROWTH = 1.1
"""After a compression that gained too little, the next one waits until the prompt is longer by
this factor, or is refused."""
MAX_FAILED_SUMMARIES = 2
"""After so many in a row no further summary is paid for in this run."""
REFUSED_SHARE = 0.6
"""What is left of a prompt that was refused by a window of unknown size."""
TOO_LONG = 2.0
"""A summary longer than this many times its limit is not used: it ignored the request."""
_GRACE_S = 2.0
_SHARE_OF_WINDOW = 8
_THINKING = 2_000


def is_full(run: RunState, window: int) -> bool:
    """Whether the next prompt reaches the threshold of a window."""
    learn_window(run, window)
    return context_tokens(run) >= run.context.threshold


def learn_window(run: RunState, window: int | None) -> None:
    """Keep the size of the model's window, and the threshold that follows from it."""
    if window is not None and window != run.context.window:
        run.context.window = window
        run.context.threshold = _threshold(run, window)


def _threshold(run: RunState, window: int) -> int:
    parts, max_tokens = run.parts.context or ContextParts(), run.request.sampling.max_tokens
    if parts.engine is not None:
        try:
            return max(1, int(parts.engine.threshold(window, max_tokens)))
        except Exception:  # a boundary: a plugin
            _log.exception("the context engine's threshold failed")
    return SummaryEngine(parts.share).threshold(window, max_tokens)


def context_tokens(run: RunState) -> int:
    """About how many tokens the next prompt has: the last known number, and an estimate of what was
    added since."""
    context, request = run.context, run.request
    if not context.measured:
        sent_only = sum(map(message_tokens, request.prefill))
        context.tokens = sent_only + text_tokens(request.ephemeral or "") + _tool_tokens(run)
    context.tokens += sum(map(message_tokens, run.conversation[context.measured :]))
    context.measured = len(run.conversation)
    return context.tokens


def _tool_tokens(run: RunState) -> int:
    return text_tokens(str(run.request.tools)) if run.request.tools else 0


async def compress(run: RunState, error: ModelError | None = None) -> bool:
    """Begin the next context of a run.

    Args:
        error: why the server refused the present context; None at the threshold.

    Returns: whether it was compressed.
    """
    tokens = context_tokens(run)
    if error is not None:
        learn_window(run, error.facts.context_limit)
        tokens = max(tokens, error.facts.prompt_tokens or 0)
    if run.tries.compressed >= MAX_PER_ANSWER or (error is None and _in_vain(run, tokens)):
        return False
    run.tries.compressed += 1
    view = _view(run, tokens, error)
    following = await _next_context(run, view)
    if following is None:
        run.context.failed_tokens = tokens
        run.note("failed_compressions")
        return False
    enter(run, following, f"{view.trigger}, {following.method}")
    run.note("compressions")
    # An estimate in the server's terms, until the next call says how many they are.
    run.context.tokens = int(view.scale * context_tokens(run))
    return True


def enter(run: RunState, following: NextContext, reason: str) -> None:
    """Begin the next context: record what is new in it, then the context itself."""
    old, whole = run.context, run.whole()
    number, record = old.number + 1, run.parts.recorder.record
    messages: list[Message] = []
    kept: list[int] = []
    prompt_length, replaced = 0, set[int]()
    for entry in following.entries:
        place = entry if isinstance(entry, int) else entry.instead_of
        if place is not None and place < run.prompt_length:
            prompt_length = len(kept) + 1
        if isinstance(entry, int):
            messages.append(run.conversation[entry])
            kept.append(old.index(entry))
            continue
        messages.append(entry.message)
        kept.append(len(whole))
        replaced.add(len(whole))
        whole.append(entry.message)
        record(
            MessageAdded(
                message=entry.message,
                turn=run.turn,
                context=number,
                synthetic=True,
                compressed=True,
            )
        )
    summary = None if following.summary is None else kept[following.summary]
    record(ContextStarted(start=len(whole), kept=kept, summary_index=summary, reason=reason))
    run.context = ContextState(
        number=number,
        kept=tuple(kept),
        past=whole,
        replaced=old.replaced | replaced,
        window=old.window,
        threshold=old.threshold,
        failed_summaries=old.failed_summaries,
    )
    run.prompt_length = prompt_length
    run.request = replace(run.request, conversation=Conversation(messages))


def _in_vain(run: RunState, tokens: int) -> bool:
    failed = run.context.failed_tokens
    return failed is not None and tokens < GROWTH * failed


def _view(run: RunState, tokens: int, error: ModelError | None) -> ContextView:
    messages, context = list(run.conversation), run.context
    beside = _tool_tokens(run)
    estimate = sum(map(message_tokens, messages))
    scale = min(4.0, max(0.5, (tokens - beside) / max(1, estimate)))
    threshold = context.threshold if context.window is not None else tokens
    if error is not None:
        threshold = min(threshold, int(REFUSED_SHARE * tokens))
    pays = context.failed_summaries < MAX_FAILED_SUMMARIES
    return ContextView(
        messages=messages,
        trigger="threshold" if error is None else "overflow",
        threshold=max(1, threshold - beside),
        window=context.window,
        scale=scale,
        harness_texts=frozenset(run.texts.as_list()),
        tool_state=run.parts.tool_state,
        summarise=_Summaries(run).ask if pays else None,
    )


async def _next_context(run: RunState, view: ContextView) -> NextContext | None:
    """The engine's result, or the default engine's; None when neither gains enough."""
    context = run.parts.context
    engine = None if context is None else context.engine
    seconds = 0.0 if context is None else context.seconds
    try:
        async with asyncio.timeout(seconds + _GRACE_S):
            default = SummaryEngine(context.share if context else None)
            found = await (engine or default).compress(view)
        if found is None and engine is None:
            return None
        problem = "it found nothing to leave out" if found is None else problem_with(view, found)
        if problem is None:
            return found
        _log.warning("the context engine's result is not used: %s", problem)
    except TimeoutError:
        _log.warning("the context engine took more than %g s", seconds + _GRACE_S)
    except DiskFull:
        raise
    except Exception:  # a boundary: an engine may be a plugin
        _log.exception("the context engine failed")
    found = await SummaryEngine().compress(replace(view, summarise=None))
    return None if found is None or problem_with(view, found) else found


def problem_with(view: ContextView, following: NextContext) -> str | None:
    """Why a next context cannot be used; None when it can."""
    before = view.messages
    for entry in following.entries:
        place = entry if isinstance(entry, int) else entry.instead_of
        if place is not None and not 0 <= place < len(before):
            return f"there is no message {place}"
    if following.summary is not None and not 0 <= following.summary < len(following.entries):
        return f"there is no summary {following.summary}"
    after = [before[e] if isinstance(e, int) else e.message for e in following.entries]
    if (system := [m for m in after if isinstance(m, SystemMessage)]) != [
        m for m in before if isinstance(m, SystemMessage)
    ] or after[: len(system)] != system:
        return "it changes the system messages"
    if not any(isinstance(message, UserMessage) for message in after):
        return "it has no user message"
    if isinstance(after[-1], AssistantMessage) and not isinstance(before[-1], AssistantMessage):
        return "it ends with the assistant"
    if faults := set(_faults(after)) - set(_faults(before)):
        return min(faults)
    was, now = view.tokens(before), view.tokens(after)
    if now > (1 - MIN_GAIN) * was:
        return f"it gains too little: {was:,} tokens became {now:,}"
    return None


def _faults(messages: Sequence[Message]) -> Iterator[str]:
    """What is wrong with roles and calls, by kind."""
    waiting: set[str] = set()
    last: Message | None = None
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in waiting:
                yield "a result has no call"
            waiting.discard(message.tool_call_id)
            last = message
            continue
        if waiting:
            yield "a call has no result"
        if type(message) is type(last) and not isinstance(message, SystemMessage):
            yield "two messages of one role follow each other"
        waiting = set()
        if isinstance(message, AssistantMessage):
            waiting = {call.id for call in message.tool_calls}
        last = message
    if waiting:
        yield "a call has no result"


@dataclass
class _Summaries:
    """Asks for the summaries of one compression."""

    run: RunState

    def __post_init__(self) -> None:
        context = self.run.parts.context
        self._until = time.monotonic() + (context.seconds if context else 0.0)

    async def ask(self, prompt: str, tokens: int) -> str | None:
        """See `context.Summarise`."""
        run = self.run
        for summariser in self._models():
            text = await self._one(summariser, prompt, tokens)
            if text is not None:
                run.context.failed_summaries = 0
                return text
            run.note("failed_summaries")
        run.context.failed_summaries += 1
        return None

    def _models(self) -> Iterator[AuxiliaryModel]:
        run = self.run
        if run.parts.context is not None and run.parts.context.summariser is not None:
            yield run.parts.context.summariser
        sampling = replace(run.request.sampling, stop=(), seed=None)
        yield AuxiliaryModel(run.parts.caller, run.request.model, sampling)

    async def _one(self, summariser: AuxiliaryModel, prompt: str, tokens: int) -> str | None:
        """One model's answer; None when it cannot be used."""
        run = self.run
        most = 2 * tokens + min(_THINKING, (run.context.window or 0) // _SHARE_OF_WINDOW)
        wanted = summariser.sampling.max_tokens
        request = ModelRequest(
            model=summariser.model,
            conversation=Conversation([UserMessage(content=prompt)]),
            call_id="",
            exact=self.run.request.exact,
            sampling=replace(summariser.sampling, max_tokens=min(most, wanted or most)),
        )
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                answer = await summariser.caller.call(
                    request, turn=run.turn, purpose="summary", agent=run.parts.agent
                )
        except (ModelError, CostLimit, UnitCostLimit, UserError) as error:
            _log.warning("no summary: %s: %s", type(error).__name__, error)
            return None
        except TimeoutError:
            _log.warning("no summary in time")
            return None
        self.run.count(answer.usage)
        text = answer.message.content.strip()
        if not text or text_tokens(text) > TOO_LONG * tokens:
            _log.warning("a summary of %d characters is not used", len(text))
            return None
        return text
