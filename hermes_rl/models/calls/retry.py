"""The one retry layer: a call is as many requests as it takes, each of them recorded.

`recovery` decides what comes after a failure, `attempts` makes the requests; here one is joined to
the other, and waits are waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from hermes_rl.errors import BadRequest, HermesError, ModelError, ModelTimeout
from hermes_rl.events import Purpose
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Completion, Conversation, ModelRequest, Sampling
from hermes_rl.models.calls.attempts import Attempts, Clock, Label, Price
from hermes_rl.models.calls.recovery import (
    Action,
    CallRecovery,
    Failure,
    GiveUp,
    Recovery,
    RetryPolicy,
    Wait,
    refused_alike,
)
from hermes_rl.models.calls.route import Account, Route
from hermes_rl.models.rate import Budget, Traffic
from hermes_rl.ports import Recorder

__all__ = ["Clock", "ModelCaller", "Price", "RetryPolicy"]

_PROBE_TOKENS = 64


@runtime_checkable
class Renewable(Protocol):
    """A client that can open new connections."""

    async def renew(self) -> None:
        """Use new connections from now on; what is under way on the old ones goes on."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A client that can ask its server for a sign of life beside the model calls."""

    async def responds(self) -> bool:
        """Whether the server answers at all."""
        ...


@dataclass(frozen=True)
class _Sending:
    """A request, and where it goes."""

    request: ModelRequest
    route: Route
    account: Account
    label: Label
    imposed: bool
    """Its output bound is a budget's."""


class ModelCaller:
    """Makes the model calls of one rollout.

    Args:
        routes: the model that was asked for, then its fallbacks; shared by all rollouts.
        recorder: this rollout's.
        price: what calls cost, in the place of the routes' prices.
        budget: what may be spent; None is no limit.
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
        self._attempts = Attempts(recorder, self._clock, price=price, budget=budget)
        self._recovery = Recovery(policy or RetryPolicy(), self._clock.uniform)

    async def call(
        self,
        request: ModelRequest,
        *,
        turn: int,
        purpose: Purpose = "agent",
        agent: str = "main",
    ) -> Completion:
        """One answer, over as many requests as it takes; `request.call_id` is replaced for each,
        and `request.model` by the route's.

        A streamed answer that broke off is asked for again, so `on_delta` may see its beginning
        twice.

        Raises: ModelError when it is final or the policy's patience is used up (Outage when nobody
        was answered in that time); CostLimit; CancelledError at once.
        """
        recovery = self._recovery.begin()
        retries = 0
        while True:
            route = self._routes[recovery.route]
            account = route.accounts.choose()
            if not retries:
                account.traffic.called()
            bounded = self._attempts.bounded(request, route)
            imposed = bounded is not request
            fitted = recovery.fit(bounded, account.client.bound if imposed else None)
            unsent = route.unsent(fitted.sampling)
            if unsent:
                fitted = replace(fitted, sampling=fitted.sampling.without(unsent))
            label = Label(turn, purpose, agent, retries, unsent)
            sending = _Sending(fitted, route, account, label, imposed)
            with account.traffic.asking(self._clock.monotonic):
                try:
                    return await self._send(sending)
                except ModelError as error:
                    account.traffic.failed(error, self._clock.monotonic())
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
                        probe = replace(sending, label=replace(label, retries=retries))
                        if await self._answers_probe(probe):
                            recovery.blame()  # the run need not stop for this request
            retries += 1

    async def _send(self, sending: _Sending) -> Completion:
        """One request; given up early where others were refused alike, or nothing is answered."""
        account, limit = sending.account, self._recovery.policy.refusals
        if limit is not None and (text := account.traffic.refused_alike(limit)) is not None:
            raise refused_alike(text, limit)
        request, silent = sending.request, False
        if account.silent_since is not None and self._recovery.policy.silence_s is not None:
            request, silent = _watched(request, account.traffic), True
        attempt = self._attempts.send(
            request, sending.route, account, sending.label, imposed=sending.imposed
        )
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
            ending = [t for t in (task, probe) if t is not None and not t.done()]
            for one in ending:
                one.cancel()
            if ending:
                await asyncio.wait(ending)
        host = account.client.endpoint
        message = account.traffic.message.removeprefix(f"{host} ") or "does not answer"
        raise ModelTimeout(f"{host} {message}", served=True)

    async def _answered(
        self, task: asyncio.Task[Completion], account: Account, part: float
    ) -> bool:
        """Wait for a request for a part of `silence_s`; False when that went by in silence."""
        since, silence_s = account.silent_since, self._recovery.policy.silence_s
        if since is None or silence_s is None:
            return True
        left = since + part * silence_s - self._clock.monotonic()
        await asyncio.wait((task,), timeout=max(0.0, left))
        return task.done() or account.silent_since is None

    async def _responds(self, account: Account) -> bool:
        """Whether a silent server answers other requests: all its slots may be busy. A server that
        fails model requests gets no credit for that."""
        if account.traffic.message or not isinstance(account.client, Checkable):
            return False
        try:
            async with asyncio.timeout((self._recovery.policy.silence_s or 0.0) / 8):
                account.traffic.alive |= await account.client.responds()
        except TimeoutError:
            return False
        return account.traffic.alive

    def fall_back(self) -> bool:
        """Leave the route in use, for the rest of the conversation: its answers are of no use.
        False when there is no other."""
        left = self._recovery.route + 1 < len(self._routes)
        if left:
            self._recovery.route += 1
        return left

    async def _carry_out(self, action: Action, failure: Failure, recovery: CallRecovery) -> None:
        """Do what was decided. Raises: the error to give up with."""
        error = failure.error
        if isinstance(action, GiveUp):
            if isinstance(error, BadRequest):
                failure.account.traffic.refused(error)
            if action.error is error:
                raise error
            raise action.error from error
        if not isinstance(action, Wait):
            return
        client = failure.account.client
        if action.renew and isinstance(client, Renewable):
            await client.renew()
        await self._sleep(action.seconds)
        # A retry that may be paid twice waits for its share of the traffic.
        while action.paid and not failure.account.traffic.take(self._clock.monotonic()):
            held = recovery.hold(replace(failure, now=self._clock.monotonic()))
            if isinstance(held, GiveUp):
                raise held.error from error
            await self._sleep(held.seconds)

    async def _answers_probe(self, sending: _Sending, *, queued: bool = True) -> bool:
        """Send the same model a short request. Where it answers that, it is only slow, or the
        request that failed is at fault."""
        label = replace(sending.label, purpose="probe")
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
            await self._attempts.send(request, sending.route, sending.account, label, queued=queued)
        except HermesError:
            return False
        return True

    async def _sleep(self, seconds: float) -> None:
        began = self._clock.monotonic()
        try:
            await self._clock.sleep(seconds)
        finally:
            self._attempts.waited(self._clock.monotonic() - began)


def _watched(request: ModelRequest, traffic: Traffic) -> ModelRequest:
    """The request; the first piece of its answer, where it is streamed, is a sign of life."""
    inner = request.on_delta

    def on_delta(piece: str) -> None:
        traffic.alive = True
        if inner is not None:
            inner(piece)

    return replace(request, on_delta=on_delta) if request.stream else request
