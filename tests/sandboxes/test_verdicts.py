"""Who may speak on descriptor 3 of a verifier."""

import os

import pytest

from hermes_rl.sandboxes import GradingSpec, Sandbox
from hermes_rl.testing import CHEATS
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


async def test_no_verdict_can_be_forged_by_a_program_of_the_agent(sandbox: Sandbox) -> None:
    """A verifier runs the agent's program without descriptor 3: it finds no other way to it."""
    await sandbox.write_file("solution.py", FORGER)
    script = "python3 /workspace/solution.py 3>&-; echo reward=0.5 >&3"
    result = await sandbox.grade(GradingSpec(script=script, score=True, timeout_s=30))
    assert result.report == b""
    assert judge(result, score=True) == {"verify": 0.0}
    honest = GradingSpec(script="echo reward=0.5 >&3", score=True, timeout_s=30)
    assert judge(await sandbox.grade(honest), score=True) == {"verify": 0.5}


WRITER = b"""
import array, os, socket
os.write(3, b"reward=1.0\\n")
"""
IMPOSTOR = b"""
report = socket.socket(fileno=os.dup(3))
verifier = array.array("i", [os.getppid(), os.getuid(), os.getgid()]).tobytes()
for kind, about in ((2, verifier), (socket.SCM_RIGHTS, array.array("i", [0]).tobytes())):
    try:
        report.sendmsg([b"reward=1.0\\n"], [(socket.SOL_SOCKET, kind, about)])
    except OSError:
        pass
"""
"""Writes in the verifier's name (2 is SCM_CREDENTIALS), and sends a descriptor along."""


async def test_a_program_with_the_verifiers_descriptor_does_not_change_its_report(
    each_sandbox: Sandbox,
) -> None:
    """What the verifier's own shell writes is the report. A program may write it only where the
    shell writes nothing, as one in Python that the script starts."""
    python = "import os; os.write(3, b'reward=0.75\\n')"
    # Root in no sandbox may give any name.
    program = WRITER + (IMPOSTOR if each_sandbox.info.backend == "bubblewrap" else b"")
    await each_sandbox.write_file("solution.py", program)
    run, descriptors = "python3 /workspace/solution.py;", set[int]()
    for script, report in (
        (f"{run} echo reward=0.25 >&3", b"reward=0.25\n"),
        (f"printf reward= >&3; {run} echo 0 >&3; {run} exit 1", b"reward=0\n"),
        (f"{run} echo cannot-judge=no display >&3", b"cannot-judge=no display\n"),
        (f'python3 -c "{python}"', b"reward=0.75\n"),
        (f'exec python3 -c "{python}"', b"reward=0.75\n"),
        ("echo 0.5 | sed s/^/reward=/ >&3", b"reward=0.5\n"),
        ("echo 0.5 | while read n; do echo reward=$n >&3; done", b"reward=0.5\n"),
    ):
        result = await each_sandbox.grade(GradingSpec(script=script, score=True, timeout_s=30))
        assert result.report == report, (script, result)
        descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(descriptors) == 1


IN_PYTHON = "import subprocess as s; s.run(['python3', '/workspace/solution.py']); exit(5)"


@pytest.mark.parametrize(
    "script",
    ["python3 /workspace/solution.py; exit 5", f'python3 -I -c "{IN_PYTHON}"'],
    ids=["bash", "python"],
)
async def test_no_program_of_the_agent_writes_into_the_verifier_that_runs_it(
    sandbox: Sandbox, script: str
) -> None:
    """Else it could make it end with success. The verifier still goes before others when memory is
    short, although it cannot say so in a /proc that is only read."""
    await sandbox.run(f"touch solution.py\n{CHEATS['patched-verifier']}", timeout_s=30)
    result = await sandbox.grade(GradingSpec(script, timeout_s=30))
    assert result.exit_code == 5, result
    said = await sandbox.grade(GradingSpec("cat /proc/self/oom_score_adj; : 9>/proc/self/mem"))
    assert said.output.startswith("1000\n")
    assert said.exit_code != 0


async def test_a_killed_verifier_gives_nothing(each_sandbox: Sandbox) -> None:
    """What a program wrote before it killed the verifier is no verdict, however it got there."""
    script = "echo reward=1.0 >&3; kill -9 $$"
    result = await each_sandbox.grade(GradingSpec(script=script, score=True, timeout_s=30))
    assert result.report == b"reward=1.0\n"
    assert judge(result, score=True) == {"verify": 0.0}
