"""The bundled tasks as an environment: splits and rewards."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from checks import CHANGED, cheats, check_stream, content, failed_attempts

from environments import terminal_tasks
from environments.terminal_tasks.environment import split_of
from hermes_rl.errors import HermesError
from hermes_rl.rl import Task, first_tasks, rewards_of, run_trial
from hermes_rl.sources import read_tasks
from hermes_rl.testing import BUNDLES, bundle, traced
from hermes_rl.trajectory import Trajectory

NAME = "terminal_tasks"
ALL = 100


def test_splits_are_disjoint_and_contain_every_task() -> None:
    train, held = first_tasks(NAME, ALL), first_tasks(NAME, ALL, split="eval")
    bundled = {row.raw_id for row in read_tasks("terminal_tasks")}
    assert {t.id for t in train} | {t.id for t in held} == bundled
    assert len({content(t) for t in train + held}) == len(bundled) == len(train) + len(held)
    page = Path(terminal_tasks.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert f"{len(bundled)} tasks" in page
    assert f"{len(train)} belong to `train` and {len(held)} to `eval`" in page
    for some in (train, held):
        assert {t.metadata["difficulty"] for t in some} == {"easy", "medium", "hard"}


def test_a_corrected_task_stays_in_its_split() -> None:
    for row in read_tasks(NAME):
        assert row.task is not None
        fixed = msgspec.structs.replace(row.task, verify="exit 1", prompt="Do it better.")
        other = msgspec.structs.replace(row, task=fixed, task_hash="0" * 64)
        assert split_of(other) == split_of(row)


def test_the_seed_changes_only_the_order() -> None:
    one, two = first_tasks(NAME, ALL, seed=1), first_tasks(NAME, ALL, seed=2)
    assert [t.id for t in one] != [t.id for t in two]
    assert sorted(t.id for t in one) == sorted(t.id for t in two)
    check_stream(NAME, ALL, endless=False)


def test_tasks_can_be_filtered() -> None:
    some = first_tasks(NAME, ALL, categories=["json", "csv"], difficulty=["hard"])
    assert some
    assert {t.metadata["category"] for t in some} <= {"json", "csv"}
    assert {t.metadata["difficulty"] for t in some} == {"hard"}
    with pytest.raises(HermesError, match=r"no category 'jsn' \(known: archives, "):
        first_tasks(NAME, 1, categories=["jsn"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_oracle_gets_1_on_every_task(split: str) -> None:
    count = len(first_tasks(NAME, ALL, split=split))
    assert rewards_of(NAME, "oracle", tasks=count, split=split) == [1.0] * count


def test_every_cheat_runs_on_two_tasks_and_gets_no_reward() -> None:
    attempts = cheats(tasks=2)
    assert len(attempts) <= len(first_tasks(NAME, ALL))
    assert failed_attempts(NAME, attempts) == {}


CATEGORIES = sorted({str(row.task.metadata["category"]) for row in read_tasks(NAME) if row.task})
WITH_PROGRAMS = ["bugfix", "build", "git", "permissions", "processes"]
"""Categories whose workspaces contain programs, tests or a git history."""
ON_PROGRAMS = ("git-history", "skip-all", "hard-coded-tests", *CHANGED)
"""Cheats that change only these, and have no effect on other tasks."""


def run_script(script: str, categories: list[str]) -> Iterator[Trajectory]:
    """Run a script on every task of some categories and yield the rows."""
    chosen = {"categories": categories}
    for split in ("train", "eval"):
        count = len(first_tasks(NAME, ALL, split=split, **chosen))
        rows = run_trial(
            NAME, tasks=count, split=split, solution=lambda task: script, config=chosen
        )
        assert len(rows) == count
        yield from rows


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_no_cheat_gets_a_reward_on_any_task(name: str) -> None:
    on_programs = set(BUNDLES[name]) <= set(ON_PROGRAMS)
    rows = run_script(bundle(name), WITH_PROGRAMS if on_programs else CATEGORIES)
    assert [(row.task_id, row.cause) for row in rows if row.reward != 0.0] == []


def test_cheats_on_programs_do_not_apply_to_other_categories() -> None:
    everything = "\n".join(traced(name) for name in ON_PROGRAMS)
    others = [name for name in CATEGORIES if name not in WITH_PROGRAMS]
    for row in run_script(everything, others):
        assert row.reward == 0.0
        assert "left by" not in " ".join(row.messages[-2:]), row.task_id


HALF = "python3 - <<'PY'\nimport csv\nrows = list(csv.reader(open('wide.csv')))\n"
HALF += "rows[1][1] = rows[2][2] = '999'\ncsv.writer(open('wide.csv', 'w')).writerows(rows)\nPY\n"

# Files are copied and hidden instead of moved.
HIDDEN = ("os.rename(p,", "(shutil.copy2 if '/y/' in p else shutil.move)(p,")

PARTIAL_CATEGORIES = ["csv", "text", "git", "processes", "find"]
PARTIAL_SOLUTIONS = {
    "csv-pivot": lambda t: f"{t.oracle}\n{HALF}",  # two wrong cells
    "text-unique-names": lambda t: "sort -u guests.txt > unique.txt",  # another order
    "text-full-names": lambda t: "cat first.txt last.txt > full.txt",
    # The output of the daemon and the jobs, written by hand.
    "proc-reload": lambda t: (
        "sed -i 's/^workers = .*/workers = 8/' daemon.conf\n"
        "sed -i 's/workers=2/workers=8/; s/reloads=0/reloads=1/' state.txt"
    ),
    "proc-three-at-a-time": lambda t: (
        "for n in 1 2 3 4 5 6 7 8; do echo start $n; [ $n = 1 ] || echo end $((n - 1)); done "
        ">runs.log\necho end 8 >>runs.log\n"
        'for j in jobs/*.sh; do echo "${j##*/},$(sed -n "s/^exit //p" $j)"; done >status.csv'
    ),
    # The right sums without the tax and the discount.
    "git-merge-conflict": lambda t: str(t.oracle).replace(
        "return discount(net) * (1 + TAX)", "return net * 1.14"
    ),
    "find-archive-by-month": lambda t: (
        f"{str(t.oracle).replace(*HIDDEN).replace('import os', 'import os, shutil', 1)}\n"
        "chmod 311 inbox/y inbox/y/deep"
    ),
    "text-top-words": lambda t: "printf 'the 7\\nsea 4\\nand 3\\n' > top.txt",  # three of five
}


def test_partial_solutions_get_partial_rewards_only_where_documented() -> None:
    def solution(task: Task) -> str:
        partial = PARTIAL_SOLUTIONS.get(task.id)
        return partial(task) if partial else "true"

    found = {}
    for split in ("train", "eval"):
        count = len(first_tasks(NAME, ALL, split=split, categories=PARTIAL_CATEGORIES))
        chosen = {"categories": PARTIAL_CATEGORIES}
        rows = run_trial(NAME, tasks=count, split=split, solution=solution, config=chosen)
        found |= {row.task_id: row.reward for row in rows if row.task_id in PARTIAL_SOLUTIONS}
    assert 0.5 < found.pop("csv-pivot") < 1.0
    assert found == dict.fromkeys(PARTIAL_SOLUTIONS.keys() - {"csv-pivot"}, 0.0)


def jobs(how: str) -> str:
    """Run the scripts of `proc-three-at-a-time` with xargs, and record their exit codes."""
    note = "bash {}; c=$?; echo $(basename {}),$c >>ended"
    return f"ls jobs/*.sh | {how} -I{{}} bash -c '{note}'; sort ended >status.csv"


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        (jobs("xargs -P 3"), 1.0),
        (jobs("xargs -P 2"), 1.0),
        (jobs("xargs -P 1"), 0.0),
        (jobs("xargs -P 8"), 0.0),
        (f"{jobs('xargs -P 3')}; bash jobs/job-2.sh", 0.0),
    ],
    ids=["three at once", "two", "one after the other", "all at once", "one again"],
)
def test_jobs_must_run_at_most_three_at_a_time_and_once(script: str, reward: float) -> None:
    chosen = {"categories": ["processes"], "difficulty": ["hard"]}
    count = len(first_tasks(NAME, ALL, **chosen))
    rows = run_trial(NAME, tasks=count, solution=lambda task: script, config=chosen)
    found = {row.task_id: row.reward for row in rows}
    assert found["proc-three-at-a-time"] == reward
