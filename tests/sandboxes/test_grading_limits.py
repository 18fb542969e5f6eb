"""A grading sandbox has the limits of the agent's: a verifier may run what the agent left."""

import asyncio

import pytest

from hermes_rl.sandboxes import (
    Bubblewrap,
    GradingResult,
    GradingSpec,
    SandboxLimits,
    SandboxSpec,
    probe,
)
from hermes_rl.verify import judge

FILL = "exec 2>/tmp/err; for i in $(seq 40); do head -c 1M /dev/zero >f$i || exit 1; done; sleep 50"
MANY = "cd; for i in $(seq 20000); do : >f$i; done; sleep 50"
"""What programs of the agent's do, the second in the verifier's own HOME."""


async def test_a_program_that_fills_its_disk_or_memory_is_ended(bubblewrap: Bubblewrap) -> None:
    limits = SandboxLimits(workspace_bytes=20 << 20, workspace_files=5_000)

    async def graded(program: str) -> GradingResult:
        spec = SandboxSpec(lease="fills", limits=limits)
        async with await bubblewrap.lease(spec) as sandbox:
            await sandbox.write_file("fill.sh", program.encode())
            script = "echo begin; cd $WORKSPACE; bash fill.sh; cat /tmp/err; exit 0"
            result = await sandbox.grade(GradingSpec(script, timeout_s=60))
            again = await sandbox.grade(GradingSpec("ls $WORKSPACE ~"))
            assert again.output == "/grading:\n\n/workspace:\nfill.sh\n", again
        return result

    fill, many = await asyncio.gather(graded(FILL), graded(MANY))
    if "No space left" not in fill.output:  # nothing but a look can hold it then
        assert fill.output == "begin\n\n[ended: its files hold more than 20971520 bytes]"
        assert (fill.exit_code, fill.timed_out) == (137, False), fill
    assert (many.exit_code, many.timed_out) == (137, False), many
    assert many.output == "begin\n\n[ended: more than 5000 files]"
    assert judge(many, score=False) == {"verify": 0.0}


async def test_an_agent_that_filled_its_disk_leaves_room_for_its_verifier(
    bubblewrap: Bubblewrap,
) -> None:
    """Else a check that cannot write down what is wrong finds nothing wrong."""
    limits = SandboxLimits(workspace_bytes=8 << 20)
    async with await bubblewrap.lease(SandboxSpec(lease="full", limits=limits)) as sandbox:
        if sandbox.info.limits["workspace_held_by"] == "kernel":
            full = await sandbox.run("cat /dev/zero >rest", timeout_s=60)
            assert "No space left" in full.output, full
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_file("more", bytes(4 << 20))
        result = await sandbox.grade(GradingSpec('cd "$WORKSPACE"; head -c 6M /dev/zero >room'))
        assert (result.exit_code, result.output) == (0, ""), result


async def test_its_memory_is_bounded_as_a_whole(bubblewrap: Bubblewrap) -> None:
    """Several processes, none of them too large alone."""
    if not (await asyncio.to_thread(probe.probe_machine)).cgroups:
        return  # then `info.limits` of the sandbox does not claim it
    limits = SandboxLimits(memory_bytes=150 << 20)
    hog = "python3 -c 'import time; a = b\"x\" * (100 << 20); time.sleep(20)'"
    async with await bubblewrap.lease(SandboxSpec(lease="memory", limits=limits)) as sandbox:
        result = await sandbox.grade(GradingSpec(f"{hog} & {hog} & wait -n; echo $?", timeout_s=60))
        assert result.output.splitlines()[-1] == "137", result


async def test_the_verifiers_files_cannot_be_changed(bubblewrap: Bubblewrap) -> None:
    """By a program of the agent's that it runs, so that the next line still finds the key."""
    deed = 'echo 0 >"$VERIFY/key"; rm -f "$VERIFY/key"; touch "$VERIFY/new"; cat "$VERIFY"/*'
    async with await bubblewrap.lease(SandboxSpec(lease="key")) as sandbox:
        await sandbox.write_file("deed.sh", deed.encode())
        spec = GradingSpec('bash "$WORKSPACE/deed.sh" 2>/dev/null', files={"key": b"42"})
        assert (await sandbox.grade(spec)).output == "42"


LOWERED = ("NOFILE", "AS", "STACK", "CPU", "FSIZE")
"""Limits without which the verifier's next program cannot start, or ends before it has found
anything."""


async def test_a_program_cannot_lower_the_limits_of_its_verifier(bubblewrap: Bubblewrap) -> None:
    """Else a check that finds what is wrong fails for another reason, and passes."""
    deed = """
import os, resource, sys
for pid in (os.getppid(), 1, 2, 3):
    try:
        resource.prlimit(pid, getattr(resource, "RLIMIT_" + sys.argv[1]), (0, 0))
        print("lowered", pid)
    except (PermissionError, ProcessLookupError):
        pass
"""
    check = 'sort "$WORKSPACE/answer" >sorted; if grep -q wrong sorted; then exit 1; fi; exit 0'
    async with await bubblewrap.lease(SandboxSpec(lease="lower")) as sandbox:
        await sandbox.write_file("deed.py", deed.encode())
        await sandbox.write_file("answer", b"wrong\n")
        for name in LOWERED:
            script = f'python3 "$WORKSPACE/deed.py" {name}; {check}'
            result = await sandbox.grade(GradingSpec(script))
            assert (result.exit_code, result.output) == (1, ""), (name, result)
