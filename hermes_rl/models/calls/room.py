"""The room that a small window leaves for an answer, known from one refusal on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hermes_rl.errors import Facts

_MARGIN = 1 / 16
"""So much longer than the estimate may a prompt be."""
_FULL = 8
"""With less than this part of the window left an estimate would cut answers: the server is asked,
whose refusal says the very number."""


@dataclass
class Room:
    """What one conversation knows of the window of one route."""

    window: int | None = None
    """Tokens of prompt and answer together."""
    _share: float = 1.0
    """Tokens of a prompt for each that its bound counts (`ModelClient.bound`)."""

    def learn(self, facts: Facts, bound: int) -> None:
        """Keep what a refusal says.

        Args:
            bound: of the refused prompt, as the client counts it.
        """
        if facts.context_limit and facts.prompt_tokens and bound > 0:
            self.window = facts.context_limit
            self._share = facts.prompt_tokens / bound

    def left(self, bound: int) -> int | None:
        """About as many tokens as an answer may have; None when that is not known well enough.

        Args:
            bound: of the prompt.
        """
        if self.window is None:
            return None
        room = self.window - math.ceil(self._share * bound * (1 + _MARGIN))
        return room if room >= self.window // _FULL else None
