"""Derived rows of a driver: groups and grades, under the same protocol."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
import scripted_rows
from scripted_rows import make_group

from hermes_rl.events import RewardPart
from hermes_rl.store import (
    CRASH_VARIABLE,
    Derived,
    Grade,
    RunDir,
    in_flight,
    load_run,
    open_derived_writer,
    open_run,
    read_commits,
)
from hermes_rl.usage import UsageTotal


def grade(number: int) -> Grade:
    columns: dict[str, Any] = {
        "trajectory_id": f"t{number}",
        "unit_id": scripted_rows.unit_id(number),
        "group_id": scripted_rows.unit_id(0),
        **dict.fromkeys(("run_id", "task_id", "grade_id"), "run"),
        "reward": 0.5,
        "rewards": [RewardPart(name="verify", score=0.5)],
        "metrics": {"lines": 3.0},
        "calls": [],
        "usage": UsageTotal(),
        "seconds": 0.1,
        "graded_at": 5,
    }
    return Grade(**{**dict.fromkeys(Grade.__struct_fields__), **columns})


async def test_groups_and_grades_are_published_and_read_back(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        await driver.publish(Derived(groups=(make_group(1), make_group(2)), grades=(grade(1),)))
        await driver.publish(Derived(groups=(make_group(1, at=2, n_valid=0),)))
        assert in_flight(driver.run_dir) == set()
    run = load_run(run_path)
    assert list(run.groups["task_id"]) == ["task-2", "task-1"]
    assert list(run.groups["n_valid"]) == [1, 0]  # the newest row of a group counts
    assert list(run.groups["why_invalid"].iloc[0]) == [None, "sandbox_died"]
    assert run.grades["metrics"].iloc[0] == {"lines": 3.0}
    assert len(run.arrow("groups")) == 3


async def test_integers_in_lists_stay_integers_next_to_null(run_path: Path) -> None:
    parts = [RewardPart(name="all", score=0.5), RewardPart(name="late", score=1.0, turn=2)]
    graded = msgspec.structs.replace(grade(1), rewards=parts)
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        await driver.publish(Derived(grades=(graded,), groups=(make_group(1),)))
    run = load_run(run_path)
    assert [repr(part["turn"]) for part in run.grades["rewards"].iloc[0]] == ["None", "2"]
    for table in ("grades", "groups"):
        assert list(run.frame(table).columns) == run.arrow(table).column_names
    assert run.frame("groups", ["size", "members"]).dtypes.tolist() == ["int32", "object"]


async def test_derived_rows_change_no_unit(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        await driver.publish(Derived(groups=(make_group(1),)))
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        assert len(driver.ledger) == 0
        assert driver.report.foreign == []
        assert driver.ledger.summary.counts == {}
    assert [c.keys.unit_id for c in read_commits(RunDir(run_path))] == [[]]


def grades_of(run_path: Path) -> list[str]:
    return sorted(load_run(run_path).arrow("grades", ["trajectory_id"]).column(0).to_pylist())


async def test_derived_rows_are_durable_at_once_and_published_together(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        async with open_derived_writer(driver.run_dir, driver.epoch) as writer:
            for number in range(3):
                await writer.add(Derived(grades=(grade(number),)))
                assert len(grades_of(run_path)) == number + 1, "durable, and shown at once"
            assert driver.run_dir.parts("grades") == []
        assert len(driver.run_dir.parts("grades")) == 1
        async with open_derived_writer(driver.run_dir, driver.epoch) as writer:  # with another name
            await writer.add(Derived(grades=(grade(3),)))
        async with open_derived_writer(driver.run_dir, driver.epoch):
            pass
    assert grades_of(run_path) == ["t0", "t1", "t2", "t3"]
    assert RunDir(run_path).writers() == []
    assert len(list(read_commits(RunDir(run_path)))) == 2


async def test_files_of_finished_work_are_removed_while_other_work_is_open(run_path: Path) -> None:
    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        open_derived_writer(driver.run_dir, driver.epoch) as writer,
    ):
        folder = run_path / "journal" / "1-derived0"
        long = [msgspec.structs.replace(grade(n), error=token_hex(700_000)) for n in range(34)]
        pending = [writer.begin(Derived(grades=(one,))) for one in long]
        assert len(list(folder.glob("asked-*"))) == 3
        for work in pending[1:]:
            await writer.add(None, work)
        assert sorted(p.name for p in folder.glob("asked-*")) == ["asked-0.jsonl", "asked-2.jsonl"]
        await writer.add(None, pending[0])
        assert [p.name for p in folder.glob("asked-*")] == ["asked-2.jsonl"]
    assert not folder.exists()


async def open_and_leave(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG):
        pass


async def publish_one(run_path: Path) -> None:
    async with await open_run(run_path, scripted_rows.CONFIG) as driver:
        await driver.publish(Derived(grades=(grade(1),)))


async def add_one(run_path: Path) -> None:
    async with (
        await open_run(run_path, scripted_rows.CONFIG) as driver,
        open_derived_writer(driver.run_dir, driver.epoch) as writer,
    ):
        await writer.add(Derived(grades=(grade(1),)))


@pytest.mark.parametrize(
    ("way", "point"),
    [
        *((publish_one, p) for p in ("recover-4-written", "publish-7-renamed", "publish-9-done")),
        *((add_one, p) for p in ("attempt-3-done", "attempt-4-synced", "publish-7-renamed")),
    ],
)
def test_a_kill_loses_no_written_derived_row(run_path: Path, way: Any, point: str) -> None:
    """The next start publishes the rows in the journal once."""
    killed = subprocess.run(
        [sys.executable, __file__, str(run_path), way.__name__],
        env={**os.environ, CRASH_VARIABLE: point, "PYTHONPATH": str(Path(__file__).parent)},
        check=False,
        timeout=60,
    )
    assert killed.returncode == -9
    asyncio.run(open_and_leave(run_path))
    assert grades_of(run_path) == ["t1"]
    assert RunDir(run_path).writers() == []


async def test_the_newest_row_is_the_last_one_written_for_any_clock(run_path: Path) -> None:
    """Also with ten starts and more, whose names do not sort like numbers."""
    for number in range(1, 12):
        async with await open_run(run_path, scripted_rows.CONFIG) as driver:
            graded = msgspec.structs.replace(grade(1), reward=float(number), graded_at=50 - number)
            rows = Derived(groups=(make_group(1, at=100 - number, size=number),), grades=(graded,))
            if number == 11:
                async with open_derived_writer(driver.run_dir, driver.epoch) as writer:
                    await writer.add(rows)
            await driver.publish(
                Derived(groups=(make_group(1, at=1, size=99),))
            ) if number < 3 else None
            if number < 11:
                await driver.publish(rows)
    run = load_run(run_path)
    assert run.groups["size"].tolist() == [11]
    assert run.grades["reward"].tolist() == [11.0]
    assert run.arrow("grades", ["reward"])["reward"].to_pylist() == [float(n) for n in range(1, 12)]


if __name__ == "__main__":
    asyncio.run(
        {way.__name__: way for way in (publish_one, add_one)}[sys.argv[2]](Path(sys.argv[1]))
    )
