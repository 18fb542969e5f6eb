"""Ends what a worker left behind: run as a process of its own, on a pipe that the worker holds.

    python -I -S warden.py STATE OWNER CGROUPS      cleans up when standard input closes

The pipe closes when the worker ends, however it ends. What belongs to an owner is found by the tag
`OWNER.N:` in the command line of its processes and by the names of its folders and cgroups, so
nothing of anybody else is touched. Standard library only: it starts fast and stays small.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time

PATIENCE_S = 20.0


def tagged(tag: bytes) -> list[int]:
    """Ids of processes with an argument that begins with `tag`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(tag) for word in words):
                found.append(int(name))
    return found


def end_processes(owner: str) -> bool:
    """SIGKILL all sandboxes of an owner; returns whether they are gone."""
    tag = f"{owner}.".encode()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        running = [pid for pid in tagged(tag) if _kill(pid, tag)]
        if not running:
            return True
        time.sleep(0.02)
    return False


def _kill(pid: int, tag: bytes) -> bool:
    """Kill a process if it still carries the tag; returns whether it was there to be killed."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if pid in tagged_one(pid, tag):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def tagged_one(pid: int, tag: bytes) -> list[int]:
    """The id itself when that process carries the tag now."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return []
    return [pid] if any(word.startswith(tag) for word in words) else []


def remove_tree(path: str) -> None:
    """Remove a folder whatever was done to it: folders of mode 000, names of any length.

    Only for folders in which nothing runs any more.
    """
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISDIR(kind):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        pass
    if os.path.lexists(path):  # locked folders, or thousands of them in each other
        for command in (["chmod", "-R", "u+rwx", path], ["rm", "-rf", path]):
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
                check=False,
            )


def remove_cgroups(base: str, owner: str) -> None:
    """Remove an owner's cgroups, which are empty by now or in a moment."""
    try:
        names = [name for name in os.listdir(base) if name.startswith(f"hermes-rl-{owner}.")]
    except OSError:
        return
    for name in names:
        remove_cgroup(os.path.join(base, name))


def remove_cgroup(path: str) -> bool:
    """Remove one; the kernel may need a moment after its last process."""
    for _ in range(100):
        try:
            os.rmdir(path)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(0.01)
    return False


def clean(state: str, owner: str, cgroups: str = "") -> None:
    """End and remove everything of an owner that is gone."""
    end_processes(owner)
    if cgroups:
        remove_cgroups(cgroups, owner)
    boxes = os.path.join(state, "boxes")
    for name in os.listdir(boxes):
        if name.startswith(f"{owner}."):
            remove_tree(os.path.join(boxes, name))
    try:
        os.unlink(os.path.join(state, "owners", owner))
    except FileNotFoundError:
        pass


def main() -> None:
    """Wait for the worker's end, then clean up."""
    state, owner, cgroups = sys.argv[1:4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    word = sys.stdin.buffer.read()
    if word != b"closed":  # an orderly worker has cleaned up itself
        clean(state, owner, cgroups)


if __name__ == "__main__":
    main()
