"""A program: opens a listening socket in the network namespace of another process, and passes it
back over a socket.

    python -I -S egress_listener.py PID UID PORT CHANNEL

A socket belongs to the namespace in which it was made, whoever holds it: the worker accepts on it
what connects inside the sandbox, and no process of ours runs in there. A process of its own, since
only one with a single thread may enter a user namespace. Standard library only.

Whoever may enter the network is the user that made the user namespace around it, or root: so it
first becomes UID (-1: stays who it is), as the sandbox did.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import sys

_NS_GET_USERNS = 0xB701
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_BACKLOG = 16


def enter(fd: int, kind: int) -> None:
    """Enter a namespace. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, kind) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def listen(pid: int, uid: int, port: int) -> socket.socket:
    """A listening socket on the loopback of a process's network. Raises: OSError."""
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if os.path.sameopenfile(network, os.open("/proc/self/ns/net", os.O_RDONLY)):
        raise OSError(f"process {pid} has the machine's network")
    user = fcntl.ioctl(network, _NS_GET_USERNS)
    if not os.path.sameopenfile(user, os.open("/proc/self/ns/user", os.O_RDONLY)):
        enter(user, _CLONE_NEWUSER)
    enter(network, _CLONE_NEWNET)
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.bind(("127.0.0.1", port))
    made.listen(_BACKLOG)
    return made


def main() -> None:
    pid, uid, port, channel = map(int, sys.argv[1:])
    with socket.socket(fileno=channel) as back:
        try:
            made = listen(pid, uid, port)
        except OSError as error:
            back.send(str(error).encode())
            return
        rights = array.array("i", [made.fileno()])
        back.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


if __name__ == "__main__":
    main()
