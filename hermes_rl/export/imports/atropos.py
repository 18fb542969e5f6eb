"""The JSONL of Atropos' `process`: a group of scored token sequences per line.

A sequence becomes a rollout with one segment. The file does not say whether its ids are those that
were sampled: without `exact` the segment counts as retokenized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.export.imports.base import ForeignRollout
from hermes_rl.export.tokens import IGNORED
from hermes_rl.messages import conversation_from_openai


class _Group(msgspec.Struct):
    """The fields of a line that are read."""

    tokens: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[dict[str, Any]] | None] | None = None
    inference_logprobs: list[list[float] | None] | None = None
    overrides: list[Any] | None = None
    generation_params: dict[str, Any] | None = None
    group_overrides: Any = None


def rollouts(row: Mapping[str, Any], number: int, exact: bool) -> Iterator[ForeignRollout]:
    """Yield one rollout per sequence of a group.

    Args:
        number: of the line.
        exact: the ids and log-probabilities are those of the engine that sampled them.

    Raises: UserError for a row of another format.
    """
    group = _checked(row)
    metadata = {k: row[k] for k in ("group_overrides", "generation_params") if row.get(k)}
    nothing: list[Any] = [None] * len(group.scores)
    sequences = zip(
        group.tokens,
        group.masks,
        group.scores,
        group.messages or nothing,
        group.inference_logprobs or nothing,
        group.overrides or nothing,
        strict=True,
    )
    for ids, mask, score, messages, logprobs, overrides in sequences:
        sampled = [mark != IGNORED for mark in mask]
        yield ForeignRollout(
            messages=conversation_from_openai(messages or []),
            model="unknown",
            reward=score,
            metadata={**metadata, **({"overrides": overrides} if overrides else {})},
            task={"atropos_group": number - 1},
            segment={
                **_tokens(ids, sampled, _logprobs(logprobs, sampled), exact),
                **_sampling(group.generation_params or {}),
                "reward": score,
            },
        )


def _checked(row: Mapping[str, Any]) -> _Group:
    try:
        group = msgspec.convert(row, _Group)
    except msgspec.ValidationError as error:
        raise UserError(f"not a group of Atropos: {error}") from None
    more = (group.messages, group.inference_logprobs, group.overrides)
    lists = [group.masks, group.scores, *(values for values in more if values)]
    if any(len(values) != len(group.tokens) for values in lists):
        raise UserError("'tokens', 'masks' and 'scores' (or 'messages' ...) differ in length")
    for ids, mask in zip(group.tokens, group.masks, strict=True):
        if len(ids) != len(mask):
            raise UserError(f"a sequence has {len(ids)} tokens and a mask of {len(mask)}")
        if any(mark not in (IGNORED, token) for token, mark in zip(ids, mask, strict=True)):
            raise UserError("a mask has a value that is neither -100 nor the token at its position")
    return group


def _tokens(
    ids: list[int], sampled: list[bool], logprobs: list[float | None], exact: bool
) -> dict[str, Any]:
    """Return the columns of a sequence: one branch, with a turn per run of sampled tokens."""
    turns: list[int] = []
    starts: list[int] = []
    for policy, run in groupby(sampled):
        if policy:
            starts.append(len(turns))
        turns += [len(starts)] * sum(1 for _ in run)
    missing = any(p is None for p, policy in zip(logprobs, sampled, strict=True) if policy)
    known = exact and bool(starts) and not missing
    return {
        "env_name": None,
        "agent_name": "main",
        "branch_index": 0,
        "n_branches": 1,
        "branch_kind": "main",
        "parent_branch": None,
        "fork_reason": None,
        "input_ids": ids,
        "loss_mask": sampled,
        "sampled_mask": sampled,
        "logprobs": logprobs,
        "logprobs_kind": "sampling" if known else "unknown",
        "turn_ids": turns,
        "version_ids": [-1] * len(ids),
        "prompt_len": starts[0] if starts else len(ids),
        "n_sampled": sum(sampled),
        "truncated": False,
        "policy_version_min": None,
        "policy_version_max": None,
        "token_source": "engine" if exact else "retokenized",
        "tokenizer_hash": None,
        "template_hash": None,
        "trainable": known,
        "exclude_reason": None if known else ("no_logprobs" if exact else "retokenized"),
        "call_starts": starts,
    }


def _sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that are numbers."""
    known = {name: params.get(name) for name in ("temperature", "top_p", "top_k", "min_p")}
    numbers = {
        name: value
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
        for name, value in known.items()
    }
    top_k = numbers["top_k"]
    return {**numbers, "top_k": None if top_k is None else int(top_k)}


def _logprobs(values: list[float] | None, sampled: list[bool]) -> list[float | None]:
    """Return the logprobs of sampled tokens; the file has 1.0 at other positions."""
    if values is None or len(values) != len(sampled):
        return [None] * len(sampled)
    pairs = zip(values, sampled, strict=True)
    return [p if policy and p <= 0 and math.isfinite(p) else None for p, policy in pairs]
