"""Makes the seccomp filters that ship beside this file, one per architecture.

    python -m hermes_rl.sandboxes.make_seccomp        needs `pip install pyseccomp` and libseccomp 2

A deny list: what a shell, compilers, git and interpreters never need and what has led out of
sandboxes before. The files are data of the package, so nothing of this is needed to run one.
"""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

# fmt: off
DENIED = (
    "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen",
    "fsconfig", "fsmount", "fspick", "mount_setattr", "ptrace", "process_vm_readv",
    "process_vm_writev", "kcmp", "pidfd_getfd", "bpf", "perf_event_open", "userfaultfd",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key",
    "request_key", "init_module", "finit_module", "delete_module", "kexec_load",
    "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl", "settimeofday",
    "clock_settime", "adjtimex", "clock_adjtime", "sethostname", "setdomainname", "setns",
    "unshare", "open_by_handle_at", "name_to_handle_at", "iopl", "ioperm", "lookup_dcookie",
    "nfsservctl", "vhangup", "syslog", "move_pages", "mbind", "set_mempolicy",
    "migrate_pages", "quotactl_fd", "process_madvise",
)
# fmt: on
"""Answered with EPERM."""
NAMESPACES = (0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEW* flags of clone; clone3 hides its flags in memory and is answered with ENOSYS."""
TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: put characters into another process's terminal."""
ALLOCATE = (0x40305828, 0x4030582A, 0x40305839)
"""FS_IOC_RESVSP, FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE: fallocate by another name."""
SEGMENT_BYTES = 64 << 10
"""Largest System V shared memory segment: with the kernel's limit of 4,096 segments for each
namespace, 256 MiB in all, which no other limit would bound. Larger ones are for /dev/shm."""
FAMILIES = {1, 2, 10, 16}
"""UNIX, INET, INET6, NETLINK; any other family is refused, AF_VSOCK (the way to a VM's host) and
AF_PACKET among them."""


def make(arch: str) -> Any:
    """The filter for one architecture, as a pyseccomp.SyscallFilter."""
    sec = importlib.import_module("pyseccomp")
    filter_ = sec.SyscallFilter(defaction=sec.ALLOW)
    wanted = getattr(sec.Arch, arch)
    if not filter_.exist_arch(wanted):
        filter_.add_arch(wanted)
        filter_.remove_arch(sec.Arch.NATIVE)
    for name in DENIED:
        try:
            filter_.add_rule(sec.ERRNO(errno.EPERM), name)
        except (OSError, ValueError, RuntimeError):
            print(f"{arch}: no system call {name}")
    for flag in NAMESPACES:
        filter_.add_rule(sec.ERRNO(errno.EPERM), "clone", sec.Arg(0, sec.MASKED_EQ, flag, flag))
    filter_.add_rule(sec.ERRNO(errno.ENOSYS), "clone3")
    for request in TERMINAL:
        rule = sec.Arg(1, sec.MASKED_EQ, 0xFFFFFFFF, request)
        filter_.add_rule(sec.ERRNO(errno.EPERM), "ioctl", rule)
    # fallocate reserves gigabytes in no time, past RLIMIT_FSIZE too. libc's posix_fallocate writes
    # the bytes itself after this answer.
    without = sec.ERRNO(errno.EOPNOTSUPP)
    filter_.add_rule(without, "fallocate")
    for request in ALLOCATE:
        filter_.add_rule(without, "ioctl", sec.Arg(1, sec.MASKED_EQ, 0xFFFFFFFF, request))
    # The limits of another process: those of a verifier, for a program that it runs.
    filter_.add_rule(sec.ERRNO(errno.EPERM), "prlimit64", sec.Arg(0, sec.NE, 0))
    filter_.add_rule(sec.ERRNO(errno.EINVAL), "shmget", sec.Arg(1, sec.GT, SEGMENT_BYTES))
    refuse = sec.ERRNO(errno.EAFNOSUPPORT)
    filter_.add_rule(refuse, "socket", sec.Arg(0, sec.GT, max(FAMILIES)))
    for family in sorted(set(range(max(FAMILIES))) - FAMILIES):
        filter_.add_rule(refuse, "socket", sec.Arg(0, sec.EQ, family))
    return filter_


def main() -> None:
    """Write both filters."""
    for arch, name in (("X86_64", "x86_64"), ("AARCH64", "aarch64")):
        path = Path(__file__).with_name(f"seccomp-{name}.bpf")
        with open(path, "wb") as file:
            make(arch).export_bpf(file)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
