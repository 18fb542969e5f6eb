"""The quick way to a row's identity gives what the long way gives, for any line and any value."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_rl import identity
from hermes_rl.errors import UserError
from hermes_rl.sources import read_rows, read_tasks
from hermes_rl.tasks import lazy_rows

GOLDEN = {
    r'{"prompt": "p"}': "4b3f025124f2bcf3b1631fdfd45d9e593332f876d6d84aa8db7bf31564b7355d",
    r'{"prompt": "q", "prompt": "p"}': (
        "4b3f025124f2bcf3b1631fdfd45d9e593332f876d6d84aa8db7bf31564b7355d"
    ),
    r'{"prompt": "p", "id": 7, "level": 2.0, "weight": 0.1, "tiny": 1e-07, "huge": 1e22, '
    r'"none": null}': "593bd75fe8b2226fbe89e7bf18d468ed039dddfc84e9e5d414b720c90bb3f51c",
    r'{"verify": {"script": "true", "timeout_s": 1.50, "files": {"a": "b"}}, "prompt": '
    r'[{"role": "user", "content": "h\u00e9 \ud83d\ude00 \u0001 \u007f \"/\\"}]}': (
        "9696bcabb3b3e7c152f2206adcf28c3e7b1110303ff1912b545d633cd4d88040"
    ),
    r'{"prompt": "p", "oracle": "x", "repeats": 4, "nested": {"b": [1, -0.0, null, true], '
    r'"a": {}}}': "e4a084f66a61ef74b02cc3e4118f90309d94bf8458f387ab51565c727aed0be2",
    r'{"prompt": "p", "n": 123456789012345678901234567890, "m": 18446744073709551615}': (
        "f6f87ff5fc5d2e1598543b13dca60f25613d4792d4809719fa0795a8fdab9163"
    ),
    r'{"prompt": "lone \ud800"}': (
        "ad2be87aeeb27b379396fc1a0748cb12b54d98b160fc2cf44f5f56817cd77a4e"
    ),
    r'{"prompt": "p", "x": NaN}': (
        "f3d4f2e47d18de7b6e25e534ec68ac550b20d3a50fdeac8fce0d7e0879370c88"
    ),
    r'{"prompt": "p", "x": 1e400}': (
        "9d3133bc7cf8fc714496df92f70f4ad92787c989928cdb48c94c22c48b9e5ed7"
    ),
    r'{"prompt": "p", "\uffff": 1, "\ud83d\ude00": 2, "z": 3, "a": 4}': (
        "0b2117dccc58fa16ff50b911b3158d093a797988f8efa9a0a9a75a8fc2035005"
    ),
}
"""Rows and the hashes that run directories hold: they may never change."""

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(["prompt", "question", "oracle", "repeats", "id", "verify"]) | st.text()
rows = st.dictionaries(names, values | st.sampled_from([1, 2.0, 3, "p"]), max_size=6)


@pytest.mark.parametrize("line", GOLDEN)
def test_task_hashes_equal_those_of_earlier_versions(line: str, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(line + "\n")
    (lazy,), (task,) = read_rows(str(path)), read_tasks(str(path))
    assert lazy.task_hash == task.task_hash == GOLDEN[line]


@given(row=rows, pretty=st.booleans(), columns=st.sampled_from([{}, {"prompt": "question"}]))
def test_lazy_and_parsed_rows_have_equal_hashes(
    row: dict[str, Any], pretty: bool, columns: dict[str, str]
) -> None:
    line = json.dumps(row, ensure_ascii=pretty, indent=1 if pretty else None)
    for raw in (line.encode("utf-8", "surrogatepass"), row):
        (lazy,) = lazy_rows([(raw, "here")], columns)
        task = lazy.parse()
        assert lazy.task_hash == task.task_hash
        assert not lazy.quick or lazy.repeats == task.repeats or task.task is None


@given(row=rows, at=st.integers(0, 60), put=st.binary(max_size=2), cut=st.integers(0, 2))
@example(row={"a": 1}, at=5, put=b"0", cut=0)
@example(row={"a": 1}, at=0, put=b"\xef\xbb\xbf", cut=0)
@example(row={"repeats": float("inf")}, at=0, put=b"", cut=0)
def test_a_damaged_line_has_the_same_hash_lazy_and_parsed(
    row: dict[str, Any], at: int, put: bytes, cut: int
) -> None:
    line = json.dumps(row).encode()
    (lazy,) = lazy_rows([(line[:at] + put + line[at + cut :], "here")], {})
    assert lazy.task_hash == lazy.parse().task_hash


@given(values)
def test_digest_is_sha256_of_canonical_json(value: object) -> None:
    try:
        text = identity.canonical_json(value).encode("utf-8", "surrogatepass")
    except ValueError:
        with pytest.raises(ValueError):
            identity.digest(value)
    else:
        assert identity.digest(value) == hashlib.sha256(text).hexdigest()


def test_mapped_columns_replace_columns_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q", "prompt": "p"}\n{"prompt": "p", "question": "q"}\n')
    found = list(read_tasks(str(path), columns={"prompt": "question"}))
    assert [r.task.prompt_text for r in found if r.task] == ["q", "q"]
    swapped = next(read_tasks(str(path), columns={"prompt": "question", "question": "prompt"}))
    assert swapped.task is not None
    assert (swapped.task.prompt_text, swapped.task.metadata) == ("q", {"question": "p"})


def test_a_missing_mapped_column_lists_the_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n')
    says = r"q.jsonl:1: no column 'NOSUCH' \(found: prompt, answer\). Fix --map prompt=NOSUCH"
    for read in (read_tasks, read_rows):
        with pytest.raises(UserError, match=says):
            list(read(str(path), columns={"prompt": "NOSUCH"}))
    path.write_text('{"prompt": "p"}\n{"prompt": "p", "check": "true"}\n')
    assert len(list(read_tasks(str(path), columns={"verify": "check"}))) == 2
