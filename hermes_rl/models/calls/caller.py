"""The only retry layer: a call makes as many requests as it needs, and each is recorded.

`ModelCaller` carries out the decisions of `recovery`. `Attempts` makes one request at a time: it
reserves its cost, waits for a slot, and journals the request before its first byte and after its
end. So the record has every request that a server may have served, including those whose answers
were discarded, and a budget never lends the same dollar twice.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, MutableMapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hermes_rl.errors import (
    BadRequest,
    ContentFiltered,
    CostLimit,
    HermesError,
    ModelAborted,
    ModelError,
    ModelTimeout,
)
from hermes_rl.events import CallEnded, CallStarted, Outcome, Purpose, Waited
from hermes_rl.messages import SystemMessage, UserMessage
from hermes_rl.models.base import (
    OUTPUT_LIMITS,
    Completion,
    Conversation,
    ModelClient,
    ModelRequest,
    Sampling,
    VersionSpan,
)
from hermes_rl.models.calls.recovery import (
    Account,
    Action,
    AnswerCut,
    CallRecovery,
    Failure,
    GiveUp,
    Recovery,
    RetryPolicy,
    Route,
    Wait,
    identical_refusals_outage,
)
from hermes_rl.models.errors import classify_exception
from hermes_rl.models.rate import OUTPUT_MAX, Budget, Estimate, Reservation, Slot, Spend, Traffic
from hermes_rl.models.tokens import CAPTURED, TokenGraph, record_tokens
from hermes_rl.ports import Recorder
from hermes_rl.usage import Usage

__all__ = ["Clock", "ModelCaller", "Price", "RetryPolicy"]

_PROBE_TOKENS = 64


@runtime_checkable
class Renewable(Protocol):
    """A client that can open new connections."""

    async def renew(self) -> None:
        """Use new connections from now on. Requests in flight complete on the old ones."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A client that can check its server without a model call."""

    async def responds(self) -> bool:
        """Return whether the server answers."""
        ...


@dataclass(frozen=True)
class _Sending:
    """One request of a call: its destination, and what is recorded of it."""

    request: ModelRequest
    route: Route
    account: Account
    turn: int
    purpose: Purpose
    agent: str
    retries: int
    """Number of earlier requests of the same call."""
    unsent: tuple[str, ...]
    """Sampling parameters that are left out, because the endpoint refused them by name."""
    imposed: bool
    """Its output limit comes from a budget (`Attempts.bounded`) and does not predict its output."""


class ModelCaller:
    """Makes the model calls of one rollout.

    Args:
        routes: the requested model, then its fallbacks; shared by all rollouts.
        recorder: this rollout's.
        price: replaces the prices of the routes.
        budget: None is unlimited.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        recorder: Recorder,
        policy: RetryPolicy | None = None,
        *,
        price: Price | None = None,
        budget: Budget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._routes = tuple(routes)
        self._clock = clock or Clock()
        self._recovery = Recovery(policy or RetryPolicy(), self._clock.uniform)
        self._attempts = Attempts(
            recorder,
            self._clock,
            price=price,
            budget=budget,
            answer_s=self._recovery.policy.answer_s,
        )

    async def call(
        self,
        request: ModelRequest,
        *,
        turn: int,
        purpose: Purpose = "agent",
        agent: str = "main",
    ) -> Completion:
        """Return one answer, making as many requests as it needs.

        Each request gets its own `call_id`, and the route's model. A streamed answer that breaks
        off is requested again, so `on_delta` may receive its beginning twice. An answer that the
        engine cut off is continued where its client can (`Completion.partial`).

        Raises: ModelError if it is final or the time limit is reached (Outage if no call was
            answered in that time); CostLimit; CancelledError at once.
        """
        recovery = self._recovery.begin()
        retries = 0
        while True:
            route = self._routes[recovery.route]
            account = route.accounts.choose()
            if not retries:
                account.traffic.count_call()
            bounded = self._attempts.bounded(request, route)
            imposed = bounded is not request
            fitted = recovery.adapt_request(bounded, account.client.bound, imposed=imposed)
            unsent = route.unsent(fitted.sampling)
            if unsent:
                fitted = replace(fitted, sampling=fitted.sampling.without(unsent))
            sending = _Sending(
                fitted, route, account, turn, purpose, agent, retries, unsent, imposed
            )
            with account.traffic.waiting_call(self._clock.monotonic):
                try:
                    return await self._send(sending)
                except ModelError as error:
                    account.traffic.note_failure(error, self._clock.monotonic())
                    if route.drop(error, fitted):
                        retries += 1
                        continue
                    failure = Failure(
                        error=error,
                        request=fitted,
                        account=account,
                        now=self._clock.monotonic(),
                        rotated=route.accounts.cool_down(account, error),
                        routes_left=recovery.route + 1 < len(self._routes),
                        imposed=imposed,
                    )
                    action = recovery.decide(failure)
                    await self._carry_out(action, failure, recovery)
                    if isinstance(action, Wait) and action.probe:
                        retries += 1
                        if await self._answers_probe(replace(sending, retries=retries)):
                            recovery.assume_request_fault()  # the run can continue
            retries += 1

    async def _send(self, sending: _Sending) -> Completion:
        """Make one request. Give up early if the endpoint refuses all calls or stays silent."""
        account, limit = sending.account, self._recovery.policy.refusals
        if limit is not None and (text := account.traffic.repeated_refusal(limit)) is not None:
            raise identical_refusals_outage(text, limit)
        request, silent = sending.request, False
        if account.silent_since is not None and self._recovery.policy.silence_s is not None:
            request, silent = _mark_alive_on_text(request, account.traffic), True
        attempt = self._attempts.send(replace(sending, request=request))
        if not silent:
            return await attempt
        task, probe = asyncio.ensure_future(attempt), None
        try:
            for part in (0.5, 1.0):
                if await self._answered(task, account, part) or await self._responds(account):
                    return await task
                if not account.traffic.probed:
                    account.traffic.probed = True
                    probe = asyncio.ensure_future(self._answers_probe(sending, queued=False))
        finally:
            ending: list[asyncio.Task[Any]] = [t for t in (task, probe) if t is not None]
            for one in ending:
                one.cancel()
            await asyncio.gather(*ending, return_exceptions=True)  # their errors are seen, too
        host, message = str(account.client.endpoint), account.traffic.message
        if host not in message:
            message = f"{host} {message or 'does not answer'}"
        raise ModelTimeout(message, served=True)

    async def _answered(
        self, task: asyncio.Task[Completion], account: Account, part: float
    ) -> bool:
        """Wait for a request during a part of `silence_s`; return False if the server stayed
        silent."""
        since, silence_s = account.silent_since, self._recovery.policy.silence_s
        if since is None or silence_s is None:
            return True
        left = since + part * silence_s - self._clock.monotonic()
        await asyncio.wait((task,), timeout=max(0.0, left))
        return task.done() or account.silent_since is None

    async def _responds(self, account: Account) -> bool:
        """Return whether a silent server answers other requests, because all its slots may be busy.
        False for a server that fails model requests."""
        if account.traffic.message or not isinstance(account.client, Checkable):
            return False
        try:
            async with asyncio.timeout((self._recovery.policy.silence_s or 0.0) / 8):
                account.traffic.alive |= await account.client.responds()
        except TimeoutError:
            return False
        return account.traffic.alive

    def fall_back(self) -> bool:
        """Use the next route for the rest of the conversation. Return False if there is none."""
        left = self._recovery.route + 1 < len(self._routes)
        if left:
            self._recovery.route += 1
        return left

    @property
    def window(self) -> int | None:
        """Tokens of the context window of the route in use, as far as a refusal or its list of
        models named it."""
        route = self._recovery.route
        return self._recovery.of_route(route).window.size or self._routes[route].window

    async def _carry_out(self, action: Action, failure: Failure, recovery: CallRecovery) -> None:
        """Carry out a decision. Raises: the error of GiveUp."""
        error = failure.error
        if isinstance(action, GiveUp):
            if isinstance(error, BadRequest):
                failure.account.traffic.note_refusal(error)
            if action.error is error:
                raise error
            raise action.error from error
        if not isinstance(action, Wait):
            return
        client = failure.account.client
        if action.renew and isinstance(client, Renewable):
            await client.renew()
        await self._sleep(action.seconds)
        # A retry that may be paid twice needs a token of the retry budget.
        while action.paid and not failure.account.traffic.take_retry_token(self._clock.monotonic()):
            held = recovery.wait_for_retry_token(replace(failure, now=self._clock.monotonic()))
            if isinstance(held, GiveUp):
                raise held.error from error
            await self._sleep(held.seconds)

    async def _answers_probe(self, sending: _Sending, *, queued: bool = True) -> bool:
        """Send a short request to the same model. If it answers, the model is only slow, or the
        failed request is at fault."""
        request = ModelRequest(
            model=sending.request.model,
            conversation=Conversation([UserMessage(content="Say yes.")]),
            call_id="",
            sampling=Sampling(max_tokens=_PROBE_TOKENS),
            stream=sending.request.stream,
            extra=sending.request.extra,
            adaptations=sending.request.adaptations,
        )
        try:
            probe = replace(sending, request=request, purpose="probe", imposed=False)
            await self._attempts.send(probe, queued=queued)
        except HermesError:
            return False
        return True

    async def _sleep(self, seconds: float) -> None:
        began = self._clock.monotonic()
        try:
            await self._clock.sleep(seconds)
        finally:
            self._attempts.waited(self._clock.monotonic() - began)


def _mark_alive_on_text(request: ModelRequest, traffic: Traffic) -> ModelRequest:
    """Return the request; the first streamed text of its answer marks the endpoint as alive."""
    inner = request.on_delta

    def on_delta(piece: str) -> None:
        traffic.alive = True
        if inner is not None:
            inner(piece)

    return replace(request, on_delta=on_delta) if request.stream else request


_COUNTED_PROMPT = "prompt tokens"

PromptHeads = MutableMapping[Hashable, int]
"""System prompt and tools -> tokens of the shortest prompt that began with them."""

Price = Callable[[str, Usage], float | None]
"""(model, usage) -> US dollars; None if the price is unknown."""


@dataclass(frozen=True)
class Clock:
    """Time and randomness, replaceable in tests."""

    monotonic: Callable[[], float] = time.monotonic
    time: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex


class Attempts:
    """Makes the requests of one rollout, each once.

    Args:
        price: replaces the prices of the routes.
        budget: None is unlimited.
        answer_s: see `RetryPolicy`.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        *,
        price: Price | None = None,
        budget: Budget | None = None,
        answer_s: float | None = None,
    ) -> None:
        self._recorder, self._clock = recorder, clock
        self._price, self._budget, self._answer_s = price, budget, answer_s
        self._graph = TokenGraph()

    def bounded(self, request: ModelRequest, route: Route) -> ModelRequest:
        """Return the request with an output limit if a budget applies and the output has no known
        limit: the answer might exceed the reservation. Otherwise return the same object."""
        if self._budget is None or _output_limit(request) is not None:
            return request
        model = route.model or request.model
        if route.prices is not None and route.prices.known_output(model) is not None:
            return request
        bound_prompt_tokens = self._worst_case(replace(request, model=model), 0, route)
        if not self._budget.binds(model, bound_prompt_tokens):
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=OUTPUT_MAX))

    async def send(self, sending: _Sending, *, queued: bool = True) -> Completion:
        """Return one answer.

        Args:
            queued: wait for a slot. Probes do not: requests without answers may hold all slots.

        Raises: ModelError; CostLimit before anything was sent; CancelledError at once.
        """
        request, route = sending.request, sending.route
        request = replace(
            request,
            call_id=self._clock.new_id(),
            model=route.model or request.model,
            extra={**request.extra, **route.extra},
        )
        sending, account = replace(sending, request=request), sending.account
        client, bound = account.client, account.client.bound(request)
        likely = 0 if sending.imposed else request.sampling.max_tokens or 0
        async with (
            self._reserved(client, request, route) as (reservation, max_input),
            account.limiter.slot(Estimate(bound, likely)) if queued else nullcontext() as slot,
        ):
            if slot is not None:
                self.waited(slot.waited_s)
            self._recorder.record(
                CallStarted(
                    call_id=request.call_id,
                    turn=sending.turn,
                    purpose=sending.purpose,
                    agent=sending.agent,
                    model=request.model,
                    started_at=self._clock.time(),
                    max_input_tokens=bound if max_input is None else max_input,
                    max_output_tokens=_output_limit(request),
                    unsent=sending.unsent,
                    continues=None if request.partial is None else request.partial.call_id,
                )
            )
            answer = await self._answer(sending, reservation, slot)
        if self._budget is not None and answer.usage is not None:
            record_prompt_tokens(client, request, answer.usage.input_tokens, route.heads)
        return answer

    def waited(self, seconds: float) -> None:
        """Record time that was spent waiting: it does not count as active time."""
        if seconds > 0:
            self._recorder.record(Waited(seconds=seconds))

    @asynccontextmanager
    async def _reserved(
        self, client: ModelClient, request: ModelRequest, route: Route
    ) -> AsyncIterator[tuple[Reservation | None, int | None]]:
        """Reserve the worst case. It is released if the request was not sent. Yields also the
        upper bound on the prompt's tokens for which it was reserved; None for both without a
        budget."""
        if self._budget is None:
            yield None, None
            return
        began = self._clock.monotonic()
        try:
            held, bound = await self._reserve(self._budget, client, request, route)
        finally:
            self.waited(self._clock.monotonic() - began)
        try:
            yield held, bound
        finally:
            held.release()

    async def _reserve(
        self, budget: Budget, client: ModelClient, request: ModelRequest, route: Route
    ) -> tuple[Reservation, int]:
        bound = bound_prompt_tokens(client, request, route.heads)
        while True:
            try:
                worst = self._worst_case(request, bound, route)
                return await budget.reserve(request.model, worst), bound
            except CostLimit:
                # While it waited, answers to other calls may have shown that the head of its
                # prompt has fewer tokens.
                refused, bound = bound, bound_prompt_tokens(client, request, route.heads)
                if bound >= refused:
                    raise

    def _worst_case(self, request: ModelRequest, bound: int, route: Route) -> Spend:
        most = _output_limit(request)
        if most is None:
            prices = route.prices
            most = OUTPUT_MAX if prices is None else prices.output_max(request.model)
        if self._price is None and route.prices is not None:
            cost = route.prices.worst(request.model, bound, most, request.cache)
            usd = None if cost is None else float(cost)
        else:
            usage = Usage(input_tokens=bound, output_tokens=most)
            usd = self._pricing(route)(request.model, usage)
        return Spend(tokens=bound + most, usd=usd)

    def _pricing(self, route: Route) -> Price:
        if self._price is not None:
            return self._price
        return route.prices.price if route.prices is not None else _unpriced

    async def _answer(
        self, sending: _Sending, reservation: Reservation | None, slot: Slot | None
    ) -> Completion:
        """Send and record the end."""
        end = partial(self._end, sending, reservation, self._clock.monotonic())
        weights = sending.account.traffic.weights
        mark = weights.mark()
        try:
            answer = await self._complete(sending)
        except asyncio.CancelledError:
            end("cancelled")
            raise
        except Exception as raised:
            error = raised if isinstance(raised, ModelError) else classify_exception(raised)
            if error is None:  # a bug in this package: the call is still recorded
                end("unknown", error=raised)
                raise
            if slot is not None:
                slot.report(error, headers=error.rate_limit)
            end("cut" if error.served else "refused", error=error)
            if error is raised:
                raise
            raise error from raised
        withheld = _error_of_answer(answer)
        if slot is not None:
            slot.report(withheld, answer.usage, answer.rate_limit)
        sending.account.traffic.note_answer(self._clock.monotonic())
        tokens = answer.tokens
        if tokens is None or not tokens.versions:
            version, count = weights.version_of(mark, answer.policy_version), 0
            if tokens is not None and (count := len(tokens.completion_ids or ())):
                known = replace(tokens, versions=(VersionSpan(version, count),))
                answer = replace(answer, tokens=known)
        else:
            weights.see(tokens.versions[-1].version)
        self._keep_tokens(sending, answer)
        end("cut" if isinstance(withheld, ModelAborted) else "ok", answer=answer, error=withheld)
        if withheld is not None:
            raise withheld
        return answer

    async def _complete(self, sending: _Sending) -> Completion:
        """Return the answer. Raises: ModelTimeout at the limit; others of the client."""
        client = sending.account.client
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                return await client.complete(sending.request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"{client.endpoint} sent no complete answer within {self._answer_s:g} s"
            raise ModelTimeout(text, served=True) from error

    def _keep_tokens(self, sending: _Sending, answer: Completion) -> None:
        """Record the token ids of an answer, even if it is withheld."""
        request = sending.request
        if answer.tokens is None or sending.purpose not in CAPTURED:
            return
        event = record_tokens(self._graph, request.call_id, sending.agent, answer.tokens, request)
        if event is not None:
            self._recorder.record(event)

    def _end(
        self,
        sending: _Sending,
        reservation: Reservation | None,
        began: float,
        outcome: Outcome,
        *,
        answer: Completion | None = None,
        error: BaseException | None = None,
    ) -> None:
        usage = answer.usage if answer else None
        price = self._pricing(sending.route)
        cost = None if usage is None else price(sending.request.model, usage)
        if reservation is not None:
            _settle(reservation, outcome, usage, cost)
        self._recorder.record(
            CallEnded(
                call_id=sending.request.call_id,
                outcome=outcome,
                latency_s=self._clock.monotonic() - began,
                finish_reason=answer.finish_reason if answer else None,
                usage=usage,
                usage_raw=answer.usage_raw if answer else None,
                cost_usd=cost,
                retries=sending.retries,
                request_id=answer.request_id if answer else getattr(error, "request_id", None),
                error=None if error is None else _describe(error),
                served_model=answer.served_model if answer else None,
                policy_version=answer.policy_version if answer else None,
            )
        )


def _output_limit(request: ModelRequest) -> int | None:
    """Return the output limit in the sampling or in extra body fields. Of several, return the
    largest: only the server knows which one it obeys."""
    limits = (request.sampling.max_tokens, *(request.extra.get(name) for name in OUTPUT_LIMITS))
    return max((n for n in limits if type(n) is int and n > 0), default=None)


def _settle(
    reservation: Reservation, outcome: Outcome, usage: Usage | None, cost: float | None
) -> None:
    """Settle the known cost; nothing for a refusal, and the worst case if the cost is unknown."""
    if outcome == "refused":
        reservation.release()
    elif usage is None or usage.total_tokens is None:
        reservation.settle(None)
    else:
        reservation.settle(Spend(tokens=usage.total_tokens, usd=cost))


def _unpriced(model: str, usage: Usage) -> float | None:
    return None


def _error_of_answer(answer: Completion) -> ModelError | None:
    """Return the error that the finish reason of a complete answer means."""
    if answer.finish_reason == "content_filter":
        return ContentFiltered(
            "the provider's filter withheld the answer", request_id=answer.request_id, served=True
        )
    if answer.finish_reason not in ("abort", "error"):
        return None
    text = f"the engine gave the request up (finish reason {answer.finish_reason})"
    if answer.partial is not None:
        return AnswerCut(text, answer.partial, request_id=answer.request_id)
    began = answer.usage is None or answer.usage.output_tokens != 0
    return ModelAborted(text, request_id=answer.request_id, served=began)


def _describe(error: BaseException) -> str:
    """Return class and message. Only messages of model errors are scrubbed, so others are
    omitted."""
    if isinstance(error, ModelError):
        return f"{type(error).__name__}: {error}"[:500]
    return type(error).__name__


class _CountedPrompt(NamedTuple):
    """A prompt whose tokens a server has counted.

    It bounds the part that another prompt shares with it: the same conversation some messages ago,
    or one with the same system prompt and tools. Only the rest is bounded by its bytes, usually
    four times the number of tokens.
    """

    bound: int
    tokens: int


def bound_prompt_tokens(client: ModelClient, request: ModelRequest, heads: PromptHeads) -> int:
    """Return an upper bound on the tokens of a request's prompt."""
    bound = client.bound(request)
    known = request.conversation.attachments.get((_COUNTED_PROMPT, request.model))
    if known is None:
        head_bound, key = _prompt_head(client, request)
        known = _CountedPrompt(head_bound, heads[key]) if key in heads else None
    if known is None or bound < known.bound:
        return bound
    return min(bound, int(known.tokens + bound - known.bound))


def record_prompt_tokens(
    client: ModelClient,
    request: ModelRequest,
    tokens: int | None,
    heads: PromptHeads,
) -> None:
    """Keep the token count of a prompt."""
    if not tokens or request.prompt_ids is not None:
        return
    kept = request.conversation.attachments
    if (_COUNTED_PROMPT, request.model) not in kept:
        _, key = _prompt_head(client, request)
        heads[key] = min(tokens, heads.get(key, tokens))
    kept[_COUNTED_PROMPT, request.model] = _CountedPrompt(client.bound(request), tokens)


def _prompt_head(client: ModelClient, request: ModelRequest) -> tuple[int, Hashable]:
    """Return the bound of a conversation's system prompt and tools, and a key for them."""
    system = [*takewhile(lambda m: isinstance(m, SystemMessage), request.conversation)]
    bound = client.bound(replace(request, conversation=Conversation(system), prefill=()))
    return bound, (request.model, bound, tuple(str(message.content) for message in system))
