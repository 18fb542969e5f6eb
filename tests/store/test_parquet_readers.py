"""Random JSON survives all readers: equal canonical JSON, absent stays absent, null stays null.

Hugging Face `datasets` decodes JSON by a parser that rounds floats in their last digits (and
refuses integers beyond 64 bits); what it gives is compared with that much tolerance.
"""

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import scripted_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.identity import canonical_json
from hermes_rl.messages import MAX_DEPTH
from hermes_rl.store import TRAJECTORIES, PartWriter, Run, RunDir

# Texts as models and tools write them: everything but half characters (no UTF-8 has them).
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(texts, values, max_size=5)

quick = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Written:
    """Some rows in a run directory with one part."""

    def __init__(self, folder: Path, arguments: list[dict[str, Any]], contents: list[str]) -> None:
        self.path = folder
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        self.part = folder / "trajectories" / "part-1-0-0.parquet"
        writer = PartWriter(self.part, TRAJECTORIES)
        self.messages = []
        for number, (expected_arguments, content) in enumerate(
            zip(arguments, contents, strict=True)
        ):
            made = scripted_rows.make_row(
                number,
                arguments=msgspec.json.encode(expected_arguments).decode(),
                content=content,
                metadata=expected_arguments,
            )
            self.messages.append([json.loads(m) for m in made.messages])
            writer.add(msgspec.to_builtins(made), 1000)
        writer.close()


def parsed(rows: Iterable[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Messages and metadata of rows whose JSON is text."""
    return [([json.loads(m) for m in r["messages"]], json.loads(r["metadata"])) for r in rows]


def through_pyarrow(path: Path) -> list[tuple[Any, Any]]:
    return parsed(pq.read_table(path).to_pylist())


def through_pandas(path: Path) -> list[tuple[Any, Any]]:
    frame = Run(RunDir(path.parents[1])).trajectories
    return list(zip(frame["messages"], frame["metadata"], strict=True))


def through_polars(path: Path) -> list[tuple[Any, Any]]:
    import polars as pl  # late, like duckdb: they cost a second, which few processes need

    return parsed(pl.read_parquet(path).to_dicts())


def through_duckdb(path: Path) -> list[tuple[Any, Any]]:
    import duckdb

    return parsed(duckdb.sql(f"select messages, metadata from '{path}'").df().to_dict("records"))


def through_datasets(path: Path, **how: Any) -> list[tuple[Any, Any]]:
    import datasets

    how = how or {"cache_dir": str(path.parent / "cache")}
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", **how)
    return [(r["messages"], r["metadata"]) for r in rows]


through_streaming = functools.partial(through_datasets, streaming=True)


def exactly(read: Any, written: Any) -> bool:
    return canonical_json(read) == canonical_json(written)


def roughly(read: Any, written: Any) -> bool:
    """Equal, but for the last digits of floats."""
    if isinstance(written, dict):
        alike = isinstance(read, dict) and list(read) == list(written)
        return alike and all(roughly(read[k], v) for k, v in written.items())
    if isinstance(written, list):
        alike = isinstance(read, list) and len(read) == len(written)
        return alike and all(map(roughly, read, written))
    if isinstance(written, float):
        return math.isclose(read, written, rel_tol=1e-11, abs_tol=1e-307)
    return type(read) is type(written) and bool(read == written)


def check(tmp: Path, arguments: list[dict[str, Any]], contents: list[str], read: Any) -> None:
    same = roughly if read in (through_datasets, through_streaming) else exactly
    written = Written(tmp, arguments, contents)
    rows = read(written.part)
    assert len(rows) == len(arguments)
    for (messages, metadata), expected, expected_arguments in zip(
        rows, written.messages, arguments, strict=True
    ):
        assert same(messages, expected)
        assert same(metadata, expected_arguments)
        function = messages[1]["tool_calls"][0]["function"]
        assert same(function["arguments"], expected_arguments), "absent, null and empty are kept"
        assert all(v is not None for m in messages for v in m.values()), "no null keys"


rows_of_json = st.lists(st.tuples(objects, texts), min_size=1, max_size=4)
EXACT = (through_pyarrow, through_pandas, through_polars, through_duckdb)


@settings(quick, max_examples=40)
@given(rows=rows_of_json)
def test_random_json_through_exact_readers(tmp_path_factory: Any, rows: Any) -> None:
    arguments, contents = [a for a, _ in rows], [c for _, c in rows]
    for read in EXACT:
        check(tmp_path_factory.mktemp("run"), arguments, contents, read)


@settings(quick, max_examples=20)
@given(rows=rows_of_json)
def test_random_json_through_datasets(tmp_path_factory: Any, rows: Any) -> None:
    arguments, contents = [a for a, _ in rows], [c for _, c in rows]
    check(tmp_path_factory.mktemp("run"), arguments, contents, through_streaming)


HARD = [
    {},
    {"a": None},
    {"a": {}, "b": []},
    {"a": [None, {}, [], ""]},
    {"n": 2**64 - 1, "m": -(2**63)},
    {"f": 1e308, "g": 5e-324, "h": 1.5, "i": -0.0},
    {"": "", " ": "\x00\x1f\u2028", "é": "日本語 🙂", "</tool_call>": "<|im_end|>"},
    {"path": "a\\b\n\t\"'", "deep": {"a": {"b": {"c": [[[[1]]]]}}}},
    {"command": "ls", "timeout": 1.0},
    {"command": ["ls"], "timeout": "1"},
]


def test_hard_json_through_all_readers(tmp_path: Path) -> None:
    contents = ["" for _ in HARD]
    for number, read in enumerate((*EXACT, through_streaming, through_datasets)):
        check(tmp_path / str(number), HARD, contents, read)
    assert math.copysign(1, json.loads('{"i":-0.0}')["i"]) < 0


def test_every_column_is_read_by_every_reader(tmp_path: Path) -> None:
    import datasets
    import duckdb
    import polars as pl

    part = Written(tmp_path, [{"a": 1}, {}], ["", "x"]).part
    names = pq.read_schema(part).names
    assert list(Run(RunDir(tmp_path)).trajectories.columns) == names
    assert pl.read_parquet(part).columns == names
    assert duckdb.sql(f"from '{part}'").columns == names
    assert duckdb.sql(f"from '{part}'").to_arrow_table()["cause"].to_pylist() == [None, None]
    rows = datasets.load_dataset("parquet", data_files=str(part), split="train", streaming=True)
    assert list(next(iter(rows))) == names
    only = datasets.load_dataset(
        "parquet", data_files=str(part), split="train", streaming=True, columns=["messages"]
    )
    assert list(next(iter(only))) == ["messages"]


def test_values_that_datasets_cannot_decode_are_stored_as_text(tmp_path: Path) -> None:
    """Larger integers come back wrong from its parser, deeper nesting not at all."""
    deep: Any = []
    for _ in range(MAX_DEPTH + 10):
        deep = [deep]
    for number, value in enumerate(
        ({"n": 123456789012345678901}, {"n": -(2**63) - 1}, {"d": deep})
    ):
        exact = msgspec.json.encode(value).decode()
        part = Written(tmp_path / str(number), [value], [""]).part
        for read in (*EXACT, through_streaming):
            [(messages, metadata)] = read(part)
            function = messages[1]["tool_calls"][0]["function"]
            assert function["arguments"] == {"_unparsed": exact}
            assert metadata == {"_unparsed": exact}
