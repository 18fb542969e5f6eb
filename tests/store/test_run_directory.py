"""The ordinary way: dispatch, record, finish, publish, read; then resume."""

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import scripted_rows
from scripted_rows import run_attempt

from hermes_rl.errors import StoreError, UserError
from hermes_rl.store import (
    TABLES,
    JournalWriter,
    OpenOptions,
    Publisher,
    load_run,
    open_run,
    schema_of,
)


async def test_a_run_is_written_read_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    async with await open_run(path, scripted_rows.CONFIG) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, 0) as journal:
            publisher = Publisher(journal)
            for number in range(10):
                await run_attempt(driver, journal, number)
            await publisher.drain()
            await run_attempt(driver, journal, 10, cause="rate_limit")
            await run_attempt(driver, journal, 11, cause="task")

            now = load_run(path)
            assert len(now.trajectories) == 10
            assert len(now.failures) == 2, "finished, not published yet"
            assert list((path / "failures").iterdir()) == []
            some = now.frame("trajectories", ["seed", "messages"])
            assert list(some.columns) == ["seed", "messages"]
            assert some["messages"][0][0]["role"] == "user"
            assert now.arrow("subagents", ["seed"]).num_rows == 4
            await publisher.drain()
        assert driver.ledger.disposition(scripted_rows.unit_id(9)) == "done"
        assert driver.ledger.disposition(scripted_rows.unit_id(10)) == "open"
        assert driver.ledger.disposition(scripted_rows.unit_id(11)) == "given_up"

    assert list((path / "journal").iterdir()) == []
    assert list((path / "tmp").iterdir()) == []
    run = load_run(path)
    assert sorted(run.trajectories["unit_id"]) == sorted(
        scripted_rows.unit_id(n) for n in range(10)
    )
    first = run.trajectories.sort_values("seed").iloc[1]
    call = first["messages"][1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"command": "ls"}
    assert first["metrics"] == {"score": 1 / 3}
    assert first["tools"] == scripted_rows.TOOLS
    assert len(run.subagents) == 4
    assert list(run.segments["input_ids"].iloc[0]) == [1, 2, 0]
    assert run.stats["units"] == {"done": 10, "given_up": 1, "open": None}
    assert run.stats["causes"] == {"rate_limit": 1, "task": 1}
    assert run.stats["reward"] == {"graded": 10, "solved": 5, "mean": 0.5}

    async with await open_run(path, scripted_rows.CONFIG) as again:
        assert again.epoch == 2
        assert again.ledger.done == 10
        assert again.ledger.next_attempt(scripted_rows.unit_id(10)) == 1
        assert again.report.lost == []


async def test_all_parts_have_the_declared_schema(tmp_path: Path) -> None:
    async with (
        await open_run(tmp_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        publisher = Publisher(journal)
        for number in range(3):
            await run_attempt(driver, journal, number, cause="model_timeout" if number else None)
            await publisher.drain()
    for table in TABLES:
        for part in (tmp_path / table).iterdir():
            assert pq.read_schema(part).equals(schema_of(table), check_metadata=True)
            assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "ZSTD"


async def test_a_newer_run_directory_is_refused(tmp_path: Path) -> None:
    async with await open_run(tmp_path, scripted_rows.CONFIG):
        pass
    epoch = tmp_path / "epochs" / "1.json"
    content = json.loads(epoch.read_text())
    del content["sha256"]
    epoch.write_text(json.dumps({**content, "schema_version": 3}))
    with pytest.raises(StoreError, match=r"newer hermes_rl .schema 3, this one knows 2"):
        await open_run(tmp_path, scripted_rows.CONFIG)
    with pytest.raises(StoreError, match="newer hermes_rl"):
        load_run(tmp_path)


async def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"contains other files .notes.txt. .*another --out"):
        await open_run(tmp_path, scripted_rows.CONFIG)
    with pytest.raises(UserError, match="cannot be written"):
        await open_run(tmp_path / "notes.txt", scripted_rows.CONFIG)
    with pytest.raises(UserError, match="is not on this disk"):
        await open_run("s3://bucket/run", scripted_rows.CONFIG)
    with pytest.raises(UserError, match="not a run directory"):
        load_run(tmp_path)


async def test_readers_use_max_attempts_of_the_run(tmp_path: Path) -> None:
    options = OpenOptions(max_attempts=1)
    async with (
        await open_run(tmp_path, scripted_rows.CONFIG, None, options) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        await run_attempt(driver, journal, 0, cause="model_timeout")
        await Publisher(journal).drain()
    run = load_run(tmp_path)
    assert run.ledger.disposition(scripted_rows.unit_id(0)) == "given_up"
    assert run.stats["units"]["given_up"] == 1


FORKED = """
import asyncio, os, sys, scripted_rows
from hermes_rl.errors import StoreError
from hermes_rl.store.driver import open_run

async def main():
    driver = await open_run(sys.argv[1], scripted_rows.CONFIG)
    ready, report_ready = os.pipe()
    if not os.fork():
        driver.release()  # as at the end of a process that inherited it
        os.write(report_ready, b"x")
        os.close(1)
        os.read(0, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        await open_run(sys.argv[1], scripted_rows.CONFIG)
    except StoreError:
        pass
    else:
        raise AssertionError("the child gave the lock away")
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
    await driver.aclose()

asyncio.run(main())
"""


async def open_and_leave(path: Path) -> None:
    async with await open_run(path, scripted_rows.CONFIG):
        pass


@pytest.mark.parametrize(("how", "status"), [("closed", 0), ("killed", -9)])
def test_a_forked_child_neither_holds_nor_releases_the_lock(
    tmp_path: Path, how: str, status: int
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", FORKED, str(tmp_path / "run"), how],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdin
    assert driver.stdout
    try:
        assert driver.stdout.read() == b""
        assert driver.wait(60) == status
        asyncio.run(open_and_leave(tmp_path / "run"))
    finally:
        driver.stdin.close()  # its child ends


@pytest.mark.parametrize(
    ("module", "call", "code", "lacks"),
    [
        (fcntl, "flock", errno.ENOSYS, r"lacks locks \(flock; Lustre has them with -o flock\)"),
        (os, "link", errno.EPERM, "lacks hard links: Operation not permitted"),
        (os, "rename", errno.EXDEV, "lacks renames"),
    ],
)
async def test_a_file_system_that_lacks_something_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, code: int, lacks: str
) -> None:
    """Such a file system cannot be mounted here; its answers to the system calls are known."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(UserError, match=lacks) as caught:
        await open_run(tmp_path / "run", scripted_rows.CONFIG)
    assert str(caught.value).endswith("needs them; choose another --out")
    monkeypatch.undo()
    assert not list((tmp_path / "run" / "tmp").iterdir())
    async with await open_run(tmp_path / "run", scripted_rows.CONFIG):
        pass


async def test_a_folder_of_a_run_on_another_disk_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount, or a link to another file system, as the system call answers there."""
    rename, run = os.rename, tmp_path / "run"

    def refuse(source: Path, target: Path) -> None:
        if Path(target).parent == run / "commits":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    async with await open_run(run, scripted_rows.CONFIG):
        pass
    files = sorted(run.rglob("*"))
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(UserError) as caught:
        await open_run(run, scripted_rows.CONFIG)
    assert "lacks renames from tmp/ to commits/: Invalid cross-device link" in str(caught.value)
    assert sorted(run.rglob("*")) == files


async def test_locks_that_exclude_nobody_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    with pytest.raises(UserError, match="two programs get the same lock"):
        await open_run(tmp_path / "run", scripted_rows.CONFIG)
