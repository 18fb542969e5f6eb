"""Sandboxes on other machines: a real sshd on loopback, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))
from relay import Relay
from sshd import Sshd, make_key, sshd

from hermes_rl.cli import main
from hermes_rl.errors import SandboxDied, SandboxStartError, UserError
from hermes_rl.sandboxes import (
    CHECKS,
    Check,
    GradingSpec,
    SandboxSpec,
    SshHosts,
    conformance,
    tells_a_host_fault,
)
from hermes_rl.store import load_run
from hermes_rl.wiring import make_backend

pytestmark = pytest.mark.slow
on_shared_loop = pytest.mark.asyncio(loop_scope="module")
"""One connection serves all of these tests."""
WORKER = Path(__file__).with_name("ssh_worker.py")


@pytest.fixture(scope="module")
def machine() -> Iterator[Sshd]:
    folder = Path("/tmp") / f"hermes-sshd-{os.getpid()}-{os.urandom(3).hex()}"
    folder.mkdir(mode=0o711)
    try:
        with sshd(folder) as running:
            yield running
            deadline = time.monotonic() + 60  # a line that was cut is noticed late
            while left_on(running) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left_on(running) == [], "closed backends leave nothing"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(machine: Sshd) -> AsyncIterator[SshHosts]:
    made = SshHosts([machine.host])
    yield made
    await made.aclose()
    assert await within(lambda: left_on(machine) == [])


@contextlib.asynccontextmanager
async def pool(*hosts: object, **settings: bool) -> AsyncIterator[SshHosts]:
    made = SshHosts(hosts, **settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.aclose()


def left_on(machine: Sshd) -> list[str]:
    """Folders of sandboxes, and locks of workers, on a machine."""
    state = Path(str(machine.host.folder))
    return [path.name for path in state.glob("hermes-rl-[0-9]*/[!p]*/*")]  # but places


async def within(condition: object, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@on_shared_loop
async def test_the_shipped_suite(backend: SshHosts, check: Check) -> None:
    await check(backend)


@on_shared_loop
async def test_a_sandbox_there_is_one_of_bubblewrap(backend: SshHosts, machine: Sshd) -> None:
    async with await backend.lease(SandboxSpec(lease="inside")) as sandbox:
        found = await sandbox.run(
            f"id -u; ls /sys/class/net 2>/dev/null; test -e {machine.folder} || echo hidden; "
            "env | grep -c SSH_; true",
            timeout_s=20,
        )
        assert found.output.split() == ["1000", "hidden", "0"]
    limits = sandbox.info.limits
    assert sandbox.info.backend == "ssh"
    assert limits["host"] == f"127.0.0.1:{machine.port}"
    assert (limits["isolation"], limits["processes"]) == ("bubblewrap", 128)


@pytest.mark.parametrize("kind", ["unknown", "wrong"])
@on_shared_loop
async def test_no_host_key_is_accepted_but_the_known_one(
    machine: Sshd, tmp_path: Path, kind: str
) -> None:
    known = tmp_path / "known_hosts"
    text = ""
    if kind == "wrong":
        other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()
        text = f"[127.0.0.1]:{machine.port} {other[0]} {other[1]}\n"
    known.write_text(text)
    async with pool(replace(machine.host, known_hosts=str(known))) as backend:
        with pytest.raises(SandboxStartError, match="its host key is not that of") as caught:
            await backend.lease(SandboxSpec(lease="x"))
    assert "\n" not in str(caught.value)
    assert known.read_text() == text


@on_shared_loop
async def test_a_refused_key_is_one_line(machine: Sshd, tmp_path: Path) -> None:
    async with pool(replace(machine.host, key=str(make_key(tmp_path / "mine")))) as backend:
        with pytest.raises(SandboxStartError, match=r"it refused your key .*see that `ssh") as e:
            await backend.lease(SandboxSpec(lease="x"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "/nowhere/python3"}, "/nowhere/python3"),
        ({"port": 1}, "refused|Connect"),
        ({"folder": "/proc/nowhere"}, "nowhere"),
    ],
    ids=["no Python", "no sshd", "no folder"],
)
@on_shared_loop
async def test_a_machine_that_cannot_be_used_is_one_line(
    machine: Sshd, changes: dict[str, object], message: str
) -> None:
    async with pool(replace(machine.host, **changes)) as backend:  # type: ignore[arg-type]
        with pytest.raises(SandboxStartError, match=message) as caught:
            await backend.lease(SandboxSpec(lease="x"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("ssh 127.0.0.1")


@on_shared_loop
async def test_without_bubblewrap_commands_run_there_only_if_that_is_allowed(
    machine: Sshd, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec unshare -r {sys.executable} "$@"\n')
    python.chmod(0o755)
    host = replace(machine.host, python=str(python))
    async with pool(host) as refuses:
        with pytest.raises(SandboxStartError, match="add --allow-unsandboxed"):
            await refuses.lease(SandboxSpec(lease="x"))
    async with pool(host, allow_plain=True) as allows:
        async with await allows.lease(SandboxSpec(lease="x")) as sandbox:
            assert sandbox.info.limits["isolation"] == "none"
            assert "processes" not in sandbox.info.limits
            assert (await sandbox.run("echo here", timeout_s=20)).output == "here\n"
        with pytest.raises(SandboxStartError, match="cannot limit the network to hosts"):
            await allows.lease(SandboxSpec(lease="x", network=("a.example",)))
        await conformance.ends_what_takes_too_long(allows)


@on_shared_loop
async def test_a_lost_connection_is_a_fault_of_the_machine(machine: Sshd) -> None:
    async with pool(machine.host) as backend:
        await tells_a_host_fault(backend, lambda sandbox: machine.cut())
        assert await within(lambda: left_on(machine) == [] and not machine.helpers())
        async with await backend.lease(SandboxSpec(lease="again")) as sandbox:
            assert (await sandbox.run("echo new", timeout_s=20)).output == "new\n"


@on_shared_loop
async def test_a_killed_helper_leaves_nothing(machine: Sshd) -> None:
    """Neither does one that is killed with its watchdog, after the next connection."""
    for watchdog_too in (False, True):
        async with pool(machine.host) as backend:
            sandbox = await backend.lease(SandboxSpec(lease="doomed"))
            await sandbox.run("(setsid sleep 5000 &)", timeout_s=20)
            command = f"sleep 5000.{os.getpid()}"
            waiting = asyncio.create_task(sandbox.run(command, timeout_s=6000))
            assert await within(lambda command=command: runs(command))
            (helper,) = machine.helpers()
            if watchdog_too:
                kill_watchdogs_of(helper)
            os.kill(helper, signal.SIGKILL)
            with pytest.raises(SandboxDied) as caught:
                await waiting
            assert caught.value.in_command
            if watchdog_too:
                await conformance.keeps_state(backend)
                await backend.aclose()
            assert await within(lambda: left_on(machine) == [])


def runs(command: str) -> bool:
    """Whether a process of this machine was started so."""
    return subprocess.run(["pgrep", "-fx", command], stdout=subprocess.DEVNULL).returncode == 0


def kill_watchdogs_of(pid: int) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if b"watchdog.py" in line and f"\0{pid}-".encode() in line:
                os.kill(int(path.parent.name), signal.SIGKILL)


@on_shared_loop
async def test_a_machine_that_falls_silent_is_given_up(
    machine: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.sandboxes.remote.PING_S", 0.2)
    monkeypatch.setattr("hermes_rl.sandboxes.remote.SILENCE_S", 6.0)
    async with Relay(machine.port) as relay, pool(relay.host(machine.host)) as backend:
        sandbox = await backend.lease(SandboxSpec(lease="silent"))
        await sandbox.run("sleep 7", timeout_s=20)
        waiting = asyncio.create_task(sandbox.run("sleep 100", timeout_s=200))
        await asyncio.sleep(0.1)
        relay.stall()
        with pytest.raises(SandboxDied, match="no answer for") as caught:
            await waiting
        assert caught.value.in_command
        with pytest.raises(SandboxDied):
            await sandbox.read_file("x")
        await sandbox.aclose()


@on_shared_loop
async def test_time_limits_count_where_the_command_runs(machine: Sshd) -> None:
    """A slow line makes no command exceed its time, nor the next one see its output."""
    async with (
        Relay(machine.port) as relay,
        pool(relay.host(machine.host)) as backend,
        await backend.lease(SandboxSpec(lease="slow")) as sandbox,
    ):
        relay.delay_s = 1.0
        assert (await sandbox.run("echo a", timeout_s=1.8)).output == "a\n"
        late = await sandbox.run("echo b; sleep 50", timeout_s=1.5)
        assert (late.output, late.timed_out) == ("b\n", True)
        assert late.seconds < 30
        assert (await sandbox.run("echo c", timeout_s=5)).output == "c\n"


@pytest.fixture
def small(machine: Sshd) -> Iterator[Path]:
    """A folder of 12 MB."""
    folder = machine.folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=711", "x", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@on_shared_loop
async def test_a_full_disk_there_is_an_error_of_the_call(
    machine: Sshd, small: Path, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(30 << 20))
    async with (
        pool(replace(machine.host, folder=str(small))) as backend,
        await backend.lease(SandboxSpec(lease="full")) as sandbox,
    ):
        with pytest.raises(OSError, match="No space left"):
            await sandbox.upload(big, "big")
        assert (await sandbox.run("echo usable", timeout_s=20)).output == "usable\n"
        graded = await sandbox.grade(GradingSpec("test ! -e /workspace/big"))
        assert graded.exit_code == 0


@on_shared_loop
async def test_places_are_shared_by_all_workers_and_other_machines_go_on(machine: Sshd) -> None:
    one = replace(machine.host, slots=1)
    dead = replace(machine.host, port=1, slots=1)
    async with pool(one) as first, pool(dead, one) as second:
        held = await first.lease(SandboxSpec(lease="held"))
        waits = asyncio.create_task(second.lease(SandboxSpec(lease="waits")))
        await asyncio.sleep(1.0)
        assert not waits.done()
        await held.aclose()
        async with asyncio.timeout(60):
            await (await waits).aclose()


@on_shared_loop
async def test_one_killed_worker_leaves_nothing_and_spares_the_other(
    machine: Sshd, backend: SshHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    described = json.dumps({k: v for k, v in vars(machine.host).items() if v is not None})
    hosts = ["--config", str(machine.folder / "run.yaml")]
    (machine.folder / "run.yaml").write_text(f'{{"sandbox": {{"hosts": [{described}]}}}}')

    async def listed(verb: str) -> list[str]:
        assert await asyncio.to_thread(main, ["sandboxes", verb, *hosts]) == 0
        return capsys.readouterr().out.splitlines()

    async with await backend.lease(SandboxSpec(lease="beside")) as beside:
        await beside.run("echo kept >file", timeout_s=20)
        before = set(machine.helpers())
        worker = await asyncio.to_thread(start_worker, described, 10)
        lines = await listed("list")
        assert lines[-1].startswith("11 sandboxes, 2 workers, 0 of them dead")
        assert sum("  doomed-" in line for line in lines) == 10
        (helper,) = set(machine.helpers()) - before
        kill_watchdogs_of(helper)
        os.kill(helper, signal.SIGKILL)
        worker.kill()
        await asyncio.to_thread(worker.wait)
        lines = await listed("list")
        assert f"worker {helper}: dead, to be reaped" in lines
        lines = await listed("reap")
        assert re.match("10 sandboxes of 1 dead workers removed on 127", lines[-1]), lines
        assert (await beside.run("cat file", timeout_s=20)).output == "kept\n"

        worker = await asyncio.to_thread(start_worker, described, 10)
        owners = len(left_on(machine))
        worker.kill()
        await asyncio.to_thread(worker.wait)
        assert await within(lambda: len(left_on(machine)) < owners - 10)
        assert (await beside.run("cat file", timeout_s=20)).output == "kept\n"


def start_worker(described: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), described, str(count)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    assert worker.stdout.readline() == "ready\n"
    return worker


@pytest.fixture
def configured(machine: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The machine's name in ~/.ssh/config, with its key and known_hosts."""
    host = machine.host
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text(
        f"Host sandbox-host\n  HostName 127.0.0.1\n  Port {host.port}\n  IdentityFile {host.key}\n"
        f"  UserKnownHostsFile {host.known_hosts}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    return "sandbox-host"


ROWS = [
    {"id": name, "prompt": "Write 42 to answer.", "verify": verify, "oracle": "echo 42 >answer"}
    for name, verify in (
        ("code", 'cd "$WORKSPACE" && grep -qx 42 answer'),
        (
            "score",
            {
                "script": "[[ $(<$WORKSPACE/answer) = 42 ]] && n=1 || n=0; echo reward=$n >&3",
                "score": True,
            },
        ),
    )
]


def test_no_cheat_of_the_corpus_earns_a_reward(configured: str, tmp_path: Path) -> None:
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["check", str(dataset), "--run", "--sandbox", "ssh", "--hosts", configured]
    assert main(command) == 0


def test_a_run_names_the_machine_in_its_rows(configured: str, tmp_path: Path) -> None:
    dataset, out = tmp_path / "rows.jsonl", tmp_path / "run"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["run", str(dataset), "--model", "oracle", "--sandbox", "ssh", "--workers", "0"]
    assert main([*command, "--hosts", configured, "--out", str(out)]) == 0
    rows = load_run(out).trajectories.to_dict("records")
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert {row["sandbox"]["backend"] for row in rows} == {"ssh"}


def test_bad_settings_are_one_line(
    tmp_path: Path, configured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text(json.dumps(ROWS[0]) + "\n")
    command = ["run", str(dataset), "--model", "oracle", "--workers", "0", "--sandbox"]
    for options, message in (
        (["ssh"], "--sandbox ssh needs machines: --hosts USER@HOST:PORT"),
        (["ssh", "--hosts", "a b"], "'a b' is not a machine"),
        (["docker", "--hosts", "a"], "'sandbox.hosts' is for --sandbox ssh"),
        (["shh"], "sandbox 'shh'"),
        (["ssh", "--hosts", "127.0.0.1:1"], "ssh 127.0.0.1:1: "),
    ):
        assert main([*command, *options, "--out", str(tmp_path / "run")]) != 0
        shown = capsys.readouterr().err.strip()
        assert message in shown
        assert len(shown.splitlines()) == 1, shown


def test_no_hosts_without_a_configuration() -> None:
    with pytest.raises(UserError, match="needs machines"):
        make_backend("ssh")
