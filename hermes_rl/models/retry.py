"""The one retry layer. Every HTTP request is a call of its own in the record.

A request is journalled before its first byte is sent and again when it ended, however it ended. The
books so know each request that a server may have served, also those whose answers were thrown away.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from hermes_rl.errors import ContentFiltered, ModelAborted, ModelError, RateLimited
from hermes_rl.events import CallEnded, CallStarted, Outcome, Purpose, Waited
from hermes_rl.models.base import Completion, ModelClient, ModelRequest
from hermes_rl.models.limiter import Estimate, Limiter, Slot
from hermes_rl.ports import Recorder
from hermes_rl.usage import Usage

Price = Callable[[str, Usage], float | None]
"""(model, usage) -> US dollars; None when the price is not known."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on."""

    outage_s: float = 1800.0
    """Seconds after a call's first failure until it is given up, whatever the failures were."""
    max_attempts: int = 6
    """Requests that may fail for other reasons than waiting helps against (429, 529, no
    connection): each of these may have been served and billed."""
    base_s: float = 0.5
    """The first pause is random between 0 and this; the bound doubles each time (full jitter)."""
    cap_s: float = 30.0
    """Upper end of that bound."""


@dataclass(frozen=True)
class Clock:
    """Time and chance, to be replaced in tests."""

    monotonic: Callable[[], float] = time.monotonic
    time: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex


class ModelCaller:
    """Makes the model calls of one rollout.

    Args:
        client: shared by all rollouts.
        limiter: shared by all rollouts on the same endpoint, account and model.
        recorder: this rollout's.
        price: what a call costs; without it every call is unpriced.
    """

    def __init__(
        self,
        client: ModelClient,
        limiter: Limiter,
        recorder: Recorder,
        policy: RetryPolicy | None = None,
        *,
        price: Price | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.client = client
        self._limiter, self._recorder = limiter, recorder
        self._policy = policy or RetryPolicy()
        self._price = price
        self._clock = clock or Clock()

    async def call(
        self,
        request: ModelRequest,
        *,
        turn: int,
        purpose: Purpose = "agent",
        agent: str = "main",
    ) -> Completion:
        """One answer, over as many requests as it takes; `request.call_id` is replaced for each.

        A streamed answer that broke off is asked for again, so `on_delta` may see its beginning
        twice.

        Raises: ModelError when it is final or the policy's patience is used up; CancelledError at
        once.
        """
        budget = _Budget(self._policy, self._clock)
        retries = 0
        while True:
            record = _CallRecord(turn, purpose, agent, retries)
            try:
                return await self._attempt(request, record)
            except ModelError as error:
                pause = budget.pause_after(error)
                if pause is None:
                    raise
            await self._wait(pause)
            retries += 1

    async def _attempt(self, request: ModelRequest, record: _CallRecord) -> Completion:
        call_id = self._clock.new_id()
        attempt = replace(request, call_id=call_id)
        bound = self.client.bound(attempt)
        estimate = Estimate(bound, attempt.sampling.max_tokens or 0)
        async with self._limiter.slot(estimate) as slot:
            self._waited(slot.waited_s)
            self._recorder.record(
                CallStarted(
                    call_id=call_id,
                    turn=record.turn,
                    purpose=record.purpose,
                    agent=record.agent,
                    model=attempt.model,
                    started_at=self._clock.time(),
                    max_input_tokens=bound,
                    max_output_tokens=attempt.sampling.max_tokens,
                )
            )
            return await self._request(attempt, record, slot)

    async def _request(self, request: ModelRequest, record: _CallRecord, slot: Slot) -> Completion:
        """Send and record the end."""
        began = self._clock.monotonic()
        end = _End(request.call_id, began, record.retries)
        try:
            answer = await self.client.complete(request)
        except ModelError as error:
            slot.report(error)
            self._end(end, "cut" if error.served else "refused", error=error)
            raise
        except asyncio.CancelledError:
            self._end(end, "cancelled")
            raise
        except BaseException as error:
            self._end(end, "unknown", error=error)  # a bug of ours: the books still know the call
            raise
        withheld = _withheld(answer)
        slot.report(withheld, answer.usage, answer.rate_limit)
        outcome: Outcome = "cut" if isinstance(withheld, ModelAborted) else "ok"
        self._end(end, outcome, answer=answer, error=withheld, model=request.model)
        if withheld is not None:
            raise withheld
        return answer

    def _end(
        self,
        end: _End,
        outcome: Outcome,
        *,
        answer: Completion | None = None,
        error: BaseException | None = None,
        model: str = "",
    ) -> None:
        usage = answer.usage if answer else None
        cost = None
        if usage is not None and self._price is not None:
            cost = self._price(model, usage)
        self._recorder.record(
            CallEnded(
                call_id=end.call_id,
                outcome=outcome,
                latency_s=self._clock.monotonic() - end.began,
                finish_reason=answer.finish_reason if answer else None,
                usage=usage,
                usage_raw=answer.usage_raw if answer else None,
                cost_usd=cost,
                retries=end.retries,
                request_id=answer.request_id if answer else getattr(error, "request_id", None),
                error=None if error is None else _describe(error),
                served_model=answer.served_model if answer else None,
                policy_version=answer.policy_version if answer else None,
            )
        )

    async def _wait(self, seconds: float) -> None:
        began = self._clock.monotonic()
        try:
            await self._clock.sleep(seconds)
        finally:
            self._waited(self._clock.monotonic() - began)

    def _waited(self, seconds: float) -> None:
        if seconds > 0:
            self._recorder.record(Waited(seconds=seconds))


@dataclass(frozen=True)
class _CallRecord:
    turn: int
    purpose: Purpose
    agent: str
    retries: int


@dataclass(frozen=True)
class _End:
    call_id: str
    began: float
    retries: int


class _Budget:
    """Decides after each failure of one call whether and how long to pause."""

    def __init__(self, policy: RetryPolicy, clock: Clock) -> None:
        self._policy, self._clock = policy, clock
        self._failures = self._counted = 0
        self._outage_began: float | None = None

    def pause_after(self, error: ModelError) -> float | None:
        """Seconds until the next request; None: give up."""
        if not error.transient:
            return None
        policy, now = self._policy, self._clock.monotonic()
        if self._outage_began is None:
            self._outage_began = now
        if not _waiting_helps(error):
            self._counted += 1
            if self._counted >= policy.max_attempts:
                return None
        bound = min(policy.cap_s, policy.base_s * 2 ** min(self._failures, 30))
        self._failures += 1
        # On top of what the server asked for, so that refused requests do not come back together.
        pause = (error.retry_after_s or 0.0) + self._clock.uniform(0.0, bound)
        left = policy.outage_s - (now - self._outage_began)
        return pause if pause <= left else None


def _waiting_helps(error: ModelError) -> bool:
    if isinstance(error, RateLimited) or error.cause == "overloaded":
        return True
    return isinstance(error, ConnectionError) and not error.served


def _withheld(answer: Completion) -> ModelError | None:
    """The error that a complete answer stands for."""
    if answer.finish_reason == "content_filter":
        return ContentFiltered(
            "the provider's filter withheld the answer", request_id=answer.request_id, served=True
        )
    if answer.finish_reason in ("abort", "error"):
        return ModelAborted(
            f"the engine gave the request up (finish reason {answer.finish_reason})",
            request_id=answer.request_id,
            served=True,
        )
    return None


def _describe(error: BaseException) -> str:
    """Class and message. Messages of model errors are scrubbed where they are made; what others say
    is not ours to show."""
    if isinstance(error, ModelError):
        return f"{type(error).__name__}: {error}"[:500]
    return type(error).__name__
