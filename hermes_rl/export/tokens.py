"""Token segments on their way to a trainer: which may go, and how their lists are cut."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.segments.rules import runs_of

_THROWN_AWAY = ("discarded", "aborted")
"""Why a segment's own answer is no part of any conversation."""

IGNORED = -100
"""Label of a token that is not trained on."""


@dataclass(frozen=True)
class TokenItem:
    """One row of `segments` with what belongs to it."""

    row: Mapping[str, Any]
    """Its row of `trajectories`, decoded."""
    segment: Mapping[str, Any]
    reward: float | None
    advantage: float | None

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return list(self.segment["input_ids"])

    @property
    def trained(self) -> int:
        """How many tokens are trained on."""
        return sum(self.segment["loss_mask"])

    @property
    def labels(self) -> list[int]:
        """The ids where they are trained on, else `IGNORED`."""
        pairs = zip(self.segment["input_ids"], self.segment["loss_mask"], strict=True)
        return [token if trained else IGNORED for token, trained in pairs]

    @property
    def start(self) -> int:
        """Tokens before the first one that is trained on: what such a branch has for a prompt."""
        return list(self.segment["loss_mask"]).index(True)

    @property
    def mask(self) -> list[int]:
        """1 where a token is trained on, else 0, from `start` on."""
        return [int(trained) for trained in self.segment["loss_mask"][self.start :]]

    def logprobs(self, absent: float) -> list[float] | None:
        """Log-probabilities of all positions, `absent` where no token was sampled; None when a
        sampled one has none."""
        if _logprobs_missing(self.segment):
            return None
        return [absent if p is None else p for p in self.segment["logprobs"]]


def refusal(item: TokenItem, *, rl: bool, retokenized: bool) -> str | None:
    """Why a segment must not be exported; key of `losses.LEFT_OUT`.

    Args:
        rl: to an RL trainer, which needs what the sampling policy really did.
        retokenized: take segments that were tokenized again all the same.
    """
    segment = item.segment
    if broken(segment):
        return "broken"
    if segment["exclude_reason"] in _THROWN_AWAY:
        return "thrown_away"
    if not any(segment["loss_mask"]):
        return "nothing_to_train"
    if not rl:
        return None
    if segment["token_source"] == "retokenized":
        return None if retokenized else "retokenized"
    if not segment["trainable"]:
        return "not_trainable"
    return "no_logprobs" if _logprobs_missing(segment) else None


def broken(segment: Mapping[str, Any]) -> bool:
    """Whether a segment breaks a rule that every reader relies on: lists of one length, trained
    tokens are sampled ones, log-probabilities are finite and at most 0, a place for each call."""
    names = ("loss_mask", "sampled_mask", "logprobs", "turn_ids", "version_ids")
    if any(len(segment[name]) != len(segment["input_ids"]) for name in names):
        return True
    if len(segment["call_ids"]) != len(segment["call_starts"]):
        return True
    masks = zip(segment["loss_mask"], segment["sampled_mask"], strict=True)
    if any(trained and not sampled for trained, sampled in masks):
        return True
    return any(p is not None and (p > 0 or not math.isfinite(p)) for p in segment["logprobs"])


@dataclass(frozen=True)
class Answer:
    """What one call sampled: positions [start, end) of a segment, whose tokens before are its
    prompt."""

    segment: Mapping[str, Any]
    start: int
    end: int

    @property
    def prompt_ids(self) -> list[int]:
        """The ids that the model was sent."""
        return list(self.segment["input_ids"][: self.start])

    @property
    def ids(self) -> list[int]:
        """The ids that it sampled."""
        return list(self.segment["input_ids"][self.start : self.end])

    @property
    def logprobs(self) -> list[float] | None:
        """One for each sampled id; None when one is not known."""
        values = self.segment["logprobs"][self.start : self.end]
        return None if None in values else list(values)


def answers_of(segments: Iterable[Mapping[str, Any]]) -> dict[str, Answer]:
    """Answers by call id, as the engine sampled them: those of broken segments and of such that
    were tokenized again are left out."""
    found: dict[str, Answer] = {}
    for segment in segments:
        if segment["token_source"] == "retokenized" or broken(segment):
            continue
        for call_id, run in zip(segment["call_ids"], runs_of(segment), strict=True):
            if run.own or call_id not in found:
                found[call_id] = Answer(segment, run.start, run.end)
    return found


def digest_of(item: TokenItem) -> bytes:
    """16 bytes that are equal for segments with equal ids and labels."""
    hashed = hashlib.sha256(array("q", item.ids).tobytes())
    hashed.update(bytes(item.segment["loss_mask"]))
    return hashed.digest()[:16]


def _logprobs_missing(segment: Mapping[str, Any]) -> bool:
    pairs = zip(segment["sampled_mask"], segment["logprobs"], strict=True)
    return any(sampled and p is None for sampled, p in pairs)
