"""The rows of one or many runs at four grains, read in batches when something asks for them.

Each grain has the Arrow stream protocol, so pandas, polars, duckdb, datasets and pyarrow take it as
it is, and no library is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError
from hermes_rl.store import Run, is_run, load_run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ROWS_AT_ONCE = 256
OWNER = ("run", "task_id", "repeat", "attempt", "status", "unit_id", "trajectory_id")
"""Columns of the attempt in each row of messages and calls."""
TEXTS = ("content", "reasoning_content", "tool_calls", "tool_call_id")

Batches = Callable[[Run, Sequence[str]], Iterator["pa.Table"]]


@dataclass(frozen=True)
class Grain:
    """Rows of some runs. Nothing is read until they are iterated, converted or passed on.

    `polars.DataFrame(grain)`, `pyarrow.table(grain)` and `duckdb.from_arrow(grain.reader())` read
    it directly.
    """

    runs: tuple[Run, ...]
    schema: pa.Schema
    """The columns, `run` first: the name of the run directory. JSON columns are text."""
    _read: Batches
    _condition: Any = None

    def select(self, *columns: str) -> Grain:
        """Only these columns; of `trajectories` only these are read. Raises: UserError."""
        unknown = [name for name in columns if name not in self.schema.names]
        if unknown:
            raise UserError(f"no column {unknown[0]!r}; there are {', '.join(self.schema.names)}")
        import pyarrow as pa

        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def where(self, condition: Any) -> Grain:
        """Only rows that satisfy an expression of selected columns, such as
        `pyarrow.compute.field("reward") >= 1`."""
        both = condition if self._condition is None else self._condition & condition
        return replace(self, _condition=both)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        names = self.schema.names
        for run in self.runs:
            for table in self._read(run, names):
                rows = table.select(names).cast(self.schema)
                rows = rows if self._condition is None else rows.filter(self._condition)
                yield from rows.to_batches()

    def reader(self) -> pa.RecordBatchReader:
        """The rows as a stream."""
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.reader().__arrow_c_stream__(requested_schema)

    def to_arrow(self) -> pa.Table:
        """All rows in memory."""
        return self.reader().read_all()

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a pandas frame; JSON columns are text (`json.loads`)."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame


@dataclass(frozen=True)
class Frames:
    """Runs as rows at four grains; their columns `run` and `trajectory_id` join them."""

    opened: tuple[Run, ...]

    @property
    def runs(self) -> pd.DataFrame:
        """One row per run: model, units, solved, tokens, cost."""
        import pandas as pd

        return pd.concat([run.runs for run in self.opened], ignore_index=True)

    @property
    def trajectories(self) -> Grain:
        """One row per attempt, failed ones included (`status`): the columns of the tables."""
        return Grain(self.opened, _attempt_schema(), _attempts)

    @property
    def messages(self) -> Grain:
        """One row per message of all attempts: its place, facts and texts."""
        import pyarrow as pa

        fields = [*_item_fields("message_info"), *(pa.field(name, pa.string()) for name in TEXTS)]
        position = pa.field("position", pa.int32())
        return Grain(self.opened, pa.schema([*_owner_fields(), position, *fields]), _messages)

    @property
    def calls(self) -> Grain:
        """One row per model call of all attempts: tokens, cost, latency, retries, outcome."""
        import pyarrow as pa

        schema = pa.schema([*_owner_fields(), *_item_fields("calls")])
        return Grain(self.opened, schema, _calls)


def frames(*runs: str | Path | Run) -> Frames:
    """Open runs for analysis together.

    Args:
        runs: runs, run directories, or folders of run directories.

    Raises: UserError when one is neither, or there is none.
    """
    opened = [one if isinstance(one, Run) else load_run(one) for one in _expand(runs)]
    if not opened:
        raise UserError("no run in these folders. Give run directories")
    return Frames(tuple(opened))


def answers(*runs: str | Path | Run) -> pd.DataFrame:
    """One row per finished unit: run, task_id, repeat, reward, target, final_response, unit_id.

    The target is that of the task's scorers, from the dataset of the run; null if the dataset is
    elsewhere now, or its row has changed.
    """
    import pandas as pd

    columns = ["task_id", "repeat", "reward", "final_response", "unit_id", "task_hash"]
    found = []
    for run in frames(*runs).opened:
        frame = run.frame("trajectories", columns)
        targets = _targets(run, set(frame["task_hash"]))
        frame.insert(3, "target", [targets.get(task) for task in frame.pop("task_hash")])
        frame.insert(0, "run", run.path.absolute().name)
        found.append(frame)
    return pd.concat(found, ignore_index=True)


def _targets(run: Run, tasks: Collection[str]) -> dict[str, Any]:
    """The target of each task: that of its first scorer with one."""
    import yaml

    from hermes_rl.sources import BUNDLED, read_rows

    dataset = yaml.safe_load((run.path / "run.yaml").read_text(encoding="utf-8"))["dataset"]
    path, found = str(dataset.get("path")), dict[str, Any]()
    # The tasks of an evaluation are beside its runs, wherever this process was started.
    places = [Path(path).expanduser(), run.path.parent / Path(path).name]
    place = next((str(one) for one in places if one.exists()), path if path in BUNDLED else None)
    missing = set(tasks)
    for row in read_rows(place, columns=dataset.get("columns")) if place else ():
        task = row.parse().task if row.task_hash in missing else None
        missing.discard(row.task_hash)
        for scorer in task.score if task else ():
            if "target" in scorer.options:
                found.setdefault(row.task_hash, scorer.options["target"])
        if not missing:
            break
    return found


def _expand(runs: Iterable[str | Path | Run]) -> Iterator[Path | Run]:
    for one in runs:
        path = one if isinstance(one, Run) else Path(one)
        if isinstance(path, Path) and path.is_dir() and not is_run(path):
            yield from sorted(child for child in path.iterdir() if is_run(child))
        else:
            yield path


def _attempt_schema() -> pa.Schema:
    import pyarrow as pa

    from hermes_rl.store import TRAJECTORIES, storage_schema

    return pa.schema([pa.field("run", pa.string()), *storage_schema(TRAJECTORIES)])


def _owner_fields() -> list[pa.Field]:
    schema = _attempt_schema()
    return [schema.field(name) for name in OWNER]


def _item_fields(column: str) -> list[pa.Field]:
    return list(_attempt_schema().field(column).type.value_type)


def _attempts(run: Run, names: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of both tables in steps, with the name of the run."""
    import pyarrow as pa

    columns = [name for name in names if name != "run"] or ["trajectory_id"]
    for table in ("trajectories", "failures"):
        for batch in run.batches(table, columns, ROWS_AT_ONCE):
            name = pa.array([run.path.absolute().name] * len(batch), pa.string())
            yield pa.table(batch).append_column("run", name)


def _explode(rows: pa.Table, column: str) -> pa.Table:
    """The items of a list column, each with its attempt."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = rows.column(column).combine_chunks()
    items = pa.Table.from_struct_array(pc.list_flatten(lists))
    owners = rows.select(list(OWNER)).take(pc.list_parent_indices(lists))
    for name in items.column_names:
        owners = owners.append_column(name, items[name])
    return owners


def _calls(run: Run, names: Sequence[str]) -> Iterator[pa.Table]:
    for rows in _attempts(run, [*OWNER, "calls"]):
        yield _explode(rows, "calls")


def _messages(run: Run, names: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow as pa

    wanted = [name for name in TEXTS if name in names]
    columns = [*OWNER, "message_info", *(["messages"] if wanted else [])]
    for rows in _attempts(run, columns):
        items = _explode(rows, "message_info")
        lengths = [len(infos) for infos in rows["message_info"]]
        positions = [n for length in lengths for n in range(length)]
        items = items.append_column("position", pa.array(positions, pa.int32()))
        for name, texts in _texts(rows, wanted).items():
            items = items.append_column(name, pa.array(texts, pa.string()))
        yield items


def _texts(rows: pa.Table, wanted: Sequence[str]) -> dict[str, list[str | None]]:
    """The texts of all messages; what is not text is JSON."""
    import msgspec

    found: dict[str, list[str | None]] = {name: [] for name in wanted}
    for texts in rows["messages"].to_pylist() if wanted else ():
        for text in texts:
            message = msgspec.json.decode(text)
            for name, values in found.items():
                value = message.get(name)
                known = value is None or isinstance(value, str)
                values.append(value if known else msgspec.json.encode(value).decode())
    return found
