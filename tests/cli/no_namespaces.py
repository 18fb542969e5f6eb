"""Run a command where no user namespace can be made: `python no_namespaces.py COMMAND ...`.

The command runs in a user namespace of its own, in which the limit of further ones is 0. Its ids
are those of the caller (root keeps all of them).
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
ALL_IDS = 2**32 - 1


def run_child(ready: int, mapped: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    os.write(ready, b"x")
    os.read(mapped, 1)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.execvp(command[0], command)


def main() -> int:
    uid, gid = os.getuid(), os.getgid()
    ready, report_ready = os.pipe()
    mapped, report_mapped = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_child(report_ready, mapped, sys.argv[1:])
    os.close(report_ready)
    if os.read(ready, 1):
        maps = Path(f"/proc/{pid}")
        if uid:
            (maps / "setgroups").write_text("deny")
        (maps / "uid_map").write_text(f"{uid} {uid} {1 if uid else ALL_IDS}")
        (maps / "gid_map").write_text(f"{gid} {gid} {1 if uid else ALL_IDS}")
        os.write(report_mapped, b"x")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
