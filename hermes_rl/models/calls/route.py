"""Where a call may go: a model at a provider, with the accounts that may pay for it.

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
"""

from __future__ import annotations

import logging
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hermes_rl.errors import ModelError
from hermes_rl.models.base import ModelClient, ModelRequest, Sampling
from hermes_rl.models.key_command import KeyRenewed
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
