"""Counts of what an export leaves out, and of what a format cannot hold."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.export.samples import unparsed

if TYPE_CHECKING:
    from hermes_rl.export.samples import Sample
    from hermes_rl.export.tokens import TokenItem

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEFT_OUT: dict[str, str] = _TEXTS["left_out"]
"""Reasons why something is not in the file: key -> text of the report."""
LOST: dict[str, str] = _TEXTS["lost"]
"""Content that a format cannot represent: key -> text of the report."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export."""

    run: str
    format: str
    out: str
    """The file that was written."""
    rollouts: int
    """Rows of table `trajectories` that were read."""
    samples: int
    """Rows of the file."""
    trained: int
    """Assistant messages, or sampled tokens, that a trainer would train on."""
    unit: str
    """Unit of `trained`: messages or tokens."""
    left_out: dict[str, int]
    """Keys of `LEFT_OUT`, with counts above 0."""
    lost: dict[str, int]
    """Keys of `LOST`, with counts above 0."""


class Losses:
    """The counters of one export.

    Args:
        supports: keys of `LOST` that the format can represent.
    """

    def __init__(self, supports: frozenset[str] = frozenset()) -> None:
        self._supports = supports
        self.left_out: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.rollouts = 0
        self.samples = 0
        self.trained = 0

    def leave_out(self, why: str, count: int = 1) -> None:
        """Count what is not written. Args: why: key of `LEFT_OUT`."""
        assert why in LEFT_OUT
        if count:
            self.left_out[why] += count

    def lose(self, what: str, count: int = 1) -> None:
        """Count what is written without something. Args: what: key of `LOST`."""
        assert what in LOST
        if count and what not in self._supports:
            self.lost[what] += count

    def report(self, *, run: str, format: str, out: str, unit: str) -> Report:
        """Return the counters as a record."""
        return Report(
            run=run,
            format=format,
            out=out,
            rollouts=self.rollouts,
            samples=self.samples,
            trained=self.trained,
            unit=unit,
            left_out={k: self.left_out[k] for k in LEFT_OUT if self.left_out[k]},
            lost={k: self.lost[k] for k in LOST if self.lost[k]},
        )


def count_sample(losses: Losses, sample: Sample) -> None:
    """Count the trained messages of a sample, and what most message formats cannot hold of it."""
    losses.trained += sum(sample.trained)
    for message, info in zip(sample.messages, sample.infos, strict=True):
        _count_message(losses, message, info)
    finish = {c["turn"]: c["finish_reason"] for c in sample.row["calls"] or () if is_of_policy(c)}
    trained = zip(sample.infos, sample.trained, strict=True)
    losses.lose(
        "cut",
        sum(yes and finish.get(info["turn"]) == "length" for info, yes in trained),
    )


def is_of_policy(call: Mapping[str, Any]) -> bool:
    """Whether a call is one of the main agent's turns."""
    return bool(call["purpose"] == "agent" and call["agent"] == "main")


def count_rewards(losses: Losses, row: Mapping[str, Any]) -> None:
    """Count the reward of a rollout and its components.

    A single component that equals the reward does not count.
    """
    parts: Sequence[Mapping[str, Any]] = row["rewards"] or ()
    plain = len(parts) == 1 and parts[0]["turn"] is None
    plain = plain and parts[0]["score"] * parts[0]["weight"] == row["reward"]
    losses.lose("rewards", row["reward"] is not None)
    turns = sum(part["turn"] is not None for part in parts)
    losses.lose("turn_rewards", turns)
    losses.lose("reward_parts", 0 if plain else len(parts) - turns)


def count_tokens(losses: Losses, items: Sequence[TokenItem]) -> None:
    """Count the trained tokens of a rollout, and what most token formats cannot hold of it."""
    row = items[0].row
    losses.trained += sum(item.trained for item in items)
    count_rewards(losses, row)
    losses.lose("images", sum(_images(message["content"]) for message in row["messages"]))


def _images(content: str | Sequence[Mapping[str, Any]]) -> int:
    """Count the parts of a content that are not text."""
    return 0 if isinstance(content, str) else sum(p.get("type") != "text" for p in content)


def _count_message(losses: Losses, message: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    losses.lose("reasoning", "reasoning_content" in message)
    losses.lose("opaque_reasoning", info["reasoning_details"] is not None)
    answer = info["role"] == "assistant"  # of a tool it is the result without hints
    losses.lose("raw_text", answer and info["raw_content"] is not None)
    losses.lose("unparsed_arguments", unparsed(message))
    losses.lose("images", _images(message["content"]))
