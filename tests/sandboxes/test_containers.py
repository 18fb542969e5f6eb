"""Sandboxes in containers: the shipped suite, who is blamed, grading, limits, and what a kill
leaves, each with a real docker and a real podman."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))
import egress_checks
from engines import IMAGE, OF_THE_BACKEND, PROGRAMS, end_left, engine, import_image

from hermes_rl.cli import main
from hermes_rl.errors import SandboxDied, SandboxKilled, SandboxStartError, TaskFault
from hermes_rl.sandboxes import (
    CHECKS,
    Check,
    Containers,
    Engine,
    GradingSpec,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    conformance,
    tells_a_host_fault,
)
from hermes_rl.store import load_run
from hermes_rl.testing import BUNDLES, bundle

HERE = Path(__file__).parent
VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
MB = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, [*PROGRAMS.values(), "buildah"])) or os.geteuid() != 0,
        reason="needs the programs dockerd, podman and buildah, and root",
    ),
]


ONE_ENGINE = pytest.mark.parametrize("running", ["docker"], indirect=True)
"""For what happens in the container or in code of ours that both engines share."""
PODMAN = pytest.mark.parametrize("running", ["podman"], indirect=True)


@pytest.fixture(scope="module", params=PROGRAMS)
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    folder = Path("/tmp") / f"hermes-{request.param}-{os.getpid()}-{os.urandom(3).hex()}"
    folder.mkdir(mode=0o711)
    try:
        with engine(request.param, folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class WithImage(Containers):
    """Leases with the tested image where none is named, as the shipped suite does."""

    async def lease(self, spec: SandboxSpec) -> Any:
        return await super().lease(replace(spec, image=spec.image or IMAGE))


@pytest_asyncio.fixture
async def backend(running: Engine, state: Path) -> AsyncIterator[WithImage]:
    made = WithImage(running.name, socket_path=running.path, state_dir=state)
    yield made
    await made.aclose()
    assert containers(running) == []
    assert graded_images(running) == []


def containers(engine: Engine) -> list[str]:
    """The names of all containers, ended ones too."""
    listed = engine.request("GET", "/containers/json", query={"all": 1})
    return [name for found in listed for name in found["Names"]]


def graded_images(engine: Engine) -> list[str]:
    listed = engine.request("GET", "/images/json")
    return [tag for found in listed for tag in found["RepoTags"] or () if "graded" in tag]


@ONE_ENGINE
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_shipped_suite(backend: WithImage, check: Check) -> None:
    await check(backend)


OF_PODMAN = (
    *OF_THE_BACKEND,
    egress_checks.clients_find_the_proxy_by_themselves,
    egress_checks.verifiers_have_no_network,
)


@PODMAN
@pytest.mark.parametrize("check", OF_PODMAN, ids=lambda check: check.__name__)
async def test_what_podman_does_for_the_suite(backend: WithImage, check: Check) -> None:
    await check(backend)


OTHERWISE = [
    check
    for check in CHECKS
    if check.__name__
    in (
        *("keeps_state", "ends_what_takes_too_long", "many_timeouts_leave_nothing", "moves_bytes"),
        "reads_while_a_command_runs",
        *("runs_background_processes", "cancelled_commands_end", "grades_what_was_left"),
        *("says_what_is_wrong_with_a_path", "keeps_whatever_was_left", "reports_and_times_out"),
        *("nothing_runs_during_grading", "starts_from_a_snapshot"),
    )
]
"""What is done otherwise for such a user."""


@ONE_ENGINE
@pytest.mark.parametrize("check", OTHERWISE, ids=lambda check: check.__name__)
def test_the_suite_as_an_ordinary_user_of_a_rootful_engine(
    running: Engine, as_ordinary_user: Callable[..., None], check: Check
) -> None:
    """One who may use its socket, as the group `docker` may, and is not root: the engine signals
    processes for him, and passes files on."""
    os.chmod(running.path, 0o666)
    engine = {"name": running.name, "socket": running.path, "image": IMAGE}
    as_ordinary_user(Path(conformance.__file__), check.__name__, engine)


@ONE_ENGINE
@pytest.mark.parametrize("name", egress_checks.NAMES)
async def test_the_network_is_a_list_of_hosts(backend: WithImage, name: str) -> None:
    await getattr(egress_checks, name)(backend)


async def test_a_killed_container_is_a_fault_of_the_machine(
    backend: WithImage, running: Engine
) -> None:
    def strike(sandbox: Sandbox) -> None:
        running.request("POST", f"/containers/{sandbox.container}/kill")  # type: ignore[attr-defined]

    await tells_a_host_fault(backend, strike)


async def sh(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command, timeout_s=60)
    return f"{result.output.strip()} [{result.exit_code}]"


async def test_what_an_agent_may_not_do(
    backend: WithImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "key"
    secret.write_text("decoy")
    monkeypatch.setenv("DECOY_SETTING", "decoy-of-the-environment")
    async with await backend.lease(SandboxSpec(lease="escape")) as sandbox:
        status = await sh(sandbox, "cat /proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapBnd"], 16) == 0xEB, "chown, dac_override, fowner, kill, setuids"
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert await sh(sandbox, f"test -e {secret}") == " [1]"
        assert await sh(sandbox, "ls /sys/class/net") == "lo [0]"
        assert (await sh(sandbox, ": >/hx/cmd")).endswith("Read-only file system [1]")
        assert (await sh(sandbox, "mount -t tmpfs x /mnt || true")) != " [0]"
        assert "sock" not in await sh(sandbox, "find / -xdev -type s")
        shown = await sh(sandbox, "env; cat /proc/*/environ")
        assert "decoy-of-the-environment" not in shown
        assert {name for name in os.environ if "TOKEN" in name or "KEY" in name} & set(
            shown.replace("=", " ").split()
        ) == set()


async def test_limits_hold(backend: WithImage) -> None:
    limits = SandboxLimits(processes=40, memory_bytes=200 * MB, tmp_bytes=8 * MB)
    async with await backend.lease(SandboxSpec(lease="limits", limits=limits)) as sandbox:
        assert sandbox.info.limits["memory_bytes"] == 200 * MB
        full = await sh(sandbox, "head -c 9M /dev/zero >/tmp/full")
        assert full.endswith("No space left on device [1]")
        forks = "for i in $(seq 60); do sleep 3 & done 2>&1; wait"
        assert "Resource temporarily unavailable" in await sh(sandbox, forks)
        assert await sh(sandbox, "echo usable") == "usable [0]"
        with pytest.raises(SandboxKilled, match="memory"):
            await sh(sandbox, "python3 -c 'b = bytearray(400 << 20)'")


async def test_a_workspace_over_its_limit_is_ended(
    backend: WithImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Containers, "watch_s", 0.2)
    limits = SandboxLimits(workspace_bytes=20 * MB)
    async with await backend.lease(SandboxSpec(lease="large", limits=limits)) as sandbox:
        with pytest.raises(SandboxKilled, match="exceeded"):
            await sandbox.run("head -c 40M /dev/zero >big; sleep 50", timeout_s=60)


async def test_what_runs_in_the_background_is_counted_too(
    backend: WithImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Containers, "watch_s", 0.2)
    limits = SandboxLimits(workspace_bytes=20 * MB)
    async with await backend.lease(SandboxSpec(lease="later", limits=limits)) as sandbox:
        await sandbox.run("(head -c 40M /dev/zero >big; sleep 100) >/dev/null 2>&1 &", timeout_s=60)
        path = f"/containers/{sandbox.container}/json"
        running = lambda: backend.engine.request("GET", path)["State"]["Running"]  # noqa: E731
        assert await asyncio.to_thread(until, lambda: not running())
        with pytest.raises(SandboxKilled, match="exceeded"):
            await sandbox.run("true", timeout_s=20)


async def test_files_of_holes_are_counted_before_grading_copies_them(backend: WithImage) -> None:
    limits = SandboxLimits(workspace_bytes=20 * MB)
    async with await backend.lease(SandboxSpec(lease="holes", limits=limits)) as sandbox:
        await sandbox.run("for n in 1 2 3; do truncate -s 1000M hole$n; done", timeout_s=20)
        for image in (None, IMAGE):
            verdict = await sandbox.grade(GradingSpec("exit 0", image=image))
            assert verdict.exit_code == 137
            assert "bytes written" in verdict.output


@ONE_ENGINE
async def test_an_agent_that_forges_the_channel_harms_only_itself(backend: WithImage) -> None:
    async with await backend.lease(SandboxSpec(lease="forger")) as sandbox:
        forge = "IFS=' ' read -ra me </proc/$BASHPID/stat; echo nonsense >/proc/${me[3]}/fd/4"
        with pytest.raises(SandboxKilled):
            await sandbox.run(f"{forge}; sleep 5", timeout_s=20)
        verdict = await sandbox.grade(GradingSpec("exit 3"))
        assert verdict.exit_code == 3


CACHE = """
import struct, sys
name, path = (text.encode() + b"\\0" for text in sys.argv[1:])
head, entry = struct.Struct("=20sIIB3xI12x"), struct.Struct("=iIIIQ")
start = head.size + entry.size
data = head.pack(b"glibc-ld.so.cache1.1", 1, len(name + path), 2, 0)
data += entry.pack(0x303, start, start + len(name), 0, 0) + name + path
open("/etc/ld.so.cache", "wb").write(data)
"""
WRITE_CACHE = f"python3 -c {shlex.quote(CACHE)}"
"""Makes a cache of the loader with one library: its name, and where it is."""


REPLACEMENTS = (
    "printf '#!/bin/bash\\nexit 0' >/usr/bin/grep",
    "mv /usr/bin /usr/bin2; ln -s /usr/bin2 /usr/bin",
    "echo /workspace/evil.so >/etc/ld.so.preload",
    "printf '#!/bin/bash\\nexit 0' >/usr/local/bin/grep; chmod +x /usr/local/bin/grep",
    "cp /bin/bash /root/b; printf '#!/root/b\\nexit 0' >/root/x; chmod +x /root/x; "
    "mv /usr/bin/bash /root/c; cp /root/x /usr/bin/bash",
    "rm -rf /tests; ln -s /usr/local/bin /tests",
    "rm -rf /logs; ln -s /workspace /logs",
    "d=$(dirname $(find /usr/lib -name libtinfo.so.6))/glibc-hwcaps/x86-64-v2; mkdir -p $d; "
    "touch $d/libtinfo.so.6",
    "mkdir -p /usr/lib/x86_64-linux-gnu/gconv; touch /usr/lib/x86_64-linux-gnu/gconv/X.so",
    f"{WRITE_CACHE} libc.so.06 /lib/x86_64-linux-gnu/../../opt/libc.so.06",
    f"{WRITE_CACHE} libtinfo.so.6 /opt/libtinfo.so.6",
    "echo x >/etc/ld.so.cache",
    "ln -s /workspace /verify",
    "rm -rf /workspace; ln -s /verify /workspace",
)


@ONE_ENGINE
@pytest.mark.parametrize("cheat", REPLACEMENTS)
async def test_no_replaced_program_judges(backend: WithImage, cheat: str) -> None:
    spec = GradingSpec(
        "grep -q right /workspace/answer && echo reward=1 >&3 || echo reward=0 >&3",
        files={"tests/test.sh": b"x"},
        score=True,
        mounts={"/tests": "tests", "/logs/verifier": ""},
    )
    async with await backend.lease(SandboxSpec(lease="cheat")) as sandbox:
        await sandbox.run(cheat, timeout_s=20)
        verdict = await sandbox.grade(spec)
        assert (verdict.exit_code, verdict.report) == (137, b"")
        assert "replaced" in verdict.output


@PODMAN
@pytest.mark.parametrize("cheat", REPLACEMENTS[:3], ids=["changed", "moved", "added"])
async def test_podman_lists_what_was_replaced(backend: WithImage, cheat: str) -> None:
    await test_no_replaced_program_judges(backend, cheat)


SCORED = GradingSpec("cd /workspace; [[ -e answer ]] && n=1 || n=0; echo reward=$n >&3", score=True)


@pytest.mark.parametrize(
    "installed",
    [
        "touch /usr/lib/x86_64-linux-gnu/libc.a /usr/lib/x86_64-linux-gnu/libtinfo.so",
        f"{WRITE_CACHE} libc.so.6 /lib/x86_64-linux-gnu/libc.so.6",
        f"mkdir -p /opt; {WRITE_CACHE} libmine.so.1 /opt/libmine.so.1",
    ],
)
@ONE_ENGINE
async def test_libraries_that_an_agent_installs_cost_no_reward(
    backend: WithImage, installed: str
) -> None:
    async with await backend.lease(SandboxSpec(lease="installed")) as sandbox:
        await sandbox.run(f"{installed}; touch answer", timeout_s=20)
        verdict = await sandbox.grade(SCORED)
        assert verdict.report == b"reward=1\n", verdict.output


@ONE_ENGINE
async def test_no_library_of_the_agent_is_loaded_to_look_up_users(backend: WithImage) -> None:
    """glibc loads what /etc/nsswitch.conf names; a verifier's shell asks it for nothing."""
    script = "[[ $(</proc/self/maps) = *nss_agents* ]] && n=1 || n=0; echo reward=$n >&3"
    cheat = """
    d=$(dirname $(find /usr/lib -name libtinfo.so.6))
    cp $d/libtinfo.so.6 $d/libnss_agents.so.2; echo passwd: agents >/etc/nsswitch.conf
    """
    async with await backend.lease(SandboxSpec(lease="users")) as sandbox:
        assert await sh(sandbox, cheat) == " [0]"
        asks = "(unset SHELL; exec bash -c 'echo \"$(</proc/self/maps)\"') | grep -c nss_agents"
        assert not (await sh(sandbox, asks)).startswith("0"), "a shell without SHELL loads it"
        verdict = await sandbox.grade(GradingSpec(script, score=True))
        assert verdict.report == b"reward=0\n"


@ONE_ENGINE
async def test_an_agent_that_prevents_its_grading_earns_nothing(backend: WithImage) -> None:
    """It is not taken for a fault of the machine, nor of the task."""
    async with await backend.lease(SandboxSpec(lease="breaker")) as sandbox:
        await sandbox.run("touch answer; chmod 0 /usr", timeout_s=20)
        verdict = await sandbox.grade(SCORED)
        assert (verdict.exit_code, verdict.report) == (137, b"")
        assert "no grading sandbox starts over what the agent left" in verdict.output


@ONE_ENGINE
async def test_a_workspace_that_leads_to_the_verifiers_files_is_none(backend: WithImage) -> None:
    spec = replace(SCORED, files={"answer": b"42"}, image=IMAGE)
    async with await backend.lease(SandboxSpec(lease="leads")) as sandbox:
        await sandbox.run("cd /; rm -rf /workspace; ln -s /verify /workspace", timeout_s=20)
        verdict = await sandbox.grade(spec)
        assert (verdict.exit_code, verdict.report) == (137, b"")


FORGER = """
for fd in /proc/[0-9]*/fd/[0-9]*; do
  case $(readlink $fd) in pipe*) echo reward=1 >$fd & (cat $fd >/dev/null) & ;; esac
done 2>/dev/null
grep -l SECRET_OF_VERIFIER /proc/[0-9]*/environ
sleep 0.2
"""


@ONE_ENGINE
async def test_no_program_of_the_agent_writes_the_report(backend: WithImage) -> None:
    """It finds no way into the verifier's descriptors, and cannot read its variables."""
    script = "export SECRET_OF_VERIFIER=1; env -i timeout 5 /bin/bash /workspace/evil 3>&-"
    spec = GradingSpec(f"{script}; echo reward=0 >&3", score=True)
    async with await backend.lease(SandboxSpec(lease="forger")) as sandbox:
        await sandbox.write_file("evil", FORGER.encode())
        for _ in range(3):
            verdict = await sandbox.grade(spec)
            assert verdict.report == b"reward=0\n"
            assert re.findall(r"^/proc/\d+/environ$", verdict.output, re.MULTILINE) == []


@ONE_ENGINE
async def test_a_paused_container_is_a_fault_of_the_machine(
    backend: WithImage, running: Engine
) -> None:
    async with await backend.lease(SandboxSpec(lease="paused")) as sandbox:
        running.request("POST", f"/containers/{sandbox.container}/pause")
        with pytest.raises(SandboxDied, match="paused from outside"):
            await sandbox.run("true", timeout_s=1)


async def test_grading_sees_what_was_left_and_mounts(backend: WithImage) -> None:
    script = """
    grep -q right answer && [[ -f /etc/made ]] && [[ ! -e /usr/bin/tee ]] || exit 1
    /tests/test.sh && echo rewards='{"a": 1}' >&3
    """
    spec = GradingSpec(
        f"cd /workspace; {script}",
        files={"tests/test.sh": b"#!/bin/bash\necho >/tests/w && echo >/logs/verifier/reward.txt"},
        score=True,
        mounts={"/tests": "tests", "/logs/verifier": ""},
    )
    async with await backend.lease(SandboxSpec(lease="graded")) as sandbox:
        await sandbox.run("echo right >answer; touch /etc/made; rm /usr/bin/tee", timeout_s=20)
        for _ in range(2):
            verdict = await sandbox.grade(spec)
            assert verdict.report == b'rewards={"a": 1}\n', verdict.output
        elsewhere = GradingSpec(
            "grep -q right /workspace/answer && test ! -e /etc/made", image=IMAGE
        )
        assert (await sandbox.grade(elsewhere)).exit_code == 0


async def test_an_image_with_a_user_and_variables(backend: WithImage, running: Engine) -> None:
    made = running.request("POST", "/containers/create", {"Image": IMAGE, "Cmd": ["true"]})
    changes = ["USER app", "ENV GREETING=hello", "WORKDIR /home/app"]
    query = {"container": made["Id"], "repo": "with-user", "tag": "1", "changes": changes}
    running.request("POST", "/commit", {}, query=query)
    running.request("DELETE", f"/containers/{made['Id']}")
    spec = SandboxSpec(lease="user", image="with-user:1", cwd="/workspace/deep")
    async with await backend.lease(spec) as sandbox:
        assert await sh(sandbox, 'id -u; pwd; echo "$GREETING"') == (
            "1000\n/workspace/deep\nhello [0]"
        )
        assert await sh(sandbox, "echo mine >file; cat file") == "mine [0]"
        await sandbox.write_file("deep/given", b"given")
        assert await sh(sandbox, "echo more >>given; cat given") == "givenmore [0]"
        job = await sandbox.start_process("read line; echo got $line")
        await job.write(b"it\n")
        assert await conformance.printed_by(job, 7) == b"got it\n"
        verdict = await sandbox.grade(GradingSpec("grep mine /workspace/deep/file && id -u"))
        assert (verdict.exit_code, verdict.output) == (0, "mine\n1000\n")


async def test_faults_of_a_task_and_of_the_machine(
    backend: WithImage, running: Engine, state: Path
) -> None:
    with pytest.raises(TaskFault, match="needs an image"):
        await Containers.lease(backend, SandboxSpec(lease="none"))
    with pytest.raises(TaskFault, match=r"is not in .* and cannot be pulled"):
        await backend.lease(SandboxSpec(lease="missing", image="localhost:1/missing:2"))
    import_image(running, io.BytesIO(bytes(10240)), "empty")
    with pytest.raises(TaskFault, match="no /bin/bash"):
        await backend.lease(SandboxSpec(lease="empty", image="empty:1"))
    made = running.request("POST", "/containers/create", {"Image": IMAGE, "Cmd": ["true"]})
    query = {"container": made["Id"], "repo": "no-user", "tag": "1", "changes": "USER nobody-here"}
    running.request("POST", "/commit", {}, query=query)
    running.request("DELETE", f"/containers/{made['Id']}")
    with pytest.raises(TaskFault, match="USER is not in its /etc/passwd"):
        await backend.lease(SandboxSpec(lease="no-user", image="no-user:1"))
    absent = Containers(running.name, socket_path=f"{state}/no.sock", state_dir=state)
    with pytest.raises(SandboxStartError, match="does not answer"):
        await absent.lease(SandboxSpec(lease="absent", image=IMAGE))


def start_worker(engine: Engine, state: Path, count: int) -> subprocess.Popen[str]:
    variables = {**os.environ, VARIABLES[engine.name]: f"unix://{engine.path}"}
    worker = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), str(state), str(count), engine.name, IMAGE],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout
    assert [worker.stdout.readline() for _ in range(2)] == ["starting\n", "ready\n"]
    return worker


def until(condition: Any, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("watchdog_too", [False, True], ids=["worker", "worker and watchdog"])
async def test_a_kill_leaves_nothing_and_spares_others(
    backend: WithImage, running: Engine, state: Path, watchdog_too: bool
) -> None:
    async with await backend.lease(SandboxSpec(lease="beside")) as beside:
        await beside.run("echo kept >file", timeout_s=20)
        (beside_it,) = containers(running)
        worker = start_worker(running, state, 3)
        assert len(containers(running)) == 4
        if watchdog_too:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                line = path.read_bytes() if path.exists() else b""
                if b"watchdog.py" in line and f"\0{worker.pid}-".encode() in line:
                    os.kill(int(path.parent.name), signal.SIGKILL)
        worker.kill()
        worker.wait()

        def living() -> list[str]:
            listed = running.request("GET", "/containers/json")
            return [name for found in listed for name in found["Names"]]

        assert until(lambda: living() == [beside_it]), "each ends with its channel"
        if watchdog_too:  # then the next start removes what has ended
            again = Containers(running.name, socket_path=running.path, state_dir=state)
            async with await again.lease(SandboxSpec(lease="next", image=IMAGE)):
                pass
            await again.aclose()
        assert until(lambda: containers(running) == [beside_it])
        assert (await beside.run("cat file", timeout_s=20)).output == "kept\n"


async def test_a_dead_engine_is_a_fault_of_the_machine() -> None:
    folder = Path("/tmp") / f"hermes-dies-{os.getpid()}-{os.urandom(3).hex()}"
    folder.mkdir(mode=0o711)
    command = [sys.executable, str(HERE / "engines.py"), "docker", str(folder)]
    process = await asyncio.to_thread(
        lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    assert process.stdout
    path = process.stdout.readline().strip()
    backend = Containers("docker", socket_path=path, state_dir=folder / "state")
    try:
        sandbox = await backend.lease(SandboxSpec(lease="orphan", image=IMAGE))
        daemon = int((folder / "pid").read_text())
        waiting = asyncio.create_task(sandbox.run("sleep 100", timeout_s=200))
        await asyncio.sleep(0.3)
        os.kill(daemon, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await waiting
        await sandbox.aclose()
    finally:
        await backend.aclose()
        process.communicate("", timeout=60)
        end_left(folder)
        shutil.rmtree(folder, ignore_errors=True)


@ONE_ENGINE
def test_a_run_in_containers(
    running: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLES[running.name], f"unix://{running.path}")
    rows = [
        {
            "id": "one",
            "prompt": "Write 42 to answer.",
            "setup": "echo given >given",
            "verify": "grep -qx 42 /workspace/answer && test -f /workspace/given",
            "oracle": "echo 42 >answer",
        },
        {"id": "bad", "prompt": "x", "verify": "true", "image": "localhost:1/none", "oracle": "id"},
    ]
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", str(dataset), "--sandbox", running.name, "--image", IMAGE, "--workers", "0"]
    for model, reward in (("oracle", 1.0), ("noop", 0.0)):
        out = tmp_path / model
        main([*command, "--model", model, "--out", str(out), "--max-attempts", "1"])
        found = load_run(out).trajectories
        by_id = {row["task_id"]: row for row in found.to_dict("records")}
        assert by_id["one"]["reward"] == reward
        assert by_id["one"]["sandbox"]["backend"] == running.name
        assert "image 'localhost:1/none' is not in" in capsys.readouterr().out
    assert containers(running) == []


def test_task_folders_are_built_and_played(
    running: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests are shown to the verifier alone; limits and the network wish of a task apply."""
    monkeypatch.setenv(VARIABLES[running.name], f"unix://{running.path}")
    monkeypatch.setenv("HERMES_RL_IMAGES", str(tmp_path / "store"))
    base = Path(running.path).parent / "rootfs.tar"
    task = tmp_path / "tasks" / "sum"
    files = {
        "task.toml": "[environment]\ncpus = 0.5\nmemory = '300M'\n",
        "instruction.md": "Write the sum of /app/numbers to /app/sum.",
        "environment/Dockerfile": (
            "FROM base\nCOPY numbers /app/\nRUN wc -l </app/numbers >/app/lines\nWORKDIR /app\n"
        ),
        "environment/numbers": "1\n2\n39\n",
        "tests/test.sh": "grep -qx 42 sum && echo 0.5 >/logs/verifier/reward.txt\n",
        "solution/solve.sh": (
            "[ $(cat /app/lines) = 3 ] && [ ! -e /tests ] || exit 1\n"
            "awk '{ s += $1 } END { print s }' numbers >sum\n"
        ),
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    command = ["run", str(task.parent), "--sandbox", running.name, "--workers", "0"]
    command += ["--set", f"sandbox.build.aliases={{base: {base}}}"]
    played = {"oracle": 0.5, "noop": 0.0} if running.name == "docker" else {"oracle": 0.5}
    for model, reward in played.items():
        out = tmp_path / model
        assert main([*command, "--model", model, "--out", str(out)]) == 0
        (row,) = load_run(out).trajectories.to_dict("records")
        assert row["reward"] == reward
        assert (row["sandbox"]["limits"]["cpus"], row["sandbox"]["limits"]["memory_bytes"]) == (
            0.5,
            300 * MB,
        )
    assert containers(running) == []


@ONE_ENGINE
@pytest.mark.parametrize("name", BUNDLES)
async def test_no_cheat_of_the_corpus_earns_a_reward(backend: WithImage, name: str) -> None:
    by_code = GradingSpec('cd "$WORKSPACE" && grep -qx 42 answer')
    script = "[[ $(<$WORKSPACE/answer) = 42 ]] && n=1 || n=0; echo reward=$n >&3"
    async with await backend.lease(SandboxSpec(lease="cheats")) as sandbox:
        await sandbox.run(bundle(name), timeout_s=60)
        assert (await sandbox.grade(by_code)).exit_code != 0
        assert (await sandbox.grade(GradingSpec(script, score=True))).report != b"reward=1\n"
