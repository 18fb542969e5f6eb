"""The contract of every sandbox backend. `conformance` is the suite that each of them must pass.

A sandbox is leased by one rollout, keeps one shell session's state between commands, and dies with
its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from hermes_rl.network import Network

MAX_OUTPUT_BYTES = 50_000
"""Bytes of output that a command's result keeps: the first 40 % and the last 60 %."""


@dataclass(frozen=True)
class SandboxLimits:
    """Upper bounds asked for. What the machine can enforce is in `SandboxInfo.limits`."""

    processes: int = 128
    memory_bytes: int = 2 << 30
    """Address space of one process; of the whole sandbox where cgroups allow it."""
    file_bytes: int = 1 << 30
    """Size of one file."""
    workspace_bytes: int = 2 << 30
    workspace_files: int = 200_000
    tmp_bytes: int = 256 << 20
    shm_bytes: int = 64 << 20
    cpus: float | None = None
    """CPUs' worth of time of the whole sandbox, where cgroups allow it; None bounds nothing."""

    def doubled(self) -> SandboxLimits:
        """Twice as much on the disk."""
        return replace(
            self,
            workspace_bytes=2 * self.workspace_bytes,
            workspace_files=2 * self.workspace_files,
        )


@dataclass(frozen=True)
class Connection:
    """One connection of a sandbox to its egress proxy, when it has ended."""

    host: str
    """As it was asked for; empty where the request could not be read."""
    port: int
    outcome: str
    """`allowed`, `refused` or `failed` (allowed, and nobody answered)."""
    reason: str
    """Why it was refused or failed."""
    sent_bytes: int
    """To the host."""
    received_bytes: int
    """From the host."""
    started_at: float
    """Unix time, seconds."""
    seconds: float


def _drop(connection: Connection) -> None:
    """Keep no record."""


@dataclass(frozen=True)
class SandboxSnapshot:
    """Files and shell state of a sandbox at one moment (`Sandbox.snapshot`)."""

    folder: Path
    """On the host."""
    shared: bool = False
    """Many sandboxes start from it: the backend may keep it unpacked, by its path."""


@dataclass(frozen=True)
class SandboxSpec:
    """What a rollout asks of a backend."""

    lease: str
    """Unique id of this lease: run id, unit id and attempt; stands in the argv of every process
    made for it."""
    image: str | None = None
    """A root file system directory (bubblewrap), an image name (docker); None is the backend's
    default."""
    cwd: str | None = None
    """Working directory of the first command; None is the workspace. Made when absent."""
    network: Network = False
    """With hosts, the sandbox has no network but an HTTP proxy on its loopback, which reaches them.
    """
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra variables of the shell, as text without NUL. Never secrets."""
    snapshot: SandboxSnapshot | None = None
    """What it starts from, in place of an empty workspace: of a sandbox with the same image."""
    on_connection: Callable[[Connection], None] = _drop
    """Takes each connection through that proxy when it ends. It must be quick."""


@dataclass(frozen=True)
class SandboxInfo:
    """What was provided: recorded in the row."""

    backend: str
    image: str | None
    limits: dict[str, object]
    """Limits in force, by name; a limit that the machine cannot enforce is absent."""


@dataclass(frozen=True)
class CommandResult:
    """A command's end."""

    output: str
    """stdout and stderr in order; UTF-8 with replacement characters; cut in the middle when too
    long."""
    exit_code: int
    """The shell's code; 124 after a timeout, 128 + n after signal n."""
    output_bytes: int
    """True number of bytes that the command printed, kept or not."""
    timed_out: bool = False
    truncated: bool = False
    """`output` lacks its middle."""
    seconds: float = 0.0
    raw: bytes = b""
    """The kept bytes as printed (head and tail, without the cut mark)."""


@dataclass(frozen=True)
class GradingSpec:
    """A verifier for a fresh sandbox over the workspace that the agent left."""

    script: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Read-only in /verify, by relative path."""
    timeout_s: float = 60.0
    score: bool = False
    """Descriptor 3 takes one line: `reward=<finite float>`, `rewards=<object of numbers>` or
    `cannot-judge=<why>`."""
    image: str | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Absolute path -> folder of `files` that is shown there, writable; empty for an empty
    folder."""


@dataclass(frozen=True)
class GradingResult:
    """What the grading sandbox saw. Judging it is `hermes_rl.rollout`'s business."""

    exit_code: int
    timed_out: bool
    output: str
    """For people to read; never parsed for a reward."""
    report: bytes = b""
    """What was written to descriptor 3, at most 4 KB; empty without `score`."""
    seconds: float = 0.0


class Process(Protocol):
    """A background process in a sandbox."""

    pid: int

    async def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        ...

    async def wait(self, timeout_s: float, *, output: bool = False) -> int | None:
        """Wait until it ends, at most so many seconds. Returns the exit code, or None.

        Args:
            output: return also when there is output to read.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises: BrokenPipeError when it has ended, or its input was
        closed."""
        ...

    async def close_input(self) -> None:
        """End its stdin: it reads what was written, then the end."""
        ...

    async def read(self) -> bytes:
        """Output since the last read: of more than 200,000 bytes the beginning and the end, with a
        mark between them."""
        ...

    async def kill(self) -> None:
        """End its whole process tree."""
        ...


class Sandbox(Protocol):
    """One leased sandbox; an async context manager.

    Every verb raises SandboxDied when backend or host lost the sandbox, and SandboxKilled when the
    agent's own
    deed ended it (out of memory or disk, killed its supervisor). After either, every later verb
    raises it again:
    a dead sandbox is never silently replaced. The error of a command that was running when it died
    has `in_command` set: a call that meets two deaths is held to have caused them.
    """

    info: SandboxInfo
    scratch: str
    """A folder outside of the workspace, which is not graded: commands see and may change it."""
    attached: dict[str, Any]
    """What its user keeps with it, such as handles of its processes; never saved."""

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a bash command in the session: cwd, exports, functions, aliases and options persist.

        A timeout kills the command's whole tree, keeps the session's earlier state and returns what
        was printed.
        """
        ...

    async def new_session(self) -> Sandbox:
        """The same sandbox through another shell session, which begins in the state of this one.

        Files, processes and limits are shared; directory, variables and functions are not. Commands
        of all sessions run one at a time. Closing it does not close the sandbox.
        """
        ...

    async def start_process(
        self, command: str, *, cwd: str | None = None, lossless: bool = False
    ) -> Process:
        """Start a background process in the session's environment.

        Args:
            lossless: it waits while its output is not read, instead of losing the middle of it.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """Read a regular file. Raises: FileNotFoundError, IsADirectoryError, PermissionError."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its parents. Raises: IsADirectoryError, PermissionError, OSError."""
        ...

    async def upload(self, local: Path, remote: str) -> None:
        """Copy a host file into the sandbox, streamed."""
        ...

    async def download(self, remote: str, local: Path) -> None:
        """Copy a regular file out of the sandbox, streamed. Raises as `read_file`."""
        ...

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """End the agent's processes for good, then run the verifier in a fresh sandbox over a copy-
        safe workspace.

        May be called again (a new sandbox each time). After the first call `run` and its kin raise
        SandboxDied.
        Raises: SandboxStartError or SandboxDied when the grading sandbox itself fails.
        """
        ...

    async def read_left(self, path: str) -> bytes:
        """End the agent's processes for good, as `grade` does, and read a regular file of the
        workspace that it left.

        Raises: SandboxDied; FileNotFoundError, IsADirectoryError, PermissionError; OSError for a
            path over a symbolic link, or one that is not below the workspace.
        """
        ...

    async def pack_left(self, local: Path) -> None:
        """End the agent's processes for good, as `grade` does, and write the workspace that it left
        to an archive on the host (`packing.FORMAT`). There is none of a workspace that exceeds the
        bounds of `packing`. Bubblewrap and Apptainer write what was changed over an image beside
        it, as a snapshot (`snapshots.changes_of`).

        Raises: SandboxDied; OSError, as of a full disk.
        """
        ...

    async def snapshot(self, folder: Path) -> bool:
        """Write its files and the session's state to a new folder of the host.

        Files are those of the workspace, of /tmp, and what was changed over an image. Processes are
        no part of it: while one runs beside the shell nothing is written, and the answer is False.

        Raises: SandboxDied, SandboxKilled; OSError, as of a full disk, or for a workspace that
            exceeds the bounds of `Packing`.
        """
        ...

    async def unpack(self, local: Path) -> None:
        """Put an archive of `pack_left` into the workspace. Raises: OSError; SandboxDied."""
        ...

    async def aclose(self) -> None:
        """End all processes and remove everything. Idempotent; shielded from cancellation by the
        caller."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind; one per process, shared by all rollouts."""

    name: str

    async def lease(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises: SandboxStartError; TaskFault when the image is missing."""
        ...

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        ...
