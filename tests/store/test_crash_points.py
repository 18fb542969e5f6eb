"""Killed at every named step of the protocol, then run again: exactly once, always readable."""

from pathlib import Path

import pytest
import run_checks as checks
from made_up import Play
from scripted_driver import Plan

from hermes_rl.store import CRASH_POINTS

KILLED = -9
RECOVERY = [p for p in CRASH_POINTS if p.startswith("recover")]


def test_an_unbroken_run_passes_all_checks(play: Play, run_path: Path) -> None:
    plan = Plan(str(run_path))
    assert play(path=plan.path) == 0
    checks.at_the_end(Path(plan.path), plan)
    assert play(path=plan.path) == 0, "nothing is left to do"
    checks.at_the_end(Path(plan.path), plan)


@pytest.mark.parametrize("passing", [1, 3])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at(play: Play, run_path: Path, point: str, passing: int) -> None:
    plan = Plan(str(run_path))
    path = run_path
    status = play(path=path, crash_at=f"{point}:{passing}")
    assert status == KILLED or passing > 1 or point in RECOVERY
    checks.always(path)
    assert play(path=path) == 0
    checks.at_the_end(path, plan)


BEFORE = [
    "attempt-2-live:30",
    pytest.param("publish-7-renamed:4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("point", [*RECOVERY, *(p for p in CRASH_POINTS if "publish-" in p)])
def test_recovery_killed_at(play: Play, run_path: Path, point: str, before: str) -> None:
    plan = Plan(str(run_path))
    path = run_path
    assert play(path=path, crash_at=before) == KILLED
    for passing in (1, 2):
        assert play(path=path, crash_at=f"{point}:{passing}") in (KILLED, 0)
        checks.always(path)
    assert play(path=path) == 0
    checks.at_the_end(path, plan)
