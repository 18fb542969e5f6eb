"""From groups of `rollouts()` to a step of GRPO."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from model import Transformer, logprobs_of

CLIP = 0.2
TOKENS_PER_ROLLOUT = 20
"""A constant divides the loss, not the length of a rollout (Dr. GRPO, arXiv 2503.20783)."""


@dataclass(frozen=True)
class Row:
    """A sequence to train on: one branch of a rollout. Lists have one entry per token."""

    ids: list[int]
    mask: list[bool]
    """True for the tokens to train."""
    logprobs: list[float | None]
    """As the sampler reported them; None where nothing was sampled."""
    versions: list[int]
    """Of the weights that sampled the token; -1 where nothing was sampled."""
    advantage: float


def rows_of(group: Any) -> list[Row]:
    """Return the rows of a group. All trained tokens of a rollout share its advantage."""
    return [
        Row(one.input_ids, one.loss_mask, one.logprobs, one.version_ids, member.advantage)
        for member in group.members
        for one in member.segments
        if member.valid and member.advantage is not None and one.trainable
    ]


def permute_advantages(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Return a group's rows with their advantages in random order: a control that cannot learn."""
    advantages = rng.sample([row.advantage for row in rows], len(rows))
    return [
        Row(row.ids, row.mask, row.logprobs, row.versions, advantage)
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def loss_of(model: Transformer, rows: Sequence[Row]) -> torch.Tensor:
    """Return the clipped loss of PPO (arXiv 1707.06347) over the rows' trained tokens."""
    new = logprobs_of(model, [row.ids for row in rows])

    def padded(values: Callable[[Row], Iterable[float]]) -> torch.Tensor:
        lists = [list(values(row)) for row in rows]
        return torch.tensor([one + [0.0] * (new.shape[1] - len(one)) for one in lists])

    mask = padded(lambda row: map(float, row.mask))
    old = padded(lambda row: (p or 0.0 for p in row.logprobs))
    advantages = torch.tensor([[row.advantage] for row in rows])
    ratio = ((new - old) * mask).exp()
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gains * mask).sum() / (len(rows) * TOKENS_PER_ROLLOUT)
