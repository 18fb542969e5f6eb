"""What an engine's logprobs are of, found out from one position at temperature 1 and at 0.5.

Let l be the log-softmax of the model's logits. Logprobs of the distribution that is sampled from
are the log-softmax of logits / T: at T = 0.5 their differences are twice those at T = 1. Raw ones,
taken before temperature, stay as they are. So the slope of the differences to the likeliest token,
by least squares, says which they are: 2 is `sampling`, 1 is `raw`. Any other slope, a bad fit, or
tokens that are all equally likely (temperature would change nothing) is `unknown`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from hermes_rl.models.base import LogprobsKind

TOP = (20, 5)
"""Numbers of likely tokens to ask for; servers differ in what they allow."""

_SLOPE_ROOM = 0.15
_FIT_ROOM = 0.02
"""Of the squared differences at T = 0.5, the share that the slope may leave unexplained."""
_FLAT = 0.01
_ABSURD = 1e3
"""No logprob of a likely token is so far from 0."""

Token = TypeVar("Token", bound=Hashable)


def kind_of(at_one: Mapping[Token, float], at_half: Mapping[Token, float]) -> LogprobsKind:
    """The kind of logprobs from those of one position at temperature 1 and at 0.5.

    Args:
        at_one: token -> logprob, of the likeliest tokens.
    """
    known = {t: p for t, p in at_one.items() if abs(p) < _ABSURD}
    shared = [t for t in known if abs(at_half.get(t, -_ABSURD)) < _ABSURD]
    if len(shared) < 2:
        return "unknown"
    top = max(shared, key=lambda token: known[token])
    apart = [(known[t] - known[top], at_half[t] - at_half[top]) for t in shared]
    square = sum(x * x for x, _ in apart)
    if square < _FLAT:
        return "unknown"
    slope = sum(x * y for x, y in apart) / square
    left = sum((y - slope * x) ** 2 for x, y in apart)
    if left > _FIT_ROOM * sum(y * y for _, y in apart):
        return "unknown"
    if abs(slope - 2) <= _SLOPE_ROOM:
        return "sampling"
    return "raw" if abs(slope - 1) <= _SLOPE_ROOM else "unknown"
