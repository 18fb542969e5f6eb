"""Ends what a worker left behind: run as a process of its own, on a pipe that the worker holds.

    python -I -S watchdog.py STATE OWNER CGROUPS      cleans up when standard input closes

The pipe closes when the worker ends, however it ends. What belongs to an owner is found by the tag
`OWNER.N:` in the command line of its processes and by the names of its folders and cgroups, so
nothing of anybody else is touched. Standard library only: it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

PATIENCE_S = 20.0
REMOVALS, REMOVAL_PAUSE_S = 5, 0.5
SHALLOW = 2
"""Levels of folders below a sandbox's folder that are removed by name."""
CONTAINERS = "containers"
"""File of a lease with the socket of an engine and, line by line, what the lease has of it."""
MARK = "HERMES_RL_LEASE"
"""Variable that names the folder of a process which runs in no sandbox (see `none`)."""


def memory_folder(state: str) -> str:
    """Where a state folder's small files lie that are written with every command: in memory."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(state))).hexdigest()[:16]
    return f"/dev/shm/hermes-rl-{os.geteuid()}-{name}"


def tagged(tag: bytes, mark: bytes = b"") -> list[int]:
    """Ids of processes with an argument that begins with `tag`, or a variable with `mark`."""
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and int(name) != os.getpid() and _carries(name, tag, mark)
    ]


def _carries(pid: str, tag: bytes, mark: bytes) -> bool:
    """Whether a process has the tag or the mark now."""
    for file, prefix in (("cmdline", tag), ("environ", mark)):
        if prefix:
            try:
                with open(f"/proc/{pid}/{file}", "rb") as source:
                    words = source.read().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(prefix) for word in words):
                return True
    return False


def end_processes(state: str, owner: str) -> bool:
    """SIGKILL everything that an owner started; returns whether it is gone.

    Gone is what two looks in a row do not find: a process in the middle of an exec shows neither
    its command line nor its environment, and one that forked is gone before its child is listed.
    """
    tag = f"{owner}.".encode()
    mark = b"%s=%s." % (MARK.encode(), os.fsencode(os.path.join(state, "boxes", owner)))
    deadline = time.monotonic() + PATIENCE_S
    empty = 0
    while time.monotonic() < deadline:
        found = [pid for pid in tagged(tag, mark) if _kill(pid, tag, mark)]
        empty = 0 if found else empty + 1
        if empty == 2:
            return True
        time.sleep(0.02)
    return False


def _kill(pid: int, tag: bytes, mark: bytes) -> bool:
    """Kill a process if it is still the one that was found; returns whether it was there."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _carries(str(pid), tag, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def remove_tree(path: str | os.PathLike[str]) -> None:
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
    if remove_shallow(path):
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        pass
    if os.path.lexists(path):  # locked folders, or thousands of them in each other
        for command in (["chmod", "-R", "u+rwx", os.fspath(path)], ["rm", "-rf", os.fspath(path)]):
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={"PATH": "/usr/bin:/bin"},
                    check=False,
                )
            except OSError:  # no descriptor left: whoever cleans up after the owner removes it
                return


def remove_shallow(path: str | os.PathLike[str], depth: int = SHALLOW) -> bool:
    """Remove a folder with few levels, as most boxes are: `rmtree` makes four times the system
    calls. Returns False, with some of it gone, when it is deeper or something is locked."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif depth == 0 or not remove_shallow(entry.path, depth - 1):
                    return False
        os.rmdir(path)
    except OSError:
        return False
    return True


def remove_container(engine: str, path: str) -> bool | None:
    """Remove a container or an image of docker or podman.

    Returns whether there is none; None if the engine did not answer.

    Args:
        engine: the path of its socket.
        path: `/containers/NAME` or `/images/NAME`.
    """
    answer = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(engine)
        head = f"DELETE /v1.41{path}?force=1&v=1 HTTP/1.0\r\nHost: engine\r\n\r\n"
        connection.sendall(head.encode())
        while data := connection.recv(4096):
            answer += data
    if not answer:
        return None
    return answer.split(b" ")[1:2] in ([b"200"], [b"204"], [b"404"])


def remove_containers(folder: str) -> bool:
    """Remove the containers and images of a lease, each of which was written down before it was
    made. Returns whether all are gone.

    An engine may refuse for a moment, while a container is ending: it is asked again.
    """
    try:
        with open(os.path.join(folder, CONTAINERS), encoding="utf-8") as file:
            engine, *paths = file.read().splitlines()
    except (OSError, ValueError):
        return True
    for _ in range(REMOVALS):
        results = {path: remove_container(engine, path) for path in paths}
        paths = [path for path, gone in results.items() if not gone]
        if not paths:
            return True
        if None in results.values():
            return False
        time.sleep(REMOVAL_PAUSE_S)
    return False


def remove_empty(path: str) -> None:
    """Remove a folder if it is there and nothing is in it."""
    try:
        os.rmdir(path)
    except OSError:
        pass


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
    """End and remove everything of an owner that is gone.

    Args:
        cgroups: folders of control groups, one a line.
    """
    end_processes(state, owner)
    for base in cgroups.splitlines():
        remove_cgroups(base, owner)
    memory = memory_folder(state)
    for boxes in (os.path.join(state, "boxes"), memory):
        try:
            names = os.listdir(boxes)
        except FileNotFoundError:
            continue
        for name in names:
            left = os.path.join(boxes, name)
            # Without their engine containers are left for a later start.
            if name.startswith(f"{owner}.") and remove_containers(left):
                remove_tree(left)
    remove_empty(memory)
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
