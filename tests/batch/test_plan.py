"""Units of a dataset and their plan: identical rows, repeats, ids."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_runner import OccurrenceCounter, Plan, RunSource, UnitReader
from hermes_rl.errors import UserError
from hermes_rl.identity import digest, group_id, unit_id
from hermes_rl.sources import read_rows
from hermes_rl.store import Ledger

HASH = "c" * 64


def reader(rows: list[dict[str, object]], repeats: int = 1) -> UnitReader:
    return UnitReader(read_rows(rows), HASH, repeats)


def test_unit_and_group_ids_are_digests_of_their_parts() -> None:
    task = "d" * 64
    assert unit_id(HASH, task, 2, 3) == digest(["unit", 1, HASH, task, 2, 3])[:32]
    assert group_id(HASH, task, 2) == digest(["unit", 1, HASH, task, 2])[:32]


def test_occurrence_counter_agrees_with_a_dictionary() -> None:
    chance = random.Random(7)
    digests = [hashlib.sha256(b"%d" % chance.randrange(3000)).hexdigest() for _ in range(20_000)]
    counter, seen = OccurrenceCounter(), {}
    for name in digests:
        assert counter.next(name) == seen.setdefault(name, 0)
        seen[name] += 1


def test_unit_ids_do_not_depend_on_row_order() -> None:
    rows: list[dict[str, object]] = [
        {"prompt": f"p{n % 3}", "repeats": 1 + n % 2} for n in range(9)
    ]
    there = {u.unit_id for u in reader(rows).take(1000, 60.0)}
    back = {u.unit_id for u in reader(rows[::-1]).take(1000, 60.0)}
    assert there == back
    assert len(there) == sum(1 + n % 2 for n in range(9))


def test_members_of_a_group_are_adjacent() -> None:
    units = reader([{"prompt": "a"}, {"prompt": "b", "repeats": 2}], repeats=3).take(100, 60.0)
    assert [(u.row.index, u.repeat) for u in units] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


async def test_fewer_than_stops_reading_early() -> None:
    read = 0

    def endless() -> Iterator[dict[str, object]]:
        nonlocal read
        while True:
            read += 1
            yield {"prompt": f"p{read}"}

    def source(rows: Iterable[dict[str, object]]) -> RunSource:
        unused: Any = None
        plan = Plan(UnitReader(read_rows(rows), HASH, 1), Ledger(3))
        return RunSource(plan, unused, unused)

    assert await source({"prompt": f"p{n}"} for n in range(199)).fewer_than(200, 60.0)
    assert not await source({"prompt": f"p{n}"} for n in range(200)).fewer_than(200, 60.0)
    assert not await source(endless()).fewer_than(200, 60.0)
    assert read < 600
    assert not await source(endless()).fewer_than(10**9, 0.0), "a stream that is not known to end"


async def test_plan_skips_done_and_given_up_units() -> None:
    rows: list[dict[str, object]] = [{"prompt": f"p{n}"} for n in range(6)]
    units = reader(rows).take(100, 60.0)
    ledger = Ledger(max_attempts=2)
    ledger.apply(units[0].unit_id, 0, done=True, cause=None)
    for attempt in range(2):
        ledger.apply(units[1].unit_id, attempt, done=False, cause="model_timeout")
    ledger.apply(units[2].unit_id, 0, done=False, cause="task")
    for attempt in range(2):
        ledger.apply(units[3].unit_id, attempt, done=False, cause="worker_lost")
    ledger.apply(units[4].unit_id, 0, done=False, cause="driver_lost")
    plan = Plan(reader(rows), ledger, epoch=5)
    items = await plan.take()
    assert [(i.row_index, i.attempt, i.isolated) for i in items] == [
        (3, 2, True),
        (4, 1, False),
        (5, 0, False),
    ]
    counts = plan.counts
    assert (counts.done, counts.given_up, counts.open, counts.known) == (1, 2, 3, 5)


async def test_reader_skips_rows_with_all_repeats_done() -> None:
    """One open repeat is enough to read its row."""
    rows: list[dict[str, object]] = [{"prompt": f"p{n}", "repeats": 2.0} for n in range(4)]
    rows.insert(2, {"prompt": "p1", "repeats": 2})
    ledger = Ledger()
    units = reader(rows).take(100, 60.0)
    for unit in units:
        if (unit.row.index, unit.repeat) != (2, 1):
            ledger.apply(unit.unit_id, 0, done=True, cause=None)
    source = reader(rows)
    assert [(u.row.index, u.repeat) for u in source.take(100, 60.0, ledger.is_done)] == [
        (2, 0),
        (2, 1),
    ]
    assert (source.rows, source.skipped, source.ended) == (5, 8, True)
    plan = Plan(reader(rows), ledger, epoch=5)
    (item,) = await plan.take()
    assert (item.row_index, item.repeat, item.attempt) == (2, 1, 0)
    counts = plan.counts
    assert (counts.units, counts.done, counts.known, counts.open) == (10, 9, 9, 1)


def test_reading_in_small_steps_gives_the_same_units() -> None:
    rows: list[dict[str, object]] = [{"prompt": f"p{n}", "repeats": 1 + n % 4} for n in range(9)]
    whole = [u.unit_id for u in reader(rows).take(1000, 60.0)]
    source, found = reader(rows), []
    while not source.ended:
        found += [u.unit_id for u in source.take(3, 60.0)]
    assert found == whole


async def test_a_bad_row_is_one_unit() -> None:
    rows: list[dict[str, object]] = [{"prompt": "a"}, {"prompt": ""}]
    plan = Plan(reader(rows, repeats=4), Ledger())
    items = await plan.take()
    assert [(i.row_index, i.task is None) for i in items] == [(0, False)] * 4 + [(1, True)]
    assert items[-1].bad_row == "row 1: 'prompt' is empty"


def test_deeply_nested_rows_are_separate_units(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep.jsonl"
    deep = '{"prompt": "a", "x": %s%d%s}'
    path.write_text("\n".join(deep % ("[" * 990, n, "]" * 990) for n in range(3)))
    units = UnitReader(read_rows(str(path)), HASH, 1).take(10, 60.0)
    assert len({unit.unit_id for unit in units}) == 3


def test_check_first_row_reports_unreadable_datasets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found: question\)\. Try --map prompt="):
        reader([{"question": "x"}]).check_first_row()
    with pytest.raises(UserError, match="no rows"):
        reader([]).check_first_row()
    with pytest.raises(UserError, match="no such file"):
        UnitReader(read_rows(str(tmp_path / "none.jsonl")), HASH, 1).check_first_row()
