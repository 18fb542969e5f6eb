"""Folders, user ids and disk space of sandboxes, each held by a lock of the process that made it.

A lock (flock) ends with its holder, however that dies, so "is its owner alive?" is one system call
and never a guess from a process id:

    STATE/owners/OWNER          locked while the owner lives
    STATE/boxes/OWNER.N/        one sandbox: control directory, workspace, layers
    /dev/shm/.../OWNER.N/       its small files that every command writes (see `watchdog`)
    STATE/slots/N               root only: locked while the N-th uid of sandboxes is in use here

What a sandbox writes on the disk is in a file system of limited size where root can make one: an
ext4 in a sparse file without a name, behind a loop device that the kernel frees with its last user.
So nothing is left of it when a worker is killed. It is mounted only while a sandbox starts, in a
mount namespace of the spawner's thread: bubblewrap copies all mounts that it sees. After that the
sandbox holds it, and a descriptor of ours, by which the host sees the files. Without root, loop
devices or mkfs.ext4 it is a plain folder, which is looked at (see `limits`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.locks import try_lock
from hermes_rl.sandboxes import processes, watchdog
from hermes_rl.sandboxes.base import SandboxLimits
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


_log = logging.getLogger(__name__)

_CLONE_NEWNS, _CLONE_FS = 0x20000, 0x200
_MS_NOSUID, _MS_NODEV, _MS_NOATIME, _MS_REC, _MS_SLAVE = 2, 4, 1024, 16384, 1 << 19
_MNT_DETACH = 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")
"""Descriptor, block size and flags of the kernel's `struct loop_config`."""
_AUTOCLEAR = 4
_BLOCK = 4096
_INODE = 256
_TRIES = 50
"""At a free loop device: another process may take it first."""
_OPTIONS = b"nobarrier,noinit_itable"
"""Nobody reads these files after a crash: what they sync need not wait for the machine's disk."""
FORMAT_S = 20.0
"""How long mkfs.ext4 may take: it needs some milliseconds."""
_FORMAT_MAX = 32 << 20
"""Bytes of an empty file system; more means that the disk does not know holes."""


def check_call(code: int, what: str) -> None:
    """Raises: OSError when a call of the C library failed."""
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare_mounts() -> None:
    """Give this thread mounts of its own, which the machine does not see; those of the machine
    stay visible. Raises: OSError."""
    check_call(libc().unshare(_CLONE_NEWNS | _CLONE_FS), "unshare")
    check_call(libc().mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount --make-rslave /")


def detach(path: Path) -> None:
    """Unmount in this thread's namespace what is mounted there, if anything is."""
    libc().umount2(os.fsencode(path), _MNT_DETACH)


@dataclass(frozen=True)
class Writable:
    """Where an overlay's writes go."""

    up: Path
    work: Path

    def arguments(self) -> list[str]:
        """For bubblewrap, after the sources and before the place."""
        return ["--overlay", str(self.up), str(self.work)]


@dataclass(frozen=True)
class Format:
    """An empty file system: its size, and what is not zero in it."""

    size: int
    parts: tuple[tuple[int, bytes], ...]

    def write(self, folder: Path) -> int:
        """Make one in a file without a name. Returns its descriptor. Raises: OSError."""
        name = folder / f"disk-{os.urandom(6).hex()}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.unlink(name)
            os.ftruncate(fd, self.size)
            for offset, data in self.parts:
                os.pwrite(fd, data, offset)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _format(folder: Path, limits: SandboxLimits) -> Format:
    """Have mkfs.ext4 make one that holds so much. Raises: OSError."""
    program = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "mkfs.ext4 is missing: install e2fsprogs")
    files = limits.workspace_files
    # Tables and maps, what the kernel keeps for itself, and then what was asked for.
    size = limits.workspace_bytes + files * _INODE + (limits.workspace_bytes >> 6) + (8 << 20)
    size = -(-size // _BLOCK) * _BLOCK
    name = folder / f"format-{os.urandom(6).hex()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
        features = ["-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard"]
        shape = ["-b", str(_BLOCK), "-I", str(_INODE), "-N", str(files), "-m", "0"]
        command = [program, "-q", "-F", *features, *shape, str(name)]
        done = subprocess.run(command, capture_output=True, timeout=FORMAT_S, env={}, check=False)
        if done.returncode != 0:
            raise OSError(errno.EINVAL, done.stderr.decode("utf-8", "replace").strip()[-200:])
        return Format(size, _parts(fd))
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, f"mkfs.ext4 took longer than {FORMAT_S:g} s") from None
    finally:
        os.close(fd)
        os.unlink(name)


def _parts(fd: int) -> tuple[tuple[int, bytes], ...]:
    found: list[tuple[int, bytes]] = []
    total = at = 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return tuple(found)
            raise
        end = os.lseek(fd, at, os.SEEK_HOLE)
        total += end - at
        if total > _FORMAT_MAX:
            raise OSError(errno.EOPNOTSUPP, "the disk does not know holes in files")
        found.append((at, os.pread(fd, end - at, at)))
        at = end


def find_disks(folder: Path) -> Disks | str:
    """Give this thread mounts of its own and make a small one on trial.

    Args:
        folder: where their files are made.

    Returns: what makes them, or why there are none. Blocks.
    """
    if not has_slots():
        return "not root"
    trial, made = folder / f"trial-{os.urandom(6).hex()}", Disks(folder)
    try:
        unshare_mounts()
        trial.mkdir(mode=0o700)
        try:
            small = SandboxLimits(workspace_bytes=1 << 20, workspace_files=100)
            os.close(made.make(small, trial)[1])
            detach(trial)
        finally:
            trial.rmdir()
    except OSError as error:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return made


class Disks:
    """Makes sized file systems: one per backend.

    Args:
        folder: where their files are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._formats: dict[tuple[int, int], Format] = {}

    def make(self, limits: SandboxLimits, where: Path) -> tuple[int, int]:
        """Mount a new one at an empty folder, in this thread's namespace. Returns the number of
        its loop device, and a descriptor of its file. Raises: OSError."""
        key = limits.workspace_bytes, limits.workspace_files
        if key not in self._formats:
            self._formats[key] = _format(self._folder, limits)
        file = self._formats[key].write(self._folder)
        try:
            number, device = _attach(file)
            try:
                mount(number, where)
            finally:
                os.close(device)  # which frees it, unless it is mounted
        except BaseException:
            os.close(file)
            raise
        return number, file


def _attach(file: int) -> tuple[int, int]:
    """A loop device for a file: its number and an open descriptor. Raises: OSError."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for last in (*[False] * _TRIES, True):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(file, _BLOCK, _AUTOCLEAR))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY or last:
                    raise
            else:
                return number, device
    finally:
        os.close(control)
    raise AssertionError  # the last try returns or raises


def mount(number: int, where: Path) -> None:
    """Mount a loop device's file system in this thread's namespace. Raises: OSError."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    device = f"/dev/loop{number}".encode()
    check_call(libc().mount(device, os.fsencode(where), b"ext4", flags, _OPTIONS), f"mount {where}")


class Storage:
    """A folder for what one sandbox, or one grading, writes on the disk.

    `enter` and `leave` are called in the spawner's thread, as often as each other; `close` last.

    Args:
        box: the folder that it is made in.
        disks: None makes a plain folder.
        limits: its size.
    """

    def __init__(self, box: Path, disks: Disks | None, limits: SandboxLimits) -> None:
        self._disks = disks
        self.limits = limits
        self._box = box
        self._number = self._root = self._file = -1
        self._entered = 0

    @property
    def sized(self) -> bool:
        """The kernel holds it to its size."""
        return self._root >= 0

    @property
    def left(self) -> bool:
        """It was entered, and nobody is in it."""
        return self.sized and self._entered == 0

    @property
    def folder(self) -> Path:
        """Where it is, as bubblewrap finds it after `enter`."""
        return self._box / "disk" if self.sized else self._box

    def seen(self, path: Path) -> Path:
        """A path below it as this process finds it."""
        if not self.sized:
            return path
        return Path(f"/proc/{os.getpid()}/fd/{self._root}") / path.relative_to(self.folder)

    def used(self) -> int:
        """Bytes in a sized file system, its own tables not counted; 0 for a plain folder."""
        if not self.sized:
            return 0
        found = os.statvfs(self.seen(self.folder))
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def held(self) -> int:
        """Bytes that a sized file system takes of the machine's disk, now or soon: those of removed
        files too, which its file keeps."""
        return max(self.used(), os.fstat(self._file).st_blocks * 512) if self.sized else 0

    def make(self, name: str, uid: int | None) -> Path:
        """Make a folder in it that belongs to a sandbox. Raises: OSError."""
        path = self.folder / name
        self.seen(path).mkdir(mode=0o700)
        if uid is not None:
            os.chown(self.seen(path), uid, uid)
        return path

    def layer(self, name: str, uid: int | None) -> Writable:
        """Make an empty layer for an overlay's writes. Raises: OSError."""
        self.make(name, uid)
        return Writable(self.make(f"{name}/up", uid), self.make(f"{name}/work", uid))

    def enter(self) -> None:
        """Let bubblewrap find it; the first time it is made. Raises: OSError."""
        if self._disks is None:
            return
        where = self._box / "disk"
        if self._root < 0:
            where.mkdir(mode=0o711)
            try:
                self._number, self._file = self._disks.make(self.limits, where)
                self._root = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._entered = 1
            except OSError as error:  # it is looked at then, and its row says so
                _log.warning("no file system of limited size for a sandbox: %s", error)
                detach(where)
                self.close()
                self._disks = None
        else:
            if self._entered == 0:
                mount(self._number, where)
            self._entered += 1

    def leave(self) -> None:
        """What needs it has found it."""
        self._entered = max(0, self._entered - 1)
        if self.sized and self._entered == 0:
            detach(self._box / "disk")

    def close(self) -> None:
        """Give it back to the machine. Idempotent. Blocks: what was not written yet may be."""
        for fd in (self._root, self._file):
            if fd >= 0:
                os.close(fd)
        self._root = self._file = -1
