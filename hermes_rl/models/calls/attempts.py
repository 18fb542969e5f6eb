"""One request: reserved, slotted, journalled before its first byte, and again when it ended.

So the record has each request that a server may have served, also those whose answers were thrown
away, and a budget never lends the same dollar twice.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, MutableMapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from hermes_rl.errors import ContentFiltered, ModelAborted, ModelError
from hermes_rl.events import CallEnded, CallStarted, Outcome, Purpose, Waited
from hermes_rl.messages import SystemMessage
from hermes_rl.models.base import Completion, Conversation, ModelClient, ModelRequest
from hermes_rl.models.calls.route import Account, Route
from hermes_rl.models.errors import classify_exception
from hermes_rl.models.rate import OUTPUT_MAX, Budget, Estimate, Reservation, Slot, Spend
from hermes_rl.models.tokens import CAPTURED, TokenGraph, record_of
from hermes_rl.ports import Recorder
from hermes_rl.usage import Usage

_BOUNDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
)
"""Body fields that bound an answer, in the dialects and token wires."""

_PROMPT_TOKENS = "prompt tokens"

Heads = MutableMapping[Hashable, int]
"""System prompt and tools -> the tokens of the shortest prompt that began with them."""

Price = Callable[[str, Usage], float | None]
"""(model, usage) -> US dollars; None when the price is not known."""


@dataclass(frozen=True)
class Clock:
    """Time and chance, to be replaced in tests."""

    monotonic: Callable[[], float] = time.monotonic
    time: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex


@dataclass(frozen=True)
class Label:
    """What the record says of a request beside the request."""

    turn: int
    purpose: Purpose = "agent"
    agent: str = "main"
    retries: int = 0
    """How many earlier requests the same call had already made."""
    unsent: tuple[str, ...] = ()
    """Sampling parameters that it goes without, since the endpoint refused them by name."""


@dataclass(frozen=True)
class _Sent:
    """A request that was sent."""

    request: ModelRequest
    label: Label
    began: float
    reservation: Reservation | None
    price: Price


class Attempts:
    """Makes the requests of one rollout, each once.

    Args:
        price: what calls cost; None leaves it to the routes.
        budget: None is no limit.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        *,
        price: Price | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._recorder, self._clock = recorder, clock
        self._price, self._budget = price, budget
        self._graph = TokenGraph()

    def bounded(self, request: ModelRequest, route: Route) -> ModelRequest:
        """The request with a bound on its output, where a budget binds it and nobody knows one: it
        might make more than the budget set aside. The same object where that is not so."""
        if self._budget is None or _named(request) is not None:
            return request
        model = route.model or request.model
        if route.prices is not None and route.prices.known_output(model) is not None:
            return request
        worst = self._worst(replace(request, model=model), 0, route)
        if not self._budget.binds(model, worst):
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=OUTPUT_MAX))

    async def send(
        self,
        request: ModelRequest,
        route: Route,
        account: Account,
        label: Label,
        *,
        imposed: bool = False,
        queued: bool = True,
    ) -> Completion:
        """One answer.

        Args:
            imposed: its output bound is a budget's (`bounded`): no measure of what it will make.
            queued: it waits for a slot, as all requests do that are not to find out why the
                requests that hold the slots are not answered.

        Raises: ModelError; CostLimit before anything was sent; CancelledError at once.
        """
        call_id = self._clock.new_id()
        request = replace(
            request,
            call_id=call_id,
            model=route.model or request.model,
            extra={**request.extra, **route.extra},
        )
        client, known = account.client, route.heads
        bound, most = client.bound(request), _named(request)
        worst = bound if self._budget is None else prompt_bound(client, request, known)
        likely = 0 if imposed else request.sampling.max_tokens or 0
        async with (
            self._reserved(request, worst, route) as reservation,
            account.limiter.slot(Estimate(bound, likely)) if queued else nullcontext() as slot,
        ):
            if slot is not None:
                self.waited(slot.waited_s)
            self._recorder.record(
                CallStarted(
                    call_id=call_id,
                    turn=label.turn,
                    purpose=label.purpose,
                    agent=label.agent,
                    model=request.model,
                    started_at=self._clock.time(),
                    max_input_tokens=worst,
                    max_output_tokens=most,
                    unsent=label.unsent,
                )
            )
            sent = _Sent(request, label, self._clock.monotonic(), reservation, self._pricing(route))
            answer = await self._answer(sent, account, slot)
        if self._budget is not None and answer.usage is not None:
            learn(client, request, answer.usage.input_tokens, known)
        return answer

    def waited(self, seconds: float) -> None:
        """Note time that was spent waiting: never the agent's active time."""
        if seconds > 0:
            self._recorder.record(Waited(seconds=seconds))

    @asynccontextmanager
    async def _reserved(
        self, request: ModelRequest, bound: int, route: Route
    ) -> AsyncIterator[Reservation | None]:
        """Set the worst case aside. What is not settled at the end, as the request was not sent,
        is given back."""
        if self._budget is None:
            yield None
            return
        began = self._clock.monotonic()
        try:
            held = await self._budget.reserve(request.model, self._worst(request, bound, route))
        finally:
            self.waited(self._clock.monotonic() - began)
        try:
            yield held
        finally:
            held.release()

    def _worst(self, request: ModelRequest, bound: int, route: Route) -> Spend:
        most = _named(request)
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

    async def _answer(self, sent: _Sent, account: Account, slot: Slot | None) -> Completion:
        """Send and record the end."""
        try:
            answer = await account.client.complete(sent.request)
        except asyncio.CancelledError:
            self._end(sent, "cancelled")
            raise
        except Exception as raised:
            error = raised if isinstance(raised, ModelError) else classify_exception(raised)
            if error is None:  # a bug of ours: the call is recorded all the same
                self._end(sent, "unknown", error=raised)
                raise
            if slot is not None:
                slot.report(error, headers=error.rate_limit)
            self._end(sent, "cut" if error.served else "refused", error=error)
            if error is raised:
                raise
            raise error from raised
        withheld = _withheld(answer)
        if slot is not None:
            slot.report(withheld, answer.usage, answer.rate_limit)
        account.traffic.answered(self._clock.monotonic())
        self._keep_tokens(sent, answer)
        outcome: Outcome = "cut" if isinstance(withheld, ModelAborted) else "ok"
        self._end(sent, outcome, answer=answer, error=withheld)
        if withheld is not None:
            raise withheld
        return answer

    def _keep_tokens(self, sent: _Sent, answer: Completion) -> None:
        """Record the ids of an answer, also of one that is withheld."""
        label, request = sent.label, sent.request
        if answer.tokens is None or label.purpose not in CAPTURED:
            return
        event = record_of(self._graph, request.call_id, label.agent, answer.tokens, request)
        if event is not None:
            self._recorder.record(event)

    def _end(
        self,
        sent: _Sent,
        outcome: Outcome,
        *,
        answer: Completion | None = None,
        error: BaseException | None = None,
    ) -> None:
        usage = answer.usage if answer else None
        cost = None if usage is None else sent.price(sent.request.model, usage)
        if sent.reservation is not None:
            _settle(sent.reservation, outcome, usage, cost)
        self._recorder.record(
            CallEnded(
                call_id=sent.request.call_id,
                outcome=outcome,
                latency_s=self._clock.monotonic() - sent.began,
                finish_reason=answer.finish_reason if answer else None,
                usage=usage,
                usage_raw=answer.usage_raw if answer else None,
                cost_usd=cost,
                retries=sent.label.retries,
                request_id=answer.request_id if answer else getattr(error, "request_id", None),
                error=None if error is None else _describe(error),
                served_model=answer.served_model if answer else None,
                policy_version=answer.policy_version if answer else None,
            )
        )


def _named(request: ModelRequest) -> int | None:
    """The output bound that a request names, in its sampling or in body fields of the user's own;
    the larger one, since only the server knows which it heeds."""
    given = (request.sampling.max_tokens, *(request.extra.get(name) for name in _BOUNDS))
    return max((n for n in given if type(n) is int and n > 0), default=None)


def _settle(
    reservation: Reservation, outcome: Outcome, usage: Usage | None, cost: float | None
) -> None:
    """Nothing for a refusal; what it was where that is known; else the worst case stays spent."""
    if outcome == "refused":
        reservation.release()
    elif usage is None or usage.total_tokens is None:
        reservation.settle(None)
    else:
        reservation.settle(Spend(tokens=usage.total_tokens, usd=cost))


def _unpriced(model: str, usage: Usage) -> float | None:
    return None


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


class _Known(NamedTuple):
    """What a server said of a prompt bounds the beginning that another one shares with it: the same
    conversation some messages ago, or one with the same system prompt and tools. Only the rest
    counts by bytes, which are four times as many as tokens as a rule."""

    bound: int
    tokens: int


def prompt_bound(client: ModelClient, request: ModelRequest, heads: Heads) -> int:
    """An upper bound on the tokens of a request's prompt."""
    bound = client.bound(request)
    known = request.conversation.attachments.get((_PROMPT_TOKENS, request.model))
    if known is None:
        own, key = _head(client, request)
        known = _Known(own, heads[key]) if key in heads else None
    if known is None or bound < known.bound:
        return bound
    return min(bound, int(known.tokens + bound - known.bound))


def learn(
    client: ModelClient,
    request: ModelRequest,
    tokens: int | None,
    heads: Heads,
) -> None:
    """Keep what a server said of a prompt."""
    if not tokens or request.prompt_ids is not None:
        return
    kept = request.conversation.attachments
    if (_PROMPT_TOKENS, request.model) not in kept:
        _, key = _head(client, request)
        heads[key] = min(tokens, heads.get(key, tokens))
    kept[_PROMPT_TOKENS, request.model] = _Known(client.bound(request), tokens)


def _head(client: ModelClient, request: ModelRequest) -> tuple[int, Hashable]:
    """The bound of what comes before the first message of a conversation, and what names it."""
    system = [*takewhile(lambda m: isinstance(m, SystemMessage), request.conversation)]
    bound = client.bound(replace(request, conversation=Conversation(system), prefill=()))
    return bound, (request.model, bound, tuple(str(message.content) for message in system))
