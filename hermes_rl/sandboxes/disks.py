"""File systems of limited size: where sandboxes of root write on the disk.

What a sandbox writes on the disk is in a file system of limited size where root can make one: an
ext4 in a sparse file without a name, behind a loop device that the kernel frees with its last user.
So nothing is left of it when a worker is killed. It is mounted only while a sandbox starts, in a
mount namespace of the spawner's thread: bubblewrap copies all mounts that it sees. After that the
sandbox holds it, and a descriptor of ours, by which the host sees the files. Without root, loop
devices or mkfs.ext4 it is a plain folder, which is looked at (see `limits`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.files import libc
from hermes_rl.sandboxes.slots import has_slots

_log = logging.getLogger(__name__)

_OPEN_TREE, _CLONE_TREE, _AT_FDCWD = 428, 1, -100
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


def open_tree(path: Path, folder: int = _AT_FDCWD) -> int:
    """A copy of the mount at a path, attached nowhere: a descriptor. Raises: OSError."""
    tree = libc().syscall(_OPEN_TREE, folder, os.fsencode(path), _CLONE_TREE | os.O_CLOEXEC)
    check_call(min(tree, 0), f"open_tree {path}")
    return int(tree)


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


def _hold(where: Path) -> int:
    """A descriptor that keeps a mount when it is detached, and copies of which can be made."""
    try:
        return open_tree(where)
    except OSError:  # not known to kernels before 5.2
        return os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


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

    def mount_of(self, name: str) -> int | None:
        """A folder of a sized file system as a mount that is attached nowhere: a descriptor. None
        for a plain folder, and where the kernel copies only mounts that are attached."""
        try:
            return open_tree(Path(name), self._root) if self.sized else None
        except OSError:
            return None

    def mount_attached(self, name: str) -> int:
        """The same of a sized file system on every kernel; in the spawner's thread. Raises:
        OSError."""
        self.enter()
        try:
            return open_tree(self.folder / name)
        finally:
            self.leave()

    def counts(self) -> tuple[int, int]:
        """Free blocks and inodes of a sized file system."""
        found = os.statvfs(self.seen(self.folder))
        return found.f_bfree, found.f_ffree

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
                self._root = _hold(where)
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
