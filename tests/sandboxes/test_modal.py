"""Sandboxes of modal: its SDK against the shipped fake server, which runs the commands for real."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))
from engines import OF_THE_BACKEND

from hermes_rl.cli import main
from hermes_rl.errors import SandboxKilled, SandboxStartError, TaskFault
from hermes_rl.sandboxes import (
    Check,
    GradingSpec,
    Modal,
    ModalSandbox,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    find_binary,
    processes,
    reachable,
    tells_a_host_fault,
)
from hermes_rl.testing import FakeModal

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[FakeModal]:
    folder = Path("/tmp") / f"hermes-modal-{os.getpid()}-{os.urandom(3).hex()}"
    folder.mkdir(mode=0o755)
    with pytest.MonkeyPatch.context() as patch:
        async with FakeModal(reachable(find_binary(), folder)) as running:
            for name, value in running.variables.items():
                patch.setenv(name, value)
            yield running
    shutil.rmtree(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(server: FakeModal) -> AsyncIterator[Modal]:
    made = Modal()
    yield made
    await made.aclose()
    async with asyncio.timeout(60):
        await asyncio.gather(*(c.process.wait() for c in server.containers.values()))


async def sh(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command, timeout_s=60)
    return f"{result.output.strip()} [{result.exit_code}]"


@pytest.mark.parametrize("check", OF_THE_BACKEND, ids=lambda check: check.__name__)
async def test_the_shipped_suite(backend: Modal, check: Check) -> None:
    """Its channel is that of ssh, and its shell that of the backend `none`."""
    await check(backend)


async def test_what_a_container_gets(backend: Modal, server: FakeModal) -> None:
    limits = SandboxLimits(cpus=0.5, memory_bytes=300 << 20)
    spec = SandboxSpec(lease="run/unit/1", limits=limits, env={"GREETING": "hello"})
    async with await backend.lease(spec) as sandbox:
        container = list(server.containers.values())[-1]
        resources = container.definition.resources
        assert (resources.milli_cpu, resources.memory_mb, resources.memory_mb_max) == (
            500,
            128,
            300,
        )
        assert container.tags == {"hermes-rl-lease": "run/unit/1"}
        assert sandbox.info.limits["cpus"] == 0.5
        assert await sh(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1") == "lo [0]"
        assert await sh(sandbox, "echo $GREETING; cd /workspace && pwd -P") == (
            f"hello\n{sandbox.workspace} [0]"
        )
        rights = await sh(sandbox, "grep Cap /proc/self/status | cut -f2 | sort -u; id -u")
        assert rights.split() == ["0" * 16, f"{0x2B:016x}", "0", "[0]"], "none over the machine"
        assert await sh(sandbox, "cat /proc/self/uid_map | tr -s ' '") == "0 54322 1 [0]"
        shown = await sh(sandbox, "env; cat /proc/*/environ")
        assert "MODAL" not in shown
    async with await backend.lease(SandboxSpec(lease="open", network=True)) as sandbox:
        machine = os.readlink("/proc/self/ns/net")
        assert await sh(sandbox, "readlink /proc/self/ns/net") == f"{machine} [0]"


async def test_containers_are_listed_with_their_leases(
    backend: Modal,
    server: FakeModal,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def listed() -> tuple[int, list[str]]:
        code = await asyncio.to_thread(main, ["sandboxes", "list"])
        return code, capsys.readouterr().out.splitlines()

    async with await backend.lease(SandboxSpec(lease="run/unit/1")):
        container = list(server.containers.values())[-1]
        code, lines = await listed()
        assert code == 0
        assert f"  run/unit/1  {container.id}" in lines
    await container.process.wait()
    assert f"  run/unit/1  {container.id}" not in (await listed())[1]
    server.refused.add("SandboxListV2")
    code, lines = await listed()
    server.refused.clear()
    assert code != 0
    assert any(" workers, " in line for line in lines), "others are listed all the same"
    assert sum(line.startswith("modal: ") for line in lines) == 1


async def test_faults_before_the_start_are_one_line(
    backend: Modal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxStartError, match="cannot limit the network to hosts"):
        await backend.lease(SandboxSpec(lease="x", network=("a.example",)))
    with pytest.raises(TaskFault, match="no such image") as caught:
        await backend.lease(SandboxSpec(lease="x", image="registry.example/missing:1"))
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(SandboxStartError, match=r"pip install 'hermes-rl\[modal\]'"):
        await Modal().lease(SandboxSpec(lease="x"))


async def test_who_is_blamed_for_an_end(backend: Modal, server: FakeModal) -> None:
    def strike(sandbox: Sandbox) -> None:
        list(server.containers.values())[-1].end()

    await tells_a_host_fault(backend, strike)
    async with await backend.lease(SandboxSpec(lease="killer")) as sandbox:
        with pytest.raises(SandboxKilled, match="ended the helper"):
            await sandbox.run("pkill -9 -f remote_helpe[r]; sleep 50", timeout_s=60)
        verdict = await sandbox.grade(GradingSpec("exit 0"))
        assert verdict.exit_code == 137


async def test_a_verifier_runs_where_no_agent_ran(backend: Modal, server: FakeModal) -> None:
    forged = "touch /made /tmp/made; echo wrong >answer"
    spec = GradingSpec("test -e /made -o -e /tmp/made && exit 5; grep -q right /workspace/answer")
    async with await backend.lease(SandboxSpec(lease="forger", network=True)) as sandbox:
        await sh(sandbox, forged)
        assert (await sandbox.grade(spec)).exit_code == 1
        grader = list(server.containers.values())[-1]
        assert grader.tags == {"hermes-rl-lease": "forger-grading"}
        assert grader.terminated
        assert isinstance(sandbox, ModalSandbox)
    assert list(server.containers.values())[-2].terminated


WORKER = """
import asyncio
from hermes_rl.sandboxes import Modal, SandboxSpec, modal_cloud, remote

remote.SILENCE_S, remote.PING_S = 8.0, 0.5
modal_cloud.ENTRY = modal_cloud.ENTRY.replace("sleep 90", "sleep 2")

async def main():
    sandbox = await Modal().lease(SandboxSpec(lease="doomed"))
    await sandbox.run("(setsid sleep 5000 &)", timeout_s=30)
    await asyncio.sleep(10)
    await sandbox.run("echo lives", timeout_s=30)
    print("ready", flush=True)
    await sandbox.run("sleep 5000", timeout_s=6000)

asyncio.run(main())
"""


async def test_a_container_ends_without_its_worker(server: FakeModal) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"ready\n"
    container = list(server.containers.values())[-1]
    inside = processes.descendants(container.init)
    assert len(inside) > 3
    worker.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await worker.wait()
        await container.process.wait()
    assert not any(proc.alive() for proc in inside)


async def test_no_cheat_of_the_corpus_earns_a_reward(server: FakeModal, tmp_path: Path) -> None:
    row = {
        "prompt": "Write 42 to answer.",
        "verify": 'cd "$WORKSPACE" && grep -qx 42 answer',
        "oracle": "echo 42 >answer",
    }
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text(json.dumps(row))
    command = ["check", str(dataset), "--run", "--sandbox", "modal"]
    assert await asyncio.to_thread(main, command) == 0
