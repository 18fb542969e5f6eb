"""The one retry layer: a call is as many requests as it takes, each of them recorded.

`recovery` decides what comes after a failure, `attempts` makes the requests; here one is joined to
the other, and waits are waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
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
    GiveUp,
    Recovery,
    RetryPolicy,
    Situation,
    Wait,
    refused_alike,
)
from hermes_rl.models.calls.route import Account, Route
from hermes_rl.models.prepare import can_shrink
from hermes_rl.models.rate import Budget, Traffic
from hermes_rl.ports import Recorder

__all__ = ["Clock", "ModelCaller", "Price", "RetryPolicy"]

_PROBE_TOKENS = 64


@runtime_checkable
class Renewable(Protocol):
    """A client that can begin anew with new connections."""

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
class _Asked:
    """A request, and where it goes."""

    request: ModelRequest
    route: Route
    account: Account
    label: Label


@dataclass(frozen=True)
class _Failed:
    """A request that failed, and where."""

    error: ModelError
    account: Account
    asked: ModelRequest
    recovery: CallRecovery
    imposed: bool
    """Its output bound was a budget's."""


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
            asked = recovery.fit(bounded, account.client.bound if imposed else None)
            unsent = route.unsent(asked.sampling)
            if unsent:
                asked = replace(asked, sampling=asked.sampling.without(unsent))
            label = Label(turn, purpose, agent, retries, unsent)
            with account.traffic.asking(self._clock.monotonic):
                try:
                    return await self._send(_Asked(asked, route, account, label), imposed=imposed)
                except ModelError as error:
                    account.traffic.failed(error, self._clock.monotonic())
                    if route.drop(error, asked):
                        retries += 1
                        continue
                    rotated = route.accounts.cool_down(account, error)
                    failed = _Failed(error, account, asked, recovery, imposed)
                    action = recovery.decide(error, self._situation(failed, rotated=rotated))
                    await self._carry_out(action, failed)
                    if isinstance(action, Wait) and action.probe:
                        retries += 1
                        await self._probe(failed, route, replace(label, retries=retries))
            retries += 1

    async def _send(self, asked: _Asked, *, imposed: bool) -> Completion:
        """One request; given up early where others were refused alike, or nothing is ever said."""
        account, limit = asked.account, self._recovery.policy.refusals
        if limit is not None and (words := account.traffic.refused_alike(limit)) is not None:
            raise refused_alike(words, limit)
        silent = account.silent_since is not None and self._recovery.policy.silence_s is not None
        request = _heard(asked.request, account.traffic) if silent else asked.request
        sending = self._attempts.send(request, asked.route, account, asked.label, imposed=imposed)
        if not silent:
            return await sending
        task, word = asyncio.ensure_future(sending), None
        try:
            for share in (0.5, 1.0):
                if await self._answered(task, account, share) or await self._responds(account):
                    return await task
                if not account.traffic.probed:
                    account.traffic.probed = True
                    word = asyncio.ensure_future(self._ask_for_a_word(asked))
        finally:
            ending = [t for t in (task, word) if t is not None and not t.done()]
            for one in ending:
                one.cancel()
            if ending:
                await asyncio.wait(ending)
        host = account.client.endpoint
        said = account.traffic.message.removeprefix(f"{host} ") or "does not answer"
        raise ModelTimeout(f"{host} {said}", served=True)

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

    def _situation(self, failed: _Failed, *, rotated: bool) -> Situation:
        account, asked = failed.account, failed.asked
        return Situation(
            now=self._clock.monotonic(),
            account=account.name,
            rotated=rotated,
            routes_left=failed.recovery.route + 1 < len(self._routes),
            answered_at=account.answered_at,
            silent_since=account.silent_since,
            max_tokens=asked.sampling.max_tokens,
            imposed=failed.imposed,
            bound=account.client.bound(asked) if failed.error.facts.context_limit else 0,
            images=_has_images(asked),
            shrinkable=_shrinkable(failed),
            adaptations=asked.adaptations,
            exact=asked.exact,
        )

    async def _carry_out(self, action: Action, failed: _Failed) -> None:
        """Do what was decided. Raises: the error to give up with."""
        if isinstance(action, GiveUp):
            if isinstance(failed.error, BadRequest):
                failed.account.traffic.refused(failed.error)
            if action.error is failed.error:
                raise action.error
            raise action.error from failed.error
        if isinstance(action, Wait):
            client = failed.account.client
            if action.renew and isinstance(client, Renewable):
                await client.renew()
            await self._sleep(action.seconds)
            if action.paid:
                await self._share(failed)

    async def _probe(self, failed: _Failed, route: Route, label: Label) -> None:
        """Ask the same model for a word. Where it answers that and not the request, the request is
        at fault, and the run need not stop for it."""
        try:
            await self._attempts.send(
                _tiny(failed.asked), route, failed.account, replace(label, purpose="probe")
            )
        except ModelError:
            return  # it says no more than the request's failures
        failed.recovery.blame()

    async def _ask_for_a_word(self, asked: _Asked) -> None:
        """Find out whether a silent model is only slow: it answers something short then."""
        label = replace(asked.label, purpose="probe")
        with suppress(HermesError):  # it is as silent as before
            await self._attempts.send(
                _tiny(asked.request), asked.route, asked.account, label, queued=False
            )

    async def _share(self, failed: _Failed) -> None:
        """Wait until a retry that may be paid twice has its share of the traffic."""
        while not failed.account.traffic.take(self._clock.monotonic()):
            at = self._situation(failed, rotated=False)
            held = failed.recovery.hold(failed.error, at)
            if isinstance(held, GiveUp):
                raise held.error from failed.error
            await self._sleep(held.seconds)

    async def _sleep(self, seconds: float) -> None:
        began = self._clock.monotonic()
        try:
            await self._clock.sleep(seconds)
        finally:
            self._attempts.waited(self._clock.monotonic() - began)


def _heard(request: ModelRequest, traffic: Traffic) -> ModelRequest:
    """The request; the first piece of its answer, where it is streamed, is a sign of life."""
    told = request.on_delta

    def hear(piece: str) -> None:
        traffic.alive = True
        if told is not None:
            told(piece)

    return replace(request, on_delta=hear) if request.stream else request


def _tiny(asked: ModelRequest) -> ModelRequest:
    """A request for a word, in the way of another one."""
    return ModelRequest(
        model=asked.model,
        conversation=Conversation([UserMessage(content="Say yes.")]),
        call_id="",
        sampling=Sampling(max_tokens=_PROBE_TOKENS),
        stream=asked.stream,
        extra=asked.extra,
        adaptations=asked.adaptations,
    )


def _shrinkable(failed: _Failed) -> bool:
    """Whether it may have failed for images that can be made smaller. Looks at no image else."""
    large = failed.error.reason in ("image_too_large", "payload_too_large")
    kept = "small_images" not in failed.asked.adaptations
    return large and kept and can_shrink(failed.asked.conversation)


def _has_images(request: ModelRequest) -> bool:
    contents = (m.content for m in request.conversation if isinstance(m, UserMessage))
    parts = (part for c in contents if isinstance(c, list) for part in c)
    return any("image" in str(part.get("type")) for part in parts)
