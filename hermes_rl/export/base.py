"""What a format is: its rows, its columns and what it can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

    from hermes_rl.export.source import Source

Row = dict[str, Any]
"""One line, or one row of Parquet, as plain values."""

AdvantageKind = Literal["grpo", "rloo", "dr_grpo"]
"""Column of table `groups`."""

Columns = Mapping[str, Any]
"""Column -> type: an alias of pyarrow (`int32`), `json`, `[type]` for a list, or a mapping of field
names to types for a struct. Arrow types are used as they are."""

IDS = ["int32"]
JSON_LIST = ["json"]
"""Parquet JSON, which `datasets` 4.7 and newer decodes."""


@dataclass(frozen=True)
class ExportOptions:
    """Which rollouts and samples are exported."""

    min_reward: float | None = None
    """Leave out rollouts with less reward, and those without one."""
    end_reasons: frozenset[str] = frozenset()
    """Export only these end reasons; empty for all."""
    dedupe: bool = False
    """Keep only the first of samples with equal messages (or token ids)."""
    limit: int | None = None
    """At most this many rollouts."""
    allow_retokenized: bool = False
    """RL formats take segments whose tokens were made from text again."""
    min_group: int = 2
    """RL formats take groups with at least this many valid members."""
    advantage: AdvantageKind = "grpo"
    """The advantage that formats with a field for one carry."""


@dataclass(frozen=True)
class Format:
    """One format: its name, its reader, and how its rows are made."""

    name: str
    about: str
    """One line: which program reads it, with which settings."""
    suffix: Literal[".jsonl", ".parquet"]
    unit: Literal["messages", "tokens"]
    """What a trainer trains on, and what the report counts."""
    rows: Callable[[Source], Iterator[Row]]
    """Makes all rows of the file, one at a time."""
    columns: Columns | Callable[[Source], Columns] | None = None
    """The columns, for Parquet."""
    holds: frozenset[str] = frozenset()
    """Keys of `losses.LOST` that this format does not lose."""
    rl: bool = False
    """Takes only exact tokens with log-probabilities of the sampling policy, graded, in groups."""
    needs: tuple[str, ...] = ()
    """Columns of table `trajectories` that it reads beside `source.COLUMNS`."""

    def arrow_schema(self, source: Source) -> pa.Schema | None:
        """Return the schema of a Parquet file; None for JSON lines."""
        import pyarrow as pa

        columns = self.columns(source) if callable(self.columns) else self.columns
        if columns is None:
            return None
        return pa.schema([(name, _arrow_type(kind)) for name, kind in columns.items()])


def _arrow_type(kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(kind, Mapping):
        return pa.struct([(name, _arrow_type(field)) for name, field in kind.items()])
    if isinstance(kind, list):
        return pa.list_(pa.field("element", _arrow_type(kind[0])))
    if kind == "json":
        return pa.json_()
    return pa.type_for_alias(kind) if isinstance(kind, str) else kind
