"""The policy's calls in a rollout whose environment runs the episode (`Environment.play`)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import msgspec

from hermes_rl.agent import AgentParts, AgentResult
from hermes_rl.errors import ContextOverflow, HermesError, PayloadTooLarge, UserError
from hermes_rl.events import ContextStarted, MessageAdded, ToolsOffered
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolMessage,
    call_ids,
    conversation_from_openai,
    with_new_ids,
)
from hermes_rl.models import Completion, Conversation, ModelRequest, Sampling
from hermes_rl.rl.blocking import Blocked, limit_steps
from hermes_rl.text import why_not_json


class LimitReached(HermesError):
    """The rollout may make no further call. It ends with this reason, and is graded."""


@dataclass(eq=False)
class _Path:
    """A conversation with the policy."""

    sent: Conversation
    busy: bool = False
    """A call that extends it is running."""


class PolicyCalls:
    """Calls the policy for the code of an environment, and records what it reads and answers.

    Calls may run side by side. A request that extends an earlier conversation continues from the
    answer as it was sampled; any other one begins a new context of the row.
    """

    def __init__(self, parts: AgentParts) -> None:
        self._parts, self._paths = parts, list[_Path]()
        self._last: _Path | None = None
        """The conversation that was recorded last."""
        self._recorded: dict[int, tuple[int, int]] = {}
        """`id` of a message -> its index and turn."""
        self._tools: tuple[dict[str, Any], ...] | None = None
        self._checked: Sequence[dict[str, Any]] = ()
        self._contexts = self._turns = self._tokens = 0
        self._limit: str | None = None
        self._cut = self._closed = False
        self._running = set[asyncio.Task[Completion]]()
        self._timer: asyncio.Timeout | None = None
        self._active_s, self._since = parts.active_s, 0.0
        """Active seconds up to the time `_since`, and that time."""

    async def run(self, playing: Coroutine[Any, Any, None]) -> None:
        """Run an episode for at most `limits.max_seconds` of its active time: that without a call
        of the policy. Code that blocks the event loop is interrupted, where that is possible.

        Raises: LimitReached; what the episode raises.
        """
        most = self._parts.limits.max_seconds
        timer = self._timer = asyncio.timeout(None)
        try:
            async with timer:
                self._count_time()
                await (playing if most is None else limit_steps(playing, most))
        except (Exception, Blocked) as error:
            if not timer.expired() and not isinstance(error, Blocked):
                raise
            self._timer = None  # calls that still run must not set it
            raise await self._reach("time_limit") from error
        finally:
            self._timer = None
        if timer.expired():  # it caught its cancellation
            raise await self._reach("time_limit")

    def _count_time(self, *, called: bool = False) -> None:
        """Count the active time so far, and set the timer to what is left of it.

        Args:
            called: the policy is called from now on.
        """
        now, most = asyncio.get_running_loop().time(), self._parts.limits.max_seconds
        if self._since and not self._running:
            self._active_s += now - self._since
        self._since = now
        if self._timer is not None and most is not None and not self._timer.expired():
            self._timer.reschedule(None if called else now + most - self._active_s)

    @property
    def model(self) -> str:
        """The policy's name."""
        return self._parts.model

    @property
    def limited(self) -> bool:
        """Whether a limit of the run was reached."""
        return self._limit is not None

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampling: Sampling | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Return the policy's answer to a conversation.

        Args:
            messages: in OpenAI's form.
            tools: OpenAI function schemas.
            sampling: for what the run leaves open.
            extra: further fields of the request.

        Raises: LimitReached; UserError for messages of another form; ModelError.
        """
        conversation = _with_tool_names(conversation_from_openai(messages))
        if not conversation:
            raise UserError("a model call needs at least one message")
        if tools is not self._checked and (why := why_not_json(tools)):
            raise UserError(f"the tools of a model call: what was passed {why}")
        self._checked = tools
        await self._check_limits()
        self._turns += 1
        turn, path = self._turns, self._path_for(conversation)
        request = self._request(path.sent, tuple(tools), sampling or Sampling(), extra or {})
        path.busy = True
        call = asyncio.ensure_future(self._parts.caller.call(request, turn=turn))
        self._count_time(called=True)
        self._running.add(call)
        try:
            completion = await call
        except HermesError as error:
            self._record(path, turn)
            if not isinstance(error, ContextOverflow | PayloadTooLarge):
                raise
            if not self._tokens:  # nothing was sampled yet: it is the prompt that does not fit
                error.cause = "task"
                raise
            raise await self._reach("context_overflow") from error
        finally:
            path.busy = False
            self._count_time(called=bool(self._running - {call}))
            self._running.discard(call)
        # An object of its own.
        answer = with_new_ids(msgspec.structs.replace(completion.message), call_ids(path.sent))
        path.sent.append(answer)
        self._record(path, turn, answer)
        usage = completion.usage
        self._tokens += ((usage.input_tokens or 0) + (usage.output_tokens or 0)) if usage else 0
        self._cut = completion.finish_reason == "length"
        return replace(completion, message=answer)

    async def close(self) -> None:
        """Cancel the calls that still run: what they cost is then in the row. No more can begin."""
        self._closed = True
        for call in self._running:
            call.cancel()
        await self._ended()

    def result(self) -> AgentResult:
        """Return how the rollout ended."""
        return AgentResult(
            end_reason=self._limit or ("output_truncated" if self._cut else "answered"),
            final_response=None,  # the last answer of the record
            turns=self._turns,
            messages=[],
            seconds=0.0,
            active_seconds=self._active_s,
        )

    async def _ended(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    async def is_over(self) -> bool:
        """Whether a limit of the run refuses a further call: then that limit ends the rollout."""
        try:
            await self._check_limits()
        except LimitReached:
            return True
        return False

    async def _check_limits(self) -> None:
        limits = self._parts.limits
        if self._closed:
            raise LimitReached("the rollout is over")
        if limits.max_turns is not None and self._turns >= limits.max_turns:
            raise await self._reach("max_turns")
        if limits.max_tokens is not None and self._tokens >= limits.max_tokens:
            raise await self._reach("token_limit")
        if self._timer is not None and self._timer.expired():
            raise await self._reach("time_limit")

    async def _reach(self, limit: str) -> LimitReached:
        """Wait for the calls that run: what they cost and answered belongs in the row."""
        self._limit = limit
        await self._ended()
        return LimitReached(f"the rollout is over: {limit}")

    def _path_for(self, conversation: Sequence[Message]) -> _Path:
        """Return a conversation extended by this one, or a new one that begins with what an earlier
        one has in common with it."""
        keys, best, shared = [_key(message) for message in conversation], None, 0
        for path in self._paths:
            pairs = zip(keys, map(_key, path.sent), strict=False)
            size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if size > shared:
                best, shared = path, size
        if best is None or best.busy or shared < len(best.sent):
            best = _Path(Conversation(best.sent[:shared] if best is not None else ()))
            self._paths.append(best)
        best.sent.extend(conversation[shared:])
        return best

    def _request(
        self,
        sent: Conversation,
        tools: tuple[dict[str, Any], ...],
        sampling: Sampling,
        extra: Mapping[str, Any],
    ) -> ModelRequest:
        parts = self._parts
        chosen = parts.policy.complete(parts.sampling)
        if self._tools is None or tools != self._tools:
            self._tools = tools  # the same tuple at every turn
            parts.recorder.record(ToolsOffered(tools=list(tools)))
        return ModelRequest(
            model=parts.model,
            conversation=sent,
            call_id="",
            tools=self._tools,
            sampling=replace(sampling, **{k: getattr(chosen, k) for k in chosen.as_dict()}),
            stream=parts.stream,
            exact=not parts.policy.repair_history,
            cache=parts.cache,
            extra=dict(extra),
        )

    def _record(self, path: _Path, turn: int, answer: Message | None = None) -> None:
        """Record the messages of a conversation that are new."""
        record, recorded = self._parts.recorder.record, self._recorded
        if self._last not in (None, path):
            self._contexts += 1
            kept = [recorded[id(m)][0] for m in path.sent if id(m) in recorded]
            record(ContextStarted(start=len(recorded), kept=kept, reason="another conversation"))
        self._last, caused_by = path, 0
        for message in path.sent:
            if id(message) in recorded:
                caused_by = recorded[id(message)][1]
                continue
            sampled = message is answer
            caused_by = turn if sampled else caused_by
            recorded[id(message)] = len(recorded), caused_by
            record(
                MessageAdded(
                    message=message,
                    turn=caused_by,
                    context=self._contexts,
                    synthetic=caused_by > 0
                    and isinstance(message, AssistantMessage)
                    and not sampled,
                )
            )


def _with_tool_names(conversation: Sequence[Message]) -> list[Message]:
    """Fill in the names of tools in their results, which OpenAI's form does not need."""
    answers = (m for m in conversation if isinstance(m, AssistantMessage))
    names = {call.id: call.name for answer in answers for call in answer.tool_calls}
    return [
        msgspec.structs.replace(m, name=names.get(m.tool_call_id, ""))
        if isinstance(m, ToolMessage) and not m.name
        else m
        for m in conversation
    ]


def _key(message: Message) -> Message:
    """What tells a message from others: not how an answer was written or thought out, which
    programs do not send back."""
    if not isinstance(message, AssistantMessage):
        return message
    return AssistantMessage(content=message.content, tool_calls=message.tool_calls)
