"""Where a call may go: a model on a provider, with the accounts that may pay for it.

A caller is given routes in order: the first is the model that was asked for, the others are its
fallbacks. Each route has accounts, one per key; the pool says which is next and which must rest.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_rl.errors import ModelError
from hermes_rl.models.base import ModelClient, ModelRequest, Sampling
from hermes_rl.models.key_command import KeyRenewed
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.rate.limiter import Limiter
from hermes_rl.models.rate.traffic import Traffic
from hermes_rl.models.wire.base import NO_LIMIT

_log = logging.getLogger(__name__)


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


class AccountPool(Protocol):
    """The accounts of one route; shared by all rollouts of the process."""

    def choose(self) -> Account:
        """The account of the next request: one that need not rest, else the one that may work
        first."""
        ...

    def rest(self, account: Account, error: ModelError) -> bool:
        """Let an account rest for what the error says of it. Returns whether another may be asked:
        one that may work now (also this one, with a new key), or, after a refused key, one that
        only rests for its rate."""
        ...


@dataclass(frozen=True)
class Route:
    """A model on a provider."""

    model: str
    """As it is called there; the empty text sends the name that a request gives."""
    accounts: AccountPool
    prices: PriceTable | None = None
    """What calls cost here; None where the caller is told otherwise."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body, the user's own."""
    refused: list[str] = field(default_factory=list, compare=False)
    """Sampling parameters that the endpoint refused by name: no rollout sends them any more."""
    heads: dict[Hashable, int] = field(default_factory=dict, compare=False)
    """What is known of how prompts begin here (`calls.prompts`)."""

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
        """The route to one account, which never rests."""
        return cls(model=model, accounts=_One(Account("", client, limiter)))


@dataclass(frozen=True)
class _One:
    """A pool of one account."""

    account: Account

    def choose(self) -> Account:
        """See `AccountPool.choose`."""
        return self.account

    def rest(self, account: Account, error: ModelError) -> bool:
        """See `AccountPool.rest`."""
        return isinstance(error, KeyRenewed)
