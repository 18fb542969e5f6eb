"""What a run of the agent is given, what it gives back, and its state between the two.

`Control` interrupts and steers a run from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from hermes_rl.agent.context import CONTEXT_SECONDS, ContextEngine, ContextState
from hermes_rl.agent.policy import Budget, IterationBudget, Limits, Policy, Refunds
from hermes_rl.agent.prompt import HINTS, WORDINGS, Messages, budget_hint
from hermes_rl.agent.run_hooks import RunHooks
from hermes_rl.errors import Interrupted
from hermes_rl.events import AnswerDiscarded, MessageAdded, Purpose
from hermes_rl.messages import AssistantMessage, Message, ToolCall, call_ids, with_new_ids
from hermes_rl.models import (
    CacheTime,
    Completion,
    Conversation,
    ModelRequest,
    Sampling,
    has_unparsed_call,
)
from hermes_rl.ports import Recorder
from hermes_rl.sandboxes import Sandbox
from hermes_rl.tools import Approval, Delegate, LoopState, OpenParts, Services, Tool, schemas
from hermes_rl.usage import Usage


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run after a turn, without its messages: what another run resumes from."""

    prompt_length: int
    turn: int
    answers: int
    tokens: int
    active_s: float
    invalid_turns: int
    last_content: str | None
    final_response: str | None
    counts: dict[str, int]
    tool_state: dict[str, Any]
    seconds: float
    """Since the run's start."""
    loop: LoopState = LoopState()
    lent: int = 0
    refunded: int = 0
    hinted: int = 0
    context: int = 0
    """Number of the present context."""
    context_start: int = 0
    """Index of its first new message in the whole conversation."""
    context_kept: tuple[int, ...] = ()
    """Indices of the earlier messages that it holds, in its order."""
    context_replaced: tuple[int, ...] = ()
    """Indices of digests and summaries."""
    context_sizes: dict[str, Any] = {}
    """What is known of its size, and of the model's window: fields of `ContextState`."""


_ELSEWHERE = (
    "context", "context_start", "context_kept", "context_replaced", "context_sizes", "counts",
    "seconds", "tool_state",
)  # fmt: skip
_SIZES = ("window", "threshold", "tokens", "measured", "failed_summaries", "failed_tokens")
_PROGRESS = tuple(name for name in Progress.__struct_fields__ if name not in _ELSEWHERE)
"""Fields that `RunState` has under the same name."""


class Caller(Protocol):
    """Calls the model: retries, limits and records each request (`models.calls.retry`)."""

    async def call(
        self, request: ModelRequest, *, turn: int, purpose: Purpose = "agent", agent: str = "main"
    ) -> Completion:
        """One answer; `request.call_id` is replaced. Raises: ModelError."""
        ...


@runtime_checkable
class FallsBack(Protocol):
    """What a caller with more than one route may offer beside `Caller`."""

    def fall_back(self) -> bool:
        """Leave the present route for the rest of the run; False when there is no other."""
        ...


@runtime_checkable
class KnowsWindow(Protocol):
    """What a caller may offer beside `Caller`."""

    @property
    def window(self) -> int | None:
        """Tokens of the model's context window, as far as a refusal named it."""
        ...


@dataclass(frozen=True)
class AuxiliaryModel:
    """A model beside the agent's: it writes summaries, or looks at images."""

    caller: Caller
    model: str
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class ContextParts:
    """How the context of a run is compressed when it is full."""

    engine: ContextEngine | None = None
    """None is `agent.summaries.SummaryEngine`."""
    window: int | None = None
    """Tokens of the model's context window; None is learned when a prompt is refused."""
    share: float | None = None
    """Of the window, less the output limit, from which on the default engine compresses."""
    summariser: AuxiliaryModel | None = None
    """Called for summaries before the run's model; None calls that at once."""
    seconds: float = CONTEXT_SECONDS
    """How long one compression may take."""


class MakesChildren(Protocol):
    """Makes what the tool `delegate_task` calls (`delegation.Delegation`)."""

    def of(self, run: RunState) -> TimedDelegate:
        """That of one run."""
        ...


class TimedDelegate(Delegate, Protocol):
    """Runs sub-agents and measures them."""

    seconds: float
    """Time that it took so far. Not active time: sub-agents add their own to that."""


@dataclass(frozen=True)
class AgentParts:
    """What a run works with; shared things come from outside and stay open."""

    caller: Caller
    model: str
    tools: Mapping[str, Tool]
    """The offered tools by name, in the order in which the model sees them."""
    sandbox: Sandbox | None
    recorder: Recorder
    policy: Policy
    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    """System prompt; a system message at the head of the prompt takes its place."""
    ephemeral: str | None = None
    """Joined to the system prompt of every request, and never recorded."""
    prefill: tuple[Message, ...] = ()
    """Sent behind the system prompt with every request, and never recorded."""
    stream: bool = False
    on_delta: Callable[[str], None] | None = None
    """Called with each piece of streamed text."""
    on_reasoning: Callable[[str], None] | None = None
    """Called with each piece of streamed reasoning."""
    cache: CacheTime | None = "5m"
    """How long a provider that wants cache markers keeps the head of the conversation; None sends
    no markers."""
    reply: Callable[[Sequence[Message]], Awaitable[Message | None]] | None = None
    """Asked for what the user says to an answer, where the run would end as `answered`; the run
    ends when it gives None. Sees the whole conversation, the system message first."""
    env: dict[str, Any] = field(default_factory=dict)
    """What tools find as `ToolContext.env`."""
    tool_state: dict[str, Any] = field(default_factory=dict)
    """What tools find as `ToolContext.state`."""
    services: Services = field(default_factory=Services)
    """What tools find as `ToolContext.services`."""
    opened: OpenParts = field(default_factory=OpenParts)
    """What tools find as `ToolContext.opened`; closed by whoever made it."""
    budget: Budget | None = None
    """Turns that this run shares with others."""
    delegation: MakesChildren | None = None
    """Starts sub-agents; None where there are none."""
    agent: str = "main"
    """The name of the agent in the attempt's record."""
    inside: RunState | None = None
    """The run that this one is a sub-agent of: tokens and active time count there too."""
    approval: Approval | None = None
    """Decides about dangerous commands; None runs every command."""
    hooks: RunHooks | None = None
    """Called at the moments of `hooks.HOOKS`; those of requests are around `caller`."""
    active_s: float = 0.0
    """Active seconds that are spent already, by the sandbox's start and the task's setup."""
    fatal_commands: tuple[str, ...] = ()
    """Names of the calls under which sandboxes of the unit's earlier attempts died."""
    after_turn: Callable[[Progress], Awaitable[None]] | None = None
    """Called after each turn that another one follows."""
    resumed: Progress | None = None
    """The state of an earlier run, whose whole, recorded conversation is the prompt."""
    context: ContextParts | None = None
    """How a full context is compressed; None ends the run as `context_overflow`."""
    vision: AuxiliaryModel | None = None
    """Looks at images for tools; None where there is none."""
    images: bool = False
    """The model takes images: it sees those in the results of tools."""


@dataclass(frozen=True)
class AgentResult:
    """How a run of the agent ended."""

    end_reason: str
    """A key of `errors.ENDINGS`."""
    final_response: str | None
    """The last assistant text of the model's; the parts of a cut one, joined."""
    turns: int
    messages: list[Message]
    """All messages in order of happening, the system message first; digests and summaries of
    compressed contexts included."""
    seconds: float
    active_seconds: float
    """Time spent in tools, and what the sandbox took before."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts, absent when zero. `suspected_unparsed_calls`: answers that may hold a tool call
    which no server parsed (`models.has_unparsed_call`). `discarded_answers`, `continued_answers`,
    `nudges`, `duplicate_calls`, `loop_warnings`, `budget_hints`: what the policy's switches did.
    `refunded_turns`: turns that did not count. `thinking_budget_exhausted`: 1 when the output limit
    went into reasoning. `compressions`: new contexts; `failed_compressions`: attempts that brought
    nothing; `failed_summaries`: calls for a summary without a usable answer."""


class Finish(Exception):
    """Leaves the loop with an ending of the policy's. Never seen outside `hermes_rl.agent`."""

    def __init__(self, end_reason: str) -> None:
        super().__init__(end_reason)
        self.end_reason = end_reason


@dataclass
class Tries:
    """What was tried for one answer. A new one begins once an answer could be acted on."""

    continued: int = 0
    """Cut answers that were gone on from."""
    cut_calls: int = 0
    """Cut tool calls that were asked for again."""
    bad_arguments: int = 0
    """Calls without JSON that were asked for again."""
    nudged: bool = False
    prefilled: int = 0
    retried: int = 0
    """Empty answers that were asked for again, on the present route."""
    again: int = 0
    """Answers of this turn that were thrown away."""
    max_tokens: int | None = None
    """Output limit of the next call, once it was raised."""
    compressed: int = 0
    """How often the context was compressed for this answer."""
    parts: list[str] = field(default_factory=list)
    """Text of the cut answers so far."""


class Control:
    """The handle on one run. `interrupt` and `steer` may be called from any thread.

    An interrupt cancels the run's task, as `asyncio.timeout` does, so the model call or the tool
    in flight ends at once; outside cancellation stays what it is.
    """

    def __init__(self, reason: str = "the user interrupted the run") -> None:
        self.reason = reason
        """Why it is interrupted: what the model reads in the place of results."""
        self.message: str | None = None
        """What the interrupting user said."""
        self._lock = threading.Lock()  # guards all below: other threads write them
        self._interrupted = False
        self._cancelled = False
        self._steers: list[str] = []
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt was asked for."""
        return self._interrupted

    def interrupt(self, message: str | None = None) -> None:
        """End the run now. A later call only replaces the message."""
        with self._lock:
            self.message = message if message is not None else self.message
            first, self._interrupted = not self._interrupted, True
            if first and self._running is not None:
                self._running[0].call_soon_threadsafe(self._cancel)

    def steer(self, text: str) -> None:
        """Say something to the run without ending it: the model reads it at its next turn."""
        with self._lock:
            self._steers.append(text)

    def take_steers(self) -> list[str]:
        """What was said since the last time."""
        if not self._steers:
            return []
        with self._lock:
            texts, self._steers = self._steers, []
        return texts

    def _cancel(self) -> None:
        """On the run's loop; the run may have ended meanwhile."""
        with self._lock:
            if self._running is None:
                return
            self._cancelled = True
            self._running[1].cancel()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run the block under this control, within one task.

        Raises: Interrupted in place of the cancellation that an interrupt brought about.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Control.scope needs a running task")
        with self._lock:
            if self._interrupted:
                raise Interrupted("interrupted before the start")
            self._running = (asyncio.get_running_loop(), task)
        before = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            if self._cancelled and task.uncancel() <= before:
                raise Interrupted("interrupted") from None
            raise
        finally:
            with self._lock:
                self._running = None


@dataclass
class RunState:
    """One run while it goes on."""

    parts: AgentParts
    control: Control
    request: ModelRequest
    """The request of every turn: it holds the growing conversation, and the same tools throughout.
    """
    prompt_length: int = 0
    """Messages of the prompt in the present context, the system message included."""
    turn: int = 0
    answers: int = 0
    """Answers of the model so far, also those that were thrown away."""
    tokens: int = 0
    """Known input and output tokens of all calls."""
    active_s: float = 0.0
    invalid_turns: int = 0
    """Turns in a row without one valid call."""
    loop: LoopState = field(default_factory=LoopState)
    """What is remembered of the calls, to notice repetitions."""
    looping: bool = False
    """The last turn reached a bound of them."""
    lent: int = 0
    """Turns that sub-agents took of those of this run."""
    refunded: int = 0
    """Turns that do not count against the limit."""
    hinted: int = 0
    """The key of `prompt.HINTS` that the model read last."""
    tries: Tries = field(default_factory=Tries)
    """What was tried for the answer of this turn."""
    last_content: str | None = None
    """The model's last text."""
    final_response: str | None = None
    """The run's answer, where it is neither that nor the joined parts of a cut one."""
    known_ids: set[str] = field(default_factory=set)
    """Of all calls so far; see `with_unique_ids`."""
    counts: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    context: ContextState = field(default_factory=ContextState)

    @classmethod
    def of(cls, parts: AgentParts, control: Control) -> RunState:
        """The state before the first message."""
        request = ModelRequest(
            model=parts.model,
            conversation=Conversation(),
            call_id="",
            tools=schemas(parts.tools.values()),
            sampling=parts.policy.complete(parts.sampling),
            stream=parts.stream,
            on_delta=parts.on_delta,
            on_reasoning=parts.on_reasoning,
            exact=not parts.policy.repair_history,
            cache=parts.cache,
            ephemeral=parts.ephemeral,
            prefill=parts.prefill,
        )
        known = call_ids(parts.prefill)
        return cls(
            parts=parts,
            control=control,
            request=request,
            active_s=parts.active_s,
            known_ids=known,
        )

    def progress(self) -> Progress:
        """Where the run is now, after a turn."""
        same = {name: getattr(self, name) for name in _PROGRESS}
        seconds = time.monotonic() - self.started
        return Progress(
            **same,
            context=self.context.number,
            context_start=len(self.context.past),
            context_kept=self.context.kept,
            context_replaced=tuple(sorted(self.context.replaced)),
            context_sizes={name: getattr(self.context, name) for name in _SIZES},
            counts=dict(self.counts),
            seconds=seconds,
            tool_state=self.parts.tool_state,
        )

    def resume(self, progress: Progress, messages: Sequence[Message]) -> None:
        """Take up the state of an earlier run.

        Args:
            messages: its whole conversation, the system message first.
        """
        for name in _PROGRESS:
            setattr(self, name, getattr(progress, name))
        self.active_s += self.parts.active_s
        self.counts = Counter(progress.counts)
        self.parts.tool_state.update(progress.tool_state)
        self.started = time.monotonic() - progress.seconds
        start, kept = progress.context_start, progress.context_kept
        self.context = ContextState(
            number=progress.context,
            kept=kept,
            past=[*messages[:start]],
            replaced=frozenset(progress.context_replaced),
            **progress.context_sizes,
        )
        self.conversation.extend(messages[index] for index in kept)
        self.conversation.extend(messages[start:])
        self.known_ids |= call_ids(m for m in messages if isinstance(m, AssistantMessage))

    @property
    def conversation(self) -> Conversation:
        """The messages of the present context."""
        return self.request.conversation

    def whole(self) -> list[Message]:
        """All messages so far, in order of happening."""
        context = self.context
        return [*context.past, *self.conversation[len(context.kept) :]]

    def originals(self) -> list[Message]:
        """All messages so far, without digests and summaries of a compression."""
        replaced = self.context.replaced
        return [m for index, m in enumerate(self.whole()) if index not in replaced]

    @property
    def texts(self) -> Messages:
        """What the harness says in this run."""
        return WORDINGS[self.parts.policy.wording].messages

    def add(
        self,
        message: Message,
        *,
        synthetic: bool = False,
        tool_ok: bool | None = None,
        seconds: float | None = None,
        raw_text: str | None = None,
    ) -> None:
        """Append a message and record it."""
        self.conversation.append(message)
        unparsed = False
        if isinstance(message, AssistantMessage):
            self.known_ids |= call_ids((message,))
            if self.turn and not synthetic:
                self.last_content = message.content
                unparsed = has_unparsed_call(message, self.request.tools)
                self.note("suspected_unparsed_calls", unparsed)
        self.parts.recorder.record(
            MessageAdded(
                message=message,
                turn=self.turn,
                context=self.context.number,
                synthetic=synthetic,
                tool_ok=tool_ok,
                seconds=seconds,
                raw_text=raw_text,
                suspected_unparsed=unparsed,
            )
        )

    def with_unique_ids(self, message: AssistantMessage) -> AssistantMessage:
        """An answer that is to join the conversation, its calls with ids that no earlier one has.

        Some servers count from 0 in each answer, and another provider that is fallen back to
        refuses such a history. As it is where the history is sent as it is.
        """
        return message if self.request.exact else with_new_ids(message, self.known_ids)

    def discard(self, why: str) -> None:
        """Record that the answer of this turn's last call is thrown away."""
        self.parts.recorder.record(AnswerDiscarded(turn=self.turn, why=why))
        self.note("discarded_answers")

    def note(self, name: str, number: int = 1) -> None:
        """Count something for the run's metrics."""
        self.counts[name] += number

    def fall_back(self) -> bool:
        """Go to the caller's next route; False when it has none."""
        caller = self.parts.caller
        return isinstance(caller, FallsBack) and caller.fall_back()

    def count(self, usage: Usage | None) -> None:
        """Add a call's usage, as far as it is known."""
        if usage is not None:
            self.tokens += (usage.input_tokens or 0) + (usage.output_tokens or 0)
            if self.parts.inside is not None:
                self.parts.inside.count(usage)

    def add_active(self, seconds: float) -> None:
        """Add active time."""
        self.active_s += seconds
        if self.parts.inside is not None:
            self.parts.inside.add_active(seconds)

    def measure(self, usage: Usage | None) -> None:
        """Take the size of the present context from the usage of its last call."""
        if usage is not None and usage.input_tokens:
            self.context.tokens = usage.input_tokens
            self.context.measured = len(self.conversation)

    def check_limits(self) -> None:
        """Before each turn. Raises: Finish when a limit of the run is reached."""
        limits = self.parts.limits
        if limits.max_turns is not None and self.turns_used >= limits.max_turns:
            raise Finish("max_turns")
        self.check_tokens()
        self.check_time()
        if self.parts.budget is not None and not self.parts.budget.consume():
            raise Finish("max_turns")

    @property
    def turns_used(self) -> int:
        """Turns that count against the limit."""
        return self.turn - self.refunded + self.lent

    def refund(self) -> None:
        """The present turn does not count. At most as many are refunded as the limit allows, so
        that every run ends."""
        limit = self.parts.limits.max_turns
        if limit is not None and self.refunded >= limit:
            return
        self.refunded += 1
        self.note("refunded_turns")
        if isinstance(self.parts.budget, Refunds):
            self.parts.budget.refund()

    def budget_hint(self) -> str | None:
        """What the model is to read about the turns that are left; None between the marks."""
        used, limit = self.turns_used, self.parts.limits.max_turns
        shared = self.parts.budget
        if isinstance(shared, IterationBudget) and (
            limit is None or shared.used * limit > used * shared.max_total
        ):
            used, limit = shared.used, shared.max_total
        if limit is None:
            return None
        reached = [mark for mark in HINTS if used * 100 >= mark * limit]
        if used >= limit or not reached or reached[-1] <= self.hinted:
            return None
        self.hinted = reached[-1]
        self.note("budget_hints")
        return budget_hint(self.hinted, used, limit)

    def take_hook_seconds(self) -> float:
        """Seconds in hooks of tools since the last time: they are not the agent's."""
        hooks = self.parts.hooks
        if hooks is None:
            return 0.0
        seconds, hooks.seconds = hooks.seconds, 0.0
        return seconds

    def check_tokens(self) -> None:
        """Raises: Finish when the tokens of the run are used up."""
        bound = self.parts.limits.max_tokens
        if bound is not None and self.tokens >= bound:
            raise Finish("token_limit")
        if self.parts.inside is not None:
            self.parts.inside.check_tokens()

    def check_time(self) -> None:
        """Raises: Finish when no active time is left."""
        bound = self.parts.limits.max_seconds
        if bound is not None and self.active_s >= bound:
            raise Finish("time_limit")
        if self.parts.inside is not None:
            self.parts.inside.check_time()

    def check_calls(self, *, valid: bool) -> None:
        """After the calls of a turn. Raises: Finish when the model is stuck.

        Args:
            valid: at least one of them named a tool and had arguments that could be read.
        """
        policy = self.parts.policy
        self.invalid_turns = 0 if valid else self.invalid_turns + 1
        if self.invalid_turns >= policy.invalid_turn_limit:
            raise Finish("invalid_tool_calls")
        if self.looping:
            raise Finish("tool_loop")

    def answered_by(self, calls: Sequence[ToolCall]) -> bool:
        """Whether these calls are the answer: one is of a tool for that, or of no other tool."""
        tools = self.parts.tools
        return any(tool.answers for tool in tools.values()) and any(
            call.name not in tools or tools[call.name].answers for call in calls
        )

    def time_left(self, most: float) -> float:
        """Seconds of active time that are left, at most `most`."""
        bound = self.parts.limits.max_seconds
        if self.parts.inside is not None:
            most = self.parts.inside.time_left(most)
        return most if bound is None else max(0.01, min(most, bound - self.active_s))

    def metrics(self) -> dict[str, float]:
        """What was counted; see `AgentResult.metrics`."""
        return {name: float(number) for name, number in self.counts.items() if number}

    def result(self, end_reason: str) -> AgentResult:
        """The result, from the conversation as it is now."""
        messages = self.whole()
        joined = "".join(self.tries.parts) or self.last_content
        return AgentResult(
            end_reason=end_reason,
            final_response=joined if self.final_response is None else self.final_response,
            turns=self.turn,
            messages=messages,
            seconds=time.monotonic() - self.started,
            active_seconds=self.active_s,
            metrics=self.metrics(),
        )
