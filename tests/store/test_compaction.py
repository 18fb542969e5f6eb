"""Merged parts: the same rows for every reader, at every moment and after every kill."""

import asyncio
import base64
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import invariants as checks
import pandas as pd
import pyarrow.parquet as pq
import pytest
from invariants import GlobReader, glob_units
from scripted_driver import Plan
from scripted_rows import CONFIG, Play, make_finished, run_attempt

from hermes_rl.cli import faults_of, main
from hermes_rl.errors import StoreError
from hermes_rl.store import (
    COMPACTION_POINTS,
    CRASH_VARIABLE,
    TABLES,
    CrashHook,
    Driver,
    JournalWriter,
    OpenOptions,
    Publisher,
    RunDir,
    compact_run,
    encode,
    encode_line,
    file_faults,
    file_sha256,
    load_run,
    open_run,
    publish_batch,
    repair_run,
    schema_of,
)

MERGE = "import sys; from hermes_rl.store import compact_run; compact_run(sys.argv[1], grace_s=0)"


def content(path: Path) -> dict[str, list[dict[str, object]]]:
    run = load_run(path)
    return {table: run.arrow(table).to_pylist() for table in TABLES}


def faults(path: Path) -> list[str]:
    return [f"{place}: {fault}" for place, fault in file_faults(RunDir(path))]


@pytest.fixture
def finished(play: Play, run_path: Path) -> Path:
    for units in (8, 14):
        assert play(path=run_path, units=units) == 0
    assert len(list(run_path.glob("trajectories/*"))) > 1
    return run_path


def count_rows(files: Path) -> int:
    """By a glob of duckdb."""
    import duckdb  # late: few processes need it

    found = duckdb.sql(f"select count(*) from read_parquet('{files}', union_by_name=true)")
    return int(found.fetchall()[0][0])


def test_rows_order_figures_and_readers_stay(finished: Path) -> None:
    before, stats, units = content(finished), load_run(finished).stats, glob_units(finished)
    done = compact_run(finished, grace_s=0)
    assert done.after < done.before
    assert len(list(finished.glob("trajectories/*.parquet"))) == 1
    assert content(finished) == before
    assert load_run(finished).stats == stats
    assert faults(finished) == []
    assert glob_units(finished) == units
    assert count_rows(finished / "trajectories/*.parquet") == len(units)
    assert len(pd.read_parquet(finished / "trajectories")) == len(units)
    assert not list((finished / ".compact").iterdir()), "old files are gone"
    for table in TABLES:
        for part in finished.glob(f"{table}/*"):
            assert pq.read_schema(part).equals(schema_of(table), check_metadata=True)
    again = compact_run(finished, grace_s=0)
    assert again.before == again.after == done.after


def test_a_merged_run_is_resumed_and_merged_again(play: Play, finished: Path) -> None:
    compact_run(finished, grace_s=0)
    plan = Plan(str(finished), units=20)
    assert play(path=finished, units=20) == 0
    checks.check_no_unit_ran_again(finished, plan)
    before = content(finished)
    compact_run(finished, grace_s=0)
    assert content(finished) == before
    assert len(list(finished.glob("trajectories/*.parquet"))) == 1
    assert len(list(finished.glob("compacted/*.json"))) == 1, "older snapshots are forgotten"
    assert faults(finished) == []
    assert play(path=finished, units=20) == 0, "nothing is left to do"
    assert glob_units(finished).most_common(1)[0][1] == 1


@pytest.mark.parametrize(("passing", "earlier"), [(1, False), (2, True)])
@pytest.mark.parametrize("point", COMPACTION_POINTS)
def test_killed_while_merging(
    play: Play, finished: Path, point: str, passing: int, earlier: bool
) -> None:
    if earlier:
        compact_run(finished, grace_s=0)
        assert play(path=finished, units=18) == 0
    units = 18 if earlier else 14
    before, globbed = content(finished), glob_units(finished)
    merge = [sys.executable, "-c", MERGE, str(finished)]
    environment = {**os.environ, CRASH_VARIABLE: f"{point}:{passing}"}
    ended = subprocess.run(merge, env=environment, check=False).returncode
    assert ended == -signal.SIGKILL or (passing > 1 and ended == 0)
    assert content(finished) == before, "load_run reads the same rows after the kill"
    assert glob_units(finished) == globbed, "and so does a glob"
    assert [f for f in faults(finished) if "belongs to no commit" not in f] == []
    assert play(path=finished, units=units) == 0, "a start completes or drops the merge"
    assert content(finished) == before
    compact_run(finished, grace_s=0)
    assert content(finished) == before
    assert glob_units(finished) == globbed
    assert faults(finished) == []
    assert len(list(finished.glob("trajectories/*.parquet"))) == 1
    assert not list((finished / "tmp").iterdir())


@pytest.mark.parametrize(
    ("point", "earlier"), [("compact-3-recorded", True), ("compact-4-exchanged", False)]
)
def test_a_late_batch_survives_an_interrupted_merge(
    play: Play, finished: Path, point: str, earlier: bool
) -> None:
    """A writer that could not be fenced publishes between the kill of a merge and its end."""
    if earlier:
        compact_run(finished, grace_s=0)
        assert play(path=finished, units=18) == 0
    merge = [sys.executable, "-c", MERGE, str(finished)]
    environment = {**os.environ, CRASH_VARIABLE: f"{point}:1"}
    assert subprocess.run(merge, env=environment, check=False).returncode == -signal.SIGKILL
    units, late = glob_units(finished), [make_finished(n) for n in (90, 91, 95)]
    done = finished.parent / "done-9.jsonl"
    done.write_bytes(b"".join(encode_line(encode(row)) for row in late))
    publish_batch(RunDir(finished), done, "1-0-9")
    compact_run(finished, grace_s=0, small=0)
    units.update(row.key.unit_id for row in late)
    for _ in range(2):
        assert glob_units(finished) == units
        assert Counter(load_run(finished).trajectories["unit_id"]) == units
        assert faults(finished) == []
        compact_run(finished, grace_s=0)


def test_readers_at_the_moment_of_a_merge(
    play: Play, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merge replaces files, and the record of an earlier one, after a reader has found them and
    before it opens them."""

    def merge_before_the_first_call(target: str, read: Callable[..., Any], grace_s: float) -> None:
        calls = itertools.count()

        def merge_and_read(*args: Any, **more: Any) -> Any:
            if not next(calls):
                compact_run(finished, grace_s=grace_s)
            return read(*args, **more)

        monkeypatch.setattr(target, merge_and_read)

    compact_run(finished, grace_s=0)
    for units in (18, 22, 26):
        assert play(path=finished, units=units) == 0
        rows = glob_units(finished)
        if units == 18:
            done = finished.parent / "done-9.jsonl"
            row = make_finished(90, content="ghp_" + "aB3d" * 9)
            done.write_bytes(encode_line(encode(row)))
            publish_batch(RunDir(finished), done, "1-0-9")
            merge_before_the_first_call("pyarrow.parquet.ParquetFile", pq.ParquetFile, 0)
            assert main(["check", str(finished), "--secrets"]) == 2
            lines = capsys.readouterr().err.splitlines()
            columns = [line.partition(" column ")[2].partition(":")[0] for line in lines]
            assert columns == ["final_response", "messages"], lines
        elif units == 22:
            merge_before_the_first_call("hermes_rl.store.commit.file_sha256", file_sha256, 0)
            assert faults_of_files(finished) == []
        else:
            merge_before_the_first_call("pyarrow.parquet.read_table", pq.read_table, 600)
            assert Counter(load_run(finished).trajectories["unit_id"]) == rows
        monkeypatch.undo()
        assert len(list(finished.glob("trajectories/*.parquet"))) == 1
    lost = next(finished.glob("segments/*.parquet"))
    lost.unlink()
    assert faults_of_files(finished) == [f"{lost}: is missing, but its batch is committed"]


def faults_of_files(path: Path) -> list[str]:
    """What `check` finds, without the faults of scripted rows."""
    return [line for line in faults_of(path) if " row " not in line]


def test_globs_read_every_row_once_at_any_moment(finished: Path) -> None:
    """A reader that lists and reads all the time, while a run is merged again and again."""
    units = glob_units(finished)

    async def more(path: Path) -> None:
        async with await open_run(path, CONFIG):
            pass

    with GlobReader(finished) as reader:
        compact_run(finished, grace_s=600)
        for _ in range(3):
            asyncio.run(more(finished))
    assert reader.reads
    assert glob_units(finished) == units


@dataclass
class Live:
    """A driver with a writer, each of whose attempts is a batch."""

    driver: Driver
    journal: JournalWriter

    async def add(self, *numbers: int, **more: object) -> None:
        """Finish and publish attempts."""
        for number in numbers:
            await run_attempt(self.driver, self.journal, number, **more)
            await Publisher(self.journal, commit=self.driver.commit).drain()

    async def begin_merge(self) -> asyncio.Task[None]:
        """Return a merge that has written its first file."""
        merging = asyncio.create_task(self.driver.merge_files(grace_s=0))
        while not list((self.driver.run_dir.path / "tmp").glob("trajectories.*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return merging


@asynccontextmanager
async def live_run(run_path: Path, many_files: int) -> AsyncIterator[Live]:
    async with (
        await open_run(run_path, CONFIG, None, OpenOptions(many_files=many_files)) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        yield Live(driver, journal)


async def test_a_running_driver_merges_small_files(run_path: Path) -> None:
    """Old files stay for readers, until the driver removes them."""
    async with live_run(run_path, many_files=5) as live:
        driver, merges, added = live.driver, list[int](), 0
        merging = asyncio.create_task(merge_always(driver, merges))
        with GlobReader(run_path) as reader:
            async with asyncio.timeout(240):
                while len(merges) < 3 or reader.reads < 6:
                    await live.add(added)
                    added += 1
        merging.cancel()
        await asyncio.wait((merging,))
        assert merging.cancelled()
        assert len(list(run_path.glob("trajectories/*.parquet"))) < added
        assert list(run_path.glob(".compact/*/trajectories/*.old"))
        await driver.merge_files(grace_s=0)
        assert not list((run_path / ".compact").iterdir())
    assert len(glob_units(run_path)) == added
    assert faults(run_path) == []
    async with await open_run(run_path, CONFIG) as driver:
        assert driver.ledger.done == added


async def test_merged_files_are_merged_when_there_are_many(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each merge makes a file that is large enough to stay, until there are three of these."""

    def sizes() -> list[int]:
        return [part.stat().st_size for part in run_path.glob("trajectories/*.parquet")]

    async with live_run(run_path, many_files=2) as live:
        for number in range(27):
            text = base64.b64encode(random.randbytes(50_000)).decode()  # hardly compresses
            await live.add(number, content=text)
            if number == 0:
                monkeypatch.setattr("hermes_rl.store.driver.SMALL_FILE", 2 * sizes()[0])
            if live.driver.many_files.is_set():
                await live.driver.merge_files(grace_s=0)
                assert len(sizes()) <= 3
    assert len(glob_units(run_path)) == 27


async def merge_always(driver: Driver, merges: list[int]) -> None:
    """Merge whenever there are many files, and count it."""
    while True:
        await driver.many_files.wait()
        await driver.merge_files()
        merges.append(len(merges))


def stall_at(patch: pytest.MonkeyPatch, point: str) -> threading.Event:
    """Let a merge wait at a crash point until the event is set."""
    go_on = threading.Event()
    patch.setenv(CRASH_VARIABLE, point)
    patch.setattr(CrashHook, "die", lambda hook: go_on.wait(60))
    return go_on


async def test_commits_do_not_wait_for_merged_files_and_stay(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge has written its files and has not switched, as on a slow disk."""
    go_on = stall_at(monkeypatch, "compact-1-written:1")
    async with live_run(run_path, many_files=3) as live:
        await live.add(*range(5))
        merging = await live.begin_merge()
        await live.add(*range(5, 8))
        assert not merging.done(), "the commits waited"
        go_on.set()
        await merging
        assert sorted(glob_units(run_path).values()) == [1] * 8
        assert len(list(run_path.glob("trajectories/*.parquet"))) == 4
        assert list((run_path / "tmp").iterdir()) == []
    assert faults(run_path) == []


async def test_a_merge_that_fails_changes_nothing(run_path: Path) -> None:
    """A committed file is damaged: it is not copied, and the run continues."""
    async with live_run(run_path, many_files=1) as live:
        await live.add(*range(3))
        part = sorted(run_path.glob("trajectories/*.parquet"))[1]
        good = part.read_bytes()
        part.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        with pytest.raises(StoreError, match=r"sha256 differs\. Nothing was merged"):
            await live.driver.merge_files()
        part.write_bytes(good)
        assert list((run_path / "tmp").iterdir()) == []
        await live.add(3)
    assert len(glob_units(run_path)) == 4
    assert faults(run_path) == []


async def test_a_merge_ends_early_fails_halfway_or_meets_a_recovery(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = stall_at(monkeypatch, "compact-1-written:2")
    async with live_run(run_path, many_files=1) as live:
        driver = live.driver
        await live.add(*range(3))
        await driver.merge_files(ends=lambda: True)
        assert list((run_path / "tmp").iterdir()) == []

        await live.add(*range(3, 6))
        full = StoreError("the disk is full")
        with monkeypatch.context() as patch:
            patch.setattr(driver.run_dir.storage, "put", Mock(side_effect=full))
            with pytest.raises(StoreError, match="full"):
                await driver.merge_files()
        assert not list(run_path.glob(".compact/*/*/*.parquet")), "recursive globs read these"

        await live.add(*range(6, 9))
        merging = await live.begin_merge()
        await live.journal.aclose()
        await driver.recover_worker(live.journal.writer)
        assert not merging.done()
        go_on.set()
        await merging
    assert len(glob_units(run_path)) == 9
    assert len(list(run_path.glob("trajectories/*.parquet"))) == 1
    assert faults(run_path) == []


def test_a_reader_that_listed_before_the_switch_still_reads(finished: Path) -> None:
    run, before = load_run(finished), content(finished)["trajectories"]
    steps = run.batches("trajectories", ["unit_id"], 1)
    first = next(steps)["unit_id"].to_pylist()
    compact_run(finished)
    rest = [u for batch in steps for u in batch["unit_id"].to_pylist()]
    assert first + rest == [row["unit_id"] for row in before]
    files = finished / "**/part-*.parquet"  # also those in hidden folders
    assert count_rows(files) == sum(map(len, content(finished).values()))


def test_an_older_version_refuses_a_merged_run(finished: Path) -> None:
    """It would miss the rows and pay for them again."""
    compact_run(finished)
    run_dir = RunDir(finished)
    assert run_dir.epoch(run_dir.epochs()[-1]).schema_version == 2


def test_damage_is_refused_reported_once_and_repaired(finished: Path) -> None:
    part = next(finished.glob("trajectories/*.parquet"))
    good = part.read_bytes()
    part.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
    with pytest.raises(StoreError, match=r"sha256 differs\. Nothing was merged"):
        compact_run(finished)
    part.write_bytes(good)
    compact_run(finished, grace_s=0)
    (record,) = finished.glob("compacted/*.json")
    text = record.read_bytes()
    record.write_bytes(text.replace(b'"rows":', b'"rowz":', 1))
    before = content(finished)
    (fault,) = faults(finished)
    assert fault.startswith(f"{record}: ")
    repair_run(finished)
    assert (faults(finished), record.read_bytes()) == ([], text)
    assert content(finished) == before
    merged = next(finished.glob("trajectories/*.parquet"))
    merged.unlink()
    assert faults(finished) == [f"{merged}: is missing, but its batch is committed"]


def test_what_cannot_be_merged_says_so(finished: Path) -> None:
    (finished / "trajectories" / "notes").mkdir()
    with pytest.raises(StoreError, match=r"trajectories/notes is not a file. Move it away"):
        compact_run(finished)
    (finished / "trajectories" / "notes").rmdir()
    (finished / "trajectories" / "notes.txt").write_text("mine")
    lock = RunDir(finished).lock()
    with pytest.raises(StoreError, match="in use by process"):
        compact_run(finished)
    lock.release()
    compact_run(finished, grace_s=0)
    assert (finished / "trajectories" / "notes.txt").read_text() == "mine"
