"""Killed at every named step of the protocol, then run again: exactly once, always readable."""

from pathlib import Path

import invariants as checks
import pytest
from scripted_driver import Plan
from scripted_rows import Play

from hermes_rl.store import COMPACTION_POINTS, CRASH_POINTS

KILLED = -9
RECOVERY = [p for p in CRASH_POINTS if p.startswith("recover")]


def test_an_undisturbed_run_passes_all_checks(play: Play, run_path: Path) -> None:
    plan = Plan(str(run_path))
    assert play(path=plan.path) == 0
    checks.check_finished_run(Path(plan.path), plan)
    assert play(path=plan.path) == 0, "nothing is left to do"
    checks.check_finished_run(Path(plan.path), plan)


@pytest.mark.parametrize("point", [*CRASH_POINTS, *COMPACTION_POINTS])
def test_killed_at(play: Play, run_path: Path, point: str) -> None:
    """At its first passing, and at the third after that. Small files are merged during the run
    where the point is one of merging. One start passes a point of recovery once at most."""
    plan = Plan(str(run_path), many_files=1 if point in COMPACTION_POINTS else 50)
    path, many_files = run_path, plan.many_files
    for passing in (1,) if point in RECOVERY else (1, 3):
        status = play(path=path, many_files=many_files, crash_at=f"{point}:{passing}")
        assert status == KILLED or passing > 1 or point in RECOVERY
        checks.check_invariants(path)
    assert play(path=path, many_files=many_files) == 0
    checks.check_finished_run(path, plan)


@pytest.mark.parametrize("point", RECOVERY)
@pytest.mark.parametrize("before", ["attempt-2-live:30", "publish-7-renamed:4"])
def test_recovery_killed_at(play: Play, run_path: Path, point: str, before: str) -> None:
    plan = Plan(str(run_path))
    path = run_path
    assert play(path=path, crash_at=before) == KILLED
    for passing in (1, 2):
        assert play(path=path, crash_at=f"{point}:{passing}") in (KILLED, 0)
        checks.check_invariants(path)
    assert play(path=path) == 0
    checks.check_finished_run(path, plan)
