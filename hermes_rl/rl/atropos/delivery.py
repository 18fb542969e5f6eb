"""A group of `rollouts()` as ScoredData of Atropos, with a stated policy for forked rollouts.

A trainer of Atropos compares the sequences of a group: its advantage of a sequence is
(score - mean) / standard deviation of the group, with n in the denominator. A rollout whose chat
template forks has several sequences, and the trainer knows of no rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hermes_rl.errors import UserError
from hermes_rl.record import Segment
from hermes_rl.rl.live import LiveGroup, LiveMember

Forks = Literal["refuse", "choose", "rescale"]
IGNORED = -100
CHOICES = "choose --forks choose or --forks rescale (docs/atropos.md)"


@dataclass(frozen=True)
class Wire:
    """What a group must look like."""

    group_size: int
    """Sequences of each sent group: what the environment registered."""
    forks: Forks = "refuse"
    max_token_len: int = -1
    """Sequences must be shorter; 0 or less for no limit."""
    messages: bool = False
    """Send the conversations too."""

    def __post_init__(self) -> None:
        if self.forks not in get_args(Forks):
            raise UserError(f"forks: {self.forks!r} is not one of {', '.join(get_args(Forks))}")
        if self.forks == "rescale" and self.group_size < 3:
            raise UserError("--forks rescale needs groups of at least 3 rollouts (--repeats)")

    def fits(self, segment: Segment) -> bool:
        """Whether a trainer takes a sequence of this length."""
        return self.max_token_len <= 0 or len(segment.input_ids) < self.max_token_len


class CannotSend(Exception):
    """Why a group cannot be delivered."""


def scored_groups(group: LiveGroup, wire: Wire, lost: Counter[str]) -> list[dict[str, Any]]:
    """Return the ScoredData of a group; each has exactly `group_size` sequences.

    Args:
        lost: counts the `tokens` that would have been trained and are `not_sent`.

    Raises: CannotSend. UserError when a rollout has forked and that is refused.
    """
    branches: list[tuple[LiveMember, list[Segment]]] = []
    for member in group.members:
        trained = [s for s in member.segments if s.trainable and any(s.loss_mask)]
        if not member.valid or not trained:
            continue
        if wire.forks == "refuse" and len(trained) > 1:
            reason = next((s.fork_reason for s in trained if s.fork_reason), "unknown")
            raise UserError(
                f"task {group.task_id}: a rollout has {len(trained)} sequences ({reason}), and its"
                f" trainer compares sequences. To send it, {CHOICES}"
            )
        branches.append((member, [s for s in trained if wire.fits(s)]))
        lost["tokens"] += sum(map(_trained, trained))
        lost["not_sent"] += sum(_trained(s) for s in trained if not wire.fits(s))
    if wire.forks == "rescale":
        return _rescaled(branches, wire)
    chosen = []
    for member, segments in branches:
        best = max(segments, key=_trained, default=None)
        if best is not None:
            chosen.append((member, best, member.reward))
            lost["not_sent"] += sum(_trained(s) for s in segments if s is not best)
    if len(chosen) < wire.group_size:
        raise CannotSend(
            f"not_deliverable: {len(chosen)} of {wire.group_size} rollouts have a sequence"
            + (f" of fewer than {wire.max_token_len} tokens" if wire.max_token_len > 0 else "")
        )
    return [_scored(chosen[: wire.group_size], wire)]


def _trained(segment: Segment) -> int:
    return sum(segment.loss_mask)


Sequence_ = tuple[LiveMember | None, Segment, float | None]
"""A sequence and its score. Without a member it fills a group, and none of it is trained."""


def _rescaled(
    branches: Sequence[tuple[LiveMember, Sequence[Segment]]], wire: Wire
) -> list[dict[str, Any]]:
    every = [(member, segment) for member, segments in branches for segment in segments]
    if not every:
        raise CannotSend("not_deliverable: no rollout has a sequence that can be sent")
    values = [member.advantage or 0.0 for member, _ in every]
    made = []
    for taken, fillers in rescale(values, wire.group_size):
        sequences: list[Sequence_] = [(*every[i], values[i]) for i in taken]
        sequences += [(None, every[taken[0]][1], value) for value in fillers]
        made.append(_scored(sequences, wire))
    return made


def rescale(advantages: Sequence[float], size: int) -> list[tuple[list[int], list[float]]]:
    """Distribute sequences over groups whose normalised scores are the given advantages.

    Scores that have mean 0 and mean square 1 are their own normalisation. The scores of a group are
    the advantages of its sequences and fillers that complete mean and mean square: with sum S and
    sum of squares Q of the advantages and k fillers this is possible if size - Q >= S^2 / k, for
    k >= 2.

    Args:
        advantages: of each sequence; each square must be at most size - 1, as with GRPO's.
        size: sequences of a group, at least 3.

    Returns: for each group the indices of its sequences, and the scores of its fillers.
    """
    left = sorted(range(len(advantages)), key=lambda i: -abs(advantages[i]))
    made = []
    while left:
        taken, total, squares = [left.pop(0)], 0.0, 0.0
        total, squares = advantages[taken[0]], advantages[taken[0]] ** 2
        while True:
            best = None
            for index in left:
                new = total + advantages[index], squares + advantages[index] ** 2
                free = size - len(taken) - 1
                if (
                    free >= 2
                    and size - new[1] >= new[0] ** 2 / free
                    and (best is None or abs(new[0]) < abs(best[1]))
                ):
                    best = (index, *new)
            if best is None:
                break
            index, total, squares = best
            left.remove(index)
            taken.append(index)
        made.append((taken, _fillers(total, squares, size, size - len(taken))))
    return made


def _fillers(total: float, squares: float, size: int, count: int) -> list[float]:
    """Return numbers with the sum -total and the sum of squares size - squares."""
    centre = -total / count
    spread = math.sqrt(max(0.0, size - squares - total * total / count) / 2)
    return [centre + spread, centre - spread, *[centre] * (count - 2)]


def _scored(sequences: Sequence[Sequence_], wire: Wire) -> dict[str, Any]:
    """Return one ScoredData. Masks have the id of a trained token, else -100; log-probabilities
    are 1.0 where nothing was sampled."""
    tokens, masks, logprobs, advantages, messages = [], [], [], [], []
    for member, segment, _ in sequences:
        ids = segment.input_ids if member is not None else segment.input_ids[:2]
        trained = segment.loss_mask if member is not None else [False] * len(ids)
        known = segment.logprobs if member is not None else [None] * len(ids)
        tokens.append(ids)
        masks.append([i if t else IGNORED for i, t in zip(ids, trained, strict=True)])
        logprobs.append([1.0 if p is None else p for p in known])
        advantages.append([(member.advantage if member else None) or 0.0] * len(ids))
        row = member.trajectory if member is not None else None
        messages.append(row["messages"] if row else [])
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": [score for _, _, score in sequences],
        "advantages": advantages,
        "inference_logprobs": logprobs,
        "messages": messages if wire.messages else None,
        "generation_params": _sampling([segment for _, segment, _ in sequences]),
        "overrides": None,
        "group_overrides": None,
    }


def _sampling(segments: Sequence[Segment]) -> dict[str, Any]:
    """Sampling parameters of the first sequence, and the versions of all."""
    first = segments[0]
    found: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(first, name)) is not None
    }
    versions = [
        version
        for segment in segments
        for version, sampled in zip(segment.version_ids, segment.sampled_mask, strict=True)
        if sampled and version >= 0
    ]
    if versions:
        found |= {"policy_version_min": min(versions), "policy_version_max": max(versions)}
    return found
