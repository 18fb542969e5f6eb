"""Workers are processes of their own; they die, hang and come too late."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import invariants as checks
import msgspec
import pytest
import scripted_rows

from hermes_rl.errors import StoreError
from hermes_rl.store import (
    CRASH_VARIABLE,
    CrashHook,
    Derived,
    Driver,
    JournalWriter,
    OpenOptions,
    Prepared,
    Publisher,
    RunDir,
    compact_run,
    load_run,
    open_run,
    prepare_batch,
)

HERE = Path(__file__).parent
OPTIONS = OpenOptions(grace_s=0.3)


def start(
    driver: Driver, worker: int, attempts: list[str], crash_at: str = "", **env: str
) -> subprocess.Popen:
    """Dispatch attempts to a new worker process."""
    for name in attempts:
        if name != "hold":
            number, attempt = map(int, name.split(":"))
            driver.dispatch(
                scripted_rows.make_item(number, attempt, driver.epoch), f"{driver.epoch}-{worker}"
            )
    order = [str(driver.run_dir.path), str(driver.epoch), str(worker), *attempts]
    return subprocess.Popen(
        [sys.executable, str(HERE / "scripted_worker.py"), *order],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HERMES_RL_CRASH_AT": crash_at, "PYTHONPATH": str(HERE), **env},
    )


async def serve(driver: Driver, worker: subprocess.Popen, outcomes: list[str]) -> list[str]:
    """Commit what a worker prepares until it ends or is suspended. Returns the attempts that it
    printed."""
    assert worker.stdout
    assert worker.stdin
    printed = []
    while line := (await asyncio.to_thread(worker.stdout.readline)).split():
        if line[0] != "commit":
            printed += line
            continue
        outcome = ""
        try:
            await driver.commit(msgspec.json.decode(bytes.fromhex(line[1]), type=Prepared))
        except StoreError as error:
            outcome = str(error)
        outcomes.append(outcome)
        with suppress(BrokenPipeError):
            worker.stdin.write(outcome + "\n")
            worker.stdin.flush()
    return printed


def receive(driver: Driver, printed: list[str], worker: int) -> None:
    for name in printed:
        number, attempt = map(int, name.split(":"))
        made = scripted_rows.make_finished(number, attempt, driver.epoch)
        driver.receive(scripted_rows.make_receipt(made, f"{driver.epoch}-{worker}"))


@pytest.mark.parametrize(
    "crash_at",
    [
        "attempt-2-live:20",
        "attempt-3-done-torn:5",
        "attempt-4-synced:4",
        "publish-7-half:1",
        "publish-7-prepared:1",
        "publish-9-live:1",
    ],
)
async def test_a_worker_dies_under_a_running_driver(run_path: Path, crash_at: str) -> None:
    todo = [f"{n}:0" for n in range(6)]
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        worker = start(driver, 1, todo, crash_at)
        printed = await serve(driver, worker, [])
        assert worker.wait(60) == -signal.SIGKILL
        receive(driver, printed[:-1], 1)  # the last receipt never reached the driver

        news = await driver.recover_worker("1-1")
        assert driver.in_flight == 0
        finished = {r.unit_id for r in news if r.status == "ok"}
        lost = {r.unit_id for r in news if r.cause == "worker_lost"}
        assert len(news) == len(finished) + len(lost)
        for receipt in news:
            (number,) = (n for n in range(6) if scripted_rows.unit_id(n) == receipt.unit_id)
            assert receipt.task_id == f"task-{number // 4}"
            if receipt.status == "ok":
                row = scripted_rows.make_row(number)
                assert receipt.usage == row.usage
                assert (receipt.reward, receipt.turns) == (row.reward, row.turns)
        assert {scripted_rows.unit_id(int(t.split(":")[0])) for t in printed[-1:]} <= finished
        for number in range(6):
            unit = scripted_rows.unit_id(number)
            gone = unit in lost
            assert driver.ledger.disposition(unit) == ("open" if gone else "done")
            assert driver.ledger.lost_workers(unit) == int(gone)
            assert driver.ledger.counted_failures(unit) == 0
            assert driver.ledger.next_attempt(unit) == 1
        assert not (run_path / "journal" / "1-1").exists()
        assert list((run_path / "tmp").iterdir()) == []
        checks.check_invariants(run_path)

        again = [f"{n}:1" for n in range(6) if scripted_rows.unit_id(n) in lost]
        second = start(driver, 2, again)
        assert await serve(driver, second, []) == again
        assert second.wait(60) == 0
        receive(driver, again, 2)
    assert list((run_path / "journal").iterdir()) == []
    run = load_run(run_path)
    assert sorted(run.trajectories["unit_id"]) == sorted(scripted_rows.unit_id(n) for n in range(6))
    assert set(run.failures["unit_id"]) == lost
    never_began = run.failures[run.failures["model"] == ""]
    assert set(run.failures["task_id"]) <= {f"task-{n // 4}" for n in range(6)}
    assert never_began["messages"].map(len).sum() == 0


@pytest.mark.parametrize(
    ("suspended_at", "refused"),
    [
        ("attempt-4-synced:2", False),
        ("publish-6-opened:1", False),
        ("publish-6-sealed:1", False),
        ("publish-7-half:1", False),
        ("publish-7-prepared:1", True),
        ("publish-7-prepared:2", True),
    ],
)
async def test_a_worker_that_continues_after_its_recovery_leaves_only_orphans(
    run_path: Path, suspended_at: str, refused: bool
) -> None:
    """It has lost its lock, as on a network file system: otherwise recovery kills it."""
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        todo = [f"{n}:0" for n in range(6)]
        worker = start(driver, 1, todo, suspended_at, HERMES_TEST_SUSPEND="1")
        outcomes: list[str] = []
        serving = asyncio.create_task(serve(driver, worker, outcomes))
        await asyncio.to_thread(os.waitpid, worker.pid, os.WUNTRACED)
        (run_path / "journal" / "1-1" / "alive").unlink()
        await driver.recover_worker("1-1")
        assert driver.in_flight == 0
        files = sorted(run_path.glob("*/part-*.parquet"))
        before = load_run(run_path).trajectories["unit_id"].tolist()
        worker.send_signal(signal.SIGCONT)
        await serving
        assert worker.wait(60) == 1
        # Other threads may run for a moment after a suspension, so an earlier one proves nothing.
        assert not refused or "writer 1-1 was given up" in outcomes
        assert sorted(run_path.glob("*/part-*.parquet")) == files
        checks.check_invariants(run_path)
        assert load_run(run_path).trajectories["unit_id"].tolist() == before
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS):
        assert list((run_path / "tmp").iterdir()) == []
        assert list((run_path / "journal").iterdir()) == []
        assert load_run(run_path).trajectories["unit_id"].tolist() == before


async def test_a_driver_commits_nothing_after_another_one_began(run_path: Path) -> None:
    """It has lost LOCK. What its worker prepared is published from the journal instead, once."""
    first = await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
    async with JournalWriter(first.run_dir, first.epoch, 1) as journal:
        await scripted_rows.run_attempt(first, journal, 0)
        batch = await journal.seal()
        assert batch is not None
        prepared = prepare_batch(first.run_dir, batch.file.path, batch.stem)
        assert prepared is not None
    for lost in (run_path / "LOCK", run_path / "journal" / "1-1" / "alive"):
        lost.unlink()
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS):
        commit = (run_path / "commits" / "1-1-0.json").read_bytes()
        lost_run = partial(pytest.raises, StoreError, match="was taken over: epoch 2 has begun")
        with lost_run():
            await first.commit(prepared)
        first.dispatch(scripted_rows.make_item(1), "1-1")
        with lost_run():
            await first.recover_worker("1-1")
        with lost_run():
            await first.publish(Derived(groups=(scripted_rows.make_group(0),)))
    assert not list((run_path / "failures").iterdir())
    await first.aclose()
    with pytest.raises(StoreError, match="the driver of 1-1 has ended"):
        await first.commit(prepared)
    assert (run_path / "commits" / "1-1-0.json").read_bytes() == commit
    assert len(load_run(run_path).trajectories) == 1
    checks.check_invariants(run_path)


@pytest.mark.parametrize(
    "point",
    ["publish-7-written", "publish-8-written", "attempt-3-done", "recover-4-written"],
)
async def test_a_driver_that_is_replaced_behind_its_check_publishes_nothing(
    run_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost LOCK, and is suspended between the comparison of epochs and a rename."""
    monkeypatch.setenv(CRASH_VARIABLE, point)
    first = await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
    monkeypatch.delenv(CRASH_VARIABLE)
    found: list[dict[str, bytes]] = []

    async def take_over() -> None:
        async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as second:
            assert second.epoch == 2
            found.append(published(run_path))

    monkeypatch.setattr(CrashHook, "die", lambda hook: asyncio.run(take_over()))
    if point.startswith("publish"):
        async with JournalWriter(RunDir(run_path), first.epoch, 1) as journal:
            await scripted_rows.run_attempt(first, journal, 0)
            batch = await journal.seal()
            assert batch is not None
            prepared = prepare_batch(journal.run_dir, batch.file.path, batch.stem)
            assert prepared is not None
        work = first.commit(prepared)
    else:
        work = first.publish(Derived(groups=(scripted_rows.make_group(0),)))
    for lost in (run_path / "LOCK", run_path / "journal" / "1-1" / "alive"):
        lost.unlink(missing_ok=True)
    # At the last point its rows are in its journal, and the second driver has published them.
    refused = pytest.raises(StoreError, match="was taken over by another driver")
    with nullcontext() if point == "recover-4-written" else refused:
        await work
    assert published(run_path) == found[0]
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS):
        assert published(run_path) == found[0]
    checks.check_invariants(run_path)
    assert not [path for path in run_path.glob("epochs/*") if path.is_dir()]


async def test_a_merge_that_is_replaced_behind_its_check_exchanges_nothing(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would put the old table back, beside which its successor has published."""
    for n in range(3):
        await add_batch(run_path, n)

    def take_over(hook: CrashHook) -> None:
        monkeypatch.delenv(CRASH_VARIABLE)
        (run_path / "LOCK").unlink()
        asyncio.run(add_batch(run_path, 3))

    monkeypatch.setattr(CrashHook, "die", take_over)
    monkeypatch.setenv(CRASH_VARIABLE, "compact-4-due")
    with pytest.raises(StoreError, match="was taken over by another driver"):
        await asyncio.to_thread(compact_run, run_path)
    whole = Counter(scripted_rows.unit_id(n) for n in range(4))
    assert checks.glob_units(run_path) == whole
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS):
        assert checks.glob_units(run_path) == whole
    checks.check_invariants(run_path)


async def test_a_file_that_is_removed_while_it_is_open_keeps_its_folder(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and FUSE give it another name until it is closed: every run ended with a traceback."""
    unlink = Path.unlink

    def hide(path: Path, missing_ok: bool = False) -> None:
        if path.name == "alive":
            path.rename(path.with_name(".nfs0001"))
        else:
            unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", hide)
    await add_batch(run_path, 0)
    monkeypatch.undo()
    (hidden,) = run_path.glob("journal/*/.nfs0001")
    hidden.unlink()
    await add_batch(run_path, 1)
    assert list((run_path / "journal").iterdir()) == []
    assert len(load_run(run_path).trajectories) == 2


async def add_batch(path: Path, number: int) -> None:
    async with (
        await open_run(path, scripted_rows.CONFIG, None, OPTIONS) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 1) as journal,
    ):
        await scripted_rows.run_attempt(driver, journal, number)
        await Publisher(journal).drain()


def published(path: Path) -> dict[str, bytes]:
    files = [*path.glob("*/*.parquet"), *path.glob("commits/*")]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


async def test_a_unit_under_which_three_workers_died_is_given_up(run_path: Path) -> None:
    unit = scripted_rows.unit_id(0)
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        for attempt in range(3):
            assert driver.ledger.disposition(unit) == "open"
            worker = start(driver, attempt, [f"0:{attempt}"], "attempt-2-live:2")
            assert worker.communicate(timeout=60)[0] == ""
            await driver.recover_worker(f"1-{attempt}")
            assert driver.ledger.lost_workers(unit) == attempt + 1
        assert driver.ledger.disposition(unit) == "given_up"
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        assert driver.ledger.disposition(unit) == "given_up"
    options = OpenOptions(retry_failed=True)
    async with await open_run(run_path, scripted_rows.CONFIG, None, options) as driver:
        assert driver.ledger.disposition(unit) == "open"
        assert driver.ledger.next_attempt(unit) == 3


async def test_a_hanging_worker_of_a_dead_driver_is_killed(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        worker = start(driver, 1, ["0:0", "hold"])
        assert worker.stdout
        while worker.stdout.readline() != "holding\n":
            pass
        worker.send_signal(signal.SIGSTOP)
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        assert worker.wait(60) == -signal.SIGKILL
        assert driver.ledger.disposition(scripted_rows.unit_id(0)) == "done", "it was durable"
        assert driver.report.lost == [scripted_rows.attempt_key(99)]
    assert list((run_path / "journal").iterdir()) == []


async def test_a_late_worker_of_an_old_epoch_is_refused(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG):
        pass
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        late = JournalWriter(driver.run_dir, 1, 1)
        with pytest.raises(StoreError, match="comes too late: epoch 2 has begun"):
            await late.__aenter__()
        async with JournalWriter(driver.run_dir, 2, 1):
            with pytest.raises(StoreError, match="exists already"):
                await JournalWriter(driver.run_dir, 2, 1).__aenter__()


async def test_a_writer_that_is_cancelled_while_it_opens_leaves_nothing(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = threading.Event(), threading.Event()

    def wait(run_dir: RunDir) -> list[int]:
        opening.set()
        go_on.wait(60)
        return []

    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        with monkeypatch.context() as patched:
            patched.setattr(RunDir, "epochs", wait)
            task = asyncio.create_task(JournalWriter(driver.run_dir, 1, 1).__aenter__())
            assert await asyncio.to_thread(opening.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with JournalWriter(driver.run_dir, 1, 1):  # the name and its lock are free
            pass


async def test_hanging_workers_share_one_grace_period(run_path: Path) -> None:
    options = OpenOptions(grace_s=6.0)
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        workers = [start(driver, n, ["hold"]) for n in range(5)]
        for worker in workers:
            assert worker.stdout
            assert worker.stdout.readline() == "holding\n"
    began = time.monotonic()
    async with await open_run(run_path, scripted_rows.CONFIG, None, options):
        took = time.monotonic() - began
    assert [worker.wait(60) for worker in workers] == [-signal.SIGKILL] * 5
    assert 6.0 <= took < 5 * 6.0


async def test_fatal_commands_survive_a_lost_receipt(run_path: Path) -> None:
    """The next attempt gets the command during which a sandbox died, also after a restart."""
    unit = scripted_rows.unit_id(0)
    died = scripted_rows.make_finished(0, cause="sandbox_died")
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        driver.dispatch(scripted_rows.make_item(0), "1-1")
        async with JournalWriter(driver.run_dir, driver.epoch, 1) as journal:
            await journal.finish(msgspec.structs.replace(died, fatal_command="call"))
        (news,) = await driver.recover_worker("1-1")
        assert (news.cause, news.fatal_command) == ("sandbox_died", "call")
        assert driver.ledger.fatal_commands(unit) == ("call",)
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        assert driver.ledger.fatal_commands(unit) == ("call",)


@pytest.mark.parametrize("damage", ["missing", "cut"])
async def test_a_damaged_part_of_a_lost_worker_is_reported(run_path: Path, damage: str) -> None:
    """Its rows are read for the receipts that never arrived."""
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        driver.dispatch(scripted_rows.make_item(0), "1-1")
        async with JournalWriter(driver.run_dir, driver.epoch, 1) as journal:
            await journal.finish(scripted_rows.make_finished(0))
            await Publisher(journal).drain()
        (part,) = driver.run_dir.parts("trajectories")
        if damage == "missing":
            part.unlink()
        else:
            part.write_bytes(part.read_bytes()[:100])
        with pytest.raises(StoreError, match=f"{part.name} cannot be read: "):
            await driver.recover_worker("1-1")
