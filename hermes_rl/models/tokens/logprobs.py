"""Determine which distribution an engine's logprobs describe, from one position at temperatures 1
and 0.5.

Let l be the log-softmax of the model's logits. Logprobs of the distribution that is sampled from
are the log-softmax of logits / T: at T = 0.5 their differences are twice those at T = 1. Raw
logprobs, taken before temperature, stay the same. So the slope of the differences to the likeliest
token, by least squares, tells which they are: 2 is `sampling`, 1 is `raw`. Any other slope, a bad
fit, or tokens that are all equally likely (temperature would change nothing) is `unknown`.

Filters matter too: SGLang's logprobs are taken after temperature and before top-p, top-k and min-p;
those of llama.cpp and vLLM's `processed_logprobs` after all of them. A third call, with top-k 2,
tells the two apart: after that filter two tokens hold all the probability.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from hermes_rl.models.base import LogprobsKind

LOWEST = -9999.0
"""vLLM writes this for minus infinity: it is not a logprob."""

TOP = (20, 5)
"""Numbers of likely tokens to request; servers differ in what they allow."""

_SLOPE_TOLERANCE = 0.15
_FIT_TOLERANCE = 0.02
"""Of the squared differences at T = 0.5, the share that the slope may leave unexplained."""
_FLAT = 0.01
_ABSURD = 1e3
"""No logprob of a likely token is so far from 0."""

Token = TypeVar("Token", bound=Hashable)

CUT = 2
"""The top-k of the third call."""
_ALL = 0.999
_CLEARLY_LESS = 0.98


def logprobs_follow_filters(at_one: Mapping[Token, float], cut: Mapping[Token, float]) -> bool:
    """Return whether logprobs are computed after top-k; also False if that is undecidable.

    Args:
        at_one: token -> logprob, of the likeliest tokens at temperature 1.
        cut: the same with top-k `CUT`.
    """
    return _probability(at_one) < _CLEARLY_LESS and _ALL < _probability(cut) < 1 / _ALL


def _probability(logprobs: Mapping[Token, float]) -> float:
    """Return the probability of the `CUT` likeliest tokens."""
    likely = sorted((p for p in logprobs.values() if -_ABSURD < p <= _FIT_TOLERANCE), reverse=True)
    return math.fsum(map(math.exp, likely[:CUT]))


def classify_call_logprobs(
    kind: LogprobsKind, filtered: bool, sent: Mapping[str, Any]
) -> LogprobsKind:
    """Return the kind of logprobs of one call.

    Args:
        kind: the result of `classify_logprobs`.
        filtered: the result of `logprobs_follow_filters`.
        sent: what was sent of temperature, top_p, top_k and min_p.

    Returns: `unknown` where logprobs are those of the sampling policy in other calls and not in
        this one: it took the likeliest token each time (temperature 0), or filters may have cut
        (what is not sent a server takes from the model's files), and the logprobs do not show it.
    """
    if kind != "sampling":
        return kind
    free = sent.get("top_p") == 1 and sent.get("top_k") in (-1, 0) and not sent.get("min_p")
    return kind if sent.get("temperature") != 0 and (filtered or free) else "unknown"


def classify_logprobs(
    at_one: Mapping[Token, float], at_half: Mapping[Token, float]
) -> LogprobsKind:
    """Return the kind of logprobs from those of one position at temperatures 1 and 0.5.

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
    if left > _FIT_TOLERANCE * sum(y * y for _, y in apart):
        return "unknown"
    if abs(slope - 2) <= _SLOPE_TOLERANCE:
        return "sampling"
    return "raw" if abs(slope - 1) <= _SLOPE_TOLERANCE else "unknown"


_OFF_AT_0 = (
    *("frequency_penalty", "presence_penalty", "min_tokens", "min_new_tokens", "mirostat"),
    *("no_repeat_ngram_size", "xtc_probability", "dry_multiplier", "top_a", "top_n_sigma"),
    *("dynatemp_range", "smoothing_factor"),
)
_OFF_AT_1 = ("repetition_penalty", "repeat_penalty", "typical_p", "tfs_z", "best_of")
_NEVER_OFF = (
    *("custom_logit_processor", "logit_bias", "bad_words", "allowed_token_ids", "json_schema"),
    *("logits_processors", "grammar", "regex", "ebnf", "structural_tag", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF_AT_0, (0,)),
    **dict.fromkeys(_OFF_AT_1, (1,)),
    **dict.fromkeys(_NEVER_OFF, ()),
    "top_n_sigma": (0, -1),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Body fields that change the sampling distribution, with values at which they do not. Missing and
empty values do not change it either."""


def shaped_by(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the body fields that change the distribution, beyond temperature, top_p, top_k,
    min_p."""
    return tuple(
        name
        for name, neutral in _NEUTRAL.items()
        if extra.get(name) not in (None, "", *neutral, [], {})
    )
