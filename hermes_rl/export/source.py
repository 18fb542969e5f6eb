"""Reading a run for an export: a row at a time, in the order of its parts, joined and filtered.

Memory is bounded by one part: at most a thousand rollouts, whose few joined columns are held while
the segments of the same part pass by. RL formats first read the group of every rollout (a number
per group) and, where there is a table `groups`, a reward and an advantage per rollout. They hold
the segments of groups of which a member is still to come, maybe in the part of another worker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.export.base import ExportOptions, Format
from hermes_rl.export.losses import Losses, count_rewards, count_rollout
from hermes_rl.export.samples import Sample, fingerprint, samples_of
from hermes_rl.export.scores import Scores
from hermes_rl.export.tokens import TokenItem, digest_of, refusal
from hermes_rl.images import with_images
from hermes_rl.store.reader import Run

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    "task_id",
    "repeat",
    "reward",
    "end_reason",
    "truncated",
    "turns",
    "messages",
    "message_info",
    "tools",
    "rewards",
    "contexts",
    "image_data",
    "model",
    "env_name",
    "split",
    "metadata",
    "trajectory_id",
    "unit_id",
    "group_id",
    "member",
    "run_id",
    "row_index",
)
"""Columns of table `trajectories` that every format gets."""

_NEVER_NULL = ("messages", "message_info", "tools", "contexts")
"""The store writes null for a value that its column cannot hold."""

ROWS_AT_ONCE = 8
"""Rows that become Python values in one go: the lists of a segment take a hundred bytes a token."""

_loads = msgspec.json.decode


class Source:
    """The rows of one run that an export is to write.

    Args:
        run: the run.
        format: the format asked for.
        options: what is exported.
        losses: counts what is read and left out.
    """

    def __init__(self, run: Run, format: Format, options: ExportOptions, losses: Losses) -> None:
        self.options = options
        self.losses = losses
        self._format = format
        self._seen: set[bytes] = set()
        tables = ["trajectories", "segments"]
        self._pending = run.unpublished(tables)
        self._parts = {t: {_stem(p): p for p in run.run_dir.parts(t)} for t in tables}
        self._taken = 0
        self._tokenizer: str | None = None
        self._sizes: Counter[str] = Counter()
        self.scores = Scores.of(run, self._facts() if format.rl else (), options.advantage)
        losses.leave_out("judged_later", self.scores.elsewhere if format.rl else 0)

    @property
    def has_segments(self) -> bool:
        """Whether the run has any row of table `segments`."""
        return bool(self._parts["segments"] or self._pending["segments"])

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Rows of `trajectories` that pass the filters, JSON decoded."""
        for stem in self._stems():
            for raw in self._rollouts_of(stem):
                yield self._decoded(raw)

    def samples(self) -> Iterator[Sample]:
        """One sample per context, those with nothing to train on and duplicates left out."""
        raw = "unparsed_arguments" in self._format.holds
        for row in self.rollouts():
            count_rewards(self.losses, row)
            for sample in samples_of(row, raw_arguments=raw):
                if not any(sample.trained):
                    self.losses.leave_out("nothing_to_train")
                elif not self._again(fingerprint, sample):
                    yield sample

    def all_contexts(self) -> Iterator[tuple[Sample, list[dict[str, Any]]]]:
        """One sample per context, whatever there is to train on, beside all segments of its
        rollout."""
        for stem in self._stems():
            for raw, segments in self._joined(stem):
                for sample in samples_of(self._decoded(raw), raw_arguments=True):
                    if not self._again(fingerprint, sample):
                        yield sample, segments

    def token_rollouts(self) -> Iterator[tuple[Mapping[str, Any], list[TokenItem]]]:
        """Rollouts with those of their segments that this format may take; none without any. RL
        formats get them by group."""
        if self._format.rl:
            yield from ((taken[0].row, taken) for group in self.groups() for taken in group)
            return
        for stem in self._stems():
            for row, items in self._token_rollouts_of(stem):
                count_rollout(self.losses, row)
                yield row, items

    def _token_rollouts_of(self, stem: str) -> Iterator[tuple[dict[str, Any], list[TokenItem]]]:
        for raw, segments in self._joined(stem):
            if not segments:
                self.losses.leave_out("no_tokens")
                continue
            row = self._decoded(raw)
            items = [self._item(row, segment) for segment in segments]
            taken = [item for item in items if item is not None]
            if taken:
                yield row, taken

    def _joined(self, stem: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Rows that pass the filters with their segments; those without any come last."""
        if all(stem not in given["segments"] for given in (self._parts, self._pending)):
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
        """The group of every rollout with what it brings: nothing when it is left out."""
        for stem in self._stems():
            came = set()
            for row, items in self._token_rollouts_of(stem):
                came.add(row["trajectory_id"])
                yield row["group_id"], items
            for table in self._tables("trajectories", stem, ["group_id", "trajectory_id"]):
                for row in table.to_pylist():
                    if row["trajectory_id"] not in came:
                        yield row["group_id"], []

    def items(self) -> Iterator[TokenItem]:
        """The segments that this format may take."""
        for _, taken in self.token_rollouts():
            yield from taken

    def groups(self) -> Iterator[list[list[TokenItem]]]:
        """The segments of whole groups, by rollout. RL formats only.

        A group comes when the last of its rollouts was read; those that are not complete are held.
        """
        held: dict[str, list[list[TokenItem]]] = {}
        missing = Counter(self._sizes)
        for group_id, rollout in self._members():
            held.setdefault(group_id, [])
            if rollout:
                held[group_id].append(rollout)
            missing[group_id] -= 1
            if not missing[group_id]:
                yield from self._whole(held.pop(group_id))
        for group in held.values():  # of which a filter or a limit took members
            yield from self._whole(group)

    def _whole(self, group: list[list[TokenItem]]) -> Iterator[list[list[TokenItem]]]:
        if len(group) >= self.options.min_group:
            for rollout in group:
                count_rollout(self.losses, rollout[0].row)
            yield sorted(group, key=lambda rollout: rollout[0].row["member"])
        else:
            self.losses.leave_out("small_group", len(group))

    def tools(self) -> Iterator[list[dict[str, Any]]]:
        """The tool schemas of every rollout, unfiltered."""
        for stem in self._stems():
            for table in self._tables("trajectories", stem, ["tools"]):
                yield from (_loads(text) for text in table.column("tools").to_pylist())

    def _item(self, row: dict[str, Any], segment: dict[str, Any]) -> TokenItem | None:
        score = self.scores.of_rollout(row)
        item = TokenItem(row=row, segment=segment, reward=score.reward, advantage=score.advantage)
        why = refusal(item, rl=self._format.rl, retokenized=self.options.allow_retokenized)
        made_by = segment["tokenizer_hash"]
        if why is None and made_by is not None:
            self._tokenizer = self._tokenizer or made_by
            why = None if made_by == self._tokenizer else "other_tokenizer"
        if why is not None:
            self.losses.leave_out(why)
            return None
        return None if self._again(digest_of, item) else item

    def _rollouts_of(self, stem: str) -> Iterator[dict[str, Any]]:
        """Rows that pass the filters, JSON as text: what waits for its segments stays small."""
        columns = [*COLUMNS, *self._format.columns]
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
                    yield raw

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with its JSON decoded, and the reward that counts."""
        decoded = [_loads(text) for text in row["messages"]]
        row["messages"] = with_images(decoded, row.pop("image_data") or ())
        row["tools"] = _loads(row["tools"])
        row["metadata"] = None if row["metadata"] is None else _loads(row["metadata"])
        row["reward"] = self.scores.of_rollout(row).reward
        return row

    @property
    def full(self) -> bool:
        """Whether as many rollouts were taken as are wanted."""
        return self.options.limit is not None and self._taken >= self.options.limit

    def _unwanted(self, row: dict[str, Any]) -> str | None:
        """Why a rollout is left out; key of `losses.LEFT_OUT`."""
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
        """The segments of a part by rollout; those of one rollout stand side by side."""
        current: list[dict[str, Any]] = []
        for table in self._tables("segments", stem, None):
            for segment in table.to_pylist():
                if current and segment["trajectory_id"] != current[0]["trajectory_id"]:
                    yield current[0]["trajectory_id"], current
                    current = []
                current.append(segment)
        if current:
            yield current[0]["trajectory_id"], current

    def _again(self, digest: Any, what: Any) -> bool:
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
        """The rows of one batch in small tables."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = self._parts[table].get(stem)
        if part is not None:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                    yield pa.Table.from_batches([batch])
        elif stem in self._pending[table]:
            waiting = self._pending[table][stem]
            yield waiting if columns is None else waiting.select(list(columns))


def _place(stem: str) -> tuple[int, int, str]:
    """Where a batch stands: the first ones of all workers, then their second ones. That is roughly
    the order of the dataset, and the members of a group come near each other."""
    found = re.fullmatch(r"(\d+)-(.+)-(\d+)", stem)
    return (int(found[1]), int(found[3]), found[2]) if found else (0, 0, stem)


def _stem(part: Path) -> str:
    return part.name.removeprefix("part-").removesuffix(".parquet")
