"""Ends processes that a killed driver would leave behind.

Ray's own agents stay for about a minute after their driver was killed. A warden is a small shell
that reads process numbers from a pipe; when the pipe closes, because the driver ended or died, it
kills those that still run. Start times keep it from killing a stranger with a recycled number.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SCRIPT = """
watched=
while read -r pid start; do watched="$watched $pid:$start"; done
for entry in $watched; do
    pid=${entry%:*}
    { read -r stat < "/proc/$pid/stat"; } 2>/dev/null || continue
    set -- ${stat##*) }
    [ "${20}" = "${entry#*:}" ] && kill -9 "$pid" 2>/dev/null
done
"""


class Warden:
    """Watches processes for as long as this process lives. Linux; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._before = set(_descendants(os.getpid()))
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._before.add(self._process.pid)

    def watch(self, pid: int) -> None:
        """End this process too."""
        started = _stat(pid)
        if started is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{pid} {started[1]}\n".encode())
            self._process.stdin.flush()

    def watch_children(self) -> None:
        """End all processes that this one started since the warden was made, theirs included."""
        for pid in _descendants(os.getpid()):
            if pid not in self._before:
                self.watch(pid)

    def close(self) -> None:
        """End what still runs, and the warden."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=10)


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None:
            children.setdefault(stat[0], []).append(int(entry.name))
    waiting = [root]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time (field 22 of /proc/PID/stat)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])
