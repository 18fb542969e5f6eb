"""Incomplete lines of a kill are cut; damage stops the run, loses nothing, and can be repaired."""

import asyncio
import os
from pathlib import Path

import invariants as checks
import msgspec
import pytest
import scripted_rows
from scripted_driver import Plan
from scripted_rows import Play

from hermes_rl.errors import StoreError
from hermes_rl.store import (
    JournalWriter,
    OpenOptions,
    RunDir,
    compact_run,
    encode_line,
    file_faults,
    load_run,
    open_run,
    repair_run,
)

KILLED = -9
OPTIONS = OpenOptions(grace_s=0.1)


def cut_run(play: Play, path: Path, crash_at: str = "publish-6-opened") -> Path:
    """A run that was killed with three finished attempts in its only `done` file."""
    assert play(path=path, crash_at=crash_at) == KILLED
    return path / "journal" / "1-0" / "done-0.jsonl"


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_torn_tail_is_cut(play: Play, run_path: Path, share: float) -> None:
    done = cut_run(play, run_path)
    lines = done.read_bytes().splitlines(keepends=True)
    tail = max(1, int(len(lines[-1]) * share))
    done.write_bytes(b"".join(lines[:-1]) + lines[-1][:tail])
    (run_path.with_name("run.log")).unlink()  # its last receipt was never given
    assert play(path=run_path) == 0
    checks.check_finished_run(run_path, Plan(str(run_path)))


def test_recovery_works_with_a_truncated_live_file(play: Play, run_path: Path) -> None:
    cut_run(play, run_path, "attempt-3-done")
    live = run_path / "journal" / "1-0" / "live-0.jsonl"
    os.truncate(live, live.stat().st_size // 2)
    assert play(path=run_path) == 0
    checks.check_finished_run(run_path, Plan(str(run_path)))


@pytest.mark.parametrize("kind", ["done", "live"])
async def test_a_flipped_byte_stops_the_run_and_can_be_repaired(
    play: Play, run_path: Path, kind: str
) -> None:
    done = cut_run(play, run_path)
    damaged = done.with_name(f"{kind}-0.jsonl")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)

    with pytest.raises(StoreError) as caught:
        await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
    kept = run_path / "quarantine" / "1-0" / damaged.name
    assert str(damaged) in str(caught.value)
    assert "line " in str(caught.value)
    assert f"moved to {kept}" in str(caught.value)
    assert "--repair` saves its good lines" in str(caught.value)
    assert kept.read_bytes() == content, "nothing is deleted"
    with pytest.raises(StoreError, match=r"waits for .hermes-rl check"):
        await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)

    report = await asyncio.to_thread(repair_run, run_path, grace_s=0.1)
    assert [Path(p).read_bytes() for p in report.saved] == [content]
    lost_rows = 1 if kind == "done" else 0
    rows = load_run(run_path)
    finished = set(rows.trajectories["unit_id"]) | set(
        rows.failures[~rows.failures["cause"].isin(["driver_lost"])]["unit_id"]
    )
    _, receipts = checks.read_log(run_path)
    assert len({unit for unit, _, _ in receipts} - finished) <= lost_rows
    assert play(path=run_path) == 0
    assert (await asyncio.to_thread(repair_run, run_path)).saved == []


async def test_a_unit_finished_twice_stops_the_run_until_repaired(
    play: Play, run_path: Path
) -> None:
    plan = Plan(str(run_path))
    assert play(path=run_path) == 0
    # This can only happen when a fenced writer continues.
    late_writer = run_path / "journal" / "1-7"
    late_writer.mkdir()
    again = [scripted_rows.make_finished(n, attempt=5) for n in (0, 1)]
    lines = [encode_line(msgspec.json.encode(f)) for f in again]
    (late_writer / "done-0.jsonl").write_bytes(b"".join(lines))

    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
        assert "finished more than once: epoch 1 attempt 0 (1-0-" in str(caught.value)
        assert "epoch 1 attempt 5 (1-7-0)" in str(caught.value)

    report = await asyncio.to_thread(repair_run, run_path)
    assert sorted(report.duplicates) == sorted(scripted_rows.unit_id(n) for n in (0, 1))
    assert play(path=run_path) == 0
    run = load_run(run_path)
    moved = run.failures[run.failures["cause"] == "duplicate"]
    assert set(moved["attempt"]) == {5}
    assert moved["reward"].isna().all()
    assert run.stats["causes"]["duplicate"] == 2
    assert run.trajectories["unit_id"].is_unique
    assert len(run.trajectories) == plan.units - 2
    assert not (run_path / "trajectories" / "part-1-7-0.parquet").exists()
    checks.check_invariants(run_path)


async def test_a_repair_updates_sums_and_excludes_duplicates_from_training(
    play: Play, run_path: Path
) -> None:
    """The batch of the later row also has a row of another unit, and tokens of both."""
    assert play(path=run_path) == 0
    both = []
    for made in (scripted_rows.make_finished(0, attempt=5), scripted_rows.make_finished(95)):
        row = msgspec.structs.replace(made.row, metrics={"captured_calls": 2.0})
        segment = msgspec.structs.replace(
            made.segments[0], trajectory_id=row.trajectory_id, reward=1.0
        )
        both.append(msgspec.structs.replace(made, row=row, segments=(segment,)))
    late_writer = run_path / "journal" / "1-7"
    late_writer.mkdir()
    lines = [encode_line(msgspec.json.encode(f)) for f in both]
    (late_writer / "done-0.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(StoreError):
        await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
    before = load_run(run_path).stats["exact_tokens"]

    await asyncio.to_thread(repair_run, run_path)
    run = load_run(run_path)
    segments = run.segments.set_index("trajectory_id").loc[[f.row.trajectory_id for f in both]]
    assert list(segments["trainable"]) == [False, True]
    assert segments["exclude_reason"].fillna("").tolist() == ["failed", ""]
    assert segments["reward"].isna().tolist() == [True, False]
    after = run.stats["exact_tokens"]
    fewer = {"trainable": before["trainable"] - 1, "trained_tokens": before["trained_tokens"] - 2}
    assert after == {**before, **fewer}
    assert after["calls"] == 4
    checks.check_invariants(run_path)


def test_a_repair_that_was_killed_when_it_had_moved_a_damaged_part_is_completed(
    play: Play, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(path=run_path) == 0
    part = next((run_path / "trajectories").iterdir())
    os.truncate(part, 300)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("hermes_rl.store.repair.write_commit", kill)
        with pytest.raises(KeyboardInterrupt):
            repair_run(run_path)
    assert not part.exists()
    repair_run(run_path)
    assert list(file_faults(RunDir(run_path))) == []


@pytest.mark.parametrize("table", ["trajectories", "segments", "failures"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_missing_file_is_given_up_by_a_repair_and_can_come_back(
    play: Play, run_path: Path, table: str, merged: bool
) -> None:
    assert play(path=run_path) == 0
    if merged:
        compact_run(run_path, grace_s=0)
    before = load_run(run_path)
    part = next(run_path.glob(f"{table}/*.parquet"))
    content = part.read_bytes()
    part.unlink()
    assert repair_run(run_path).lost == [f"{table}/{part.name}"]
    assert play(path=run_path) == 0
    assert [*file_faults(RunDir(run_path))] == [], "its units have run again"
    assert repair_run(run_path).lost == []
    part.write_bytes(content)
    assert [*file_faults(RunDir(run_path))] == [(part, "is not in the commit of its batch")]
    again = repair_run(run_path)
    assert bool(again.duplicates) == (table == "trajectories")
    assert play(path=run_path) == 0
    assert [*file_faults(RunDir(run_path))] == []
    after = load_run(run_path)
    for name in (table, "trajectories"):
        found = (set(run.arrow(name)["trajectory_id"].to_pylist()) for run in (before, after))
        assert next(found) == next(found)
    if table != "trajectories":
        assert after.stats == before.stats


def test_a_batch_that_is_committed_during_a_check_is_no_fault(play: Play, run_path: Path) -> None:
    """Its parts have their names; its commit follows, and then its `done` file is removed."""
    assert play(path=run_path) == 0
    commit = next(run_path.glob("commits/*.json"))
    content, (writer, _, number) = commit.read_bytes(), commit.stem.rpartition("-")
    done = run_path / "journal" / writer / f"done-{number}.jsonl"
    part = next((run_path / "trajectories").iterdir())
    foreign = part.with_name("part-1-7-7.parquet")
    foreign.write_bytes(part.read_bytes())
    done.parent.mkdir()
    done.touch()
    commit.unlink()
    found = file_faults(RunDir(run_path))
    assert next(found) == (foreign, "belongs to no commit")
    commit.write_bytes(content)
    done.unlink()
    done.parent.rmdir()
    assert [fault for fault in found if fault[0].suffix == ".parquet"] == []


async def test_foreign_parts_are_reported_and_kept(play: Play, run_path: Path) -> None:
    assert play(path=run_path) == 0
    part = next((run_path / "trajectories").iterdir())
    (run_path / "trajectories" / "part-9-0-0.parquet").write_bytes(part.read_bytes())
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        assert driver.report.foreign == ["trajectories/part-9-0-0.parquet"]
    assert (run_path / "trajectories" / "part-9-0-0.parquet").exists()


async def test_rows_of_lost_attempts_keep_their_turns(play: Play, run_path: Path) -> None:
    """Killed with a call open: the turns so far stand, the call is unknown, nothing is graded."""
    cut_run(play, run_path, "attempt-2-live:14")
    async with await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS) as driver:
        assert len(driver.report.lost) == 3
    run = load_run(run_path)
    lost = run.failures
    assert list(lost["cause"]) == ["driver_lost"] * 3
    assert lost["reward"].isna().all()
    assert set(lost["error"]) == {"driver_lost: killed"}
    calls = [call for calls in lost["calls"] for call in calls]
    assert {call["outcome"] for call in calls} == {"ok", "unknown"}
    assert run.stats["calls"]["unknown"] >= 1
    assert max(len(m) for m in lost["messages"]) >= 1


async def test_foreign_files_do_not_prevent_a_start(play: Play, run_path: Path) -> None:
    """A network file system keeps removed files that are open as `.nfs...`."""
    cut_run(play, run_path)
    folder = run_path / "journal" / "1-0"
    (folder / ".nfs0001").write_bytes(b"x")
    (folder / "done-x.jsonl").write_bytes(b"x")
    (run_path / "journal" / "1-0.txt").write_bytes(b"x")
    (run_path / "tmp" / ".nfs0002").mkdir()
    (run_path / "tmp" / "half").write_bytes(b"x")
    assert play(path=run_path) == 0
    assert sorted(os.listdir(folder)) == [".nfs0001", "done-x.jsonl"]
    assert os.listdir(run_path / "tmp") == [".nfs0002"]
    assert load_run(run_path).trajectories["unit_id"].is_unique


def zeros_in(path: Path, share: float = 0.4) -> int:
    """Overwrite the middle of a line with zeros, as of a page that never came to the disk."""
    content = bytearray(path.read_bytes())
    lines = bytes(content).splitlines(keepends=True)
    number = int(len(lines) * share)
    at = sum(map(len, lines[:number])) + len(lines[number]) // 3
    content[at : at + 60] = bytes(60)
    path.write_bytes(content)
    return at


@pytest.mark.parametrize("kind", ["done", "live"])
async def test_unwritten_pages_are_skipped(play: Play, run_path: Path, kind: str) -> None:
    """Power was lost: a later page of an unsynced tail is there, an earlier one is not."""
    done = cut_run(play, run_path, "attempt-3-done:3")  # the third is not synced
    if kind == "done":
        lines = [
            encode_line(msgspec.json.encode(scripted_rows.make_finished(n))) for n in (60, 61, 62)
        ]
        with done.open("ab") as file:
            file.writelines(lines)
    zeros_in(done.with_name(f"{kind}-0.jsonl"), share=0.8 if kind == "done" else 0.4)
    run_path.with_name("run.log").unlink()
    assert play(path=run_path) == 0
    assert load_run(run_path).trajectories["unit_id"].is_unique
    if kind == "done":
        assert scripted_rows.unit_id(62) in set(load_run(run_path).trajectories["unit_id"])


async def test_zeros_in_synced_bytes_are_damage(run_path: Path) -> None:
    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        for number in range(4):
            await scripted_rows.run_attempt(driver, journal, number)
    done = run_path / "journal" / "1-0" / "done-0.jsonl"
    at = zeros_in(done, share=0.3)
    with pytest.raises(StoreError, match=r"line 2 \(byte \d+\) is damaged"):
        await open_run(run_path, scripted_rows.CONFIG, None, OPTIONS)
    assert at > 0
