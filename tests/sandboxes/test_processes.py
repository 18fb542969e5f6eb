"""Finding and ending processes while they fork, leave their parents and change their programs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest

from hermes_rl.sandboxes import (
    Jobs,
    MarkedProcesses,
    Proc,
    Quiescence,
    Sandbox,
    Snapshot,
    children,
    find,
    processes,
    snapshot,
    stop_tree,
)

IDS = int(Path("/proc/sys/kernel/pid_max").read_text())


@contextmanager
def running(
    command: list[str], env: dict[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block."""
    process = subprocess.Popen(command, env=env, pass_fds=pass_fds, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def seen(process: subprocess.Popen[bytes]) -> Proc:
    found = find(process.pid)
    assert found is not None
    return found


def test_one_empty_look_is_not_the_end() -> None:
    """An orphan that the first looks miss, as one does that was forked behind their back."""
    with running(["bash", "-c", "sleep 971 & wait"]) as shell:
        only_child(shell.pid)
        with running(["sleep", "972"]) as stray:
            misses = [Snapshot([])] * 2  # while the job lives, and once more

            def orphans() -> Snapshot:
                return misses.pop() if misses else snapshot([stray.pid])

            assert Jobs(lambda: shell.pid, orphans).end()
            assert stray.wait(60) < 0


def test_whom_the_looks_find_dying() -> None:
    """Two empty looks count when the second finds nobody dying whom the first had not."""
    one, two = Proc(5, 1), Proc(-1, 2)

    def looks(*dying: set[Proc]) -> list[bool]:
        quiescence = Quiescence()
        return [quiescence.gone(Snapshot([], frozenset(who))) for who in dying]

    assert looks(set(), set()) == [False, True]
    assert looks({one}, {one}) == [False, True]
    assert looks({one}, {one, two}, {two}) == [False, False, True]
    quiescence = Quiescence()
    assert [quiescence.gone(Snapshot(alive)) for alive in ([], [one], [], [])] == [
        False,
        False,
        False,
        True,
    ]
    strangers = [{Proc(-1, number)} for number in range(10)]
    assert looks(*strangers) == [False] * 9 + [True], "a busy machine holds nobody up for ever"


@pytest.mark.parametrize(
    ("proc", "other", "younger"),
    [
        (Proc(8, 5), Proc(7, 9), True),
        (Proc(7, 9), Proc(8, 5), False),
        (Proc(7, 9), Proc(7, 8), True),
        (Proc(7, 8), Proc(7, 9), False),
        (Proc(7, 8), Proc(7, 8), False),
        (Proc(7, 301), Proc(7, IDS - 2), True),  # the ids began anew between the two
        (Proc(7, IDS - 2), Proc(7, 301), False),
    ],
)
def test_who_is_younger(proc: Proc, other: Proc, younger: bool) -> None:
    assert proc.younger(other) is younger


def test_kin_by_mark_and_by_life_line() -> None:
    """Of each kind one alone; not who only reads the line, is older, or is a bare fork of ours."""
    reads, line = os.pipe()
    shell = ["sh", "-c", "sleep 973 & wait"]
    mark = {"KIN": f"of {os.getpid()}"}
    try:
        with running(["sleep", "973"], env=mark) as elder, younger(seen(elder)) as eldest:
            marked_all = MarkedProcesses(
                eldest, f"KIN={mark['KIN']}".encode(), os.readlink(f"/proc/self/fd/{line}")
            )
            with (
                running(shell, env=mark) as marked,
                running(shell, env={}, pass_fds=(line,)) as holder,
                running(shell, env={}, pass_fds=(reads,)) as reader,
            ):
                child, held = only_child(marked.pid), only_child(holder.pid)
                only_child(reader.pid)
                assert {proc.pid for proc in marked_all.snapshot().alive} == {
                    marked.pid,
                    child,
                    held,
                }
                assert {proc.pid for proc in marked_all.orphans().alive} == {marked.pid, held}
    finally:
        os.close(reads)
        os.close(line)


@contextmanager
def younger(other: Proc) -> Iterator[Proc]:
    """A process that was started at least a tick later."""
    while True:
        with running(["sleep", "973"]) as process:
            if seen(process).start > other.start:
                yield seen(process)
                return


def only_child(pid: int) -> int:
    """A process's child, once it is there and has become `sleep`."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for child in children(pid):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):
                return child
        time.sleep(0.005)
    raise AssertionError(f"{pid} has no child")


async def test_no_program_hides_from_a_timeout(each_sandbox: Sandbox) -> None:
    """Children without an environment, and chains of children that leave their parents at once."""
    sleep = f"sleep {950_000 + os.getpid()}"
    chain = f"(setsid sh -c '(exec sh -c \"exec {sleep}\" &)' &)"
    command = f"(env -i setsid {sleep} &); {chain}; {sleep}"
    for number in range(20):
        assert (await each_sandbox.run(command, timeout_s=number / 500)).timed_out
    found = await each_sandbox.run(f"pgrep -fc '^{sleep}' || true", timeout_s=20)
    assert found.output == "0\n"


def test_a_tree_that_gets_little_cpu_time_is_stopped_all_the_same() -> None:
    """A process stops when it next runs; one that has not stopped may fork before it is killed."""
    cpu = str(max(os.sched_getaffinity(0)))
    tree = "while :; do sleep 974 & sleep 0.002; done"
    busy = "for i in 1 2 3 4; do (while :; do :; done) & done"
    script = f"nice -n 19 bash -c '{tree}' & echo $!; read; {busy}; echo; wait"
    command = ["taskset", "--cpu-list", cpu, "bash", "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            root = find(int(shell.stdout.readline()))
            assert root is not None
            while len(children(root.pid)) < 10:
                time.sleep(0.005)
            shell.stdin.write(b"\n")
            shell.stdin.flush()
            shell.stdout.readline()
            stop_tree(root)
            assert [proc for proc in snapshot([root.pid]).alive if not proc.halted()] == []
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_tree_whose_processes_wake_each_other_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "STOP_MOST_S", 0.5)
    with running(["bash", "-c", "sleep 975 & wait"]) as shell:
        only_child(shell.pid)
        halted = cycle([True, False, False, True])  # always one of the two, each time the other
        monkeypatch.setattr(Proc, "halted", lambda proc: next(halted))
        began = time.monotonic()
        stop_tree(seen(shell))
        assert 0.5 <= time.monotonic() - began < processes.STOP_S


async def test_a_tree_that_grows_while_it_is_killed(each_sandbox: Sandbox) -> None:
    """A killed parent's child, forked a moment ago, would be left to process 1."""
    sleep = f"sleep {960_000 + os.getpid()}"
    grows = f"while :; do sh -c 'sh -c \"{sleep} & wait\" & wait' & sleep 0.002; done"
    for number in range(8):
        process = await each_sandbox.start_process(grows)
        await each_sandbox.run(f"sleep 0.0{number}", timeout_s=20)
        await process.kill()
        assert await process.poll() == 137
        # Who survives sleeps for days; who was killed may need a moment to end on a busy machine.
        look = f"pgrep -f '^{sleep}' || exit 0; sleep 0.05"
        ended = f"(for i in $(seq 100); do {look}; done; exit 1)"
        found = await each_sandbox.run(ended, timeout_s=60)
        assert found.exit_code == 0, found.output
