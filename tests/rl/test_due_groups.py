"""Which groups have no row of their present state: found without looking at each of them."""

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.rl.groups import due_groups, gather
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.reader import Run
from hermes_rl.store.schema import schema_of

SHARED = {"run_id": "r", "task_hash": "h", "env_name": None, "split": None}


def row(group: int, member: int, attempt: int, *, done: bool) -> dict[str, Any]:
    """A row of `trajectories` or `failures`."""
    return {
        **SHARED,
        "group_id": f"g{group}",
        "task_id": f"t{group}",
        "row_index": group,
        "member": member,
        "unit_id": f"{group:016x}{member:016x}",
        "trajectory_id": f"{group}-{member}-{attempt}",
        "attempt": attempt,
        "reward": 1.0 if done else None,
        "cause": None if done else "task",
    }


class Tables:
    """Stands for a run's tables."""

    def __init__(self, **rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def arrow(self, table: str, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([schema_of(table).field(name) for name in columns])
        return pa.Table.from_pylist(self.rows[table], schema=schema)


units = st.tuples(st.integers(0, 3), st.integers(0, 1))
attempts = st.dictionaries(units, st.lists(st.booleans(), min_size=1, max_size=3), max_size=8)
"""Unit -> how its attempts ended; nothing follows one that is done."""


def tried(ends: dict[tuple[int, int], list[bool]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"trajectories": [], "failures": []}
    for (group, member), own in ends.items():
        last = own.index(True) if True in own else len(own) - 1
        for attempt in range(last + 1):
            done = own[attempt]
            table = "trajectories" if done else "failures"
            found[table].append(row(group, member, attempt, done=done))
    return found


@given(
    attempts,
    st.lists(st.tuples(attempts, st.sampled_from([None, "not now"])), max_size=3),
    st.data(),
)
def test_a_group_is_due_until_its_newest_row_shows_its_members(
    now: dict[tuple[int, int], list[bool]],
    before: list[tuple[dict[tuple[int, int], list[bool]], str | None]],
    data: st.DataObject,
) -> None:
    shown: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    states = [*before, (now, None)] if data.draw(st.booleans()) else before
    for at, (ends, error) in enumerate(states):
        for gathered in gather(cast(Run, Tables(**tried(ends)))):
            state = [(m.unit_id, m.trajectory_id) for m in gathered.members]
            group_id = gathered.facts["group_id"]
            columns = {"group_id": group_id, "created_at": at, "error": error}
            rows.append(
                {
                    **columns,
                    "unit_ids": [unit for unit, _ in state],
                    "trajectory_ids": [trajectory for _, trajectory in state],
                }
            )
            if error is None:
                shown[group_id] = state
    run = cast(Run, Tables(**tried(now), groups=rows))
    ledger = Ledger()
    for table in ("trajectories", "failures"):
        for one in tried(now)[table]:
            done = table == "trajectories"
            ledger.apply(one["unit_id"], one["attempt"], done=done, cause=None if done else "task")
    due = {gathered.facts["group_id"] for gathered in due_groups(run, ledger, size=None)}
    wanted = {
        gathered.facts["group_id"]
        for gathered in gather(run)
        if shown.get(gathered.facts["group_id"])
        != [(m.unit_id, m.trajectory_id) for m in gathered.members]
    }
    assert due <= wanted, "never one whose newest row shows it"
    # What a group had and has no more, and members that come back to what an older row shows, are
    # the doing of repairs alone: then a group may wait for its next change.
    shown_before = {t for r in rows if r["error"] is None for t in r["trajectory_ids"]}
    units_before = {u for r in rows if r["error"] is None for u in r["unit_ids"]}
    for group_id in wanted - due:
        (gathered,) = [g for g in gather(run) if g.facts["group_id"] == group_id]
        assert {m.trajectory_id for m in gathered.members} <= shown_before | {None}
        assert {m.unit_id for m in gathered.members} <= units_before
