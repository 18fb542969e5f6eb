"""Token segments for trainers: which may be exported, and how their lists are cut."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.segments import answer_spans

_THROWN_AWAY = ("discarded", "aborted")
"""Values of `exclude_reason` of an answer that is in no conversation."""

IGNORED = -100
"""Label of a token that is not trained on."""


@dataclass(frozen=True)
class TokenItem:
    """One row of `segments` with its rollout and score."""

    row: Mapping[str, Any]
    """Row of its rollout in `trajectories`, decoded."""
    segment: Mapping[str, Any]
    reward: float | None
    advantage: float | None
    parts: Sequence[Mapping[str, Any]] = ()
    """Components of the reward."""

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return list(self.segment["input_ids"])

    @property
    def trained(self) -> int:
        """The number of tokens that are trained on."""
        return sum(self.segment["loss_mask"])

    @property
    def labels(self) -> list[int]:
        """The ids of tokens that are trained on, else `IGNORED`."""
        pairs = zip(self.segment["input_ids"], self.segment["loss_mask"], strict=True)
        return [token if trained else IGNORED for token, trained in pairs]

    @property
    def start(self) -> int:
        """The number of tokens before the first trained one: the prompt of the branch."""
        return list(self.segment["loss_mask"]).index(True)

    @property
    def mask(self) -> list[int]:
        """1 for a token that is trained on, else 0, from `start` on."""
        return [int(trained) for trained in self.segment["loss_mask"][self.start :]]

    @property
    def turn_rewards(self) -> list[float | None]:
        """The reward of each trained token's turn, score times weight, from `start` on; None for
        tokens of other turns. Turns are those of the main agent."""
        known: dict[int, float] = {}
        if self.segment["agent_name"] == "main":
            for part in self.parts:
                if (turn := part["turn"]) is not None:
                    known[turn] = known.get(turn, 0.0) + part["score"] * part["weight"]
        names = ("turn_ids", "loss_mask")
        marks = zip(*(self.segment[name][self.start :] for name in names), strict=True)
        return [known.get(turn) if trained else None for turn, trained in marks]

    def logprobs(self, absent: float) -> list[float] | None:
        """Return log-probabilities of all positions, `absent` where no token was sampled.

        None when a sampled token has none.
        """
        if _logprobs_missing(self.segment):
            return None
        return [absent if p is None else p for p in self.segment["logprobs"]]


def refusal(item: TokenItem, *, rl: bool, retokenized: bool) -> str | None:
    """Return why a segment must not be exported (key of `losses.LEFT_OUT`); None if it may.

    Args:
        rl: for an RL trainer, which needs the tokens that the policy sampled.
        retokenized: take segments that were retokenized from text too.
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
    """Whether a segment breaks a rule of the table.

    All lists have one length, trained tokens are sampled, log-probabilities are finite and at most
    0, and each call has a start.
    """
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
    """The answer of a call: positions [start, end) of a segment, after those of its prompt."""

    segment: Mapping[str, Any]
    start: int
    end: int

    @property
    def prompt_ids(self) -> list[int]:
        """The ids that the model was sent."""
        return list(self.segment["input_ids"][: self.start])

    @property
    def ids(self) -> list[int]:
        """The sampled ids."""
        return list(self.segment["input_ids"][self.start : self.end])

    @property
    def logprobs(self) -> list[float] | None:
        """One for each sampled id; None when one is unknown."""
        values = self.segment["logprobs"][self.start : self.end]
        return None if None in values else list(values)


def answers_of(segments: Iterable[Mapping[str, Any]]) -> dict[str, Answer]:
    """Return exact answers by call id, without those of broken and of retokenized segments."""
    found: dict[str, Answer] = {}
    for segment in segments:
        if segment["token_source"] == "retokenized" or broken(segment):
            continue
        for call_id, run in zip(segment["call_ids"], answer_spans(segment), strict=True):
            if run.owned or call_id not in found:
                found[call_id] = Answer(segment, run.start, run.end)
    return found


def digest_of(item: TokenItem) -> bytes:
    """Hash the ids and labels of a segment to 16 bytes."""
    hashed = hashlib.sha256(array("q", item.ids).tobytes())
    hashed.update(bytes(item.segment["loss_mask"]))
    return hashed.digest()[:16]


def _logprobs_missing(segment: Mapping[str, Any]) -> bool:
    pairs = zip(segment["sampled_mask"], segment["logprobs"], strict=True)
    return any(sampled and p is None for sampled, p in pairs)
