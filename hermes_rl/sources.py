"""Where task rows come from: files, folders, Hugging Face datasets, bundled names, Python
iterables.

Every source is streamed; none is loaded whole. A source yields (row, place), or (error text, place)
for a
row that cannot be read, so that bad rows become failed units and never stop a run.
"""

from __future__ import annotations

import csv
import glob
import gzip
import importlib.resources
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from hermes_rl.errors import HermesError, UserError
from hermes_rl.input_errors import did_you_mean, nearest, nearest_file
from hermes_rl.task_folders import read_rows as read_task_folders
from hermes_rl.task_folders import task_folders
from hermes_rl.tasks import (
    Columns,
    DuplicateKey,
    LazyRow,
    RawRow,
    TaskRow,
    decoded,
    lazy_rows,
    renamed,
    task_row,
    unique_keys,
)

RUNS = "runs"
"""The folder of run directories, unless `--out` names another."""

BUNDLED = ("smoke", "terminal_tasks", "tool_tasks")
"""Datasets that ship with the package."""

_CHECK = f". Check the path (bundled: {', '.join(BUNDLED)})"

Source = Iterator[tuple[RawRow, str]]

_BATCH_ROWS = 256
_HUB_S = 10.0
_FIELD_CHARS = 1 << 30
"""Maximum size of a CSV field, which may contain a whole file."""
_SURELY = 0.8
"""Names this similar to a bundled one (by `difflib`) are not looked up on the hub."""
_LOOKED_AT = 100
"""Rows that are searched for the columns of `--map`."""


def read_tasks(
    dataset: str | Iterable[Mapping[str, Any]],
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Iterator[TaskRow]:
    """The rows of a dataset, lazily and in order.

    Args:
        dataset: a path, a bundled name, a Hugging Face name (`owner/name`, `name:config:split`), or
            rows.
        columns: renames, our name -> the dataset's.
        limit: only this many rows.

    Raises: UserError when there is no such dataset, or it is of no known kind.
    """
    for index, (raw, place) in enumerate(_rows(dataset, columns, limit)):
        yield task_row(raw, index, place, columns or {})


def read_rows(
    dataset: str | Iterable[Mapping[str, Any]],
    *,
    columns: Columns | None = None,
    limit: int | None = None,
) -> Iterator[LazyRow]:
    """Like `read_tasks`, but parses tasks lazily; identities are available without parsing."""
    yield from lazy_rows(_rows(dataset, columns, limit), columns or {})


def mapped_rows(
    dataset: str | Iterable[Mapping[str, Any]],
    *,
    columns: Columns | None = None,
    limit: int | None = None,
    skip_unreadable: bool = False,
) -> Iterator[dict[str, Any]]:
    """The unparsed rows with mapped names.

    Raises: UserError, as `read_tasks`; also for a row that cannot be read.
    """
    for raw, place in _rows(dataset, columns, limit):
        row = decoded(raw) if isinstance(raw, bytes) else raw
        if not isinstance(row, str):
            yield renamed(row, columns or {})
        elif not skip_unreadable:
            raise UserError(f"{place}: {row}")


def _rows(
    dataset: str | Iterable[Mapping[str, Any]], columns: Columns | None, limit: int | None
) -> Source:
    source = _checked(dataset) if isinstance(dataset, str) else _from_rows(dataset)
    if limit is not None:
        source = itertools.islice(source, limit)
    return _with_columns(source, columns) if columns else source


def _with_columns(source: Source, columns: Columns) -> Source:
    """The same rows, after checking that the first of them have the columns.

    Raises: UserError for a column that none of them has.
    """
    first = list(itertools.islice(source, _LOOKED_AT))
    rows = [decoded(raw) if isinstance(raw, bytes) else raw for raw, _ in first]
    found = dict.fromkeys(str(k) for row in rows if not isinstance(row, str) for k in row)
    for name, column in columns.items():
        if found and column not in found:
            some = f" (found: {', '.join(list(found)[:8])})"
            raise UserError(
                f"{first[0][1]}: no column {column!r}{did_you_mean(column, found, some)}. "
                f"Fix --map {name}={column}"
            )
    return itertools.chain(first, source)


def dataset_name(dataset: str) -> str:
    """A short name for a run directory: `data/my.jsonl` -> `my`."""
    return Path(dataset.partition(":")[0].removesuffix(".gz")).stem or "dataset"


def _from_rows(rows: Iterable[Mapping[str, Any]]) -> Source:
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            yield row, f"row {number}"
        else:
            yield f"a row must be a mapping, not {type(row).__name__}", f"row {number}"


def _checked(dataset: str) -> Source:
    """The rows of a named dataset. Raises: UserError, whatever its reader raises."""
    place = None
    try:
        for raw, place in _open(dataset):
            yield raw, place
    except HermesError:
        raise
    except Exception as error:  # a boundary: files, Arrow and the hub's client raise many classes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if place is None:
            raise UserError(f"{dataset}: cannot be read ({reason}). Check the file") from error
        raise UserError(f"{place}: no row after this one can be read ({reason})") from error


def _open(dataset: str) -> Source:
    path = Path(dataset).expanduser()
    if dataset in BUNDLED and not path.exists():
        return _jsonl(bundled_path(dataset))
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if _is_path(dataset) or nearest(dataset, BUNDLED, _SURELY):
        raise UserError(f"{dataset}: no such file or dataset{_instead(dataset)}")
    return _hub(dataset)


def _is_path(dataset: str) -> bool:
    """Whether a missing name can only be a path, for which the hub is not queried."""
    path = Path(dataset).expanduser()
    folder = dataset.partition("/")[0]
    return bool(
        path.suffix
        or dataset.startswith((".", "/", "~"))
        or dataset.count("/") > 1
        or ("/" in dataset and (folder == RUNS or Path(folder).is_dir()))
        or next(path.parent.glob(f"{glob.escape(path.name)}.*"), None)
    )


def _instead(dataset: str, otherwise: str = _CHECK) -> str:
    """A similar file or bundled dataset."""
    bundled = nearest(dataset, BUNDLED)
    if bundled is not None:
        return f" (did you mean {bundled!r}?)"
    name = nearest_file(Path(dataset).expanduser())
    return otherwise if name is None else f" (did you mean {str(Path(dataset).with_name(name))!r}?)"


def bundled_path(name: str) -> Path:
    """The file of a bundled dataset, as installed or in a checkout. Raises: UserError."""
    installed = importlib.resources.files("hermes_rl") / "data" / f"{name}.jsonl"
    candidates = [Path(str(installed)), Path(__file__).parents[1] / "datasets" / f"{name}.jsonl"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(f"the bundled dataset {name!r} is missing: reinstall hermes-rl")


def _file(path: Path) -> Source:
    name = path.name.lower()
    reader = _READERS.get(Path(name.removesuffix(".gz")).suffix)
    if reader is None or (reader is _parquet and name.endswith(".gz")):
        raise UserError(f"{path}: unknown kind of file. Use one of {KINDS}")
    return reader(path)


def _binary(path: Path) -> BinaryIO:
    """A file's content, unpacked where its name ends in `.gz`."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _jsonl(path: Path) -> Source:
    name = str(path)
    with _binary(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield line, f"{name}:{number}"


def _json(path: Path) -> Source:
    try:
        with _binary(path) as file:
            data = json.loads(file.read(), object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON: {error}. For one object a line use .jsonl"
        ) from None
    if not isinstance(data, list):
        raise UserError(f"{path}: must hold a list of rows. For one object a line use .jsonl")
    for number, row in enumerate(data):
        yield (row if isinstance(row, dict) else "a row must be a JSON object"), f"{path}[{number}]"


def _csv(path: Path) -> Source:
    with (
        _binary(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as lines,
    ):
        csv.field_size_limit(_FIELD_CHARS)  # of the module: no reader of its own has one
        # Strict: a quote that nothing closes would else swallow all rows behind it.
        reader = csv.DictReader(lines, strict=True)
        for row in _readable(reader):
            place = f"{path}:{reader.reader.line_num}"
            _named_once(reader.fieldnames or (), path)
            if isinstance(row, str):
                yield row, place
                continue
            if None in row:
                yield "more fields than columns", place
                continue
            yield {k: _csv_value(k, v) if v else None for k, v in row.items()}, place


def _readable(reader: csv.DictReader[str]) -> Iterator[dict[str, Any] | str]:
    """The rows of the reader, or the error of an unreadable row."""
    while True:
        begins = max(reader.reader.line_num, 1) + 1  # line 1 is the header
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not valid CSV: {error}. Fix the quotes of the row that begins in line {begins}"


def _named_once(columns: Iterable[str], path: Path) -> None:
    """Raises: UserError, if two columns have one name: the reader would keep only the last."""
    seen: set[str] = set()
    for name in columns:
        if name and name in seen:
            raise UserError(f"{path}: two columns are named {name!r}. Rename one")
        seen.add(name)


_CSV_JSON = {
    *("files", "verify", "score", "requires", "toolsets", "answer_tools", "limits", "repeats"),
    "env_vars",
}


def _csv_value(column: str, text: str) -> Any:
    """CSV holds only text: columns of another type are read as JSON where they parse."""
    if column not in _CSV_JSON:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # The script `true` is a script, no JSON.
    return text if column == "verify" and not isinstance(value, dict) else value


def _parquet(path: Path) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from None
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                yield _plain(row), f"{path} row {number}"
                number += 1


_READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
_ENDS = (*_READERS, *(f"{end}.gz" for end in _READERS if end != ".parquet"))
KINDS = f"{', '.join(_READERS)}; all but Parquet also with .gz"
"""The kinds of files that are read, for messages."""


def _folder(path: Path) -> Source:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _saved(path)
        return
    if task_folders(path):
        yield from read_task_folders(path)
        return
    files = sorted(p for p in path.iterdir() if p.name.lower().endswith(_ENDS))
    if not files:
        raise UserError(f"{path}: holds no file of a dataset ({KINDS}) and no task folders")
    for file in files:
        yield from _file(file)


def _saved(path: Path) -> Source:
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(path))
    if isinstance(data, DatasetDict):
        names = ", ".join(data)
        raise UserError(
            f"{path}: holds the splits {names}; name one, such as {path}/{next(iter(data))}"
        )
    for number, row in enumerate(data):
        yield _plain(row), f"{path} row {number}"


def _hub(name: str) -> Source:
    repo, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        _ask_hub(repo)
        from datasets import load_dataset  # seconds, which a name that is not there need not wait

        data = load_dataset(repo, config or None, split=split or "train", streaming=True)
    except Exception as error:  # a boundary: the hub's client raises many unrelated classes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name}: no such file, no bundled dataset ({', '.join(BUNDLED)}), and no Hugging Face "
            f"dataset that can be reached: {reason}{_instead(name, otherwise='')}"
        ) from None
    for number, row in enumerate(data):
        yield _plain(row), f"{name} row {number}"


def _ask_hub(repo: str) -> None:
    """Make one request, so that a misspelled path fails at once: the loader retries for half a
    minute. Raises: errors of the hub client."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        HfApi().dataset_info(repo, timeout=_HUB_S)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls, which Arrow adds for absent fields, at every depth of objects."""
    return {str(k): _without_nulls(v) for k, v in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value
