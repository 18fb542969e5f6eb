"""A checkpoint of the ledger changes what a start reads, and nothing that it knows."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import invariants as checks
import msgspec
import pytest
import scripted_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_driver import Plan
from scripted_rows import Play
from test_ledger import apply, commit_of, histories

from hermes_rl.cli import read_status
from hermes_rl.errors import StoreError
from hermes_rl.store import (
    Ledger,
    OpenOptions,
    RunDir,
    file_faults,
    load_ledger,
    load_run,
    open_checkpoint,
    open_run,
    read_commits,
    repair_run,
    write_checkpoint,
    write_commit,
)

FILE = "ledger.checkpoint"
UNITS = 11


def snapshot(ledger: Ledger) -> list[object]:
    """All that a ledger knows."""
    about = ledger.next_attempt, ledger.counted_failures, ledger.lost_workers
    units = {
        unit: (state, *(of(unit) for of in about), {*ledger.fatal_commands(unit)})
        for unit, state in ledger.units()
    }
    return [units, ledger.done, ledger.given_up, len(ledger), ledger.summary.counts]


def without(run_dir: RunDir) -> Ledger:
    """The ledger, from all commits."""
    ledger = Ledger()
    ledger.load(read_commits(run_dir))
    return ledger


async def begin(path: Path) -> None:
    async with await open_run(path, scripted_rows.CONFIG):
        pass


@pytest.fixture(scope="module")
def empty_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path = tmp_path_factory.mktemp("checkpoint") / "run"
    asyncio.run(begin(path))
    return RunDir(path)


@settings(max_examples=40, deadline=None)
@given(history=histories, cuts=st.tuples(*[st.floats(0, 1)] * 3), first=st.integers(1, 3))
def test_a_checkpoint_changes_nothing_that_a_start_knows(
    empty_run: RunDir,
    history: dict[int, list[str | None]],
    cuts: tuple[float, ...],
    first: int,
) -> None:
    """Attempts in four parts: of the first checkpoint, of the second, committed later, applied."""
    attempts = [
        (n, i, cause)
        for n, tries in history.items()
        for i, cause in enumerate(tries)
        if None not in tries[:i]  # a unit finishes once
    ]
    random.Random(len(attempts)).shuffle(attempts)
    at = [0, *sorted(int(cut * len(attempts)) for cut in cuts), len(attempts)]
    for path in [*empty_run.path.glob("commits/*"), *empty_run.path.glob(FILE)]:
        path.unlink()
    base = None
    for n in range(3):
        made = commit_of(attempts[at[n] : at[n + 1]])
        stem = f"1-{n % 2}-{n and n - 1 + first}"
        write_commit(empty_run, msgspec.structs.replace(made, stem=stem))
        if n < 2:
            base = write_checkpoint(empty_run, 1, base) or base
    whole, short = without(empty_run), load_ledger(empty_run)
    assert (short.base is None) == (at[2] == 0)
    for ledger in (whole, short):
        apply(ledger, attempts[at[3] :])
    assert snapshot(short) == snapshot(whole)
    keys = [bytes.fromhex(scripted_rows.unit_id(n)) for n in range(401)]
    assert [*map(short.is_done, keys)] == [*map(whole.is_done, keys)]
    done = b"".join(key for key in keys if whole.is_done(key))
    assert short.all_done(done)
    assert not any(short.all_done(done + key) for key in keys if not whole.is_done(key))
    assert short.reopen_given_up() == whole.reopen_given_up()
    assert snapshot(short) == snapshot(whole)


def test_keys_may_have_the_same_first_half(empty_run: RunDir) -> None:
    for path in empty_run.path.glob("commits/*"):
        path.unlink()
    made = commit_of([(n, 0, None if n % 2 else "model_timeout") for n in range(8)])
    base = None
    for n in range(2):
        ids = [f"{(m // 4):016x}{(5 * m + n) % 8:016x}" for m in range(8)]
        keys = msgspec.structs.replace(made.keys, unit_id=ids)
        write_commit(empty_run, msgspec.structs.replace(made, stem=f"1-0-{n}", keys=keys))
        base = write_checkpoint(empty_run, 1, base)
    whole, short = without(empty_run), load_ledger(empty_run)
    assert short.base is not None
    assert short.changed == {}
    assert {u: short.disposition(u) for u, _ in whole.units()} == dict(whole.units())
    done = [bytes.fromhex(unit) for unit, state in whole.units() if state == "done"]
    assert short.all_done(b"".join(done))
    assert not any(short.all_done(bytes.fromhex(u)) for u, s in whole.units() if s != "done")


@pytest.fixture
def finished(play: Play, run_path: Path) -> RunDir:
    """A run whose checkpoint covers all batches."""
    assert play(path=run_path, units=UNITS) == 0
    run_dir = RunDir(run_path)
    assert checks.check_checkpoint(run_dir) == UNITS
    return run_dir


def test_a_damaged_checkpoint_is_not_used(finished: RunDir) -> None:
    """Whatever byte is changed, and wherever it is cut."""
    expected, path, draw = snapshot(without(finished)), finished.path / FILE, random.Random(1)
    content = path.read_bytes()
    assert snapshot(load_ledger(finished)) == expected
    for _ in range(100):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        assert open_checkpoint(finished) is None
    for size in (0, 8, 31, 32, 40, *draw.sample(range(len(content)), 20)):
        path.write_bytes(content[:size])
        assert open_checkpoint(finished) is None
    assert snapshot(load_ledger(finished)) == expected
    assert [*file_faults(finished)] == []


def test_a_status_reads_only_later_commits(finished: RunDir) -> None:
    base = open_checkpoint(finished)
    assert base is not None
    for commit in finished.path.glob("commits/*.json"):
        if base.covers(commit.stem):
            commit.write_bytes(b"never read")
    status = read_status(finished.path)
    assert (status.trouble, status.done > 0) == ((), True)
    min(finished.path.glob("failures/*")).unlink()
    with pytest.raises(StoreError, match="is damaged"):  # without a checkpoint, all are read
        read_status(finished.path)


def remove_a_part(run_dir: RunDir) -> None:
    min(run_dir.path.glob("trajectories/*")).unlink()


def cut_a_part(run_dir: RunDir) -> None:
    part = min(run_dir.path.glob("failures/*"))
    part.write_bytes(part.read_bytes()[:-1])


def remove_a_commit(run_dir: RunDir) -> None:
    min(run_dir.path.glob("commits/*")).unlink()


def repair_with_it(run_dir: RunDir) -> None:
    """As a version does that has no checkpoints."""
    content = (run_dir.path / FILE).read_bytes()
    remove_a_part(run_dir)
    repair_run(run_dir.path)
    (run_dir.path / FILE).write_bytes(content)


@pytest.mark.parametrize("change", [remove_a_part, cut_a_part, remove_a_commit, repair_with_it])
def test_a_run_that_lost_files_is_read_from_its_commits(
    finished: RunDir, change: Callable[[RunDir], None]
) -> None:
    before = snapshot(load_ledger(finished))
    change(finished)
    changed = RunDir(finished.path)
    assert open_checkpoint(changed) is None
    assert (snapshot(load_ledger(changed)) == before) == (change is cut_a_part)


def test_a_start_reads_only_later_commits(finished: RunDir, play: Play) -> None:
    """Also after their files were merged."""
    path, plan = finished.path, Plan(str(finished.path), UNITS + 9)
    checkpoint = (path / FILE).read_bytes()
    assert play(path=path, units=plan.units) == 0
    assert play(do="compact", path=path) == 0
    expected = snapshot(without(RunDir(path)))
    (path / FILE).write_bytes(checkpoint)
    base = open_checkpoint(RunDir(path))
    assert base is not None
    assert len(base) == UNITS
    stems = RunDir(path).commit_stems()
    covered = {
        file: file.read_bytes()
        for file in (path / f"commits/{stem}.json" for stem in stems if base.covers(stem))
    }
    assert 0 < len(covered) < len(stems)
    for file in covered:
        file.write_text("not read")
    assert snapshot(load_ledger(RunDir(path))) == expected
    assert load_run(path).ledger.done == load_ledger(RunDir(path)).done
    for file, content in covered.items():
        file.write_bytes(content)
    assert play(path=path, units=plan.units) == 0
    checks.check_finished_run(path, plan)


async def test_a_checkpoint_frees_what_the_ledger_has_of_it(run_path: Path, play: Play) -> None:
    assert play(path=run_path, units=UNITS) == 0
    (run_path / FILE).unlink()
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        await driver.write_checkpoint()
        assert not (run_path / FILE).exists()  # for so few units
    options = OpenOptions(many_units=1)
    async with await open_run(run_path, scripted_rows.CONFIG, None, options) as driver:
        before = snapshot(driver.ledger)
        assert len(driver.ledger.changed) == UNITS
        await driver.write_checkpoint()
        assert len(driver.ledger.changed) == UNITS - driver.ledger.done
        assert snapshot(driver.ledger) == before
        assert snapshot(load_ledger(driver.run_dir)) == before


async def test_a_run_continues_without_a_checkpoint(run_path: Path, play: Play) -> None:
    assert play(path=run_path, units=UNITS) == 0
    (run_path / FILE).unlink()
    options = OpenOptions(many_units=1)
    async with await open_run(run_path, scripted_rows.CONFIG, None, options) as driver:
        (run_path / FILE).mkdir()
        await driver.write_checkpoint()
        assert [*run_path.glob("tmp/*")] == []
        assert driver.ledger.base is None
        (run_path / FILE).rmdir()
    async with await open_run(run_path, scripted_rows.CONFIG, None, options) as driver:
        with patch("hermes_rl.store.checkpoint._map", side_effect=ValueError("damaged")):
            await driver.write_checkpoint()
        assert driver.ledger.base is None
        (run_path / FILE).write_text("damaged")
    assert open_checkpoint(RunDir(run_path)) is None
