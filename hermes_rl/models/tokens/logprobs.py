"""What an engine's logprobs are of, found out from one position at temperature 1 and at 0.5.

Let l be the log-softmax of the model's logits. Logprobs of the distribution that is sampled from
are the log-softmax of logits / T: at T = 0.5 their differences are twice those at T = 1. Raw ones,
taken before temperature, stay as they are. So the slope of the differences to the likeliest token,
by least squares, says which they are: 2 is `sampling`, 1 is `raw`. Any other slope, a bad fit, or
tokens that are all equally likely (temperature would change nothing) is `unknown`.

Temperature is not all: SGLang's logprobs are taken behind it and before top-p, top-k and min-p,
llama.cpp's and vLLM's `processed_logprobs` behind all. A third look, with top-k 2, tells the two
apart: behind that filter two tokens hold all the probability.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

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

CUT = 2
"""The top-k of the third look."""
_ALL = 0.999
_CLEARLY_LESS = 0.98


def filters_shown(at_one: Mapping[Token, float], cut: Mapping[Token, float]) -> bool:
    """Whether logprobs are of what top-k leaves over; False also where that cannot be told.

    Args:
        at_one: token -> logprob, of the likeliest tokens at temperature 1.
        cut: the same with top-k `CUT`.
    """
    return _held(at_one) < _CLEARLY_LESS and _ALL < _held(cut) < 1 / _ALL


def _held(told: Mapping[Token, float]) -> float:
    """The probability of the `CUT` likeliest tokens."""
    likely = sorted((p for p in told.values() if -_ABSURD < p <= _FIT_ROOM), reverse=True)
    return math.fsum(map(math.exp, likely[:CUT]))


def kind_in(kind: LogprobsKind, filtered: bool, sent: Mapping[str, Any]) -> LogprobsKind:
    """What the logprobs of one call are of.

    Args:
        kind: as `kind_of` told it.
        filtered: as `filters_shown` told it.
        sent: what was sent of temperature, top_p, top_k and min_p.

    Returns: `unknown` where logprobs are those of the sampling policy in other calls and not in
        this one: it took the likeliest token each time (temperature 0), or filters may have cut
        (what is not sent a server takes from the model's files), and the logprobs do not show it.
    """
    if kind != "sampling":
        return kind
    free = sent.get("top_p") == 1 and sent.get("top_k") in (-1, 0) and not sent.get("min_p")
    return kind if sent.get("temperature") != 0 and (filtered or free) else "unknown"


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
