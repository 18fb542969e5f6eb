"""How a number came about, kept short however long a run is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class _Step(Protocol):
    @property
    def reason(self) -> str: ...


S = TypeVar("S", bound=_Step)

_GROWTH = ("slow_start", "clean_round")


class History(Generic[S]):
    """Changes in order. A run of growth is two entries, its first and its last; when there are too
    many, every other one of the older half goes."""

    BOUND = 256

    def __init__(self, changes: Iterable[S] = ()) -> None:
        self._changes = list(changes)

    @property
    def changes(self) -> tuple[S, ...]:
        """What is kept."""
        return tuple(self._changes)

    def add(self, change: S) -> None:
        """One more."""
        last = self._changes[-2:]
        growing = change.reason in _GROWTH
        if growing and len(last) == 2 and all(c.reason == change.reason for c in last):
            self._changes[-1] = change
            return
        self._changes.append(change)
        if len(self._changes) > self.BOUND:
            half = self.BOUND // 2
            self._changes[1:half] = self._changes[1:half:2]
