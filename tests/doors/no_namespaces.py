"""Run a command where no user namespace can be made: `python no_namespaces.py COMMAND ...`.

The command runs in a user namespace of its own whose limit of further ones is 0. Its ids are those
of the caller (root keeps all of them).
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
ALL = 2**32 - 1


def child(told: int, go: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    os.write(told, b"x")
    os.read(go, 1)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.execvp(command[0], command)


def main() -> int:
    uid, gid = os.getuid(), os.getgid()
    hear, told = os.pipe()
    go, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(told, go, sys.argv[1:])
    os.close(told)
    if os.read(hear, 1):
        maps = Path(f"/proc/{pid}")
        if uid:
            (maps / "setgroups").write_text("deny")
        (maps / "uid_map").write_text(f"{uid} {uid} {1 if uid else ALL}")
        (maps / "gid_map").write_text(f"{gid} {gid} {1 if uid else ALL}")
        os.write(send, b"x")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
