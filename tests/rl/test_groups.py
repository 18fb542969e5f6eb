"""Groups of a run: their members, advantages, and when their rows are written."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import Lab, start_server

from batch_runner import Pilot, Report, Silent, arun_batch
from hermes_rl.messages import text_of
from hermes_rl.rl import EPSILON, dr_grpo, due_groups, gather, group_report
from hermes_rl.store import Ledger, Run, load_run, schema_of
from hermes_rl.testing import ServedRequest

# A random number decides: 0 and 1 are rewards, 2 is a verifier that cannot judge.
DRAW = "echo $((RANDOM % 3)) >out.txt"
JUDGE = (
    'n=$(cat "$WORKSPACE/out.txt"); [ "$n" = 2 ] && echo cannot-judge=two >&3 || echo reward=$n >&3'
)
EASY = {"prompt": "do", "oracle": "true", "verify": "true"}


async def run_rows(lab: Lab, rows: list[dict[str, Any]], pilot: Pilot | None = None) -> Report:
    path = lab.path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"workers": 0, "concurrency": 8, "max_attempts": 1, "allow_unsandboxed": True}
    config = {
        "dataset": {"path": str(path), "repeats": 4},
        "model": {"name": "oracle"},
        "sandbox": {"backend": "none"},
        "run": {"out": str(lab.out), **run},
    }
    return await arun_batch(config, progress=Silent(), pilot=pilot)


def advantages_of(run: Run) -> dict[str, dict[str, Any]]:
    """Compute GRPO and RLOO of each member with a reward from the rows."""
    found = {}
    for group, rows in run.trajectories.groupby("group_id"):
        rewards = dict(zip(rows["member"], rows["reward"], strict=True))
        valid = list(rewards.values())
        if len(valid) >= 2:
            centre, scale = statistics.fmean(valid), statistics.stdev(valid)
            found[group] = {
                m: ((r - centre) / (scale + EPSILON), (r - centre) * len(valid) / (len(valid) - 1))
                for m, r in rewards.items()
            }
    return found


async def test_advantages_are_over_valid_members_only(lab: Lab) -> None:
    verify = {"script": JUDGE, "score": True}
    rows = [{**EASY, "id": f"t{n}", "n": n, "oracle": DRAW, "verify": verify} for n in range(12)]
    report = await run_rows(lab, rows)
    run = load_run(lab.out)
    groups, wanted = run.groups, advantages_of(run)
    counted = group_report(run)
    assert counted.unjudged == report.given_up == len(run.failures)
    assert any(f"unjudged: {report.given_up} of the dropped" in line for line in counted.lines())
    assert len(groups) == 12
    assert (groups["size"] == 4).all()
    assert groups["n_valid"].sum() == report.done < 48
    for group in groups.to_dict("records"):
        assert group["sendable"] == (group["n_valid"] >= 2) == (group["group_id"] in wanted)
        columns = (group[name] for name in ("members", "valid", "why_invalid", "grpo", "rloo"))
        for member, valid, why, grpo, rloo in zip(*columns, strict=True):
            assert why == (None if valid else "verifier")
            if valid and group["sendable"]:
                assert (grpo, rloo) == pytest.approx(wanted[group["group_id"]][member])
            else:
                assert grpo is None or grpo != grpo  # pandas shows null as NaN


async def test_a_pilot_writes_only_complete_groups(
    lab: Lab,
) -> None:
    rows: list[dict[str, Any]] = [{**EASY, "id": f"t{n}", "n": n} for n in range(6)]
    rows += [{**EASY, "id": "six", "repeats": 6}, {**EASY, "id": "one", "repeats": 1}]
    assert (await run_rows(lab, rows, pilot=Pilot(every=2, units=16))).done == 16
    sizes = {"six": 6, **{f"t{n}": 4 for n in range(6)}}
    assert {task: g["size"] for task, g in lab.groups().items()}.items() <= sizes.items()
    await run_rows(lab, rows)
    assert {task: g["size"] for task, g in lab.groups().items()} == sizes, (
        "a single rollout has no group"
    )
    assert len(lab.rows("groups")) == len(sizes), "each group is written once"


# A member that failed and is rolled out again

GROUPS, SIZE = 3, 4
FAILING = ("1", "2")
"""Task and member."""
TALK = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"Number {n}.", id=f"n{n}", n=n)

async def reply(self, task, trajectory, ctx):
    if len(trajectory.answers) == 1:
        return f"Task {task.metadata['n']}, member {ctx.member}."

async def compute_reward(self, task, trajectory, ctx):
    return (ctx.member + 1) / 4
"""
REWARDS = [(member + 1) / SIZE for member in range(SIZE)]


class Policy:
    """Answers; one member fails some times in its second turn."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.requests: Counter[tuple[str, str]] = Counter()

    def __call__(self, request: ServedRequest) -> Any:
        who = re.search(r"^Task (\d), member (\d)", text_of(request.messages[-1]))
        if who is None:
            return "Hello."
        place = (who[1], who[2])
        self.requests[place] += 1
        if place == FAILING and self.left:
            self.left -= 1
            return {"text": "", "fault": "content_filter"}
        return f"Welcome, {who[2]}."


def attempts_of_failing(lab: Lab, name: str) -> list[dict[str, Any]]:
    rows = [r for r in lab.rows(name) if (r["task_id"][1:], str(r["member"])) == FAILING]
    return sorted(rows, key=lambda row: row["attempt"])


@pytest.mark.parametrize("later", [False, True])
async def test_a_retried_member_keeps_its_place_and_the_others_stay_unchanged(
    lab: Lab, later: bool
) -> None:
    """Retried in the same start, or with --retry-failed in a later one."""
    env, policy = lab.write(TALK).path, Policy(failures=1 if later else 2)
    run: dict[str, Any] = {"max_attempts": 1 if later else 3}
    dataset = {"limit": GROUPS}
    async with start_server(policy=policy) as server:
        report = await lab.run(env, server, dataset=dataset, run=run)
        rows, before = lab.rows(), lab.groups()
        if later:
            assert (report.done, report.given_up) == (GROUPS * SIZE - 1, 1)
            files = {p: p.read_bytes() for p in lab.out.glob("*/*.parquet")}
            run["retry_failed"] = True
            report = await lab.run(env, server, dataset=dataset, run=run)
            assert {path: path.read_bytes() for path in files} == files
    assert (report.done, report.given_up) == (GROUPS * SIZE, 0)
    lost, (done,) = (attempts_of_failing(lab, name) for name in ("failures", "trajectories"))
    assert [row["attempt"] for row in (*lost, done)] == list(range(len(lost) + 1))
    assert {row["cause"] for row in lost} == {"content_filter"}
    assert {row["unit_id"] for row in lost} == {done["unit_id"]}
    others = [row for row in lab.rows() if row["unit_id"] != done["unit_id"]]
    assert {row["attempt"] for row in others} == {0}
    assert [row for row in lab.rows() if row in rows] == rows
    places = [(str(n), str(m)) for n in range(GROUPS) for m in range(SIZE)]
    tries = 2 if later else 3
    assert policy.requests == {place: tries if place == FAILING else 1 for place in places}

    after = lab.groups()
    assert [(g["n_valid"], g["rewards"]) for g in after.values()] == [(SIZE, REWARDS)] * GROUPS
    new = after["n1"]
    assert new["unit_ids"][2] == done["unit_id"]
    assert new["trajectory_ids"][2] == done["trajectory_id"]
    assert new["dr_grpo"] == dr_grpo(REWARDS)
    assert len(lab.rows("groups")) == GROUPS + later, "the older row stays"
    if later:
        old = before["n1"]
        assert after == {**before, "n1": new}
        assert (old["trajectory_ids"][2], old["rewards"][2], old["n_valid"]) == (None, None, 3)
        assert old["why_invalid"][2] == "content_filter"
        assert old["dr_grpo"] == dr_grpo([*REWARDS[:2], None, REWARDS[3]])
        for column in ("group_id", "members", "unit_ids", "size"):
            assert old[column] == new[column], column


# `due_groups` finds groups without a row of their present state

SHARED = {"run_id": "r", "task_hash": "h", "env_name": None, "split": None}


def row_of(group: int, member: int, attempt: int, *, done: bool) -> dict[str, Any]:
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
    """The tables of a run, in memory."""

    def __init__(self, **rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def arrow(self, table: str, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([schema_of(table).field(name) for name in columns])
        return pa.Table.from_pylist(self.rows[table], schema=schema)


Ends = dict[tuple[int, int], list[bool]]
attempts = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 1)),
    st.lists(st.booleans(), min_size=1, max_size=3),
    max_size=8,
)
"""Unit -> whether each attempt is done; attempts after one that is done are ignored."""


def tables_of(ends: Ends) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"trajectories": [], "failures": []}
    for (group, member), ended in ends.items():
        last = ended.index(True) if True in ended else len(ended) - 1
        for attempt in range(last + 1):
            done = ended[attempt]
            table = "trajectories" if done else "failures"
            found[table].append(row_of(group, member, attempt, done=done))
    return found


@given(
    attempts,
    st.lists(st.tuples(attempts, st.sampled_from([None, "not now"])), max_size=3),
    st.booleans(),
)
def test_a_group_is_due_until_its_newest_row_has_its_members(
    now: Ends, before: list[tuple[Ends, str | None]], written: bool
) -> None:
    shown: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for at, (ends, error) in enumerate([*before, (now, None)] if written else before):
        for gathered in gather(cast(Run, Tables(**tables_of(ends)))):
            group_id = gathered.facts["group_id"]
            state = {
                "unit_ids": [m.unit_id for m in gathered.members],
                "trajectory_ids": [m.trajectory_id for m in gathered.members],
            }
            rows.append({"group_id": group_id, "created_at": at, "error": error, **state})
            if error is None:
                shown[group_id] = state
    tables = tables_of(now)
    run = cast(Run, Tables(**tables, groups=rows))
    ledger = Ledger()
    for table, cause in (("trajectories", None), ("failures", "task")):
        for one in tables[table]:
            ledger.apply(one["unit_id"], one["attempt"], done=cause is None, cause=cause)
    due = {gathered.facts["group_id"] for gathered in due_groups(run, ledger, size=None)}
    wanted = {}
    for gathered in gather(run):
        units = [m.unit_id for m in gathered.members]
        ids = [m.trajectory_id for m in gathered.members]
        if shown.get(gathered.facts["group_id"]) != {"unit_ids": units, "trajectory_ids": ids}:
            wanted[gathered.facts["group_id"]] = (units, ids)
    assert due <= wanted.keys(), "a group whose newest row is current is not due"
    # Only repairs remove members or restore those of an older row; such a group may wait for its
    # next change.
    shown_ids = {t for r in rows if r["error"] is None for t in r["trajectory_ids"]} | {None}
    shown_units = {u for r in rows if r["error"] is None for u in r["unit_ids"]}
    for group_id in wanted.keys() - due:
        units, ids = wanted[group_id]
        assert set(ids) <= shown_ids
        assert set(units) <= shown_units
