"""What `sandbox_verbs` is measured against: the same actions without a harness.

    python bare_verbs.py (start | builtin | external) COUNT [MB]

`start` runs `true` in a bubblewrap with the options of our sandboxes and waits for it; the others
send a command to a bash that only reads, forks, runs and waits.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from bare import plain
from sandbox_verbs import COMMANDS, ballast

from hermes_rl.sandboxes import (
    find_binary,
    first_slot,
    launch,
    reachable,
    recipe,
)

LOOP = 'while IFS= read -r line; do (eval "$line") >/dev/null & wait $!; echo $?; done'


def start(count: int, folder: Path) -> None:
    """One bubblewrap after the other, as a user id that no sandbox has."""
    folder.chmod(0o711)
    uid = first_slot()
    for name in ("ws", "ctl"):
        (folder / name).mkdir()
        if uid is not None:
            os.chown(folder / name, uid, uid)
    sandbox = plain(recipe.make_etc(folder / "etc", network=False), folder, ["true"])
    binary = reachable(find_binary(), folder)
    for _ in range(count):
        near, far = socket.socketpair()
        with near:
            bubblewrap = launch(binary, sandbox, uid, far)
            assert bubblewrap.process.wait() == 0
            bubblewrap.close()


def commands(count: int, command: str) -> None:
    """One command after the other."""
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-c", LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as bash:
        assert bash.stdin is not None
        assert bash.stdout is not None
        for _ in range(count):
            bash.stdin.write(command.encode() + b"\n")
            assert bash.stdout.read(16) == b"0\n"
        bash.stdin.close()


def main() -> None:
    """See the module."""
    verb, count, *size = sys.argv[1:]
    held = ballast(int(size[0]) if size else 400)
    if verb == "start":
        with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
            start(int(count), Path(folder))
    else:
        commands(int(count), COMMANDS[verb])
    held.close()


if __name__ == "__main__":
    main()
