"""A resume that skips what is done and unchanged finds the same units as one that parses all."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_runner import DatasetIndex, Silent, UnitReader, arun_batch
from hermes_rl.sources import read_rows
from hermes_rl.testing import FakeServer

HASH = "c" * 64
ROWS = st.one_of(
    st.builds(lambda n: json.dumps({"prompt": f"task {n}"}), st.integers(0, 9)),
    st.builds(
        lambda n, k: json.dumps({"prompt": f"task {n}", "repeats": k}),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    st.sampled_from(["", "not JSON", '{"prompt": 5}', '{"prompt": "x", "repeats": 0}']),
)


def found(reader: UnitReader, done: set[bytes]) -> tuple[Any, ...]:
    """Everything that a plan learns from a reader."""
    units = []
    while not reader.ended:
        units += reader.take(7, 60.0, lambda key: key in done)
    open_units = [(u.unit_id, u.row.index, u.row.place, u.occurrence, u.repeat) for u in units]
    members = [reader.members_of(row) for row in range(reader.rows + 1)]
    return open_units, reader.skipped, reader.rows, reader.bad_rows, members


def plain(dataset: Path, done: set[bytes]) -> UnitReader:
    return UnitReader(read_rows(str(dataset)), HASH, 2)


def indexed(folder: Path, dataset: Path, done: set[bytes]) -> UnitReader:
    def all_done(keys: bytes) -> bool:
        return all(keys[at : at + 16] in done for at in range(0, len(keys), 16))

    index = DatasetIndex(
        folder / "dataset.index",
        dataset,
        config_hash=HASH,
        columns={},
        repeats=2,
        all_done=all_done,
        block_bytes=64,
    )
    return UnitReader(index.rows(), HASH, 2, note=index.note)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=40),
    edits=st.lists(st.tuples(st.integers(0, 60), ROWS), max_size=4),
    chance=st.integers(0, 2**32),
)
def test_an_index_changes_nothing_that_a_plan_learns(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], edits: list[Any], chance: int
) -> None:
    """Rows are replaced and added between the starts, some units end, the index is damaged."""
    folder, draw = tmp_path_factory.mktemp("index"), random.Random(chance)
    dataset, done = folder / "rows.jsonl", set[bytes]()
    for place, row in [(0, rows[0]), *edits, (len(rows), "")]:
        rows[place : place + 1] = [row]
        dataset.write_text("\n".join(rows) + draw.choice(["\n", ""]))
        expected = found(plain(dataset, done), done)
        assert found(indexed(folder, dataset, done), done) == expected
        done |= {bytes.fromhex(unit[0]) for unit in expected[0] if draw.random() < 0.8}
        damage(folder / "dataset.index", draw)


def damage(index: Path, draw: random.Random) -> None:
    data = bytearray(index.read_bytes())
    if draw.random() < 0.3:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    index.write_bytes(data)


def test_blocks_that_are_done_are_not_parsed(tmp_path: Path) -> None:
    dataset, done = tmp_path / "rows.jsonl", set[bytes]()
    dataset.write_text("".join(f'{{"prompt": "task {n}"}}\n' for n in range(100)))
    units = found(indexed(tmp_path, dataset, done), done)[0]
    done |= {bytes.fromhex(unit[0]) for unit in units}
    reader = indexed(tmp_path, dataset, done)
    reader.take(1000, 60.0)  # without `done`, each row that is parsed would be a unit
    assert (reader.skipped, reader.rows, reader.ended) == (200, 100, True)


async def run(folder: Path, rows: Iterable[dict[str, Any]], server: FakeServer) -> Any:
    endpoint = {"base_url": server.base_url}
    config = kit.make_config(folder, rows, endpoint=endpoint)
    return await arun_batch(config, progress=Silent())


async def test_a_run_of_a_large_dataset_has_an_index(tmp_path: Path, server: FakeServer) -> None:
    rows = [
        {"prompt": f'task {n}\nSCRIPT: ["done"]', "metadata": {"text": "x" * 2**20}}
        for n in range(17)
    ]
    report = await run(tmp_path, rows, server)
    assert (report.done, len(server.entries)) == (17, 17)
    assert (tmp_path / "run" / "dataset.index").exists()
    rows[3] = {**rows[3], "prompt": 'another task\nSCRIPT: ["done"]'}
    report = await run(tmp_path, [*rows, rows[0]], server)
    assert (report.units, report.done, len(server.entries)) == (18, 18, 19)
