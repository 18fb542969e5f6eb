"""Folders, user ids and disk space of sandboxes, each held by a lock of the process that made it.

A lock (flock) ends with its holder, however that dies, so "is its owner alive?" is one system call
and never a guess from a process id:

    STATE/owners/OWNER          locked while the owner lives
    STATE/boxes/OWNER.N/        one sandbox: control directory, workspace, layers
    /dev/shm/.../OWNER.N/       its small files that every command writes (see `watchdog`)
    STATE/slots/N               root only: locked while the N-th uid of sandboxes is in use here
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.locks import try_lock
from hermes_rl.sandboxes import processes, watchdog
from hermes_rl.sandboxes.files import libc

FIRST_SLOT_UIDS = (1_900_000_000, 200_000)
"""Sandboxes of root run as the first of these user ids that exists, and those above it. The lower
ones are for containers with fewer ids: on a machine they may be a user's, who got them for
containers of his own (/etc/subuid) and could open the files of sandboxes."""

_UID_MAP = Path("/proc/self/uid_map")


def has_slots() -> bool:
    """Whether sandboxes can have user ids of their own: root, where those ids exist.

    A rootless container maps some tens of thousands of ids, and `unshare -r` only one: there root
    is an ordinary user of the machine, and all sandboxes share its id.
    """
    return first_slot() is not None


def first_slot() -> int | None:
    """The lowest user id of sandboxes; None when they cannot have ids of their own."""
    if os.geteuid() != 0:
        return None
    ranges = _ranges()
    for uid in FIRST_SLOT_UIDS:
        if any(inside <= uid < inside + count for inside, _, count in ranges):
            return uid
    return None


def is_host_root() -> bool:
    """Whether the kernel takes us for the machine's root: no sandbox may start as we are."""
    return os.geteuid() == 0 and any(
        inside == 0 and outside == 0 for inside, outside, _ in _ranges()
    )


def account() -> str:
    """Who we are, as a part of a folder's name: root of a user namespace is not the machine's."""
    euid = os.geteuid()
    for inside, outside, count in _ranges():
        if inside <= euid < inside + count and outside != inside:
            return f"{euid}-{outside + euid - inside}"
    return str(euid)


def _ranges() -> list[tuple[int, int, int]]:
    """(first id inside, first id outside, how many), as user_namespaces(7) has them."""
    try:
        lines = _UID_MAP.read_text().splitlines()
    except OSError:
        return [(0, 0, 1 << 32)]
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in lines)]


SLOTS = 20_000
OWNER_NAMES = 100
ROOM_BYTES = 256 << 20
"""Free memory file system below which nothing more is put there."""


def default_state_dir() -> Path:
    """A folder of this user below the machine's temporary folder."""
    return Path(tempfile.gettempdir()) / f"hermes-rl-{account()}"


def trusted_folder(path: Path, mode: int) -> Path:
    """Make a folder of ours. Raises: SandboxStartError when somebody else's stands there."""
    try:
        path.mkdir(parents=True, mode=mode)
        path.chmod(mode)  # whatever the umask took
    except FileExistsError:
        _adopt(path, mode)
    return path


def _adopt(path: Path, mode: int) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SandboxStartError(f"{path} is not a folder of ours: remove it, or choose a state_dir")
    if found.st_mode & 0o022:
        raise SandboxStartError(f"{path} can be written by others: choose a state_dir of your own")
    if found.st_mode & mode != mode:
        path.chmod(stat.S_IMODE(found.st_mode) | mode)


def lock(path: Path) -> int | None:
    """Open and lock a file. Returns its descriptor, or None while somebody else holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):
        # The former holder may have removed the file between our open and our lock.
        if try_lock(fd) and os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    os.close(fd)
    return None


class Home:
    """The state folder as one owner (a backend in a process) uses it."""

    def __init__(self, root: Path | None = None) -> None:
        # Absolute: the watchdog and bubblewrap work elsewhere.
        self.root = trusted_folder((root or default_state_dir()).absolute(), 0o711)
        self.boxes = trusted_folder(self.root / "boxes", 0o711)
        self.owners = trusted_folder(self.root / "owners", 0o700)
        self._made = 0
        self._memory = Path(watchdog.memory_folder(str(self.root)))
        self._lock = self._become_owner()
        self._cgroups = ""
        self._watchdog: Watchdog | None = None

    def guard(self, cgroups: str = "") -> None:
        """Clean up after owners that are gone, and have it done after us. Blocks.

        Args:
            cgroups: where control groups are made, one a line; empty for none.
        """
        self._cgroups = cgroups
        reap(self.root, cgroups)
        self._watchdog = Watchdog(self.root, self.owner, cgroups)

    def _become_owner(self) -> int:
        me = processes.find(os.getpid())
        # A reaper between our open and our lock takes us for gone: under a new name then.
        for _ in range(OWNER_NAMES):
            self.owner = f"{os.getpid()}-{me.start if me else 0}-{secrets.token_hex(3)}"
            held = lock(self.owners / self.owner)
            if held is not None:
                return held
        raise SandboxStartError(f"cannot lock {self.owners / self.owner}")

    def new_box(self) -> Path:
        """A new folder for one sandbox, closed to all other users."""
        self._made += 1
        box = self.boxes / f"{self.owner}.{self._made}"
        box.mkdir(mode=0o700)
        return box

    def memory_folder(self, box: Path) -> Path:
        """A new folder in memory for a sandbox's small files; `box` where there is no storage.

        Memory spares a file system that writes out what is replaced, or is slow to make files.
        """
        try:
            found = os.statvfs(self._memory.parent)
            if found.f_bavail * found.f_frsize < ROOM_BYTES:
                return box
            made = trusted_folder(self._memory, 0o711) / box.name
            made.mkdir(mode=0o700)
        except (OSError, SandboxStartError):
            return box
        return made

    def close(self) -> None:
        """End and remove what is left of all boxes, and give the ownership up. Idempotent. Blocks.

        What is left: a box that was given back without a free descriptor.
        """
        if self._lock >= 0:
            watchdog.clean(str(self.root), self.owner, self._cgroups)
            os.close(self._lock)
            self._lock = -1
            if self._watchdog is not None:
                self._watchdog.close()


@dataclass(frozen=True)
class Held:
    """A sandbox on this machine."""

    lease: str
    """Empty where none of its processes is left."""
    where: str
    """The socket of its container's engine, or `this machine`."""
    since: float
    """Unix time of its start."""


@dataclass(frozen=True)
class Worker:
    """A process that leases sandboxes, or did."""

    name: str
    pid: int
    alive: bool
    sandboxes: list[Held]


def workers(state: Path) -> list[Worker]:
    """All that have sandboxes in a state folder, dead ones too. Blocks."""
    owners, folders = state / "owners", state / "boxes"
    leases = _leases()
    found: dict[str, list[Held]] = {name: [] for name in _names(owners)}
    for name in _names(folders):
        owner, _, number = name.rpartition(".")
        with contextlib.suppress(OSError):
            since = (folders / name).stat().st_mtime
            engine = folders / name / watchdog.CONTAINERS
            where = engine.read_text().split("\n")[0] if engine.is_file() else "this machine"
            # A worker's first folder is shared by its sandboxes.
            if name in leases or engine.is_file() or number != "1":
                found.setdefault(owner, []).append(Held(leases.get(name, ""), where, since))
    return [
        Worker(name, int(name.partition("-")[0]), _alive(owners / name), held)
        for name, held in sorted(found.items())
        if name[:1].isdigit()
    ]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _alive(owner: Path) -> bool:
    """Whether somebody holds an owner's lock."""
    if not owner.exists():
        return False
    held = lock(owner)
    if held is None:
        return True
    os.close(held)
    return False


def _leases() -> dict[str, str]:
    """Name of a sandbox's folder -> its lease, by the command lines of all processes."""
    found: dict[str, str] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            arguments = (
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            )
            found.update((m[1], m[2]) for text in arguments if (m := _TAG.fullmatch(text)))
    return found


_TAG = re.compile(r"(\d+-\d+-[0-9a-f]{6}\.\d+):(.+)", re.DOTALL)
"""OWNER.N:LEASE, as in the command lines of a sandbox."""


class Slots:
    """Machine-wide user ids, for a launcher that is root: no other sandbox on this machine has
    one that was taken here."""

    def __init__(self) -> None:
        run = Path("/run")
        base = run / "hermes-rl" if os.access(run, os.W_OK) else default_state_dir()
        self._folder = trusted_folder(trusted_folder(base, 0o711) / "slots", 0o700)
        self._first = first_slot() or 0
        self._locks: dict[int, int] = {}
        """User id -> the descriptor of its lock."""
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        """A free user id. Raises: SandboxStartError when all are taken."""
        if self._free:
            return self._free.pop()
        while self._next < SLOTS:
            number = self._next
            held = lock(self._folder / str(number))
            self._next += 1
            if held is not None:
                self._locks[self._first + number] = held
                return self._first + number
        raise SandboxStartError(f"all {SLOTS} sandbox slots of this machine are taken")

    def give_back(self, uid: int) -> None:
        """Keep a user id, whose processes and folders are gone, for the next sandbox."""
        self._free.append(uid)

    def close(self) -> None:
        """Give all free user ids back to the machine."""
        for uid in self._free:
            os.close(self._locks.pop(uid))
        self._free.clear()


@dataclass(frozen=True)
class Launch:
    """What to start."""

    argv: Sequence[str]
    executable: str
    """What runs; argv[0] is only its name, which the sandbox can see."""
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """All of its environment."""
    uid: int | None = None
    """User and group id to drop to; None keeps ours."""


@dataclass(frozen=True)
class _Calls:
    """System call numbers of one architecture: libc's functions would change every thread."""

    setgroups: int
    setresgid: int
    setresuid: int


_CALLS = {"x86_64": _Calls(116, 119, 117), "aarch64": _Calls(159, 149, 147)}
_PR_SET_DUMPABLE = 4


@contextmanager
def identity(uid: int | None) -> Iterator[None]:
    """This thread as user and group `uid`, without any other group; root before and after. None
    changes nothing. Raises: SandboxStartError where the system calls' numbers are not known.

    To the kernel an identity belongs to a thread. The saved ids stay 0, which is the way back; a
    program that is started loses them at its exec.
    """
    if uid is None:
        yield
        return
    calls = _CALLS.get(platform.machine())
    if calls is None:
        machine = platform.machine()
        raise SandboxStartError(f"root cannot start sandboxes on {machine}: use an ordinary user")
    library = libc()
    groups = os.getgroups()

    def call(number: int, *values: object) -> None:
        if library.syscall(number, *values) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot take the identity {uid}: {os.strerror(code)}")

    call(calls.setgroups, 0, None)
    try:
        call(calls.setresgid, uid, uid, 0)
        call(calls.setresuid, uid, uid, 0)
        yield
    finally:
        call(calls.setresuid, 0, 0, 0)
        call(calls.setresgid, 0, 0, 0)
        call(calls.setgroups, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
        library.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of identity clears it


def start(launch: Launch, stdio: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process with its own session, and all three standard descriptors on `stdio`.
    Call it in a Spawner's thread. Raises: OSError.

    No preexec_fn and no user=: both cost vfork, several milliseconds in a large process.
    """
    with identity(launch.uid):
        return subprocess.Popen(
            launch.argv,
            executable=launch.executable,
            stdin=stdio.fileno(),
            stdout=stdio.fileno(),
            stderr=stdio.fileno(),
            env=dict(launch.env),
            cwd="/",
            pass_fds=launch.pass_fds,
            start_new_session=True,
        )


def reap(state: Path, cgroups: str = "") -> list[str]:
    """Clean up after all owners that are gone. Blocks. Returns their names."""
    gone = []
    owners = state / "owners"
    known = set(os.listdir(owners))
    for name in sorted(known):
        try:
            held = lock(owners / name)
        except OSError:
            continue
        if held is None:
            continue
        watchdog.clean(str(state), name, cgroups)
        os.close(held)
        gone.append(name)
    # A folder is made after its owner's lock and removed before it: without one it is a stray.
    for box in os.listdir(state / "boxes"):
        owner = box.rpartition(".")[0]
        if owner not in known and not (owners / owner).exists():
            watchdog.clean(str(state), owner, cgroups)
            gone.append(owner)
    return gone


class Watchdog:
    """The process that cleans up when this one is gone.

    It is no child of this one: Ray kills an actor's children together with the actor.
    """

    def __init__(self, state: Path, owner: str, cgroups: str) -> None:
        ours, self._pipe = os.pipe()
        self._ended, theirs = os.pipe()
        command = [sys.executable, "-I", "-S", watchdog.__file__, str(state), owner, cgroups]
        subprocess.run(
            ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command],
            stdin=ours,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
            check=True,
        )
        os.close(ours)
        os.close(theirs)

    def close(self) -> None:
        """All is cleaned up: let it go. Blocks a moment."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                os.write(self._pipe, b"closed")
            os.close(self._pipe)
            self._pipe = -1
            os.read(self._ended, 1)  # end of file: it has ended
            os.close(self._ended)
