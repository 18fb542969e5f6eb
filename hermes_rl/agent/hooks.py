"""Recorders for agents that no run directory stands behind."""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl.events import Event

OnEvent = Callable[[Event], None]


class Tape:
    """Keeps the events of a run in memory and shows each to a listener.

    Args:
        on_event: called on the agent's loop, before the run goes on; it must be quick.
    """

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self.events: list[Event] = []
        self._on_event = on_event

    def record(self, event: Event) -> None:
        """See `ports.Recorder`."""
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
