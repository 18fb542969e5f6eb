"""Each cheat has teeth: there is a careless verifier that it gets the better of, and none of them
gets a reward from a careful one."""

import subprocess
from pathlib import Path

import pytest
from careless_env import CARELESS, CLOSED

from hermes_rl.rl import run_trial
from hermes_rl.testing import BUNDLES, CHEATS, bundle, traced

ENV = Path(__file__).with_name("careless_env.py")


def test_every_cheat_is_in_one_bundle_and_every_script_is_bash() -> None:
    assert sorted(name for members in BUNDLES.values() for name in members) == sorted(CHEATS)
    for script in [*CHEATS.values(), *map(bundle, BUNDLES)]:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_traces_are_of_cheats_alone() -> None:
    """Where nothing was done there are none: the scripts' own names in them prove nothing."""
    rows = run_trial(ENV, tasks=len(CARELESS), solution=lambda task: without(task.id))
    assert not [r.task_id for r in rows if "left by" in " ".join(r.messages[-2:])]


def without(name: str) -> str:
    """The look for traces, without the cheat."""
    script = traced(name).replace(CHEATS[name], 'W="$WORKSPACE"')
    return script.replace("seq 200", "seq 2")


def test_each_cheat_gets_the_better_of_a_careless_verifier() -> None:
    assert set(CARELESS) == set(CHEATS)
    rows = run_trial(ENV, tasks=len(CARELESS), solution=lambda task: traced(task.id))
    found = {row.task_id: row.reward for row in rows}
    undone = [r.task_id for r in rows if f"left by {r.task_id}" not in " ".join(r.messages[-2:])]
    assert undone == [], "these cheats did nothing"
    assert found == {name: float(name not in CLOSED) for name in CHEATS}


@pytest.mark.parametrize(("played", "reward"), [(True, 0.0), (False, 1.0)])
def test_a_careful_verifier_gives_cheats_nothing_and_a_solution_1(
    played: bool, reward: float
) -> None:
    rows = run_trial(
        ENV,
        tasks=len(CARELESS),
        solution=lambda task: CHEATS[task.id] if played else str(task.oracle),
        config={"careful": True},
    )
    found = {row.task_id: row.reward for row in rows}
    found.pop("git-history")  # there the history itself holds the solution
    assert found == dict.fromkeys(found, reward)
