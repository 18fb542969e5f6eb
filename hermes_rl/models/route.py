"""Where a call may go: a model on a provider, with the accounts that may pay for it.

A caller is given routes in order: the first is the model that was asked for, the others are its
fallbacks. Each route has accounts, one per key; the pool says which is next and which must rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hermes_rl.errors import ModelError
from hermes_rl.models.base import ModelClient
from hermes_rl.models.limiter import Limiter
from hermes_rl.models.prices import PriceTable


@dataclass(frozen=True)
class Account:
    """One key at one endpoint, with the client that sends it and the limiter of its rate."""

    name: str
    """For records: the variable that holds the key, never the key."""
    client: ModelClient
    limiter: Limiter


class AccountPool(Protocol):
    """The accounts of one route; shared by all rollouts of the process."""

    def choose(self) -> Account:
        """The account of the next request: one that need not rest, else the one that may work
        first."""
        ...

    def rest_s(self) -> float:
        """Seconds until an account may work; 0 when one may now."""
        ...

    def rest(self, account: Account, error: ModelError) -> bool:
        """Let an account rest for what the error says of it. Returns whether another may work
        now."""
        ...


@dataclass(frozen=True)
class Route:
    """A model on a provider."""

    model: str
    accounts: AccountPool
    prices: PriceTable | None = None
    """What calls cost here; None where the caller is told otherwise."""
