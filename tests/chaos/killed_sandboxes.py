"""SIGKILL a worker with many sandboxes, on each backend, and see that none of them is left.

    python tests/chaos/killed_sandboxes.py [--n 50] [--backends bubblewrap,none,docker,...]

Needs root, and what the tests of the backends need. Another worker runs beside each one, and its
sandboxes must work afterwards. Where the worker has a watchdog on this machine, there are two
rounds: the worker alone is killed, then another with its watchdog, for which the next start cleans
up. Prints a line for each round. Exits with 1 when anything was left after a lease (60 s of
silence, for sandboxes elsewhere) and 60 s more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sandboxes"))

from hermes_rl.sandboxes import (  # noqa: E402
    Apptainer,
    Bubblewrap,
    Containers,
    Modal,
    SandboxBackend,
    SandboxSpec,
    SshHost,
    SshHosts,
    Subprocess,
    find_binary,
    reachable,
    watchdog,
)

LEASE_S, MORE_S = 60.0, 60.0
ORDINARY = 54321
"""A user id that is not in use: root may not start containers of apptainer."""
BACKENDS = ("bubblewrap", "none", "docker", "podman", "ssh", "apptainer", "modal")


def make_backend(how: dict[str, Any]) -> SandboxBackend:
    """The backend of a description, which workers get too."""
    kind, state = how["kind"], Path(how["state"])
    if kind in ("docker", "podman"):
        return Containers(kind, socket_path=how["socket"], state_dir=state)
    if kind == "ssh":
        return SshHosts([SshHost(**how["host"])])
    if kind == "apptainer":
        return Apptainer(program=how["program"], state_dir=state)
    if kind == "modal":
        return Modal()
    return Bubblewrap(state_dir=state) if kind == "bubblewrap" else Subprocess(state_dir=state)


async def work(how: dict[str, Any], count: int, mark: str) -> None:
    """Lease sandboxes, say so, and run a command in each: until standard input has a line."""
    backend = make_backend(how)

    async def lease(number: int) -> Any:
        spec = SandboxSpec(lease=f"{mark}-{number}", image=how.get("image"))
        sandbox = await backend.lease(spec)
        stays = f"setsid bash -c 'exec -a {mark} sleep 5000' >/dev/null 2>&1 &"
        await sandbox.run(f"mkdir d; echo kept >d/f; {stays}", timeout_s=300)
        return sandbox

    sandboxes = await asyncio.gather(*map(lease, range(count)))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    read = (sandbox.run("cat d/f", timeout_s=60) for sandbox in sandboxes)
    print("".join([result.output for result in await asyncio.gather(*read)]).count("kept"))
    await backend.aclose()


@dataclass
class Setting:
    """A backend with what it needs."""

    how: dict[str, Any]
    left: Callable[[], set[str]]
    """What sandboxes have on the machine beside processes: names of folders and containers."""
    uid: int | None = None
    """Who workers run as; None is ourselves."""
    code: Path = ROOT

    def worker(self, count: int, mark: str) -> subprocess.Popen[str]:
        python, user = sys.executable, []
        if self.uid is not None:
            python = "/usr/bin/python3"
            user = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--"]
        script = self.code / "killed_sandboxes.py" if self.uid else Path(__file__)
        command = [*user, python, str(script), "--work", json.dumps(self.how), str(count), mark]
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self.code)},
        )
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n", "the worker did not start"
        return worker


def folders_of(state: Path) -> set[str]:
    """Owners and sandboxes of a state folder, those in memory too."""
    memory = Path(watchdog.memory_folder(str(state)))
    parents = (state / "boxes", state / "owners", memory)
    return {f"{p.name}/{name}" for p in parents if p.is_dir() for name in os.listdir(p)}


@contextlib.asynccontextmanager
async def setting(kind: str, folder: Path) -> AsyncIterator[Setting]:
    """Make what a backend needs, in a folder."""
    state = folder / "state"
    if kind != "ssh":
        state.mkdir(mode=0o711)
    how: dict[str, Any] = {"kind": kind, "state": str(state)}
    if kind in ("docker", "podman"):
        from engines import IMAGE, engine

        with engine(kind, folder) as running:

            def containers() -> set[str]:
                listed = running.request("GET", "/containers/json", query={"all": 1})
                return {name for found in listed for name in found["Names"]}

            found = {**how, "socket": running.path, "image": IMAGE}
            yield Setting(found, lambda: folders_of(state) | containers())
    elif kind == "ssh":
        from sshd import sshd

        with sshd(folder) as machine:
            there = Path(str(machine.host.folder))

            def left() -> set[str]:
                return set().union(*(folders_of(p.parent) for p in there.glob("*/boxes")))

            yield Setting({**how, "host": asdict(machine.host)}, left)
    elif kind == "modal":
        from hermes_rl.testing import FakeModal

        async with FakeModal(reachable(find_binary(), folder)) as server:
            os.environ.update(server.variables)

            def running_ones() -> set[str]:
                found = server.containers.values()
                return {one.id for one in found if one.process.returncode is None}

            yield Setting(how, running_ones)
    elif kind == "apptainer":
        code = folder / "code"
        shutil.copytree(ROOT / "hermes_rl", code / "hermes_rl")
        shutil.copy(__file__, code)
        yield Setting(
            {**how, **_fake_apptainer(folder, code)}, lambda: folders_of(state), ORDINARY, code
        )
    else:
        yield Setting(how, lambda: folders_of(state))


def _fake_apptainer(folder: Path, code: Path) -> dict[str, str]:
    """The program and an image, which belong to the ordinary user."""
    from engines import root_file_system

    from hermes_rl.testing import fake_apptainer

    image = folder / "image"
    image.mkdir()
    with tarfile.open(root_file_system(folder)) as archive:
        archive.extractall(image)
    for path in (folder / "state", image, *image.rglob("*")):
        os.lchown(path, ORDINARY, ORDINARY)
    for path in (code, *code.rglob("*")):
        path.chmod(0o755)
    source = code / "hermes_rl" / "testing" / "fake_apptainer.py"
    bwrap = reachable(find_binary(), folder)
    program = fake_apptainer.install(folder, bwrap, "/usr/bin/python3", str(source))
    return {"program": str(program), "image": str(image)}


def carriers(mark: str) -> set[int]:
    """Processes that name the lease of a round, or that its commands started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found - {os.getpid()}


def kill(worker: subprocess.Popen[str], watchdog_too: bool) -> None:
    """SIGKILL a worker; with its watchdog first, which is not its child."""
    for path in Path("/proc").glob("[0-9]*/cmdline") if watchdog_too else ():
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if b"watchdog.py" in line and f"\0{worker.pid}-".encode() in line:
                os.kill(int(path.parent.name), signal.SIGKILL)
    worker.kill()
    worker.wait()


async def strike(made: Setting, count: int, watchdog_too: bool) -> str:
    """One round. Returns what was left; empty for nothing."""
    kind, tag = made.how["kind"], os.urandom(3).hex()
    mark = f"doomed-{tag}"
    before = time.monotonic()
    beside = await asyncio.to_thread(made.worker, 2, f"beside-{tag}")
    kept = made.left()
    doomed = await asyncio.to_thread(made.worker, count, mark)
    processes, held = len(carriers(mark)), len(made.left() - kept)
    started_s, struck = time.monotonic() - before, time.monotonic()
    await asyncio.to_thread(kill, doomed, watchdog_too)

    def left() -> list[str]:
        return sorted(map(str, carriers(mark))) + sorted(made.left() - kept)

    if watchdog_too:
        again = await asyncio.to_thread(made.worker, 1, f"next-{tag}")
        await asyncio.to_thread(again.communicate, "\n")
    while (remains := left()) and time.monotonic() < struck + LEASE_S + MORE_S:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    output, _ = await asyncio.to_thread(beside.communicate, "\n")
    if output != "2\n":
        remains.append(f"the worker beside it: {output!r}")
    who = "worker and watchdog" if watchdog_too else "worker"
    print(
        f"{kind}: {count} sandboxes ({processes} processes, {held} folders and containers) in "
        f"{started_s:.0f} s; {who} killed: {len(remains)} left after "
        f"{time.monotonic() - struck:.0f} s",
        flush=True,
    )
    return ", ".join(remains)


async def main() -> int:
    """All backends in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        await work(json.loads(options.work[0]), int(options.work[1]), options.work[2])
        return 0
    failed = 0
    for kind in options.backends.split(","):
        folder = Path("/tmp") / f"hermes-killed-{os.getpid()}-{kind}"
        folder.mkdir(mode=0o711)
        try:
            async with setting(kind, folder) as made:
                for watchdog_too in (False, True)[: 1 if kind in ("ssh", "modal") else 2]:
                    if remains := await strike(made, options.n, watchdog_too):
                        failed += 1
                        print(f"{kind}: left: {remains[:2000]}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
