"""What holds for sandboxes of apptainer, each run as an ordinary user by `launcher`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import SandboxKilled, SandboxStartError, TaskFault
from hermes_rl.sandboxes import (
    Apptainer,
    ApptainerSandbox,
    GradingSpec,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    SifImages,
    conformance,
    processes,
    tells_a_host_fault,
)
from hermes_rl.testing import BUNDLES, bundle

USER = 54321
CANARY = "canary-7f3a"
"""What the launcher's environment holds."""


async def sh(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command, timeout_s=60)
    return f"{result.output.strip()} [{result.exit_code}]"


async def shows_nothing_of_the_host(backend: Apptainer) -> None:
    async with await backend.lease(SandboxSpec(lease="closed")) as sandbox:
        shown = await sh(sandbox, "env; cat /proc/*/environ | tr '\\0' '\\n'")
        assert CANARY not in shown
        assert "APPTAINER" not in await sh(sandbox, "env")
        assert await sh(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1") == "lo [0]"
        assert await sh(sandbox, "test -e /root -a -e /work") == " [1]"
        assert (await sh(sandbox, ": >/hx/cmd")).endswith("Read-only file system [1]")
        limits = sandbox.info.limits
        assert (limits["processes"], limits["workspace_held_by"]) == (128, "watching")
        assert "memory_bytes" not in limits
        forks = "for i in {1..200}; do sleep 1 & done 2>&1; wait"
        assert "Resource temporarily unavailable" in await sh(sandbox, forks)
    spec = SandboxSpec(lease="network-on", network=True)
    async with await backend.lease(spec) as sandbox:
        assert await sh(sandbox, "readlink /proc/self/ns/net") == (
            f"{os.readlink('/proc/self/ns/net')} [0]"
        )


async def tells_host_faults(backend: Apptainer) -> None:
    def strike(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, ApptainerSandbox)
        os.kill(sandbox.host_pid, signal.SIGKILL)

    await tells_a_host_fault(backend, strike)


async def refuses_in_one_line(backend: Apptainer) -> None:
    listed = SandboxSpec(lease="x", network=("a.example",))
    error = await conformance.fails(backend.lease(listed), SandboxStartError)
    assert "cannot limit the network to hosts" in str(error)
    absent = SandboxSpec(lease="x", image="/nowhere.sif")
    error = await conformance.fails(backend.lease(absent), SandboxStartError)
    assert "apptainer did not start /nowhere.sif: FATAL" in str(error)
    assert "\n" not in str(error)
    bare = Apptainer.lease(backend, SandboxSpec(lease="x"))
    assert "needs an image" in str(await conformance.fails(bare, TaskFault))


async def ends_what_writes_too_much(backend: Apptainer) -> None:
    """Into the workspace, a temporary folder or the image."""
    backend.watch_s = 0.2
    limits = SandboxLimits(workspace_bytes=20 << 20)
    for place in ("big", "/dev/shm/big", "/opt/big"):
        async with await backend.lease(SandboxSpec(lease="large", limits=limits)) as sandbox:
            await sh(sandbox, "mkdir -p /opt")
            command = sandbox.run(f"head -c 40M /dev/zero >{place}; sleep 50", timeout_s=60)
            error = await conformance.fails(command, SandboxKilled)
            assert "exceeded its limits" in str(error)


async def lets_no_replaced_program_judge(backend: Apptainer) -> None:
    spec = GradingSpec(
        "grep -q right /workspace/answer && echo reward=1 >&3 || echo reward=0 >&3", score=True
    )
    for cheat in (
        "printf '#!/bin/bash\\nexit 0' >/usr/bin/grep",
        "printf '#!/bin/bash\\nexit 0' >/usr/local/bin/grep; chmod +x /usr/local/bin/grep",
        "mv /usr/bin /usr/bin2; /usr/bin2/ln -s /usr/bin2 /usr/bin",
        "echo /workspace/evil.so >/etc/ld.so.preload",
        "ln -s /workspace /verify",
    ):
        async with await backend.lease(SandboxSpec(lease="cheat")) as sandbox:
            await sh(sandbox, cheat)
            verdict = await sandbox.grade(spec)
            assert (verdict.exit_code, verdict.report) == (137, b""), (cheat, verdict)
            assert "replaced" in verdict.output


async def keeps_changes_of_the_image_for_grading(backend: Apptainer) -> None:
    script = """
    cd /workspace; grep -q right answer && [[ -f /opt/made ]] && [[ ! -e /usr/bin/tee ]] || exit 1
    /tests/test.sh && echo reward=0.5 >&3
    """
    spec = GradingSpec(
        script,
        files={"tests/test.sh": b"#!/bin/bash\necho >/tests/w && echo >/logs/verifier/x"},
        score=True,
        mounts={"/tests": "tests", "/logs/verifier": ""},
    )
    async with await backend.lease(SandboxSpec(lease="graded")) as sandbox:
        await sh(sandbox, "echo right >answer; mkdir -p /opt; touch /opt/made; rm /usr/bin/tee")
        for _ in range(2):
            verdict = await sandbox.grade(spec)
            assert verdict.report == b"reward=0.5\n", verdict.output
        assert isinstance(sandbox, ApptainerSandbox)
        other = replace(
            spec, script="test ! -e /opt/made", image=sandbox.spec.image, score=False, mounts={}
        )
        assert (await sandbox.grade(other)).exit_code == 0


async def gives_no_cheat_a_reward(backend: Apptainer) -> None:
    verifiers = (
        GradingSpec('cd "$WORKSPACE" && grep -qx 42 answer'),
        GradingSpec(
            "[[ $(<$WORKSPACE/answer) = 42 ]] && n=1 || n=0; echo reward=$n >&3", score=True
        ),
    )
    for name in BUNDLES:
        async with await backend.lease(SandboxSpec(lease=f"cheats-{name}")) as sandbox:
            await sandbox.run(bundle(name), timeout_s=60)
            for spec in verifiers:
                verdict = await sandbox.grade(spec)
                won = verdict.report == b"reward=1\n" if spec.score else verdict.exit_code == 0
                assert not won, (name, verdict)


WORKER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from hermes_rl.sandboxes import Apptainer, SandboxSpec

async def main():
    backend = Apptainer(state_dir=Path(sys.argv[1]), program=sys.argv[2])
    for number in range(5):
        spec = SandboxSpec(lease=f"doomed-{number}", image=sys.argv[3])
        sandbox = await backend.lease(spec)
        await sandbox.run("mkdir d; chmod 000 d; setsid sleep 5000 & :", timeout_s=30)
    print("ready", flush=True)
    await sandbox.run("sleep 5000", timeout_s=6000)

asyncio.run(main())
"""


def gone(condition: Callable[[], bool], those: Iterable[processes.Proc]) -> None:
    while not condition() or any(p.alive() for p in those):
        time.sleep(0.05)


async def leaves_nothing_of_a_killed_worker(backend: Apptainer) -> None:
    async with await backend.lease(SandboxSpec(lease="beside")) as beside:
        assert isinstance(beside, ApptainerSandbox)
        folders = beside.folders.home.parent
        state = folders.parent
        before = set(os.listdir(folders))
        arguments = [str(state), str(backend.program), str(beside.spec.image)]
        worker = await asyncio.to_thread(
            lambda: subprocess.Popen(
                [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE
            )
        )
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == b"ready\n"
        started = processes.descendants(worker.pid)
        assert len(started) > 15
        worker.kill()
        await asyncio.to_thread(worker.wait)
        async with asyncio.timeout(60):
            await asyncio.to_thread(gone, lambda: set(os.listdir(folders)) == before, started)
        assert await sh(beside, "echo here") == "here [0]"
        assert Path(state / "owners").is_dir()


ARCHIVE = "task.tar"
"""Beside the program: an archive of `docker save` with the image `task:0123`."""


async def starts_in_the_working_directory_of_a_task_image(backend: Apptainer) -> None:
    archive, name = Path(str(backend.program)).with_name(ARCHIVE), "task:0123"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HERMES_RL_IMAGES"] = folder
        lease = backend.lease(SandboxSpec(lease="early", image=name))
        error = await conformance.fails(lease, TaskFault)
        assert str(error) == "image 'task:0123' is not built on this machine for apptainer"
        images = SifImages(backend.program)
        await asyncio.to_thread(images.load, archive)
        async with await backend.lease(SandboxSpec(lease="task", image=name)) as sandbox:
            assert await sh(sandbox, "pwd; echo $FROM_IMAGE; touch made") == "/app\nyes [0]"
            assert sandbox.info.image == name
            verdict = await sandbox.grade(GradingSpec('cd "$WORKDIR" && test -e made'))
            assert verdict.exit_code == 0, verdict.output


NAMES = (
    *("shows_nothing_of_the_host", "tells_host_faults", "refuses_in_one_line"),
    *("ends_what_writes_too_much", "lets_no_replaced_program_judge"),
    *("keeps_changes_of_the_image_for_grading", "gives_no_cheat_a_reward"),
    "leaves_nothing_of_a_killed_worker",
)
