"""From an answer's token ids to the event that records them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from hermes_rl.events import Purpose, TokensAdded, pack_ids, pack_logprobs
from hermes_rl.models.base import ModelRequest, TokenCapture
from hermes_rl.models.tokens.graph import TokenGraph

CAPTURED: tuple[Purpose, ...] = ("agent", "summary")
"""Calls of the policy. Judges and users are other models, or play other parts."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "top_a": (0,),
    "tfs_z": (1,),
    "top_n_sigma": (0, -1),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_new_tokens": (0,),
    "custom_logit_processor": (),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logit_bias": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Body fields that change what is sampled, with the values at which they do not (beside absence and
emptiness)."""


def shaped_by(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of body fields that change the distribution beside temperature, top_p, top_k, min_p."""
    return tuple(
        name
        for name, neutral in _NEUTRAL.items()
        if extra.get(name) not in (None, "", *neutral, [], {})
    )


def record_of(
    graph: TokenGraph, call_id: str, agent: str, tokens: TokenCapture, request: ModelRequest
) -> TokensAdded | None:
    """Place an answer's tokens in a rollout's graph.

    Returns: the event to record; None when they have no place: ids of the prompt or of the answer
        are absent, or are none (over 31 bits).

    Raises: TokensFault for a call that was recorded already.
    """
    sampled, prompt = tokens.completion_ids, tokens.prompt_ids
    if not sampled or prompt is None:
        return None
    try:
        packed, whole = pack_ids(sampled), pack_ids(prompt)
    except struct.error:
        return None
    sent = {**(tokens.sampling or request.sampling).as_dict(), **request.extra}
    event = TokensAdded(
        call_id=call_id,
        sampled=packed,
        logprobs=_logprobs(tokens),
        logprobs_kind=tokens.logprobs_kind,
        source=tokens.source,
        fork_reason=tokens.fork_reason,
        tokenizer_hash=tokens.tokenizer_hash,
        template_hash=tokens.template_hash,
        temperature=_number(sent.get("temperature")),
        top_p=_number(sent.get("top_p")),
        top_k=_whole(sent.get("top_k")),
        min_p=_number(sent.get("min_p")),
        shaped_by=tuple(dict.fromkeys((*tokens.shaped_by, *shaped_by(request.extra)))),
    )
    return graph.add(event, whole, agent)


def _logprobs(tokens: TokenCapture) -> bytes | None:
    values = tokens.logprobs
    if values is None or len(values) != len(tokens.completion_ids or ()):
        return None
    try:
        return pack_logprobs(values)
    except OverflowError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 31 else None
