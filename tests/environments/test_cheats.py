"""Each shipped cheat fools a careless verifier, and none fools a careful one."""

import subprocess
from pathlib import Path

import pytest
from careless_env import CARELESS, CLOSED

from hermes_rl.rl import run_trial
from hermes_rl.testing import BUNDLES, CHEATS, bundle, traced

ENV = Path(__file__).with_name("careless_env.py")


def test_every_cheat_is_in_one_bundle_and_is_valid_bash() -> None:
    assert sorted(name for members in BUNDLES.values() for name in members) == sorted(CHEATS)
    for script in [*CHEATS.values(), *map(bundle, BUNDLES)]:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_without_a_cheat_there_are_no_traces() -> None:
    """The names of cheats in the scripts are not traces."""
    rows = run_trial(ENV, tasks=len(CARELESS), solution=lambda task: script_without_cheat(task.id))
    assert not [r.task_id for r in rows if "left by" in " ".join(r.messages[-2:])]


def script_without_cheat(name: str) -> str:
    """The script that searches for traces, without the cheat."""
    script = traced(name).replace(CHEATS[name], 'W="$WORKSPACE"')
    return script.replace("seq 200", "seq 2")


def test_each_cheat_fools_a_careless_verifier() -> None:
    assert set(CARELESS) == set(CHEATS)
    rows = run_trial(ENV, tasks=len(CARELESS), solution=lambda task: traced(task.id))
    found = {row.task_id: row.reward for row in rows}
    undone = [r.task_id for r in rows if f"left by {r.task_id}" not in " ".join(r.messages[-2:])]
    assert undone == [], "these cheats did not run"
    assert found == {name: float(name not in CLOSED) for name in CHEATS}


@pytest.mark.parametrize(("played", "reward"), [(True, 0.0), (False, 1.0)])
def test_a_careful_verifier_gives_cheats_0_and_solutions_1(played: bool, reward: float) -> None:
    rows = run_trial(
        ENV,
        tasks=len(CARELESS),
        solution=lambda task: CHEATS[task.id] if played else str(task.oracle),
        config={"careful": True},
    )
    found = {row.task_id: row.reward for row in rows}
    found.pop("git-history")  # its git history contains the solution
    assert found == dict.fromkeys(found, reward)
