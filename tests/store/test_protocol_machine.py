"""Random sequences of what drivers, writers, merges and readers do, each killed at a random moment.

Hypothesis chooses the steps. All of them are real processes: a driver or a merge that is killed, or
a writer that is suspended when its driver has died, with or without the lock by which others fence
it, and continues later. After each step every reader sees every acknowledged row once.

`HERMES_RL_MACHINE_EXAMPLES=300 pytest -o faulthandler_timeout=0 THIS_FILE` runs more of them, in
about 15 minutes of CPU; without the option pytest ends a test after ten minutes.
"""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import invariants as checks
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scripted_driver import Plan
from scripted_rows import Play

from hermes_rl.store import COMPACTION_POINTS, CRASH_POINTS, load_run

EXAMPLES = int(os.environ.get("HERMES_RL_MACHINE_EXAMPLES", "0"))
RECOVERY = [p for p in CRASH_POINTS if not p.startswith("attempt-")]
WRITING = ("attempt-2", "attempt-3", "attempt-4", "publish-6", "publish-7-half", "publish-7-prep")
STALLS = [p for p in CRASH_POINTS if p.startswith(WRITING) and not p.endswith("-torn")]


def moments(points: list[str], passing: int) -> st.SearchStrategy[str]:
    """Where a process is killed; the empty text for not at all."""
    at = st.builds("{}:{}".format, st.sampled_from(points), st.integers(1, passing))
    return st.just("") | at


class Protocol(RuleBasedStateMachine):
    """One run directory, whatever happens to it."""

    play: Play
    place: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.place))
        self.path = self.folder / "run"
        self.units = 7  # of which two never succeed; see `Plan`
        self.suspended: list[int] = []

    def do(self, **order: object) -> int:
        return self.play(path=self.path, **order)

    @rule(
        more=st.integers(0, 4),
        crash_at=moments([*CRASH_POINTS, *COMPACTION_POINTS], 12),
        many_files=st.integers(1, 4),
    )
    def drive(self, more: int, crash_at: str, many_files: int) -> None:
        """Files are merged meanwhile, and read all the time."""
        self.units += more
        order = {"units": self.units, "many_files": many_files}
        with checks.GlobReader(self.path):
            assert self.do(**order, crash_at=crash_at) == (-9 if crash_at else 0) or (
                crash_at and self.do(**order) == 0
            )

    @precondition(lambda self: (self.path / "commits").is_dir())
    @rule(crash_at=moments([*COMPACTION_POINTS, *COMPACTION_POINTS, *RECOVERY], 3))
    def merge(self, crash_at: str) -> None:
        assert self.do(do="compact", crash_at=crash_at) in ((-9, 0) if crash_at else (0,))

    @rule(
        more=st.integers(1, 4),
        point=st.sampled_from(STALLS),
        passing=st.integers(1, 6),
        fenced=st.booleans(),
    )
    def outlive_the_driver(self, more: int, point: str, passing: int, fenced: bool) -> None:
        """A writer that is not fenced lost its lock, as with the lease of a network file system."""
        self.units += more
        status = self.do(do="stall", units=self.units, crash_at=f"{point}:{passing}")
        assert status >= 0
        if status:
            self.suspended.append(status)
            for lock in () if fenced else self.path.glob("journal/*/alive"):
                lock.unlink()

    @precondition(lambda self: self.suspended)
    @rule(which=st.integers(0, 9))
    def wake(self, which: int) -> None:
        """It may fail, and may have been killed."""
        pid = self.suspended.pop(which % len(self.suspended))
        assert self.play(do="wake", pid=pid) in (0, 1, -9)

    @invariant()
    def every_reader_sees_every_acknowledged_row_once(self) -> None:
        if not (self.path / "epochs").is_dir():
            return
        checks.check_invariants(self.path)
        if not list(self.path.glob("epochs/*.json")):
            return
        rows, failed = (
            Counter(load_run(self.path).arrow(table, ["unit_id"])[0].to_pylist())
            for table in ("trajectories", "failures")
        )
        assert set(rows.values()) <= {1}
        _, receipts = checks.read_log(self.path)
        assert {unit for unit, _, _ in receipts} <= rows.keys() | failed.keys()

    def teardown(self) -> None:
        """Whoever is suspended wakes up last of all; then the run is completed and merged."""
        plan = Plan(str(self.path), self.units)
        while self.suspended:
            self.wake(0)
        try:
            assert self.do(units=self.units) == 0
            checks.check_finished_run(self.path, plan)
            before = checks.glob_units(self.path)
            assert self.do(do="compact") == 0
            assert checks.glob_units(self.path) == before
            assert self.do(units=self.units) == 0
            checks.check_finished_run(self.path, plan)
        finally:
            shutil.rmtree(self.folder)


@pytest.mark.slow
def test_any_sequence_of_steps(play: Play, run_path: Path) -> None:
    class Here(Protocol):
        pass

    Here.play, Here.place = staticmethod(play), run_path.parent
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=EXAMPLES or 4,
            stateful_step_count=8 if EXAMPLES else 5,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
