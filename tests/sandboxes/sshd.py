"""A real sshd on loopback for tests: its own configuration, keys and folder, on a free port."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hermes_rl.sandboxes import SshHost, processes

PROGRAM = "/usr/sbin/sshd"
_START_S = 30.0


@dataclass
class Sshd:
    """A running sshd."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    host: SshHost
    """How a worker reaches it, with a folder of its own for what sandboxes keep."""

    def sessions(self) -> list[int]:
        """Ids of its processes, one or two for each connection."""
        return [proc.pid for proc in processes.descendants(self.process.pid)]

    def connections(self) -> list[int]:
        """Ids of the processes that serve a connection each."""
        return processes.children(self.process.pid)

    def helpers(self) -> list[int]:
        """Ids of the helpers that it runs."""
        return [pid for pid in self.sessions() if b"remote_helper" in _command_line(pid)]

    def cut(self) -> None:
        """SIGKILL what serves connections; what they ran is on its own."""
        for pid in self.connections():
            os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def make_key(path: Path) -> Path:
    """A new key without a passphrase. Returns its path."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def free_port() -> int:
    """Below those that the kernel hands out: it gives this one to no other process meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """A running sshd that lets this user in with the key `folder/key`."""
    if not os.access(PROGRAM, os.X_OK):
        raise AssertionError(f"no {PROGRAM}: install the package openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    made, server, client = folder / "state", make_key(folder / "server"), make_key(folder / "key")
    made.mkdir(mode=0o711)
    shutil.copy(f"{client}.pub", folder / "authorized_keys")
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {server}\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"MaxSessions 200\nMaxStartups 200\nPrintMotd no\nSetEnv TMPDIR={made}\n"
    )
    public = Path(f"{server}.pub").read_text().split(" ", 2)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
    with (folder / "log").open("wb") as log:
        command = [PROGRAM, "-D", "-e", "-f", str(folder / "config")]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    host = SshHost(
        "127.0.0.1",
        port=port,
        key=str(client),
        known_hosts=str(folder / "known_hosts"),
        folder=str(made),
        slots=200,
    )
    found = Sshd(folder, port, process, host)
    try:
        _answers(found)
        yield found
    finally:
        sessions = found.sessions()
        process.kill()
        process.wait()
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _answers(found: Sshd) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", found.port), 5):
            return
        if found.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError((found.folder / "log").read_text()[-2000:])
        time.sleep(0.02)


def with_host(host: SshHost, **changes: object) -> SshHost:
    """The same host, otherwise configured."""
    return replace(host, **changes)  # type: ignore[arg-type]
