"""What a run may spend: the worst case is reserved before a call, and settled after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OUTPUT_MAX = 32_768
"""Output tokens that a call may make where it names no bound and none is known of its model: what
is reserved for it."""


@dataclass(frozen=True)
class Spend:
    """An amount; of a reservation the worst case, of a settlement what it was."""

    tokens: int = 0
    """Input and output."""
    usd: float | None = 0.0
    """None where the price is not known."""


class Reservation(Protocol):
    """A part of the budget that one call holds."""

    def settle(self, spent: Spend | None) -> None:
        """Say what the call cost; None when nobody knows: the worst case stays spent."""
        ...

    def release(self) -> None:
        """The call was not served: nothing was spent."""
        ...


class Budget(Protocol):
    """Hands out reservations."""

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """Set the worst case of one call aside.

        Raises: CostLimit when that much is not left.
        """
        ...
