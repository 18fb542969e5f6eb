"""Runs at a URL, on a real S3 server (moto) behind a proxy that fails on request."""

import asyncio
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import kit
import pytest
from botocore.loaders import create_loader
from s3 import KEYS, SIGNED, Proxy, s3_proxy, s3_server

from hermes_rl.cli import main
from hermes_rl.errors import StoreError, UserError
from hermes_rl.store import (
    Driver,
    Finished,
    JournalWriter,
    OpenOptions,
    Publisher,
    append_attempts,
    compact_run,
    fetch_run,
    load_run,
    open_mirror,
    open_run,
    working_copy,
)
from hermes_rl.testing import FakeServer
from hermes_rl.trajectory import fold

QUICK = ("--workers", "0", "--set", "run.publish_every_s=0.05")
SHORT_S = 0.9
"""A lease that ends soon: the clock of the store has whole seconds."""
ROWS = [kit.make_task(number, turns=1) for number in range(4)]


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with s3_server() as address, pytest.MonkeyPatch.context() as patch:
        # Each opened URL has a session of its own, which reads 2 MB of JSON that never change.
        patch.setattr("botocore.session.create_loader", cache(create_loader))
        yield address


@pytest.fixture
def proxy(moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """The way to the S3 server."""
    with s3_proxy(moto) as proxy:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.address}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-a"))
        yield proxy


@pytest.fixture
async def url(proxy: Proxy) -> str:
    """A new run in a new bucket."""
    return f"s3://{await proxy.make_bucket()}/runs/one"


def on_machine(tmp_path: Path, name: str) -> dict[str, str]:
    """The environment of a machine without a copy of the run."""
    return {"XDG_CACHE_HOME": str(tmp_path / name)}


def arguments(
    folder: Path, server: FakeServer, url: str, *more: str, rows: Sequence[Any] = ROWS
) -> list[str]:
    return [*kit.run_arguments(folder, rows, server, *QUICK, *more), "--out", url]


async def rows_at(url: str) -> dict[str, dict[str, Any]]:
    return kit.comparable_rows((await asyncio.to_thread(load_run, url)).path)


async def test_another_machine_resumes_and_reads_a_run(
    tmp_path: Path, server: FakeServer, proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await kit.finish_run(*arguments(tmp_path, server, url, "--limit", "2"))
    assert first.report()["path"] == url
    served = len(server.entries)

    other = on_machine(tmp_path, "machine-b")
    second = await kit.finish_run(*arguments(tmp_path, server, url), env=other)
    assert second.report()["done"] == 4
    assert not set(first.receipts()) & set(second.receipts())
    assert len(server.entries) == 2 * served

    requests = list[tuple[str, str]]()
    proxy.failure = lambda *request: requests.append(request)
    run = await asyncio.to_thread(load_run, url)
    assert {method for method, path in requests if "/.log/0" in path} == {"GET"}
    assert set(kit.final_rows(run.path)) == {*first.receipts(), *second.receipts()}
    kit.check_usage(run.path, server.entries)
    assert await asyncio.to_thread(main, ["check", url]) == 0
    assert "4 units done" in capsys.readouterr().out
    target = tmp_path / "rows.jsonl"
    export = ["export", url, "--to", "trl", "--out", str(target)]
    assert await asyncio.to_thread(main, export) == 0
    assert await asyncio.to_thread(main, ["show", url]) == 0
    keys = await proxy.objects(url)
    assert {"run.yaml", "stats.json", "trajectories/part-1-0-0.parquet"} <= set(keys)
    assert not [key for key in keys if "beat" in key or "probe" in key]


async def test_a_killed_run_of_many_small_files_is_merged_resumed_and_read(
    tmp_path: Path, server: FakeServer, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It merges while it runs, and is killed then. It resumes at once on the same machine, and
    another one reads the same rows."""
    rows = [kit.make_task(number, turns=1) for number in range(64)]
    often = ("--set", "run.publish_every_s=0.01", "--set", "run.lease_s=60", "--concurrency", "2")
    command = arguments(tmp_path, server, url, *often, rows=rows)
    run = await kit.start_run(*command)
    disk = working_copy(url)
    # On a slow disk, batches of several units may leave too few files for a merge.
    while run.process.returncode is None and not list(disk.glob("compacted/*.json")):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    kit.kill(run.pid)
    await run.wait()
    again = await kit.finish_run(*command)  # before its lease has ended
    assert again.report()["done"] == 64
    kit.check_no_unit_ran_again(disk, run.receipts() | again.receipts())
    kit.check_usage(disk, server.entries)
    assert len(await parts_at(proxy, url)) <= OpenOptions().many_files, "more are merged"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    assert await asyncio.to_thread(main, ["check", url]) == 0
    found = await rows_at(url)
    assert len(found) == 64
    assert found == kit.comparable_rows(disk)


async def test_a_start_removes_what_a_killed_driver_could_not_name(
    tmp_path: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Globs would read the rows of its last parts beside those of the second attempt."""
    async with driving(url, SHORT_S) as (mirror, _, add):
        await add(1)
        await asyncio.to_thread(mirror.sync)
        named = await parts_at(proxy, url)
        await add(2)
        proxy.failure = lambda method, path: "403" if method == "PUT" and ".log/0" in path else None
        with pytest.raises(PermissionError):
            await asyncio.to_thread(mirror.sync)
        mirror.close()
    proxy.failure = lambda method, path: None
    assert named < await parts_at(proxy, url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    second = await asyncio.to_thread(open_after_lease, url)
    await asyncio.to_thread(second.claim, second.first_epoch)
    assert await parts_at(proxy, url) == named
    second.close()


@pytest.mark.slow
async def test_silent_driver_is_replaced_and_cannot_commit(
    tmp_path: Path, server: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [kit.make_task(n, turns=1, latency_s=0.0 if n < 2 else 10.0) for n in range(4)]
    command = arguments(tmp_path, server, url, "--set", "run.lease_s=15", rows=rows)
    first = await kit.start_run(*command, "--concurrency", "1")
    await kit.wait_for_units(first, 2)
    other = on_machine(tmp_path, "machine-b")
    refused = await kit.finish_run(*command, env=other, code=2)
    assert f"is in use by process {first.pid} on " in refused.errors

    os.kill(first.pid, signal.SIGSTOP)
    while True:  # until its lease has ended
        await asyncio.sleep(5)
        second = await kit.start_run(*command, env=other)
        if await second.wait() == 0:
            break
        assert "last sign of life" in second.errors
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-c"))
    finished = await rows_at(url)
    os.kill(first.pid, signal.SIGCONT)
    assert await first.wait() == 3
    assert "was taken over by process" in first.report()["detail"]
    assert sorted(row["task_id"] for row in finished.values()) == [f"task-{n}" for n in range(4)]
    assert await rows_at(url) == finished
    assert await asyncio.to_thread(main, ["check", url]) == 0


async def test_failing_store_ends_no_run(
    tmp_path: Path, server: FakeServer, proxy: Proxy, url: str
) -> None:
    dice = random.Random(1)

    def fail(method: str, path: str) -> str | None:
        if "/runs/one/.log/00" in path and method == "PUT":
            return "lost" if dice.random() < 0.5 else None
        return "503" if "/runs/one/" in path and dice.random() < 0.25 else None

    run = await kit.start_run(*arguments(tmp_path, server, url, "--set", "run.lease_s=4"))
    await kit.wait_for_units(run, 1)
    proxy.failure = fail
    assert await run.wait() == 0, (run.errors, run.report()["detail"])
    assert proxy.failed
    proxy.failure = lambda method, path: None
    assert len(await rows_at(url)) == 4
    assert await asyncio.to_thread(main, ["check", url]) == 0


def fill(url: str, lease_s: float = 30.0, *units: str) -> Any:
    """A driver of a run with a batch for each unit."""
    mirror = open_mirror(url, lease_s)
    for batch in [[kit.make_attempt(unit)] for unit in units] or [[]]:
        asyncio.run(append_attempts(mirror.path, {}, batch))
    try:
        mirror.claim(mirror.first_epoch + max(0, len(units) - 1))
    except UserError:
        mirror.close()
        raise
    (mirror.path / "stats.json").write_text("{}")
    return mirror


async def test_outage_at_the_end_is_reported_and_completed_by_the_next_start(
    proxy: Proxy, url: str
) -> None:
    mirror = await asyncio.to_thread(fill, url)
    proxy.failure = lambda method, path: "down"
    why = await mirror.finish(0.1)
    assert why.startswith(f"{url} lacks what was finished last: ")
    assert f"It is in {mirror.path}" in why
    await append_attempts(mirror.path, {}, [kit.make_attempt("ab" * 16)])
    mirror.stop()  # Ctrl-C, while the store fails and while files are uploaded
    assert "lacks what was finished last" in await mirror.finish()
    proxy.failure = lambda method, path: None
    assert "lacks what was finished last: interrupted. It is in" in await mirror.finish()
    proxy.failure = lambda method, path: "down"
    mirror.close()
    with pytest.raises(UserError, match=r"cannot be read: .* Check the address"):
        await asyncio.to_thread(open_mirror, url, 30.0)

    proxy.failure = lambda method, path: None
    again = await asyncio.to_thread(open_mirror, url, 30.0)
    await asyncio.to_thread(again.claim, again.first_epoch)
    again.close()
    keys = await proxy.objects(url)
    assert {"stats.json", "trajectories/part-2-0-0.parquet"} <= {*keys}


async def test_only_one_of_two_drivers_that_start_together_gets_the_run(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirrors = []
    for name in "ab":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        mirrors.append(await asyncio.to_thread(open_mirror, url, 30.0))
    both = [asyncio.to_thread(mirror.claim, 1) for mirror in mirrors]
    results = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(result) for result in results if result is not None) == [StoreError]
    assert "another driver has just started" in str(next(filter(None, results)))


def open_after_lease(url: str) -> Any:
    """Take a run over whose driver had a lease of nothing, by the clock of the store (seconds)."""
    deadline = time.monotonic() + kit.WAIT_S
    while True:
        try:
            return open_mirror(url, 30.0)
        except StoreError:
            assert time.monotonic() < deadline


async def compact_after_lease(url: str) -> None:
    deadline = time.monotonic() + kit.WAIT_S
    while await asyncio.to_thread(main, ["compact", url]):
        assert time.monotonic() < deadline


async def test_a_claim_is_all_that_a_driver_leaves(
    proxy: Proxy,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The store refuses what comes after the claim; the next driver knows the epoch of it."""
    claimed: list[str] = []

    def fail(method: str, path: str) -> str | None:
        refused = "403" if claimed and method == "PUT" else None
        claimed.extend([path] if path.endswith(".log/0000000001.json") else [])
        return refused

    proxy.failure = fail
    with pytest.raises(UserError, match="cannot be written"):
        await asyncio.to_thread(fill, url, SHORT_S)
    proxy.failure = lambda method, path: None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    await compact_after_lease(url)
    assert await asyncio.to_thread(main, ["check", url]) == 0, capsys.readouterr().err


async def test_a_run_that_was_killed_before_its_first_commit_is_resumed_elsewhere(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with driving(url, SHORT_S) as (mirror, _, _):
        (mirror.path / "manifest.json").write_text("{}")
        await asyncio.to_thread(mirror.sync)
        mirror.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    second = await asyncio.to_thread(open_after_lease, url)
    assert (second.path / "manifest.json").read_text() == "{}"
    second.close()


async def test_a_start_after_a_kill_while_it_fetched_need_not_wait(proxy: Proxy, url: str) -> None:
    mirror = await asyncio.to_thread(fill, url)
    mirror.close()  # killed: its last sign of life is new
    shutil.rmtree(mirror.path)
    proxy.failure = lambda method, path: "403" if method == "GET" and ".state" in path else None
    with pytest.raises(UserError, match="cannot be used"):
        await asyncio.to_thread(open_mirror, url, 30.0)
    proxy.failure = lambda method, path: None
    (await asyncio.to_thread(open_mirror, url, 30.0)).close()


async def test_rows_that_were_published_but_not_uploaded_are_kept(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = await asyncio.to_thread(fill, url, SHORT_S)
    commit = first.path / "commits" / "1-0-0.json"
    commit.write_text("{}")
    first.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    await compact_after_lease(url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-a"))
    second = await asyncio.to_thread(open_mirror, url, 30.0)
    (note,) = second.notes
    second.close()
    assert (Path(note.rpartition(" ")[2]) / "commits" / "1-0-0.json").read_text() == "{}"


async def test_a_driver_that_was_replaced_removes_no_merged_parts(
    proxy: Proxy,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was suspended when only the removal of orphans was left of its end."""
    first = await asyncio.to_thread(fill, url, 30.0, "1" * 32, "2" * 32)
    assert await first.finish() == ""
    first.close()
    suspended = await asyncio.to_thread(fill, url, SHORT_S, "3" * 32)
    await asyncio.to_thread(suspended.sync, final=True)
    suspended.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    await compact_after_lease(url)
    assert capsys.readouterr().out.startswith(f"{url}: 3 Parquet files are now 1")
    (merged,) = [key for key in await proxy.objects(url) if key.startswith("trajectories/")]
    await suspended.finish()
    assert merged in await proxy.objects(url)


async def test_merged_files_are_merged_again(proxy: Proxy, url: str) -> None:
    """Also when the last merge was killed before its upload."""
    units = [f"{number}" * 32 for number in range(6)]
    for batches in (units[:2], units[2:4], units[4:]):
        mirror = await asyncio.to_thread(fill, url, 30.0, *batches)
        assert await mirror.finish() == ""
        mirror.close()
        if batches == units[4:]:
            await asyncio.to_thread(compact_run, mirror.path, grace_s=0)
        assert await asyncio.to_thread(main, ["compact", url]) == 0
        (_,) = [key for key in await proxy.objects(url) if key.startswith("trajectories/")]
        assert len(list((mirror.path / "trajectories").iterdir())) == 1
    assert await asyncio.to_thread(main, ["check", url]) == 0
    run = await asyncio.to_thread(load_run, url)
    assert sorted(run.trajectories["unit_id"]) == units


@asynccontextmanager
async def driving(url: str, lease_s: float = 30.0) -> AsyncIterator[tuple[Any, Driver, Any]]:
    """A driver of a run that merges small files, and what adds a batch for each unit."""
    mirror = await asyncio.to_thread(open_mirror, url, lease_s)
    options = OpenOptions(many_files=1, first_epoch=mirror.first_epoch)
    async with (
        await open_run(mirror.path, {}, None, options) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        await asyncio.to_thread(mirror.claim, driver.epoch)

        async def add(*numbers: int) -> None:
            for number in numbers:
                events = kit.make_attempt(f"{number}" * 32)
                await journal.finish(Finished(key=events[0].key, row=fold(events)))
                await Publisher(journal, commit=driver.commit).drain()

        yield mirror, driver, add


async def parts_at(proxy: Proxy, url: str) -> set[str]:
    return {key for key in await proxy.objects(url) if key.startswith("trajectories/")}


async def test_files_are_merged_while_a_run_at_a_url_continues(proxy: Proxy, url: str) -> None:
    """The merge waits for an upload, and batches are committed meanwhile; an upload fails."""
    stalled, ends = threading.Event(), threading.Event()

    def stall(method: str, path: str) -> str | None:
        if method == "PUT" and "/trajectories/" in path:
            stalled.set()
            ends.wait(60)
        return None

    async with driving(url) as (mirror, driver, add):
        await add(1, 2, 3)
        proxy.failure = stall
        uploading = asyncio.create_task(asyncio.to_thread(mirror.sync))
        assert await asyncio.to_thread(stalled.wait, 60)
        merging = asyncio.create_task(driver.merge_files(quiet=mirror.quiet))
        await add(4, 5)
        await driver.merge_files(quiet=mirror.quiet, ends=lambda: True)  # the workers end
        assert not uploading.done()
        assert not merging.done()
        ends.set()
        await uploading
        await merging
        await asyncio.to_thread(mirror.sync)
        assert await parts_at(proxy, url) == {f"trajectories/part-1-0-4.{1_000_000}.parquet"}
        assert len(await rows_at(url)) == 5

        await add(6, 7)
        proxy.failure = lambda method, path: "403" if path.endswith("-6.parquet") else None
        with pytest.raises(PermissionError):
            await asyncio.to_thread(mirror.sync)
        proxy.failure = lambda method, path: None
        assert "trajectories/part-1-0-5.parquet" in await parts_at(proxy, url)
        await driver.merge_files(quiet=mirror.quiet)
        assert await mirror.finish() == ""
        mirror.close()
    assert await parts_at(proxy, url) == {f"trajectories/part-1-0-6.{1_000_001}.parquet"}
    assert len(await rows_at(url)) == 7
    assert await asyncio.to_thread(main, ["check", url]) == 0


async def test_files_that_are_merged_while_a_reader_fetches_them(
    proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` and `load_run` read the log again when files vanish."""
    fetching, merged = threading.Event(), threading.Event()

    def stall(method: str, path: str) -> str | None:
        if method == "GET" and "/trajectories/" in path:
            fetching.set()
            merged.wait(60)
        return None

    async def check() -> list[str]:
        assert await asyncio.to_thread(main, ["check", url]) == 0, capsys.readouterr().err
        return []

    async def load() -> list[str]:
        return list((await asyncio.to_thread(fetch_run, url))[1])

    async with driving(url) as (mirror, driver, add):
        for first, reader in ((1, check), (3, load)):
            await add(first, first + 1)
            await asyncio.to_thread(mirror.sync)
            fetching.clear()
            merged.clear()
            proxy.failure = stall
            reading = asyncio.create_task(reader())
            assert await asyncio.to_thread(fetching.wait, 60)
            await driver.merge_files(quiet=mirror.quiet)
            await asyncio.to_thread(mirror.sync)
            merged.set()
            assert await reading == []
        assert await mirror.finish() == ""
        mirror.close()
    assert len(await rows_at(url)) == 4


async def test_a_store_that_lost_its_log_during_a_run_is_reported(proxy: Proxy, url: str) -> None:
    """Nothing could be read after further entries."""
    async with driving(url) as (mirror, _, add):
        await add(1)
        await asyncio.to_thread(mirror.sync)
        async with aiohttp.ClientSession(headers=SIGNED) as session:
            for key in await proxy.objects(url):
                await session.delete(f"{proxy.target}/{url.removeprefix('s3://')}/{key}")
        await add(2)
        lost = ".log/0000000002.json is missing. Restore it from a backup"
        with pytest.raises(StoreError, match=re.escape(lost)):
            await asyncio.to_thread(mirror.sync)
        why = await mirror.finish()
        assert why == f"{url}/{lost}. The rows of this run are in {mirror.path}"
        mirror.close()
    assert not [key for key in await proxy.objects(url) if key.startswith(".log/0")]
    assert len(kit.final_rows(mirror.path)) == 2


async def test_a_store_that_was_emptied_between_two_starts_gets_its_rows_back(
    tmp_path: Path, server: FakeServer, proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start would pay for every row again."""
    order = arguments(tmp_path, server, url, "--concurrency", "1")
    await kit.finish_run(*order)
    rows, objects, served = await rows_at(url), await proxy.objects(url), len(server.entries)
    async with aiohttp.ClientSession(headers=SIGNED) as session:
        for key in objects:
            await session.delete(f"{proxy.target}/{url.removeprefix('s3://')}/{key}")
    assert not await proxy.objects(url)
    assert await asyncio.to_thread(main, ["check", url]) == 2
    refused = await kit.finish_run(*order, code=2)
    assert f"hermes-rl check {url} --repair" in "".join(refused.errors)
    assert len(server.entries) == served
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["check", url, "--repair"]) == 0
    assert "4 units done" in capsys.readouterr().out
    assert await rows_at(url) == rows
    await kit.finish_run(*order)
    assert len(server.entries) == served


async def test_the_end_of_a_run_uploads_everything_after_an_entry_that_failed(
    proxy: Proxy, url: str
) -> None:
    async with driving(url) as (mirror, _, add):
        await add(1)
        proxy.failure = lambda method, path: "403" if method == "PUT" and ".log/0" in path else None
        with pytest.raises(PermissionError):
            await asyncio.to_thread(mirror.sync)
        await add(2)
        requests: list[str] = []
        proxy.failure = lambda method, path: requests.append(path)
        assert await mirror.finish() == ""
        mirror.close()
    bucket = f"/{url.split('/')[2]}"
    assert requests.count(bucket) == 2, "only the run and the one table that it has are listed"
    assert len(await rows_at(url)) == 2


async def test_a_driver_that_was_replaced_merges_into_no_file_of_its_successor(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with driving(url, SHORT_S) as (mirror, driver, add):
        await add(1, 2)
        await driver.merge_files(quiet=mirror.quiet)
        await add(3, 4)
        await asyncio.to_thread(mirror.sync)
        mirror.close()  # it is suspended
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
            await compact_after_lease(url)
        named = await parts_at(proxy, url)
        await driver.merge_files(quiet=mirror.quiet)
        with pytest.raises(StoreError, match="was taken over"):
            await asyncio.to_thread(mirror.sync)
        assert named < await parts_at(proxy, url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    assert await asyncio.to_thread(main, ["compact", url]) == 0
    assert await parts_at(proxy, url) == named
    assert len(await rows_at(url)) == 4


async def test_a_driver_shows_that_it_lives_during_a_long_merge(proxy: Proxy, url: str) -> None:
    mirror = await asyncio.to_thread(fill, url, 0.4)
    seen = threading.Semaphore(0)

    def watch(method: str, path: str) -> None:
        if method == "PUT" and ".log/beat-" in path:
            seen.release()

    proxy.failure = watch
    with mirror.quiet:
        for _ in range(3):
            assert await asyncio.to_thread(seen.acquire, timeout=60)
    assert await mirror.finish() == ""
    mirror.close()
    assert not [key for key in await proxy.objects(url) if "beat" in key]


async def test_store_without_conditional_put_is_refused(proxy: Proxy, url: str) -> None:
    proxy.failure = lambda method, path: "overwrite"
    with pytest.raises(UserError, match="ignores put-if-absent"):
        await asyncio.to_thread(open_mirror, url, 30.0)


@pytest.mark.slow
async def test_a_run_is_merged_and_damage_in_the_store_is_reported_and_repaired(
    tmp_path: Path,
    server: FakeServer,
    proxy: Proxy,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await kit.finish_run(*arguments(tmp_path, server, url, "--concurrency", "1"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine-b"))
    rows = await rows_at(url)
    assert await asyncio.to_thread(main, ["compact", url]) == 0
    assert "Parquet files are now" in capsys.readouterr().out
    assert await rows_at(url) == rows
    (part,) = [key for key in await proxy.objects(url) if key.startswith("trajectories/")]

    place = f"{proxy.target}/{url.removeprefix('s3://')}/{part}"
    async with aiohttp.ClientSession(headers=SIGNED) as session:
        intact = await (await session.get(place)).read()
        flipped = bytes([*intact[:-9], intact[-9] ^ 1, *intact[-8:]])
        damages = ((flipped, "does not match its sha256"), (None, "is missing"))
        for damage, line in damages:
            if damage is None:
                await session.delete(place)
            else:
                await session.put(place, data=damage)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"reader-{line[:2]}"))
            assert await asyncio.to_thread(main, ["check", url]) == 2
            assert f"{url}/{part}: {line}" in capsys.readouterr().err
            with pytest.raises(StoreError, match=line):
                await asyncio.to_thread(load_run, url)
            if damage is not None:  # the object is put back after a check
                await asyncio.to_thread(main, ["check", url])
                await session.put(place, data=intact)
                assert await rows_at(url) == rows
    # The machine that has the rows puts them back; without it, their units run again. A commit is
    # made again from its files.
    (commit, *_) = [key for key in await proxy.objects(url) if key.startswith("commits/")]
    lost = (("machine-b", part, 4, 0), ("machine-d", commit, 4, 0), ("machine-c", part, 0, 2))
    for machine, name, units, code in lost:
        async with aiohttp.ClientSession(headers=SIGNED) as session:
            await session.delete(f"{proxy.target}/{url.removeprefix('s3://')}/{name}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        assert await asyncio.to_thread(main, ["check", url, "--repair"]) == code
        shown = capsys.readouterr().out
        assert f"{units} units done" in shown
        assert shown.count("lost: ") == (0 if units else 1)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
        assert len(await rows_at(url)) == units


async def test_a_lost_or_damaged_entry_of_the_log_is_read_from_its_copy_and_written_again(
    proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = await asyncio.to_thread(fill, url, 30.0, "00" * 16, "11" * 16)
    assert await mirror.finish() == ""
    mirror.close()
    rows = await rows_at(url)
    base = f"{proxy.target}/{url.removeprefix('s3://')}/"
    log = [key for key in await proxy.objects(url) if key.startswith(".log/00")]
    first, second, *_ = (name for name in log if name.endswith("json"))

    async with aiohttp.ClientSession(headers=SIGNED) as session:
        before = {name: await (await session.get(base + name)).read() for name in log}
        await session.delete(base + first)
        data = before[second]
        await session.put(base + second, data=bytes([*data[:40], data[40] ^ 1, *data[41:]]))
        last = second.replace(".json", ".copy").replace("2.", f"{len(log) // 2}.")
        await session.delete(base + last)  # as by a driver that was killed between the two
        assert await rows_at(url) == rows
        assert await asyncio.to_thread(main, ["check", url]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition("one/")[2] for line in lines] == [
            f"{first} is missing; its copy is intact",
            f"{second} is damaged: its content does not match its sha256; its copy is intact",
        ]
        assert await asyncio.to_thread(main, ["check", url, "--repair"]) == 0
        assert "its copy is intact" in capsys.readouterr().out
        after = {name: await (await session.get(base + name)).read() for name in log}
        assert after == before
        for lost in (first, first.replace(".json", ".copy")):
            await session.delete(base + lost)
    assert await asyncio.to_thread(main, ["check", url]) == 2
    assert "Restore" in capsys.readouterr().err


async def test_urls_that_cannot_be_used_are_refused_in_one_line(
    proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        ("show", url): "is not a run",
        ("show", "s3://absent/run"): "is not a run",
        ("show", "gs://bucket/run"): "pip install gcsfs",
        ("show", "what://x/run"): "what://x/run",
        ("compact", url): "is not a run",
        ("check", url, "--repair"): "is not a run",
    }
    for command, line in refused.items():
        assert await asyncio.to_thread(main, list(command)) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1
