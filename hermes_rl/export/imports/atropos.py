"""Atropos' JSONL: a group of scored token sequences per line, as its `process` mode writes it.

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
from hermes_rl.events import Begun
from hermes_rl.export.imports.base import (
    ForeignRollout,
    RolloutNamer,
    call_id,
    finished,
    trajectory_id_of,
)
from hermes_rl.export.tokens import IGNORED
from hermes_rl.messages import conversation_from_openai
from hermes_rl.record import Segment
from hermes_rl.store.rows import Finished

UNSAMPLED = 1.0
"""Log-probability of a position that was not sampled."""


def rollouts(
    rows: Iterator[Mapping[str, Any]], namer: RolloutNamer, *, exact: bool
) -> Iterator[Finished]:
    """Yield one finished rollout per sequence of each group.

    Args:
        exact: the ids and log-probabilities are those of the engine that sampled them.

    Raises: UserError for a row of another format.
    """
    for number, group in enumerate(rows):
        _check(group)
        for place, score in enumerate(group["scores"]):
            rollout = _rollout(group, number, place, score)
            begun = namer.begun(rollout)
            yield finished(rollout, begun, [_segment(group, place, begun, exact)])


class _Group(msgspec.Struct):
    """The required types of a line."""

    tokens: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[dict[str, Any]] | None] | None = None
    inference_logprobs: list[list[float] | None] | None = None
    overrides: list[Any] | None = None
    generation_params: dict[str, Any] | None = None


def _check(group: Mapping[str, Any]) -> None:
    try:
        form = msgspec.convert(group, _Group)
    except msgspec.ValidationError as error:
        raise UserError(f"not a group of Atropos: {error}") from None
    more = (form.messages, form.inference_logprobs, form.overrides)
    lists = [form.masks, form.scores, *(values for values in more if values)]
    if any(len(values) != len(form.tokens) for values in lists):
        raise UserError("'tokens', 'masks' and 'scores' (or 'messages' ...) differ in length")
    for ids, mask in zip(form.tokens, form.masks, strict=True):
        if len(ids) != len(mask):
            raise UserError(f"a sequence has {len(ids)} tokens and a mask of {len(mask)}")
        if any(own not in (IGNORED, token) for token, own in zip(ids, mask, strict=True)):
            raise UserError("a mask has a value that is neither -100 nor the token at its position")


def _rollout(group: Mapping[str, Any], number: int, place: int, score: float) -> ForeignRollout:
    messages = (group.get("messages") or [[]] * len(group["scores"]))[place]
    kept = ("group_overrides", "generation_params")
    overrides = (group.get("overrides") or [None] * len(group["scores"]))[place]
    metadata = {k: group[k] for k in kept if group.get(k)}
    return ForeignRollout(
        messages=conversation_from_openai(messages or []),
        model="unknown",
        reward=float(score),
        metadata={**metadata, **({"overrides": overrides} if overrides else {})},
        task={"atropos_group": number},
        calls=sum(own for own, _ in groupby(m != IGNORED for m in group["masks"][place])),
    )


def _segment(group: Mapping[str, Any], place: int, begun: Begun, exact: bool) -> Segment:
    ids, masks = list(group["tokens"][place]), group["masks"][place]
    sampled = [mask != IGNORED for mask in masks]
    logprobs = _logprobs(group, place, sampled)
    turns, starts = _turns(sampled)
    source = "engine" if exact else "retokenized"
    known = any(sampled) and all(
        p is not None for p, own in zip(logprobs, sampled, strict=True) if own
    )
    trainable = exact and known
    params = group.get("generation_params") or {}
    return Segment(
        trajectory_id=trajectory_id_of(begun),
        unit_id=begun.key.unit_id,
        run_id=begun.run_id,
        task_id=begun.task_id,
        group_id=begun.group_id,
        member=begun.member,
        env_name=None,
        agent_name="main",
        branch_index=0,
        n_branches=1,
        branch_kind="main",
        parent_branch=None,
        fork_reason=None,
        input_ids=ids,
        loss_mask=sampled,
        sampled_mask=sampled,
        logprobs=logprobs,
        logprobs_kind="sampling" if exact and known else "unknown",
        turn_ids=turns,
        version_ids=[-1] * len(ids),
        prompt_len=sampled.index(True) if any(sampled) else len(ids),
        n_sampled=sum(sampled),
        temperature=_number(params, "temperature"),
        top_p=_number(params, "top_p"),
        top_k=None if (top_k := _number(params, "top_k")) is None else int(top_k),
        min_p=_number(params, "min_p"),
        finish_reasons=[""] * len(starts),
        truncated=False,
        reward=float(group["scores"][place]),
        policy_version_min=None,
        policy_version_max=None,
        token_source=source,
        tokenizer_hash=None,
        template_hash=None,
        model="unknown",
        trainable=trainable,
        exclude_reason=None if trainable else ("no_logprobs" if exact else "retokenized"),
        call_ids=[call_id(turn) for turn in range(1, len(starts) + 1)],
        call_starts=starts,
    )


def _number(params: Mapping[str, Any], name: str) -> float | None:
    value = params.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _logprobs(group: Mapping[str, Any], place: int, sampled: list[bool]) -> list[float | None]:
    logprobs = group.get("inference_logprobs")
    values = logprobs[place] if logprobs else None
    if values is None or len(values) != len(sampled):
        return [None] * len(sampled)
    return [
        float(p) if own and p <= 0 and math.isfinite(p) else None
        for p, own in zip(values, sampled, strict=True)
    ]


def _turns(sampled: list[bool]) -> tuple[list[int], list[int]]:
    """Return the turn of each token and the starts of turns: a run of sampled tokens is a turn."""
    turns: list[int] = []
    starts: list[int] = []
    for own, run in groupby(sampled):
        if own:
            starts.append(len(turns))
        turns += [len(starts)] * sum(1 for _ in run)
    return turns, starts
