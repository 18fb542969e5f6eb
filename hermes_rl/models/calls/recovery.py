"""Where a call may go, and what to do after a failed request.

A caller is given routes in order: the first is the model that was requested, the others are its
fallbacks. Each route has accounts, one per key, chosen by a strategy:

- `fill_first`: the first that is available, in the order given.
- `round_robin`: each in turn. `random`: any. `least_used`: the one that was chosen least.

A refused account cools down: 5 minutes after a refused key (401, 403); after a 429 or a lack of
credit until the time that the provider names (Retry-After, else the reset of the limit that is used
up). Without either, one that is over its rate cools down until its limiter would start another
request (at least a second), one without credit for an hour. Of the accounts that are available,
those come first whose limiter starts a request now. A refusal for the rate concerns one model, the
others concern the whole account; 5xx, 529 and bad requests concern no account. All workers of a run
share cooldowns (`hermes_rl.models.rate.share`). A single account never cools down for its rate,
because its limiter handles that.

After a failure one decision is made at a time, as a value. `Recovery` belongs to one rollout and
keeps what the conversation learned; `CallRecovery` belongs to one call, takes in each of its
failures and decides the next step. They neither wait nor send. The order of the steps:

1. send it without what was refused (large images, all images, content in parts, signatures,
   encrypted reasoning, grammar patterns), once each, and never again with it in this conversation;
2. another account;
3. fewer output tokens, where the error names how many there may be;
4. another model, when this one will not answer in time or at all;
5. wait, with full jitter, on top of what the server asked for; once, with new connections;
6. give up, with an error that says whether the request or the endpoint is at fault.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hermes_rl.errors import (
    AuthError,
    BadRequest,
    BillingError,
    ConnectionLost,
    ContentFiltered,
    ContextOverflow,
    Facts,
    ModelAborted,
    ModelError,
    ModelNotFound,
    ModelTimeout,
    Outage,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    RateLimited,
    Reason,
)
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Adaptation, ModelClient, ModelRequest, Sampling
from hermes_rl.models.key_command import KeyRenewed
from hermes_rl.models.prepare import can_shrink
from hermes_rl.models.providers import PriceTable
from hermes_rl.models.rate import Cooldowns, Limiter, Traffic, resets_s
from hermes_rl.models.wire import NO_LIMIT

_log = logging.getLogger(__name__)

Strategy = Literal["fill_first", "round_robin", "random", "least_used"]

AUTH_COOLDOWN_S = 300.0
COOLDOWN_S = 3600.0
"""Of an account without credit whose provider names no time."""
LEAST_COOLDOWN_S = 1.0
"""A provider may name no time at all (`Retry-After: 0`, or a date that has passed)."""

_OF_THE_ACCOUNT = ("auth", "auth_permanent", "billing")
_OF_ITS_RATE = ("rate_limit",)


@dataclass(frozen=True)
class Account:
    """One key at one endpoint, with the client that sends it and the limiter of its rate."""

    name: str
    """For records: the variable that holds the key, never the key."""
    client: ModelClient
    limiter: Limiter

    @property
    def traffic(self) -> Traffic:
        """What the calls of all rollouts see there."""
        return self.limiter.traffic

    @property
    def answered_at(self) -> float | None:
        """When it last answered anybody, here or at another worker of the run."""
        known = (self.traffic.answered_at, self.limiter.answered_at)
        return max((at for at in known if at is not None), default=None)

    @property
    def silent_since(self) -> float | None:
        """Since when calls wait for it that never gave a sign of life; None once it gave one."""
        if self.traffic.alive or self.limiter.answered_at is not None:
            return None
        return self.traffic.waiting_since


class KeyPool:
    """The accounts of one model at one endpoint; shared by all rollouts of the process.

    Args:
        accounts: at least one.
        scope: what a rate is counted by, for example endpoint and model.
        cooldowns: shared by all pools of the process.
    """

    def __init__(
        self,
        accounts: Sequence[Account],
        cooldowns: Cooldowns,
        *,
        scope: str,
        strategy: Strategy = "fill_first",
        chance: random.Random | None = None,
    ) -> None:
        self.accounts = tuple(accounts)
        self._cooldowns, self._scope, self._strategy = cooldowns, scope, strategy
        self._chance = chance or random.Random()
        self._used = dict.fromkeys(range(len(self.accounts)), 0)
        self._turn = 0

    def choose(self) -> Account:
        """The account of the next request: an available one, else the first to be available."""
        left = [self._left_s(account) for account in self.accounts]
        ready = [i for i, seconds in enumerate(left) if seconds <= 0]
        chosen = self._ready(ready) if ready else self._least_bad(left)
        self._used[chosen] += 1
        return self.accounts[chosen]

    def _ready(self, ready: Sequence[int]) -> int:
        """By the strategy, one whose rate lets a request start now; else the first to have room."""
        if len(ready) == 1:
            return ready[0]
        backlog = {i: self.accounts[i].limiter.backlog_s for i in ready}
        free = [i for i in ready if backlog[i] <= 0]
        return self._pick(free) if free else min(ready, key=lambda i: backlog[i])

    def _least_bad(self, left: Sequence[float]) -> int:
        """The first to be available of those that only cool down for their rate: a key that was
        refused will be refused again, and that would stop the run."""

        def how_bad(i: int) -> tuple[bool, float]:
            return self._cooldowns.left_s(self.accounts[i].name) > 0, left[i]

        return min(range(len(left)), key=how_bad)

    def cool_down(self, account: Account, error: ModelError) -> bool:
        """Let an account cool down for what the error says of it.

        Returns: whether another may be used: one that is available now (also this one, with a new
        key), or, after a refused key, one that only cools down for its rate.
        """
        if isinstance(error, KeyRenewed):
            return True
        seconds = self._seconds(account, error)
        if seconds:
            of_rate = error.reason in _OF_ITS_RATE
            name = self._rate_of(account) if of_rate else account.name
            self._cooldowns.start(name, seconds, error.reason)
        others = [a for a in self.accounts if a.name != account.name]
        if error.reason in _OF_THE_ACCOUNT:
            # Wait for rate-limited accounts; otherwise nothing would end the run.
            return any(self._cooldowns.left_s(a.name) <= 0 for a in others)
        return any(self._left_s(a) <= 0 for a in others)

    def _seconds(self, account: Account, error: ModelError) -> float:
        """How long an account cools down for an error, in seconds; 0: not at all."""
        if error.reason in ("auth", "auth_permanent"):
            return AUTH_COOLDOWN_S
        of_rate = error.reason in _OF_ITS_RATE and len(self.accounts) > 1
        if of_rate or error.reason in _OF_THE_ACCOUNT:
            told = error.retry_after_s
            if told is None:
                told = resets_s(error.rate_limit, self._cooldowns.now())
            if told is None:
                told = min(account.limiter.backlog_s, COOLDOWN_S) if of_rate else COOLDOWN_S
            return max(told, LEAST_COOLDOWN_S)
        return 0.0

    def _pick(self, ready: Sequence[int]) -> int:
        match self._strategy:
            case "random":
                return self._chance.choice(ready)
            case "least_used":
                return min(ready, key=lambda i: self._used[i])
            case "round_robin":
                after = [i for i in ready if i >= self._turn]
                chosen = after[0] if after else ready[0]
                self._turn = (chosen + 1) % len(self.accounts)
                return chosen
            case _:
                return ready[0]

    def _left_s(self, account: Account) -> float:
        names = (account.name, self._rate_of(account))
        return max(self._cooldowns.left_s(name) for name in names)

    def _rate_of(self, account: Account) -> str:
        return f"{account.name} {self._scope}"


@dataclass(frozen=True)
class Route:
    """A model on a provider."""

    model: str
    """As it is called there; the empty text sends the name that a request gives."""
    accounts: KeyPool
    prices: PriceTable | None = None
    """What calls cost here; None where the caller is told otherwise."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body, the user's own."""
    refused: list[str] = field(default_factory=list, compare=False)
    """Sampling parameters that the endpoint refused by name: no rollout sends them any more."""
    heads: dict[Hashable, int] = field(default_factory=dict, compare=False)
    """What is known of how prompts begin here."""

    def unsent(self, sampling: Sampling) -> tuple[str, ...]:
        """The parameters of a sampling that the endpoint refused by name."""
        return tuple(name for name in self.refused if name in sampling.as_dict())

    def drop(self, error: ModelError, request: ModelRequest) -> bool:
        """Stop sending the parameters of a request that its refusal names. An exact request loses
        only what does not change the distribution: the seed, and filters that cut nothing off.

        Returns: whether the request is worth sending again without them.
        """
        sent = request.sampling.as_dict()
        names = [name for name in error.facts.refused if name in sent]
        harmless = {"seed", *(name for name, value in NO_LIMIT if sent.get(name) == value)}
        if not names or (request.exact and not harmless.issuperset(names)):
            return False
        for name in names:
            if name not in self.refused:
                self.refused.append(name)
                _log.warning("%s does not take %r: no longer sent (%s)", request.model, name, error)
        return True

    @classmethod
    def single(cls, model: str, client: ModelClient, limiter: Limiter) -> Route:
        """The route to one account."""
        return cls(model, KeyPool((Account("", client, limiter),), Cooldowns(), scope=model))


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on, and by which means."""

    outage_s: float = 1800.0
    """Seconds after a call's first failure until it is given up, whatever the failures were."""
    first_answer_s: float | None = None
    """The same while there never was a sign of life (`Traffic.alive`); None is no difference."""
    silence_s: float | None = None
    """Such an endpoint may keep silent for so long; None leaves that to the client's timeouts."""
    refusals: int | None = None
    """After so many refusals in the same words, with no answer between them, nothing is sent."""
    max_attempts: int = 6
    """Failures of one request at a server that answers others, or that began to answer this one:
    each may have been served and billed, and the request itself is likely at fault."""
    base_s: float = 0.5
    """The first pause is random between 0 and this; the bound doubles each time (full jitter)."""
    cap_s: float = 30.0
    """Upper end of that bound."""
    hint_s: float = 600.0
    """The longest Retry-After that is heeded; after it the request is tried again."""
    adapt: bool = True
    """Send again without what a server refused. This changes what the model sees, so requests that
    are to be exact (preset `rl`) are never adapted."""
    fall_back_after: int = 2
    """Failures of a server that is down, overloaded or limits the rate, before the next route."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that failed, and what else the decision after it depends on."""

    error: ModelError
    request: ModelRequest
    """As it was sent."""
    account: Account
    now: float
    """Seconds of a monotonic clock."""
    rotated: bool = False
    """The account cools down, and another may be used (`KeyPool.cool_down`)."""
    routes_left: bool = False
    """There is another model to fall back to."""
    imposed: bool = False
    """The request's output bound is a budget's: what the server has room for will do."""


@dataclass(frozen=True)
class Again:
    """Send at once, changed: what changed is learned already."""


@dataclass(frozen=True)
class Rotate:
    """Send at once, with another account."""


@dataclass(frozen=True)
class FallBack:
    """Send at once, to the next route."""


@dataclass(frozen=True)
class Wait:
    """Send after a pause."""

    seconds: float
    renew: bool = False
    """With new connections."""
    paid: bool = False
    """The failed request may have been served: another one needs its share of the traffic."""
    probe: bool = False
    """Ask the server for something else before, to learn whether it answers anybody
    (`CallRecovery.blame`)."""


@dataclass(frozen=True)
class GiveUp:
    """Raise the error."""

    error: ModelError


Action = Again | Rotate | FallBack | Wait | GiveUp

_ADAPTATIONS: dict[Reason, Adaptation] = {
    "multimodal_tool_content_unsupported": "text_only",
    "thinking_signature": "no_signatures",
    "invalid_encrypted_content": "no_encrypted_reasoning",
    "llama_cpp_grammar_pattern": "no_grammar",
}
_ROTATE: tuple[Reason, ...] = ("auth", "auth_permanent", "billing", "rate_limit")
_STAY: tuple[Reason, ...] = ("ssl_cert_verification", "provider_policy_blocked")
"""What the user must fix: another model would hide it."""

_LEAST_OUTPUT = 256
"""With less room than this an answer is not worth asking for."""
_UNTOLD = 4096
"""Asked for instead of a budget's bound, when a window is too small and nobody says by how much."""
_RENEW_AFTER = 2


_MARGIN = 1 / 16
"""So much longer than the estimate may a prompt be."""
_FULL = 8
"""With less than this part of the window left an estimate would cut answers: the server is asked,
whose refusal says the very number."""


@dataclass
class Window:
    """What one conversation knows of the context window of one route.

    From one refusal on it says how much room a small window leaves for an answer."""

    size: int | None = None
    """Tokens of prompt and answer together."""
    _share: float = 1.0
    """Tokens of a prompt for each that its bound counts (`ModelClient.bound`)."""

    def learn(self, facts: Facts, bound: int) -> None:
        """Keep what a refusal says.

        Args:
            bound: of the refused prompt, as the client counts it.
        """
        if facts.context_limit and facts.prompt_tokens and bound > 0:
            self.size = facts.context_limit
            self._share = facts.prompt_tokens / bound

    def left(self, bound: int) -> int | None:
        """About as many tokens as an answer may have; None when that is not known well enough.

        Args:
            bound: of the prompt.
        """
        if self.size is None:
            return None
        left = self.size - math.ceil(self._share * bound * (1 + _MARGIN))
        return left if left >= self.size // _FULL else None


@dataclass
class _Learned:
    """What one route will not take, for the rest of the conversation."""

    adaptations: set[Adaptation] = field(default_factory=set)
    output_cap: int | None = None
    window: Window = field(default_factory=Window)


class Recovery:
    """What one rollout learned. See the module.

    Args:
        uniform: chance, as `random.uniform`.
    """

    def __init__(self, policy: RetryPolicy, uniform: Callable[[float, float], float]) -> None:
        self.policy, self.uniform = policy, uniform
        self.route = 0
        """Number of the route in use. What was left is not returned to in this conversation."""
        self._learned: dict[int, _Learned] = {}

    def begin(self) -> CallRecovery:
        """Begin a call: what was learned stays, what went wrong is forgotten."""
        return CallRecovery(self)

    def of_route(self, route: int) -> _Learned:
        """What a route will not take."""
        return self._learned.setdefault(route, _Learned())


@dataclass
class _Failures:
    """The failures of one call at one route."""

    since: float | None = None
    """When the first of them was."""
    last: float | None = None
    number: int = 0
    counted: int = 0
    """Those for which the request is likely at fault."""
    unexplained: int = 0
    """Those of a server that answered nobody else meanwhile."""
    lost: int = 0
    """Lost connections and silences in a row."""
    renewed: bool = False
    probed: bool = False
    turned: set[tuple[str, Reason]] = field(default_factory=set)
    """Accounts that were turned away from since the last pause, and why."""


class CallRecovery:
    """The decisions of one call. Several calls of a rollout may be under way at once."""

    def __init__(self, rollout: Recovery) -> None:
        self.route = rollout.route
        self._rollout, self._policy = rollout, rollout.policy
        self._failed = _Failures()
        self._output_cap: int | None = None

    def fit(
        self, request: ModelRequest, imposed: Callable[[ModelRequest], int] | None = None
    ) -> ModelRequest:
        """The request as the route in use will take it.

        Args:
            imposed: the client's `bound`, where the request's output bound is a budget's.
        """
        learned = self._rollout.of_route(self.route)
        if learned.adaptations:
            request = replace(request, adaptations=request.adaptations | learned.adaptations)
        room = None
        if imposed and self._output_cap is None and learned.window.size is not None:
            room = learned.window.left(imposed(request))
        caps = (self._output_cap, learned.output_cap, room)
        cap = min((c for c in caps if c is not None), default=None)
        asked = request.sampling.max_tokens
        if cap is not None and (asked is None or asked > cap):
            request = replace(request, sampling=replace(request.sampling, max_tokens=cap))
        return request

    def decide(self, at: Failure) -> Action:
        """What comes after a failure."""
        for step in (self._adapt, self._rotate, self._lower, self._fall_back):
            action = step(at)
            if action is not None:
                return action
        return self._wait(at) if at.error.transient else GiveUp(at.error)

    def hold(self, at: Failure) -> Wait | GiveUp:
        """What comes when a paid retry has no share of the traffic yet."""
        cap = self._policy.cap_s
        return self._in_time(Wait(self._rollout.uniform(cap / 2, cap), paid=True), at)

    def _adapt(self, at: Failure) -> Action | None:
        """Each once: what the failed request was already without did not help."""
        wanted = _unwanted(at)
        if wanted is None or wanted in at.request.adaptations:
            return None
        if wanted != "completion_cap" and (not self._policy.adapt or at.request.exact):
            return None
        self._rollout.of_route(self.route).adaptations.add(wanted)
        return Again()

    def _rotate(self, at: Failure) -> Action | None:
        """Once from each account between two pauses: a cooldown may be shorter than a request
        takes, and the accounts would then take turns for ever."""
        refusal = (at.account.name, at.error.reason)
        if not at.rotated or at.error.reason not in _ROTATE or refusal in self._failed.turned:
            return None
        self._failed.turned.add(refusal)
        return Rotate()

    def _lower(self, at: Failure) -> Action | None:
        """A cap of the model stays; the room that a full window leaves is for this call alone."""
        error, most = at.error, at.request.sampling.max_tokens
        if self._output_cap is not None or not isinstance(error, BadRequest | ContextOverflow):
            return None
        cap = error.facts.max_output_tokens
        if at.imposed and cap is None and error.reason == "context_overflow":
            cap = _UNTOLD
        if cap is None or (cap < _LEAST_OUTPUT and not at.imposed):
            return None
        if most is not None and most <= cap:
            return None
        self._output_cap = cap
        learned = self._rollout.of_route(self.route)
        if error.facts.context_limit:
            learned.window.learn(error.facts, at.account.client.bound(at.request))
        if error.reason == "format_error" and error.facts.context_limit is None:
            learned.output_cap = cap
        return Again()

    def _fall_back(self, at: Failure) -> Action | None:
        error = at.error
        if not at.routes_left or error.reason in _STAY:
            return None
        if error.transient:
            soon = (error.retry_after_s or 0.0) <= self._policy.cap_s
            early = self._failed.number < self._policy.fall_back_after
            if soon and early and self._first_left(at) > 0:
                return None
        elif isinstance(error, ContextOverflow | PayloadTooLarge):
            return None  # the policy filled its window: that ends as it would without fallbacks
        elif not isinstance(
            error, AuthError | BillingError | ModelNotFound | ContentFiltered | BadRequest
        ):
            return None
        self.route += 1
        self._rollout.route = max(self._rollout.route, self.route)
        self._failed, self._output_cap = _Failures(), None
        return FallBack()

    def _wait(self, at: Failure) -> Wait | GiveUp:
        error, policy, call = at.error, self._policy, self._failed
        if call.since is None:
            call.since = at.now
        silent = self._first_left(at) < math.inf  # then it is not the request's fault
        if self._others_answered(at) or (_at_fault(error) and not silent):
            call.counted += 1
        elif not _waiting_helps(error):
            call.unexplained += 1
        call.last = at.now
        call.turned.clear()
        if call.counted >= policy.max_attempts:
            return GiveUp(error)
        bound = min(policy.cap_s, policy.base_s * 2 ** min(call.number, 30))
        call.number += 1
        # On top of what the server asked for, so that refused requests do not come back together.
        hint = min(error.retry_after_s or 0.0, policy.hint_s)
        pause = hint + self._rollout.uniform(0.0, bound)
        doubtful = call.unexplained == policy.max_attempts and not call.probed
        wait = Wait(pause, renew=self._renewal(error), paid=error.served, probe=doubtful)
        call.probed = call.probed or doubtful
        return self._in_time(wait, at)

    def blame(self) -> None:
        """The server answers something else: when this request fails again, it is at fault."""
        self._failed.counted = max(self._failed.counted, self._policy.max_attempts - 1)

    def _others_answered(self, at: Failure) -> bool:
        """The server answered somebody since this call's last failure, which waiting should have
        fixed."""
        answered_at, last = at.account.answered_at, self._failed.last
        if _waiting_helps(at.error) or last is None or answered_at is None:
            return False
        return answered_at > last

    def _first_left(self, at: Failure) -> float:
        """Seconds left for a first sign of life; infinite once there was one."""
        silent_since = at.account.silent_since
        if self._policy.first_answer_s is None or silent_since is None:
            return math.inf
        return silent_since + self._policy.first_answer_s - at.now

    def _renewal(self, error: ModelError) -> bool:
        call = self._failed
        call.lost = call.lost + 1 if isinstance(error, ConnectionLost | ModelTimeout) else 0
        if call.lost < _RENEW_AFTER or call.renewed:
            return False
        call.renewed = True
        return True

    def _in_time(self, wait: Wait, at: Failure) -> Wait | GiveUp:
        """The pause, or the end when it is longer than the patience that is left."""
        left = self._first_left(at)
        if left <= 0:
            silent = f"nothing was answered within {self._policy.first_answer_s or 0.0:g} s"
            return GiveUp(_outage(silent, at.error))
        if left < math.inf:
            return replace(wait, seconds=min(wait.seconds, left))
        since = at.now if self._failed.since is None else self._failed.since
        spent = at.now - since
        if wait.seconds <= self._policy.outage_s - spent:
            return wait
        answered_at = at.account.answered_at
        if answered_at is not None and answered_at > since:
            return GiveUp(at.error)  # the endpoint works: it is this call that fails
        span = f"{spent:.0f} s" if spent < 120 else f"{spent / 60:.0f} min"
        return GiveUp(_outage(f"no answer for {span}", at.error))


def _unwanted(at: Failure) -> Adaptation | None:
    """What the request may be refused for: large images first, then images at all."""
    facts, reason, messages = at.error.facts, at.error.reason, at.request.conversation
    if facts.completion_cap:
        return "completion_cap"  # another name, which the model does not see
    if facts.no_images or reason in ("image_too_large", "payload_too_large"):
        contents = (m.content for m in messages if isinstance(m, UserMessage))
        parts = (part for c in contents if isinstance(c, list) for part in c)
        if not any("image" in str(part.get("type")) for part in parts):
            return None
        kept = "small_images" not in at.request.adaptations and not facts.no_images
        return "small_images" if kept and can_shrink(messages) else "no_images"
    return _ADAPTATIONS.get(reason)


def _outage(what: str, error: ModelError) -> Outage:
    """Return the error that stops the run."""
    return Outage(
        f"{what}, the last error: {error}",
        status=error.status,
        request_id=error.request_id,
        served=error.served,
        reason=error.reason,
    )


def refused_alike(text: str, calls: int) -> Outage:
    """Return the error that stops the run when no request is accepted."""
    return Outage(f"{calls} calls were refused in the same words, none was answered: {text}")


def _waiting_helps(error: ModelError) -> bool:
    """Whether the server is overloaded for now, or not there."""
    if isinstance(error, RateLimited | Overloaded):
        return True
    return isinstance(error, ConnectionLost) and not error.served


def _at_fault(error: ModelError) -> bool:
    """Whether the server accepted the request and began to answer: another request may do better,
    this one perhaps not."""
    if isinstance(error, RateLimited | Overloaded | ConnectionLost):
        return False
    return isinstance(error, ProtocolError | ModelAborted) or (
        error.served and error.status is None
    )
