"""Task rows: read lazily from every input; a bad row names its place and stops nothing."""

import base64
import datetime
import decimal
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hermes_rl.errors import UserError
from hermes_rl.sources import dataset_name, read_tasks
from hermes_rl.tasks import parse_row

TOOL = {"name": "f", "parameters": {"type": "object"}}
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "id": "a", "verify": "true", "level": 1},
    {"prompt": "two", "files": {"x.txt": "hello"}, "requires": ["git"]},
    {"prompt": [{"role": "user", "content": "three"}]},
]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_all_inputs_give_the_same_tasks(tmp_path: Path) -> None:
    import datasets

    jsonl = write_jsonl(tmp_path / "a.jsonl", ROWS)
    as_json = tmp_path / "b.json"
    as_json.write_text(json.dumps(ROWS))
    # Arrow wants one type a column, so the list prompt is left out of the columnar inputs.
    columns = dict.fromkeys(k for row in ROWS[:2] for k in row)
    flat = [{**columns, **row} for row in ROWS[:2]]
    pq.write_table(pa.Table.from_pylist(flat), tmp_path / "c.parquet")
    datasets.Dataset.from_list(flat).save_to_disk(str(tmp_path / "saved"))
    expected = [r.task_hash for r in read_tasks(ROWS)]
    assert [r.task_hash for r in read_tasks(str(jsonl))] == expected
    assert [r.task_hash for r in read_tasks(str(as_json))] == expected
    assert [r.task_hash for r in read_tasks(str(tmp_path / "c.parquet"))] == expected[:2]
    assert [r.task_hash for r in read_tasks(str(tmp_path / "saved"))] == expected[:2]
    assert all(r.task is not None for r in read_tasks(ROWS))
    for plain in (jsonl, as_json):
        packed = tmp_path / f"{plain.name}.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert [r.task_hash for r in read_tasks(str(packed))] == expected
    places = [row.place for row in read_tasks(str(tmp_path / "a.jsonl.gz"))]
    assert places == [f"{tmp_path}/a.jsonl.gz:{n}" for n in (1, 2, 3)]


def test_a_truncated_gzip_csv_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    packed = gzip.compress(b"prompt\n" + b"".join(b"%d\n" % n for n in range(100_000)))
    path.write_bytes(packed)
    assert sum(1 for _ in read_tasks(str(path))) == 100_000
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"t\.csv\.gz:\d+: no row after this one can be read"):
        list(read_tasks(str(path)))


def test_csv_columns_may_contain_json(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('question,requires,repeats\n"say ""hi""","[""git""]",2\n')
    (row,) = read_tasks(str(path), columns={"prompt": "question"})
    assert row.task is not None
    assert row.task.prompt_text == 'say "hi"'
    assert row.task.requires == ("git",)
    assert row.repeats == 2


def test_sources_are_streamed() -> None:
    def endless() -> Iterator[dict[str, str]]:
        number = 0
        while True:
            yield {"prompt": f"task {number}"}
            number += 1

    rows = list(read_tasks(endless(), limit=3))
    assert [r.index for r in rows] == [0, 1, 2]


def test_bad_rows_are_reported_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "fine"}\n{"broken\n\n{"question": "q"}\n[1]\n{"prompt": "last"}\n')
    rows = list(read_tasks(str(path)))
    assert [r.task is not None for r in rows] == [True, False, False, False, True]
    assert rows[1].place == f"{path}:2"
    assert "not valid JSON" in (rows[1].error or "")
    assert rows[2].place == f"{path}:4"
    assert rows[2].error == "no column 'prompt' (found: question). Try --map prompt=COLUMN"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": 3}, "'prompt' must be text"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "end with a user message"),
        ({"files": {"../up": "x"}}, "inside the workspace"),
        ({"files": {"/etc/motd": "x"}}, "inside the workspace"),
        ({"files": {"folder/": "x"}}, "inside the workspace"),
        ({"files": {"a/b/c": "x", "a": "y"}}, "'a' as a file and as the folder of 'a/b/c'"),
        ({"files": {"a": {"base64": "!"}}}, "not valid base64"),
        ({"files": ["a"]}, "'files' must be an object"),
        ({"verify": {"scirpt": "x"}}, "'script'"),
        ({"verify": {"script": "x", "timeuot": 3}}, "unknown key 'timeuot'"),
        ({"verify": {"script": "x", "timeout_s": -1}}, "timeout_s"),
        ({"verify": {"script": "x", "mounts": {"/tests": "/etc"}}}, "'verify.mounts'"),
        ({"verify": {"script": "x", "mounts": {"/tests": "../etc"}}}, "'verify.mounts'"),
        ({"verify": {"script": "x", "mounts": {"/tests": "a\0b"}}}, "'verify.mounts'"),
        ({"verify": {"script": "x", "mounts": {"tests": "a"}}}, "'verify.mounts'"),
        ({"verify": {"script": "x", "mounts": {1: "a"}}}, "'verify.mounts'"),
        ({"requires": "git"}, "'requires' must be a list"),
        ({"answer_tools": {"name": "f"}}, "'answer_tools' must be a list of objects with name, d"),
        ({"answer_tools": ["f"]}, "'answer_tools' must be a list of objects with name, descr"),
        ({"answer_tools": [{"name": "f", "x": 1}]}, "'answer_tools.0' has the unknown key 'x'"),
        ({"answer_tools": [{"name": "a.b"}]}, "'answer_tools.0.name' must match"),
        ({"answer_tools": [{"name": "f"}]}, "'answer_tools.0.parameters' must be a JSON schema"),
        ({"answer_tools": [TOOL, TOOL]}, "'answer_tools.1.name': 'f' is the name of another one"),
        ({"answer_tools": [{**TOOL, "description": 1}]}, "'answer_tools.0.description' must be t"),
        ({"repeats": 0}, "'repeats'"),
        ({"limits": {"turns": 3}}, "unknown key 'turns'"),
        ({"setup": 4}, "'setup' must be text"),
    ],
)
def test_invalid_rows_name_the_error(change: dict[str, Any], says: str) -> None:
    row = parse_row({"prompt": "p", **change}, 0, "here")
    assert row.task is None
    assert says in (row.error or "")


def test_files_and_metadata_are_kept_exactly() -> None:
    blob = bytes(range(256))
    row = {
        "prompt": "p",
        "files": {"bin": {"base64": base64.b64encode(blob).decode()}, "ü.txt": "grüße"},
        "level": 2.0,
        "nested": {"a": [1, None]},
    }
    task = parse_row(row, 0, "here").task
    assert task is not None
    assert task.files == {"bin": blob, "ü.txt": "grüße".encode()}
    assert task.metadata == {"level": 2, "nested": {"a": [1, None]}}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent.jsonl", "no such file"),
        ("./absent", "no such file"),
    ],
)
def test_missing_datasets_are_reported(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(read_tasks(name))


def test_unknown_file_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.xlsx"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="unknown kind of file"):
        list(read_tasks(str(path)))


def test_dataset_names() -> None:
    assert dataset_name("data/my.jsonl") == "my"
    assert dataset_name("smoke") == "smoke"
    assert dataset_name("data/my.jsonl.gz") == "my"
    assert dataset_name("openai/gsm8k:main:test") == "gsm8k"


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "half \ud800"}, "'prompt' is not valid Unicode text"),
        ({"prompt": "p", "note\ud800": "x"}, "is not valid Unicode text"),
        ({"prompt": "p", "id": "x\ud800"}, "'id' is not valid Unicode text"),
        ({"prompt": "p", "count": 2**70}, "'count' holds a whole number of more than 64 bits"),
        ({"prompt": "p", "tags": {1, 2}}, "column 'tags' holds a set"),
        ({"prompt": "p", "verify": "tr\0ue"}, "'verify' holds a NUL byte"),
        ({"prompt": "p", "verify": {"script": "true", "image": 5}}, "'verify.image'"),
        ({"prompt": "p", "env_vars": ["A=1"]}, "'env_vars' must be an object"),
        ({"prompt": "p", "env_vars": {"A B": "1"}}, "'A B', which is not the name of a variable"),
        ({"prompt": "p", "env_vars": {"A": 1}}, "'env_vars.A' must be text"),
        ({"prompt": "p", "limits": {"max_turns": 0.5}}, "'limits.max_turns' must be 1 or more"),
        ({"prompt": "p", "id": [1]}, "'id' must be text or a number"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "content part"),
        ({"prompt": [{"role": "assistant", "tool_calls": 5}]}, "'tool_calls' a list"),
        ({"prompt": [{"role": "assistant", "tool_calls": [5]}]}, "tool call without a name"),
        ({"prompt": [{"role": "assistant", "reasoning_content": 5}]}, "'reasoning_content'"),
    ],
)
def test_rows_that_cannot_be_stored_are_bad_rows(row: dict[str, Any], error: str) -> None:
    parsed = parse_row(row, 0, "my.jsonl:1")
    assert parsed.task is None
    assert error in str(parsed.error)
    msgspec.msgpack.encode(parsed)  # it is sent to workers and stored in the journal


def test_parquet_types_are_converted_to_json(tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "id": 7,
        "repeats": 2.0,
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "blob": b"\xff",
        "big": 1e300,
        "nested": {"days": [datetime.date(2026, 1, 2)]},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (parsed,) = read_tasks(str(tmp_path / "t.parquet"))
    assert parsed.task is not None, parsed.error
    assert (parsed.task.id, parsed.repeats) == ("7", 2)
    assert parsed.task.metadata == {
        "when": "2026-01-02T03:04:05+00:00",
        "day": "2026-01-02",
        "price": "1.50",
        "blob": {"base64": "/w=="},
        "big": 1e300,
        "nested": {"days": ["2026-01-02"]},
    }
    msgspec.json.encode(parsed)


def test_scripts_in_csv_are_not_parsed_as_json(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('prompt,verify\na,true\nb,"{""script"": ""test -f x""}"\n')
    first, second = (row.task for row in read_tasks(str(path)))
    assert first is not None
    assert first.verify is not None
    assert first.verify.script == "true"
    assert second is not None
    assert second.verify is not None
    assert second.verify.script == "test -f x"


def test_unknown_dataset_names_fail_fast() -> None:
    code = "from hermes_rl.sources import read_tasks; list(read_tasks('no/such'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "UserError: no/such: no such file, no bundled dataset" in done.stderr
    assert "Retrying" not in done.stderr  # as the loader alone does for half a minute


def test_long_csv_fields_are_read_and_broken_ones_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'prompt,x\n"' + b"a" * 200_000 + b'",1\r\nb\rc,2\nlast,3\n')
    rows = list(read_tasks(str(path)))
    assert rows[0].task is not None
    assert len(rows[0].task.prompt_text) == 200_000
    assert rows[-1].task is not None
    assert rows[-1].task.prompt_text == "last"


def test_an_unclosed_csv_quote_is_reported_with_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.csv"
    path.write_text('prompt,id\nfirst,1\n"no end,2\nthird,3\n')
    rows = list(read_tasks(str(path)))
    assert [row.task is not None for row in rows] == [True, False]
    assert "Fix the quotes of the row that begins in line 3" in str(rows[1].error)
    path.write_text('prompt,id\n"a "quoted" word",1\nlast,2\n')
    rows = list(read_tasks(str(path)))
    assert rows[0].place.endswith(":2")
    assert "begins in line 2" in str(rows[0].error)
    assert [row.task is not None for row in rows] == [False, True]


def test_duplicate_csv_columns_are_refused_except_empty_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,id,prompt\na,1,b\n")
    with pytest.raises(UserError, match="two columns are named 'prompt'"):
        list(read_tasks(str(path)))
    path.write_text("prompt,,\na,,\n")
    (row,) = read_tasks(str(path))
    assert row.task is not None
