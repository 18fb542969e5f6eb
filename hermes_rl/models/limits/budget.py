"""What a run may spend: the worst case is reserved before a call, and settled after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OUTPUT_MAX = 32_000
"""Output tokens of a call that names no bound, where none is known of its model: what a budget sets
aside for it, and what is sent as its bound then. As many as the Messages dialect sends by itself,
so that a budget changes nothing there."""


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

    def binds(self, model: str, worst: Spend) -> bool:
        """Whether a call of that worst case takes anything from it."""
        ...

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """Set the worst case of one call aside.

        Raises: CostLimit when that much is not left.
        """
        ...

    def end(self, *, finished: bool) -> None:
        """The attempt that it belongs to has ended.

        Args:
            finished: its unit is done: what it cost says what others will cost.
        """
        ...
