"""Routes and accounts for calls, and decisions after failed requests.

A caller has routes in order: the requested model, then its fallbacks. Each route has accounts, one
per key, chosen by a strategy:

- `fill_first`: the first available one in the configured order.
- `round_robin`: each in turn. `random`: any. `least_used`: the one chosen least often.

A refused account cools down: 5 minutes after a refused key (401, 403), and after a 429 or a lack of
credit until the time that the provider names (Retry-After, else the reset of the exhausted limit).
Without either, an account over its rate cools down until its limiter would start another request
(at least a second), and one without credit for an hour. Of the available accounts, those whose
limiter allows a request now come first. A refusal for the rate concerns one model, the others
concern the whole account; 5xx, 529 and bad requests concern no account. All workers of a run share
cooldowns (`hermes_rl.models.rate.share`). A single account never cools down for its rate, because
its limiter handles that.

Each decision is a value. `Recovery` keeps what one rollout has learned, and `CallRecovery` decides
the next step after each failure of one call. Neither waits or sends. The order of the steps:

1. send the request without the refused feature (large images, all images, content parts,
   signatures, encrypted reasoning, grammar patterns), once each, for the rest of the conversation;
2. another account;
3. fewer output tokens, if the error names a limit;
4. another model, if this one does not answer in time;
5. wait, with full jitter on top of the server's hint; once, with new connections;
6. give up, with an error that blames either the request or the endpoint.
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
from hermes_rl.models.base import Adaptation, ModelClient, ModelRequest, PartialAnswer, Sampling
from hermes_rl.models.key_command import KeyRenewed
from hermes_rl.models.prepare import has_shrinkable_image
from hermes_rl.models.providers import PriceTable
from hermes_rl.models.rate import Cooldowns, Limiter, Traffic, seconds_until_reset
from hermes_rl.models.wire import NEUTRAL_FILTERS

_log = logging.getLogger(__name__)

Strategy = Literal["fill_first", "round_robin", "random", "least_used"]

AUTH_COOLDOWN_S = 300.0
COOLDOWN_S = 3600.0
"""For an account without credit, if the provider names no time."""
LEAST_COOLDOWN_S = 1.0
"""Minimum, because a provider may name none (`Retry-After: 0`, or a past date)."""

_ACCOUNT_REASONS = ("auth", "auth_permanent", "billing")
_RATE_REASONS = ("rate_limit",)


@dataclass(frozen=True)
class Account:
    """One key at one endpoint, with the client that sends it and the limiter of its rate."""

    name: str
    """The variable that holds the key, for records; never the key."""
    client: ModelClient
    limiter: Limiter

    @property
    def traffic(self) -> Traffic:
        """What the calls of all rollouts have observed."""
        return self.limiter.traffic

    @property
    def answered_at(self) -> float | None:
        """When it last answered a call of any worker of the run."""
        known = (self.traffic.answered_at, self.limiter.answered_at)
        return max((at for at in known if at is not None), default=None)

    @property
    def silent_since(self) -> float | None:
        """Since when calls wait, if the endpoint has never responded; None once it has."""
        if self.traffic.alive or self.limiter.answered_at is not None:
            return None
        return self.traffic.waiting_since


class KeyPool:
    """The accounts of one model at one endpoint; shared by all rollouts of the process.

    Args:
        accounts: at least one.
        scope: what rate limits apply to, for example endpoint and model.
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
        """Return the account for the next request: an available one, else the first to become
        so."""
        left = [self._cooldown_left_s(account) for account in self.accounts]
        ready = [i for i, seconds in enumerate(left) if seconds <= 0]
        chosen = self._choose_ready(ready) if ready else self._choose_soonest(left)
        self._used[chosen] += 1
        return self.accounts[chosen]

    def _choose_ready(self, ready: Sequence[int]) -> int:
        """Choose by the strategy among accounts that allow a request now, else the first that
        will."""
        if len(ready) == 1:
            return ready[0]
        backlog = {i: self.accounts[i].limiter.backlog_s for i in ready}
        free = [i for i in ready if backlog[i] <= 0]
        return self._choose_by_strategy(free) if free else min(ready, key=lambda i: backlog[i])

    def _choose_soonest(self, left: Sequence[float]) -> int:
        """Return the first to become available, preferring accounts that cool down for their rate:
        a refused key would be refused again, and that would stop the run."""

        def readiness(i: int) -> tuple[bool, float]:
            return self._cooldowns.left_s(self.accounts[i].name) > 0, left[i]

        return min(range(len(left)), key=readiness)

    def cool_down(self, account: Account, error: ModelError) -> bool:
        """Start the cooldown that an error calls for.

        Returns: whether another account may be used: one that is available now (or this one with a
            new key), or after a refused key one that cools down only for its rate.
        """
        if isinstance(error, KeyRenewed):
            return True
        seconds = self._seconds(account, error)
        if seconds:
            of_rate = error.reason in _RATE_REASONS
            name = self._rate_of(account) if of_rate else account.name
            self._cooldowns.start(name, seconds, error.reason)
        others = [a for a in self.accounts if a.name != account.name]
        if error.reason in _ACCOUNT_REASONS:
            # Wait for rate-limited accounts; otherwise nothing would end the run.
            return any(self._cooldowns.left_s(a.name) <= 0 for a in others)
        return any(self._cooldown_left_s(a) <= 0 for a in others)

    def _seconds(self, account: Account, error: ModelError) -> float:
        """Return the seconds for which an account cools down after an error; 0 for none."""
        if error.reason in ("auth", "auth_permanent"):
            return AUTH_COOLDOWN_S
        of_rate = error.reason in _RATE_REASONS and len(self.accounts) > 1
        if of_rate or error.reason in _ACCOUNT_REASONS:
            seconds = error.retry_after_s
            if seconds is None:
                seconds = seconds_until_reset(error.rate_limit, self._cooldowns.now())
            if seconds is None:
                seconds = min(account.limiter.backlog_s, COOLDOWN_S) if of_rate else COOLDOWN_S
            return max(seconds, LEAST_COOLDOWN_S)
        return 0.0

    def _choose_by_strategy(self, ready: Sequence[int]) -> int:
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

    def _cooldown_left_s(self, account: Account) -> float:
        names = (account.name, self._rate_of(account))
        return max(self._cooldowns.left_s(name) for name in names)

    def _rate_of(self, account: Account) -> str:
        return f"{account.name} {self._scope}"


@dataclass(frozen=True)
class Route:
    """A model on a provider."""

    model: str
    """Its name at the provider; empty for the name in the request."""
    accounts: KeyPool
    prices: PriceTable | None = None
    """Prices of calls; None if the caller has its own."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Extra fields of each request's body."""
    refused: list[str] = field(default_factory=list, compare=False)
    """Sampling parameters that the endpoint refused by name. No rollout sends them again."""
    heads: dict[Hashable, int] = field(default_factory=dict, compare=False)
    """Token counts of system prompts and tools, as the endpoint counts them."""
    windows: Mapping[str, int] = field(default_factory=dict, compare=False)
    """What the endpoint says of context windows, as far as it has answered (`read_windows`)."""

    @property
    def window(self) -> int | None:
        """Tokens of the model's context window, if the endpoint says so."""
        return self.windows.get(self.model) or self.windows.get("")

    def unsent(self, sampling: Sampling) -> tuple[str, ...]:
        """Return the parameters that the endpoint refused by name."""
        return tuple(name for name in self.refused if name in sampling.as_dict())

    def drop(self, error: ModelError, request: ModelRequest) -> bool:
        """Stop sending the sampling parameters that a refusal names.

        An exact request loses only what does not change the distribution: the seed, and neutral
        filters.

        Returns: whether to send the request again without them.
        """
        sent = request.sampling.as_dict()
        names = [name for name in error.facts.refused if name in sent]
        harmless = {"seed", *(name for name, value in NEUTRAL_FILTERS if sent.get(name) == value)}
        if not names or (request.exact and not harmless.issuperset(names)):
            return False
        for name in names:
            if name not in self.refused:
                self.refused.append(name)
                _log.warning("%s does not take %r: no longer sent (%s)", request.model, name, error)
        return True

    @classmethod
    def single(cls, model: str, client: ModelClient, limiter: Limiter) -> Route:
        """Return the route to a single account."""
        return cls(model, KeyPool((Account("", client, limiter),), Cooldowns(), scope=model))


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of retries, and permitted measures."""

    outage_s: float = 1800.0
    """Seconds from a call's first failure until it is given up."""
    first_answer_s: float | None = None
    """The same while the endpoint has never responded (`Traffic.alive`); None for no difference."""
    silence_s: float | None = None
    """Maximum silence of such an endpoint; None leaves it to the client's timeouts."""
    answer_s: float | None = None
    """Maximum seconds until an answer is complete; None for no limit: long answers are valid."""
    refusals: int | None = None
    """After this many identical refusals in a row, no request is sent."""
    max_attempts: int = 6
    """Maximum failures of a request at a server that answers other calls, or that began to answer
    this one. Each may have been billed, and the request itself is probably at fault."""
    base_s: float = 0.5
    """The first pause is random between 0 and this; the bound doubles each time (full jitter)."""
    cap_s: float = 30.0
    """Maximum of that bound."""
    hint_s: float = 600.0
    """Maximum Retry-After to obey."""
    fall_back_after: int = 2
    """Failures at an unavailable or rate-limited server before the next route is used."""


class AnswerCut(ModelAborted):
    """The engine cut an answer off; another request continues it.

    Args:
        partial: the answer so far; the request that failed sampled some of it.
    """

    def __init__(self, text: str, partial: PartialAnswer, *, request_id: str | None = None) -> None:
        super().__init__(text, request_id=request_id, served=True)
        self.partial = partial


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed request, and everything else that the next decision depends on."""

    error: ModelError
    request: ModelRequest
    """As it was sent."""
    account: Account
    now: float
    """Seconds of a monotonic clock."""
    rotated: bool = False
    """Another account may be used (`KeyPool.cool_down`)."""
    routes_left: bool = False
    """There is another fallback."""
    imposed: bool = False
    """The request's output limit comes from a budget, so a smaller one is acceptable."""


@dataclass(frozen=True)
class Resend:
    """Send again at once: with a change that `Recovery` has learned, or for the rest of an
    answer."""


@dataclass(frozen=True)
class SwitchAccount:
    """Send at once with another account."""


@dataclass(frozen=True)
class FallBack:
    """Send at once to the next route."""


@dataclass(frozen=True)
class Wait:
    """Send after a pause."""

    seconds: float
    renew: bool = False
    """Use new connections."""
    paid: bool = False
    """The failed request may have been served: a retry needs a token of the retry budget."""
    probe: bool = False
    """Send a short request first, to learn whether the server answers any
    (`CallRecovery.assume_request_fault`)."""


@dataclass(frozen=True)
class GiveUp:
    """Raise the error."""

    error: ModelError


Action = Resend | SwitchAccount | FallBack | Wait | GiveUp

_ADAPTATIONS: dict[Reason, Adaptation] = {
    "multimodal_tool_content_unsupported": "text_only",
    "thinking_signature": "no_signatures",
    "invalid_encrypted_content": "no_encrypted_reasoning",
    "llama_cpp_grammar_pattern": "no_grammar",
}
_SWITCH_ACCOUNT: tuple[Reason, ...] = ("auth", "auth_permanent", "billing", "rate_limit")
_NEVER_FALL_BACK: tuple[Reason, ...] = ("ssl_cert_verification", "provider_policy_blocked")
"""The user must fix these: another model would hide them."""

WEIGHTS_CAP_S = 2.0
"""The bound of a pause within a cut answer: engines that load weights are back soon."""
_MIN_OUTPUT = 256
"""Minimum output tokens for which a request is worth sending."""
_SMALL_WINDOW_OUTPUT = 4096
"""Replaces a budget's limit if the context window is too small by an unknown amount."""
_RENEW_AFTER = 2


_MARGIN = 1 / 16
"""A prompt may exceed its estimate by this part."""
_FULL = 8
"""If less than one part in this many is left of the window, an estimate might cut answers. The
server's refusal names the exact number."""


@dataclass
class Window:
    """What one conversation has learned about the context window of a route."""

    size: int | None = None
    """Tokens of prompt and answer together."""
    _share: float = 1.0
    """Actual tokens of a prompt per token of its bound (`ModelClient.bound`)."""

    def learn(self, facts: Facts, bound: int) -> None:
        """Learn from a refusal.

        Args:
            bound: the client's bound of the refused prompt.
        """
        if facts.context_limit and facts.prompt_tokens and bound > 0:
            self.size = facts.context_limit
            self._share = facts.prompt_tokens / bound

    def left(self, bound: int) -> int | None:
        """Estimate the tokens that an answer may have; None if the estimate is too uncertain.

        Args:
            bound: the client's bound of the prompt.
        """
        if self.size is None:
            return None
        left = self.size - math.ceil(self._share * bound * (1 + _MARGIN))
        return left if left >= self.size // _FULL else None


@dataclass
class _Learned:
    """What a route refuses, for the rest of the conversation."""

    adaptations: set[Adaptation] = field(default_factory=set)
    output_cap: int | None = None
    window: Window = field(default_factory=Window)


class Recovery:
    """What one rollout has learned about its routes.

    Args:
        uniform: `random.uniform`.
    """

    def __init__(self, policy: RetryPolicy, uniform: Callable[[float, float], float]) -> None:
        self.policy, self.uniform = policy, uniform
        self.route = 0
        """Index of the route in use; it only increases within a conversation."""
        self._learned: dict[int, _Learned] = {}

    def begin(self) -> CallRecovery:
        """Begin a call. What was learned stays; failures start at zero."""
        return CallRecovery(self)

    def of_route(self, route: int) -> _Learned:
        """Return what a route refuses."""
        return self._learned.setdefault(route, _Learned())


@dataclass
class _Failures:
    """The failures of one call at one route."""

    since: float | None = None
    """Time of the first one."""
    last: float | None = None
    number: int = 0
    counted: int = 0
    """Failures for which the request is probably at fault."""
    unexplained: int = 0
    """Failures of a server that answered no other call meanwhile."""
    lost: int = 0
    """Consecutive lost connections and timeouts."""
    renewed: bool = False
    probed: bool = False
    replaced: set[tuple[str, Reason]] = field(default_factory=set)
    """Accounts that were replaced since the last pause, with the reason."""


class CallRecovery:
    """The decisions of one call. A rollout may have several calls in flight."""

    def __init__(self, rollout: Recovery) -> None:
        self.route = rollout.route
        self._rollout, self._policy = rollout, rollout.policy
        self._failed = _Failures()
        self._output_cap: int | None = None
        self._partial: PartialAnswer | None = None
        """What the route has sampled of the answer."""

    def adapt_request(
        self, request: ModelRequest, bound: Callable[[ModelRequest], int], *, imposed: bool
    ) -> ModelRequest:
        """Adapt a request to the route in use.

        Args:
            bound: the client's.
            imposed: the output limit comes from a budget.
        """
        learned = self._rollout.of_route(self.route)
        if learned.adaptations:
            request = replace(request, adaptations=request.adaptations | learned.adaptations)
        space, requested = None, request.sampling.max_tokens
        estimates = imposed or (requested is not None and not request.exact)
        if estimates and self._output_cap is None and learned.window.size is not None:
            space = learned.window.left(bound(request))
        caps = (self._output_cap, learned.output_cap, space)
        cap = min((c for c in caps if c is not None), default=None)
        if cap is not None and (requested is None or requested > cap):
            request = replace(request, sampling=replace(request.sampling, max_tokens=cap))
        return request if self._partial is None else replace(request, partial=self._partial)

    def decide(self, at: Failure) -> Action:
        """Decide the next step after a failure."""
        if isinstance(at.error, AnswerCut):  # progress: no failure of this request or its server
            self._failed, self._partial = _Failures(), at.error.partial
            return Resend()
        for step in (self._adapt, self._rotate, self._lower_output, self._fall_back):
            action = step(at)
            if action is not None:
                return action
        return self._wait(at) if at.error.transient else GiveUp(at.error)

    def wait_for_retry_token(self, at: Failure) -> Wait | GiveUp:
        """Decide what to do when the retry budget has no token."""
        cap = self._policy.cap_s
        return self._in_time(Wait(self._rollout.uniform(cap / 2, cap), paid=True), at)

    def _adapt(self, at: Failure) -> Action | None:
        """Leave out a refused feature, unless the failed request was already without it. Exact
        requests are never adapted: that would change what the model sees."""
        wanted = _feature_to_leave_out(at)
        if wanted is None or wanted in at.request.adaptations:
            return None
        if wanted != "completion_cap" and at.request.exact:
            return None
        self._rollout.of_route(self.route).adaptations.add(wanted)
        return Resend()

    def _rotate(self, at: Failure) -> Action | None:
        """Leave each account once between two pauses. A cooldown may be shorter than a request, and
        the accounts would alternate forever."""
        refusal = (at.account.name, at.error.reason)
        if (
            not at.rotated
            or at.error.reason not in _SWITCH_ACCOUNT
            or refusal in self._failed.replaced
        ):
            return None
        self._failed.replaced.add(refusal)
        return SwitchAccount()

    def _lower_output(self, at: Failure) -> Action | None:
        """Lower the output limit: to the model's for the conversation, to what a full window leaves
        for this call only."""
        error, most = at.error, at.request.sampling.max_tokens
        if self._output_cap is not None or not isinstance(error, BadRequest | ContextOverflow):
            return None
        cap = error.facts.max_output_tokens
        if at.imposed and cap is None and error.reason == "context_overflow":
            cap = _SMALL_WINDOW_OUTPUT
        if cap is None or (cap < _MIN_OUTPUT and not at.imposed):
            return None
        if most is not None and most <= cap:
            return None
        self._output_cap = cap
        learned = self._rollout.of_route(self.route)
        if error.facts.context_limit:
            learned.window.learn(error.facts, at.account.client.bound(at.request))
        if error.reason == "format_error" and error.facts.context_limit is None:
            learned.output_cap = cap
        return Resend()

    def _fall_back(self, at: Failure) -> Action | None:
        error = at.error
        if not at.routes_left or error.reason in _NEVER_FALL_BACK:
            return None
        if error.transient:
            soon = (error.retry_after_s or 0.0) <= self._policy.cap_s
            early = self._failed.number < self._policy.fall_back_after
            if soon and early and self._first_response_left_s(at) > 0:
                return None
        elif isinstance(error, ContextOverflow | PayloadTooLarge):
            return None  # the model filled its window: a fallback must not change that ending
        elif not isinstance(
            error, AuthError | BillingError | ModelNotFound | ContentFiltered | BadRequest
        ):
            return None
        self.route += 1
        self._rollout.route = max(self._rollout.route, self.route)
        self._failed, self._output_cap, self._partial = _Failures(), None, None
        return FallBack()

    def _wait(self, at: Failure) -> Wait | GiveUp:
        error, policy, call = at.error, self._policy, self._failed
        if call.since is None:
            call.since = at.now
        silent = self._first_response_left_s(at) < math.inf  # then the request is not at fault
        if self._others_answered(at) or (_request_may_be_at_fault(error) and not silent):
            call.counted += 1
        elif not _waiting_helps(error):
            call.unexplained += 1
        call.last = at.now
        call.replaced.clear()
        if call.counted >= policy.max_attempts:
            return GiveUp(error)
        cut = self._partial is not None or isinstance(error, ModelAborted)
        cap_s = min(policy.cap_s, WEIGHTS_CAP_S) if cut else policy.cap_s
        bound = min(cap_s, policy.base_s * 2 ** min(call.number, 30))
        call.number += 1
        # Jitter on top of the server's hint, so that refused requests do not return together.
        hint = min(error.retry_after_s or 0.0, policy.hint_s)
        pause = hint + self._rollout.uniform(0.0, bound)
        doubtful = call.unexplained == policy.max_attempts and not call.probed
        paid = error.served and not isinstance(error, ModelAborted)
        wait = Wait(pause, renew=self._renewal(error), paid=paid, probe=doubtful)
        call.probed = call.probed or doubtful
        return self._in_time(wait, at)

    def assume_request_fault(self) -> None:
        """The server answers other requests: give this one up at its next failure."""
        self._failed.counted = max(self._failed.counted, self._policy.max_attempts - 1)

    def _others_answered(self, at: Failure) -> bool:
        """Whether the server answered another call since this call's last failure, although waiting
        should have fixed that."""
        answered_at, last = at.account.answered_at, self._failed.last
        if _waiting_helps(at.error) or last is None or answered_at is None:
            return False
        return answered_at > last

    def _first_response_left_s(self, at: Failure) -> float:
        """Return the seconds left for a first response; infinite once there was one."""
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
        """Return the pause, or give up if it exceeds the time limit."""
        left = self._first_response_left_s(at)
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
            return GiveUp(at.error)  # the endpoint works: only this call fails
        span = f"{spent:.0f} s" if spent < 120 else f"{spent / 60:.0f} min"
        return GiveUp(_outage(f"no answer for {span}", at.error))


def _feature_to_leave_out(at: Failure) -> Adaptation | None:
    """Return the feature to leave out: large images first, then all images."""
    facts, reason, messages = at.error.facts, at.error.reason, at.request.conversation
    if facts.completion_cap:
        return "completion_cap"  # only a field name, which the model does not see
    if facts.no_images or reason in ("image_too_large", "payload_too_large"):
        contents = (m.content for m in messages if isinstance(m, UserMessage))
        parts = (part for c in contents if isinstance(c, list) for part in c)
        if not any("image" in str(part.get("type")) for part in parts):
            return None
        kept = "small_images" not in at.request.adaptations and not facts.no_images
        return "small_images" if kept and has_shrinkable_image(messages) else "no_images"
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


def identical_refusals_outage(text: str, calls: int) -> Outage:
    """Return the error that stops the run when no request is accepted."""
    return Outage(f"{calls} calls were refused in the same words, none was answered: {text}")


def _waiting_helps(error: ModelError) -> bool:
    """Return whether the server is temporarily overloaded or unreachable."""
    if isinstance(error, RateLimited | Overloaded):
        return True
    return isinstance(error, ConnectionLost | ModelAborted) and not error.served


def _request_may_be_at_fault(error: ModelError) -> bool:
    """Return whether the server accepted the request and began to answer, so that this request may
    fail again where others succeed."""
    if isinstance(error, RateLimited | Overloaded | ConnectionLost):
        return False
    return isinstance(error, ProtocolError) or (error.served and error.status is None)
