"""Random sequences of kills, each at a random passing of a random point, then a run to the end."""

import tempfile
from pathlib import Path

import invariants as checks
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_driver import Plan
from scripted_rows import Play

from hermes_rl.store import CRASH_POINTS

kills = st.lists(
    st.tuples(st.sampled_from(CRASH_POINTS), st.integers(1, 40)), min_size=1, max_size=6
)


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(kills=kills, units=st.sampled_from([7, 10, 13]))
def test_any_sequence_of_kills(
    play: Play, run_path: Path, kills: list[tuple[str, int]], units: int
) -> None:
    with tempfile.TemporaryDirectory(dir=run_path.parent) as folder:
        path = Path(folder) / "run"
        for point, passing in kills:
            assert play(path=path, units=units, crash_at=f"{point}:{passing}") in (0, -9)
            checks.check_invariants(path)
        assert play(path=path, units=units) == 0
        checks.check_finished_run(path, Plan(str(path), units))
