"""What an agent does to void its attempt: it is graded all the same, on what it left.

A failure of infrastructure would be tried again and kept out of the scores, so no action of an
agent may look like one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_rl.errors import ENDINGS
from hermes_rl.events import EventLog
from hermes_rl.ports import WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.rollout import run_attempt

from .conftest import Journal, Open, Stage, script

DEEP = "import os\nfor i in range({n}): os.mkdir('d'); os.chdir('d')"
PRLIMIT = """
import os, resource
for pid in (1, 2, os.getppid()):
    for number in range(16):
        try: resource.prlimit(pid, number, (0, 0))
        except OSError: pass
"""
KILLS = {
    "state_pipes": "cd /run/hx && rm -f a b && mkfifo a b",
    "state_gone": "rm -rf /run/hx",
    "state_link": "ln -sf /dev/zero /run/hx/a; ln -sf /dev/zero /run/hx/b",
    "kill_1": "kill -9 1; kill -STOP 1",
    "kill_2": "kill -9 2",
    "kill_all": "kill -9 -1",
    "close": "exec 3<&- 4>&- 0<&- 1>&- 2>&-",
    "limits": "ulimit -n 3; ulimit -u 1; ulimit -f 0; ls | cat",
    "limits_of_others": f'python3 -c "{PRLIMIT}"',
    "lock": "mkdir a; touch a/f f; chmod 000 a/f f a .",
    "deep": f'python3 -c "{DEEP.format(n=1500)}"',
    "deeper": f'python3 -c "{DEEP.format(n=3000)}"',
    "sparse": "for i in $(seq 300); do truncate -s 1G s$i; done",
    "names": r"touch $'new\nline' $'\xff\xfe' '-rf' '*' \\ ; mkdir $'\n\xff'; touch $'\n\xff/x'",
    "links": "ln -s . o; ln -s o/o/l l; ln -s /proc/self/fd fd; echo x >f; ln f g; mkfifo p",
    "device": "mknod c c 0 0; python3 -c \"import socket; socket.socket(1).bind('s')\"",
    "memory": "head -c 1G /dev/zero >/dev/shm/x; head -c 1G /dev/zero >/run/x",
    "session": "cat() { exit 9; }; builtin() { :; }; printf() { :; }; readonly PATH=; set -e",
    "traps": "trap 'exit 3' DEBUG EXIT ERR; shopt -s extdebug; alias echo=exit; false",
    "environment": "export BIG=$(head -c 20M /dev/zero | tr '\\0' x)",
    "channel": "exec >&/proc/2/fd/4; while :; do echo 'E 0 s'; done",
}
STUCK = {
    "stop": "kill -STOP 2",
    "forks": "bomb() { bomb | bomb & }; bomb; sleep 20",
    "processes": "for i in $(seq 200); do sleep 100 & done; sleep 20",
}
"""Those that take the host seconds to see."""


async def play(stage: Stage, kept: Path, kills: dict[str, str]) -> dict[str, Trajectory]:
    """One attempt for each, all at once, where workspaces are kept."""
    context = replace(stage.context, workspaces=kept)

    async def attempt(index: int, command: str) -> Trajectory:
        calls = [
            {"arguments": {"command": f"touch /workspace/begun; {command}", "timeout": 2}},
            {"arguments": {"command": "echo next", "timeout": 2}},
        ]
        verifier = "test -e /workspace/begun || exit 9; test -e /workspace/solved"
        row = {"prompt": script(*[{"calls": [c]} for c in calls], "done"), "verify": verifier}
        item: WorkItem = stage.item(row, index)
        return await run_attempt(context, item, EventLog(Journal().record))

    rows = await asyncio.gather(*(attempt(i, kill) for i, kill in enumerate(kills.values())))
    return dict(zip(kills, rows, strict=True))


def assert_graded(rows: dict[str, Trajectory]) -> None:
    ends = {name: (row.cause, row.error, row.end_reason, row.reward) for name, row in rows.items()}
    failed = {name: end for name, end in ends.items() if end[0] is not None or end[3] != 0.0}
    assert failed == {}
    assert {row.end_reason for row in rows.values()} <= {*ENDINGS}


async def test_sandbox_kills_are_graded(stage: Open, tmp_path: Path) -> None:
    rows = await play(await stage(), tmp_path / "workspaces", KILLS)
    assert_graded(rows)
    ends = {name: row.end_reason for name, row in rows.items()}
    assert ends["kill_2"] == ends["kill_all"] == "sandbox_killed"
    assert ends["kill_1"] == ends["limits_of_others"] == ends["deep"] == "answered"
    kept = {path.name.partition(".")[0] for path in tmp_path.glob("workspaces/*.tar.gz")}
    absent = {name for name, row in rows.items() if row.trajectory_id not in kept}
    assert absent == {"deeper"}, "no name of the machine's leads there"


@pytest.mark.slow
async def test_shell_kills_are_graded(stage: Open, tmp_path: Path) -> None:
    rows = await play(await stage(), tmp_path / "workspaces", STUCK)
    assert_graded(rows)
    assert rows["stop"].end_reason == "sandbox_killed"
