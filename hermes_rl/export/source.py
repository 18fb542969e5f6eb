"""Reads a run for an export: row by row, in the order of its parts, joined and filtered.

Memory is bounded by one part: at most a thousand rollouts, whose few joined columns are held while
the segments of the same part are read. RL formats first read the group of every rollout (a number
per group) and, if there is a table `groups`, a reward and an advantage per rollout. They hold the
segments of incomplete groups, whose members may be in the parts of several workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hermes_rl.export.losses import Losses, count_rewards, count_sample, count_tokens
from hermes_rl.export.samples import (
    Sample,
    before_untrained,
    fingerprint,
    samples_of,
    without_tail,
)
from hermes_rl.export.tokens import TokenItem, digest_of, refusal
from hermes_rl.images import with_images
from hermes_rl.leaks import leaks_of_row
from hermes_rl.store import Run, order_of, stem_of

if TYPE_CHECKING:
    import pyarrow as pa

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
    """Maximum number of rollouts."""
    allow_retokenized: bool = False
    """RL formats take segments whose tokens were made from text again."""
    allow_secrets: bool = False
    """Export rollouts whose texts look like somebody's secret."""
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
    """Unit that a trainer trains on and the report counts."""
    rows: Callable[[Source], Iterator[Row]]
    """Makes all rows of the file, one at a time."""
    columns: Columns | Callable[[Source], Columns] | None = None
    """The columns, for Parquet."""
    supports: frozenset[str] = frozenset()
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


COLUMNS = (
    "task_id", "repeat", "reward", "end_reason", "truncated", "turns", "messages", "message_info",
    "tools", "rewards", "contexts", "image_data", "model", "env_name", "split", "metadata",
    "trajectory_id", "unit_id", "group_id", "member", "run_id", "row_index",
)  # fmt: skip
"""Columns of table `trajectories` that every format gets."""

_NEVER_NULL = ("messages", "message_info", "tools", "contexts")
"""Columns that are null only if the store could not hold the value."""

ROWS_AT_ONCE = 8
"""Rows that are converted together: as Python values, segments take 100 bytes a token."""

_loads = msgspec.json.decode


@dataclass(frozen=True)
class Score:
    """Reward and advantage of one rollout."""

    reward: float | None = None
    advantage: float | None = None
    parts: Sequence[Mapping[str, Any]] = ()
    """Components of `score_group` or of a regrade; empty for those of the row."""


@dataclass(frozen=True)
class Scores:
    """Scores of the rollouts of a run, and the sizes of its groups.

    If the run has a table `groups`, its rewards (of `score_group` or of a regrade) and advantages
    count; else the rewards of `trajectories` do, and there are no advantages.
    """

    by_trajectory: Mapping[str, Score] = field(default_factory=dict)
    valid: Mapping[str, int] = field(default_factory=dict)
    """Group -> members with a reward."""
    in_failures: int = 0
    """Members with a reward that have no row in `trajectories`."""

    @classmethod
    def of(
        cls, run: Run, graded: Iterable[tuple[str, float | None]], advantage: AdvantageKind
    ) -> Scores:
        """Read the scores of a run.

        Args:
            run: with or without a table `groups`.
            graded: group and reward of every rollout in `trajectories`.
            advantage: the column of `groups` to read.
        """
        valid = Counter(group for group, reward in graded if reward is not None)
        known: dict[str, Score] = {}
        columns = ["group_id", "trajectory_ids", "rewards", "n_valid", advantage, "reward_parts"]
        for group in run.arrow("groups", columns).to_pylist():  # the last row of a group counts
            valid[group["group_id"]] = group["n_valid"]
            parts = group["reward_parts"] or [()] * len(group["rewards"])
            columns_of_members = (group["trajectory_ids"], group["rewards"], group[advantage])
            for trajectory, reward, value, of in zip(*columns_of_members, parts, strict=True):
                if trajectory is not None:
                    known[trajectory] = Score(reward=reward, advantage=value, parts=of or ())
        finished = run.arrow("trajectories", ["trajectory_id"])["trajectory_id"] if known else ()
        others = known.keys() - {trajectory.as_py() for trajectory in finished}
        in_failures = sum(known[trajectory].reward is not None for trajectory in others)
        return cls(known, valid, in_failures)

    def of_rollout(self, row: Mapping[str, Any]) -> Score:
        """Return the score of a row of `trajectories`."""
        return self.by_trajectory.get(row["trajectory_id"], Score(reward=row["reward"]))

    def valid_members(self, group_id: str) -> int:
        """Return how many members of a group have a reward."""
        return self.valid.get(group_id, 0)


class Source:
    """The rows of one run that an export is to write.

    Args:
        run: the run.
        format: the format to write.
        options: what is exported.
        losses: counts what is read and left out.
    """

    def __init__(self, run: Run, format: Format, options: ExportOptions, losses: Losses) -> None:
        self.options = options
        self.losses = losses
        self._format = format
        self._seen: set[bytes] = set()
        tables = ["trajectories", "segments"]
        self._run_dir = run.run_dir
        self._pending = run.unpublished(tables)
        self._parts = {t: {stem_of(p): p for p in run.run_dir.parts(t)} for t in tables}
        self.leaks: list[str] = []
        """Rollouts read so far whose texts look like somebody's secret."""
        self._taken = 0
        self._tokenizer: str | None = None
        self._sizes: Counter[str] = Counter()
        self.scores = Scores.of(run, self._facts() if format.rl else (), options.advantage)
        losses.leave_out("judged_later", self.scores.in_failures if format.rl else 0)

    @property
    def has_segments(self) -> bool:
        """Whether the run has any row of table `segments`."""
        return bool(self._parts["segments"] or self._pending["segments"])

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `trajectories` that pass the filters, JSON decoded."""
        for stem in self._stems():
            for raw in self._rollouts_of(stem):
                yield self._decoded(raw)

    def samples(self) -> Iterator[Sample]:
        """Yield one sample per context, without duplicates and samples with nothing to train on."""
        raw = "unparsed_arguments" in self._format.supports
        for row in self.rollouts():
            count_rewards(self.losses, row)
            for sample in samples_of(row, raw_arguments=raw):
                if not any(sample.trained):
                    self.losses.leave_out("nothing_to_train")
                elif not self._is_duplicate(fingerprint, sample):
                    yield sample

    def samples_without_tail(self) -> Iterator[Sample]:
        """Yield `samples` that end with their last trained message, with their losses counted."""
        for whole in self.samples():
            sample = without_tail(whole)
            self.losses.lose("tail", len(whole.messages) - len(sample.messages))
            count_sample(self.losses, sample)
            yield sample

    def samples_before_untrained(self) -> Iterator[Sample]:
        """Yield `samples` for readers that train on every assistant message.

        Each ends before its first assistant message that must not be trained on, with its losses
        counted.
        """
        for whole in self.samples():
            sample = before_untrained(whole)
            if any(sample.trained):
                cut = len(sample.messages) < len(whole.messages)
                self.losses.lose("cut_before_untrained", cut)
                count_sample(self.losses, sample)
                yield sample
            else:
                self.losses.leave_out("untrained_before")

    def all_contexts(self) -> Iterator[tuple[Sample, list[dict[str, Any]]]]:
        """Yield one sample per context, trainable or not, with all segments of its rollout."""
        for stem in self._stems():
            for raw, segments in self._joined(stem):
                for sample in samples_of(self._decoded(raw), raw_arguments=True):
                    if not self._is_duplicate(fingerprint, sample):
                        yield sample, segments

    def token_rollouts(self) -> Iterator[list[TokenItem]]:
        """Yield the segments that this format may take, by rollout; RL formats get whole groups."""
        if self._format.rl:
            yield from (items for group in self.groups() for items in group)
            return
        for stem in self._stems():
            for items in self._token_rollouts_of(stem):
                count_tokens(self.losses, items)
                yield items

    def _token_rollouts_of(self, stem: str) -> Iterator[list[TokenItem]]:
        for raw, segments in self._joined(stem):
            if not segments:
                self.losses.leave_out("no_tokens")
                continue
            row = self._decoded(raw)
            items = [self._item(row, segment) for segment in segments]
            if taken := [item for item in items if item is not None]:
                yield taken

    def _joined(self, stem: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield rows that pass the filters with their segments; those without any come last."""
        if all(stem not in tables["segments"] for tables in (self._parts, self._pending)):
            yield from ((raw, []) for raw in self._rollouts_of(stem))
            return
        waiting = {row["trajectory_id"]: row for row in self._rollouts_of(stem)}
        for trajectory_id, segments in self._segments_of(stem):
            raw = waiting.pop(trajectory_id, None)
            if raw is not None:
                yield raw, segments
        while waiting:
            yield waiting.pop(next(iter(waiting))), []

    def _members(self) -> Iterator[tuple[str, list[TokenItem]]]:
        """Yield the group of every rollout with its segments, none when it is left out."""
        for stem in self._stems():
            found = set()
            for items in self._token_rollouts_of(stem):
                found.add(items[0].row["trajectory_id"])
                yield items[0].row["group_id"], items
            for table in self._tables("trajectories", stem, ["group_id", "trajectory_id"]):
                for row in table.to_pylist():
                    if row["trajectory_id"] not in found:
                        yield row["group_id"], []

    def groups(self) -> Iterator[list[list[TokenItem]]]:
        """Yield the segments of whole groups, by rollout. RL formats only.

        A group is held until the last of its rollouts is read.
        """
        held: dict[str, list[list[TokenItem]]] = {}
        missing = Counter(self._sizes)
        for group_id, rollout in self._members():
            held.setdefault(group_id, [])
            if rollout:
                held[group_id].append(rollout)
            missing[group_id] -= 1
            if not missing[group_id]:
                yield from self._complete(held.pop(group_id))
        for group in held.values():  # a filter or a limit removed members
            yield from self._complete(group)

    def _complete(self, group: list[list[TokenItem]]) -> Iterator[list[list[TokenItem]]]:
        if len(group) >= self.options.min_group:
            for items in group:
                count_tokens(self.losses, items)
                self.losses.lose("no_advantage", sum(item.advantage is None for item in items))
            yield sorted(group, key=lambda rollout: rollout[0].row["member"])
        else:
            self.losses.leave_out("small_group", len(group))

    def tools(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the tool schemas of every rollout, unfiltered."""
        for stem in self._stems():
            for table in self._tables("trajectories", stem, ["tools"]):
                yield from (_loads(text) for text in table.column("tools").to_pylist())

    def _item(self, row: dict[str, Any], segment: dict[str, Any]) -> TokenItem | None:
        score = self.scores.of_rollout(row)
        item = TokenItem(
            row=row,
            segment=segment,
            reward=score.reward,
            advantage=score.advantage,
            parts=score.parts or row["rewards"] or (),
        )
        why = refusal(item, rl=self._format.rl, retokenized=self.options.allow_retokenized)
        made_by = segment["tokenizer_hash"]
        if why is None and made_by is not None:
            self._tokenizer = self._tokenizer or made_by
            why = None if made_by == self._tokenizer else "other_tokenizer"
        if why is not None:
            self.losses.leave_out(why)
            return None
        return None if self._is_duplicate(digest_of, item) else item

    def _rollouts_of(self, stem: str) -> Iterator[dict[str, Any]]:
        """Yield rows that pass the filters, with JSON as text to save memory."""
        columns = [*COLUMNS, *self._format.needs]
        if self._format.unit == "messages":
            columns.append("calls")
        for table in self._tables("trajectories", stem, columns):
            for raw in table.to_pylist():
                if self.full:
                    return
                why = self._unwanted(raw)
                self.losses.rollouts += 1
                if why is not None:
                    self.losses.leave_out(why)
                else:
                    self._taken += 1
                    self._search(raw)
                    yield raw

    def _search(self, raw: dict[str, Any]) -> None:
        """Note what looks like a secret in a row, unless it may be exported."""
        if not self.options.allow_secrets:
            found = next(leaks_of_row(raw), None)
            if found is not None:
                column, leak = found
                self.leaks.append(f"{raw['task_id']} #{raw['repeat']} ({column}: {leak.kind})")

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        """Decode the JSON of a row, and replace its reward by the score's."""
        decoded = [_loads(text) for text in row["messages"]]
        row["messages"] = with_images(decoded, row.pop("image_data") or ())
        row["tools"] = _loads(row["tools"])
        row["metadata"] = None if row["metadata"] is None else _loads(row["metadata"])
        row["reward"] = self.scores.of_rollout(row).reward
        return row

    @property
    def full(self) -> bool:
        """Whether the limit of rollouts is reached."""
        return self.options.limit is not None and self._taken >= self.options.limit

    def _unwanted(self, row: dict[str, Any]) -> str | None:
        """Return why a rollout is left out (key of `losses.LEFT_OUT`); None if it is not."""
        options = self.options
        reward = self.scores.of_rollout(row).reward
        if any(row[name] is None for name in _NEVER_NULL):
            return "incomplete"
        if options.min_reward is not None and (reward is None or reward < options.min_reward):
            return "low_reward"
        if options.end_reasons and row["end_reason"] not in options.end_reasons:
            return "end_reason"
        if self._format.rl and reward is None:
            return "not_graded"
        if self._format.rl and self.scores.valid_members(row["group_id"]) < options.min_group:
            return "small_group"
        return None

    def _segments_of(self, stem: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the segments of a part by rollout; those of a rollout are adjacent."""
        rows = (row for table in self._tables("segments", stem, None) for row in table.to_pylist())
        for trajectory_id, segments in groupby(rows, key=itemgetter("trajectory_id")):
            yield trajectory_id, list(segments)

    def _is_duplicate(self, digest: Any, what: Any) -> bool:
        if not self.options.dedupe:
            return False
        key = digest(what)
        if key in self._seen:
            self.losses.leave_out("duplicate")
            return True
        self._seen.add(key)
        return False

    def _facts(self) -> Iterator[tuple[str, float | None]]:
        for stem in self._stems():
            for table in self._tables("trajectories", stem, ["group_id", "reward"]):
                names = table.column("group_id").to_pylist()
                self._sizes.update(names)
                yield from zip(names, table.column("reward").to_pylist(), strict=True)

    def _stems(self) -> list[str]:
        return sorted({*self._parts["trajectories"], *self._pending["trajectories"]}, key=_place)

    def _tables(self, table: str, stem: str, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield the rows of one batch in small tables."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = self._parts[table].get(stem)
        if part is not None:
            with self._run_dir.read_part(part, pq.ParquetFile) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                    yield pa.Table.from_batches([batch])
        elif stem in self._pending[table]:
            waiting = self._pending[table][stem]
            yield waiting if columns is None else waiting.select(list(columns))


def _place(stem: str) -> tuple[int, int, str]:
    """Sort key of a batch: the first ones of all workers, then their second ones.

    That is roughly the order of the dataset, and the members of a group are near each other.
    """
    epoch, number, writer, sequence = order_of(stem)
    return epoch, sequence, f"{writer}{number}"
