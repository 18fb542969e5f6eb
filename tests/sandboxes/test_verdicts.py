"""Who may speak on descriptor 3 of a verifier."""

from pathlib import Path

import pytest

from hermes_rl.sandboxes.base import GradingSpec, SandboxBackend, SandboxSpec
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
from hermes_rl.sandboxes.none import Subprocess
from hermes_rl.testing.cheats import CHEATS
from hermes_rl.verify import judge

FORGER = b"""
import os, signal
for name in ("/hx/report", "/proc/%d/fd/3" % os.getppid(), "/proc/self/fd/3"):
    try:
        with open(name, "w") as report:
            report.write("reward=1.0\\n")
    except OSError:
        pass
os.kill(os.getppid(), signal.SIGKILL)
"""


async def test_no_verdict_can_be_forged_by_a_program_of_the_agent(state: Path) -> None:
    """A verifier runs the agent's program without descriptor 3: it finds no other way to it."""
    backend = Bubblewrap(state_dir=state)
    try:
        async with await backend.lease(SandboxSpec(lease="forger")) as box:
            await box.write_file("solution.py", FORGER)
            script = "python3 /workspace/solution.py 3>&-; echo reward=0.5 >&3"
            result = await box.grade(GradingSpec(script=script, score=True, timeout_s=30))
            assert result.report == b""
            assert judge(result, score=True) == 0.0
            honest = GradingSpec(script="echo reward=0.5 >&3", score=True, timeout_s=30)
            assert judge(await box.grade(honest), score=True) == 0.5
    finally:
        await backend.aclose()


IN_PYTHON = "import subprocess as s; s.run(['python3', '/workspace/solution.py']); exit(5)"


@pytest.mark.parametrize(
    "script",
    ["python3 /workspace/solution.py; exit 5", f'python3 -I -c "{IN_PYTHON}"'],
    ids=["bash", "python"],
)
async def test_no_program_of_the_agent_writes_into_the_verifier_that_runs_it(
    bubblewrap: Bubblewrap, script: str
) -> None:
    """Else it could make it end with success. The verifier still goes before others when memory is
    short, although it cannot say so in a /proc that is only read."""
    async with await bubblewrap.lease(SandboxSpec(lease="writer")) as box:
        await box.run(f"touch solution.py\n{CHEATS['patched-verifier']}", timeout_s=30)
        result = await box.grade(GradingSpec(script, timeout_s=30))
        assert result.exit_code == 5, result
        said = await box.grade(GradingSpec("cat /proc/self/oom_score_adj; : 9>/proc/self/mem"))
        assert said.output.startswith("1000\n")
        assert said.exit_code != 0


@pytest.mark.parametrize("kind", [Bubblewrap, Subprocess])
async def test_a_killed_verifier_gives_nothing(
    state: Path, kind: type[Bubblewrap] | type[Subprocess]
) -> None:
    """What a program wrote before it killed the verifier is no verdict, however it got there."""
    backend: SandboxBackend = kind(state_dir=state)
    try:
        async with await backend.lease(SandboxSpec(lease="killed")) as box:
            script = "echo reward=1.0 >&3; kill -9 $$"
            result = await box.grade(GradingSpec(script=script, score=True, timeout_s=30))
            assert result.report == b"reward=1.0\n"
            assert judge(result, score=True) == 0.0
    finally:
        await backend.aclose()
