"""What a format is: one file of `hermes_rl.export.formats` with a `FORMAT`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hermes_rl.export.source import Source

Row = dict[str, Any]
"""One line, or one row of Parquet, as plain values."""

AdvantageKind = Literal["grpo", "rloo", "dr_grpo"]
"""Column of table `groups`."""


@dataclass(frozen=True)
class ExportOptions:
    """What is exported."""

    min_reward: float | None = None
    """Leave out rollouts with less reward, and those without one."""
    end_reasons: frozenset[str] = frozenset()
    """Only these endings; empty for all."""
    dedupe: bool = False
    """Of samples with equal messages (or token ids) only the first."""
    limit: int | None = None
    """At most this many rollouts."""
    allow_retokenized: bool = False
    """RL formats take segments whose tokens were made again from text."""
    min_group: int = 2
    """RL formats take groups with at least this many valid members."""
    advantage: AdvantageKind = "grpo"
    """Which advantage formats with room for one carry."""


@dataclass(frozen=True)
class Format:
    """One format: what it is called, what it holds and how its rows are made."""

    name: str
    about: str
    """One line: who reads it, with which settings."""
    suffix: Literal[".jsonl", ".parquet"]
    unit: Literal["messages", "tokens"]
    """What a trainer trains on, and what the report counts."""
    rows: Callable[[Source], Iterator[Row]]
    """Makes all rows of the file, one at a time."""
    schema: Callable[[Source], Any] | None = None
    """The Arrow schema, for Parquet."""
    holds: frozenset[str] = frozenset()
    """Keys of `losses.LOST` that are no loss here."""
    rl: bool = False
    """Takes only exact tokens with log-probabilities of the sampling policy, graded, in groups."""
    columns: tuple[str, ...] = ()
    """Columns of table `trajectories` that it needs beside `source.COLUMNS`."""
