"""Both filters that ship: what the kernel would answer to a call, by interpreting their
instructions as it does."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from hermes_rl.sandboxes import make_seccomp

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "x86_64": {"prlimit64": 302, "fallocate": 285, "ioctl": 16, "shmget": 29, "socket": 41,
               "clone": 56, "clone3": 435, "mount": 165, "ptrace": 101, "read": 0, "kill": 62},
    "aarch64": {"prlimit64": 261, "fallocate": 47, "ioctl": 29, "shmget": 194, "socket": 198,
                "clone": 220, "clone3": 435, "mount": 40, "ptrace": 117, "read": 63, "kill": 129},
}  # fmt: skip
HIGH = 1 << 32
ANSWERS = [
    ("prlimit64", (0, 7), 0),
    ("prlimit64", (1, 7), errno.EPERM),
    ("prlimit64", (HIGH, 7), errno.EPERM),
    ("prlimit64", (HIGH - 1, 7), errno.EPERM),
    ("fallocate", (3, 0, 0, 1 << 30), errno.EOPNOTSUPP),
    ("ioctl", (3, 0x5401), 0),
    ("ioctl", (3, 0x5412), errno.EPERM),
    ("ioctl", (3, 0x5412 | 7 * HIGH), errno.EPERM),
    *(("ioctl", (3, request), errno.EOPNOTSUPP) for request in make_seccomp.ALLOCATE),
    ("ioctl", (3, make_seccomp.ALLOCATE[0] | HIGH), errno.EOPNOTSUPP),
    ("shmget", (0, make_seccomp.SEGMENT_BYTES), 0),
    ("shmget", (0, make_seccomp.SEGMENT_BYTES + 1), errno.EINVAL),
    ("shmget", (0, HIGH), errno.EINVAL),
    ("socket", (1,), 0),
    ("socket", (40,), errno.EAFNOSUPPORT),
    ("clone", (17,), 0),
    ("clone", (0x10000000 | 17,), errno.EPERM),
    ("clone3", (), errno.ENOSYS),
    ("mount", (), errno.EPERM),
    ("ptrace", (), errno.EPERM),
    ("read", (), 0),
    ("kill", (5, 9), 0),
]


def answer(arch: str, token: int, number: int, values: tuple[int, ...]) -> int:
    """What a filter returns for one call: see seccomp(2) and the classic BPF machine."""
    code = Path(make_seccomp.__file__).with_name(f"seccomp-{arch}.bpf").read_bytes()
    data = struct.pack("<IIQ6Q", number, token, 0, *(*values, 0, 0, 0, 0, 0, 0)[:6])
    at = register = 0
    while True:
        kind, yes, no, k = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        match kind:
            case 0x20:  # load a word
                (register,) = struct.unpack_from("<I", data, k)
            case 0x06:  # return
                return int(k)
            case 0x05:  # jump
                at += k
            case 0x54:  # and
                register &= k
            case 0x15 | 0x25 | 0x35 | 0x45:  # jump if equal, greater, not less, any bit
                holds = {0x15: register == k, 0x25: register > k, 0x35: register >= k}
                at += yes if holds.get(kind, bool(register & k)) else no
            case _:
                raise AssertionError(f"instruction {kind:#x} at {at - 1}")


@pytest.mark.parametrize("arch", ARCH)
def test_what_is_answered_to_a_call(arch: str) -> None:
    for name, values, expected in ANSWERS:
        said = answer(arch, ARCH[arch], CALLS[arch][name], values)
        assert said == (ERRNO | expected if expected else ALLOW), (name, values, hex(said))


@pytest.mark.parametrize("arch", ARCH)
def test_another_table_of_calls_is_no_way_round(arch: str) -> None:
    """The calls of the 32-bit kernel interface, and x32's on x86_64, kill."""
    others = {0x40000003, 0x40000028, *ARCH.values()} - {ARCH[arch]}
    for token in others:
        assert answer(arch, token, 0, ()) not in (ALLOW,), hex(token)
    if arch == "x86_64":
        assert answer(arch, ARCH[arch], 0x40000000 | 302, (1,)) != ALLOW
