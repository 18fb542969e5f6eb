"""Reads a journal file while it is written."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import scripted_rows
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.events import ToolsOffered
from hermes_rl.store import (
    AppendFile,
    CrashHook,
    JournalWriter,
    encode_line,
    open_run,
    read_payloads,
)


class Growing(io.RawIOBase):
    """A file that is written while it is read; an empty piece is the current end."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def open(self, mode: str) -> io.BufferedReader:
        """As a path's."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._pieces.pop(0) if self._pieces else b""
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("at", [1, 5, 15, -1])
def test_a_line_being_written_is_not_damage(at: int) -> None:
    """A reader meets the first part of a line at the file's end, and the rest a moment later."""
    first, second = encode_line(b'{"line":1}'), encode_line(b'{"line":2}')
    file: Any = Growing(first + second[:at], b"", second[at:], b"")
    assert list(read_payloads(file)) == [b'{"line":1}']


@given(texts=st.lists(st.text(), min_size=1), times=st.sampled_from([1, 100, 10_000]))
def test_what_is_appended_is_read(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], times: int
) -> None:
    """Short lines are kept as they are, and long ones are compressed."""
    path = tmp_path_factory.mktemp("journal") / "done-0.jsonl"
    file = AppendFile(path, CrashHook(), "attempt-3-done")
    for text in texts:
        file.append(json.dumps({"text": text * times}).encode())
        file.synced = file.size
    file.close()
    found = [msgspec.json.decode(payload) for payload in read_payloads(path)]
    assert [line["text"] for line in found] == [text * times for text in texts]
    assert file.size == path.stat().st_size
    assert [line.get("synced", 0) > 0 for line in found] == [n > 0 for n in range(len(texts))]


async def test_a_live_file_has_the_same_tools_once_and_every_lost_attempt_gets_them(
    run_path: Path,
) -> None:
    few, many = ([{"name": f"tool-{n}"} for n in range(count)] for count in (1, 300))
    offers = [few, many, few, many, many]
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, 1) as journal:
            for number, tools in enumerate(offers):
                driver.dispatch(scripted_rows.make_item(number), journal.writer)
                recorder = journal.recorder(scripted_rows.attempt_key(number))
                recorder.record(scripted_rows.make_begun(number))
                recorder.record(ToolsOffered(tools=tools))
        (live,) = (run_path / "journal" / journal.writer).glob("live-*")
        events = [msgspec.json.decode(payload)["e"]["event"] for payload in read_payloads(live)]
        assert [events.count(kind) for kind in ("tools", "same_tools")] == [2, 3]
        await driver.recover_worker(journal.writer)
    (part,) = (run_path / "failures").glob("*.parquet")
    rows = pq.read_table(part, columns=["unit_id", "tools"]).to_pylist()
    found = {row["unit_id"]: json.loads(row["tools"]) for row in rows}
    assert [found[scripted_rows.unit_id(n)] for n in range(5)] == offers
