"""What every sandbox backend must do, as checks that anybody can run against theirs.

    from hermes_rl.sandboxes.conformance_files import CHECKS
    for check in CHECKS:
        await check(backend)

Each check leases what it needs, asserts, and closes it again. Here are those about the session;
`conformance_files` has those about files and grading, and the whole list.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from hermes_rl.errors import SandboxDied, SandboxKilled
from hermes_rl.sandboxes.base import CommandResult, Sandbox, SandboxBackend, SandboxSpec

Check = Callable[[SandboxBackend], Awaitable[None]]
TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def leased(backend: SandboxBackend, name: str = "check") -> AsyncIterator[Sandbox]:
    """One sandbox, closed at the end."""
    sandbox = await backend.lease(SandboxSpec(lease=f"conformance-{name}"))
    try:
        yield sandbox
    finally:
        await sandbox.aclose()


async def sh(sandbox: Sandbox, command: str, *, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run a command."""
    return await sandbox.run(command, timeout_s=timeout_s)


async def expect(sandbox: Sandbox, command: str, output: str, code: int = 0) -> None:
    """Run a command and compare."""
    result = await sh(sandbox, command)
    assert (result.output, result.exit_code) == (output, code), f"{command!r}: {result}"


async def keeps_state(backend: SandboxBackend) -> None:
    """Directory, exports, functions, aliases, options and umask live on; plain output is exact."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "mkdir -p 'a b'; cd 'a b'; export V=$'x\\ny\"\\'z'; umask 027", "")
        await expect(sandbox, "f() { echo \"f:$1\"; }; alias hi='echo alias'; set -o pipefail", "")
        await expect(sandbox, 'basename "$PWD"; echo "$V"; umask', "a b\nx\ny\"'z\n0027\n")
        await expect(sandbox, "f 1; hi; false | true; echo $?", "f:1\nalias\n1\n")
        await expect(sandbox, "unset V; unset -f f; unalias hi; set +o pipefail; cd ..", "")
        await expect(
            sandbox, 'echo "${V-none}"; type f >/dev/null 2>&1 || echo gone', "none\ngone\n"
        )
        await expect(sandbox, 'cd - >/dev/null; basename "$PWD"', "a b\n")


async def survives_exits(backend: SandboxBackend) -> None:
    """`exit`, errexit, `exec`, a killed subshell and `kill 0` end a command, not the session."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "export KEPT=1; exit 3", "", 3)
        await expect(sandbox, "echo $KEPT", "1\n")
        await expect(sandbox, "set -e; false; echo no", "", 1)
        await expect(sandbox, "set +e; true", "")
        await expect(sandbox, "exec true", "")
        await expect(sandbox, "exec >&- 2>&-; echo lost", "", 1)
        await expect(sandbox, "kill -9 $BASHPID", "", 137)
        await expect(sandbox, "kill 0; sleep 5", "", 143)
        await expect(sandbox, "trap 'echo bye' EXIT; export LATE=2", "bye\n")
        await expect(sandbox, "echo $KEPT $LATE; return 7", "1 2\n", 7)


async def survives_syntax(backend: SandboxBackend) -> None:
    """Unbalanced quotes, an open heredoc, NUL bytes, no final newline, unicode."""
    async with leased(backend) as sandbox:
        result = await sh(sandbox, "echo 'never closed")
        assert result.exit_code != 0
        assert "unexpected EOF" in result.output
        result = await sh(sandbox, "cat <<END\nin the open")
        assert "in the open" in result.output
        result = await sh(sandbox, "echo a\0b")
        assert result.exit_code == 0
        await expect(sandbox, "printf 'no newline'", "no newline")
        await expect(sandbox, "echo 'grüße 漢字 🙂'", "grüße 漢字 🙂\n")


async def stdin_is_given_or_empty(backend: SandboxBackend) -> None:
    """A command that reads its input gets what was passed, else the end of it at once."""
    async with leased(backend) as sandbox:
        await expect(sandbox, 'cat; read x; echo "[$x]"', "[]\n")
        result = await sandbox.run("cat; wc -c </dev/null", timeout_s=TIMEOUT_S, stdin=b"in\0put\n")
        assert result.raw == b"in\0put\n0\n"
        big = bytes(range(256)) * 4096
        result = await sandbox.run("wc -c", timeout_s=TIMEOUT_S, stdin=big)
        assert result.output.strip() == "1048576"


async def bounds_output(backend: SandboxBackend) -> None:
    """Head and tail are kept, the count is true, bytes that are no UTF-8 survive in `raw`."""
    async with leased(backend) as sandbox:
        result = await sh(sandbox, "seq 1 2000000")
        assert result.truncated
        assert result.output_bytes == 14888896
        assert len(result.raw) == 50_000
        assert result.output.startswith("1\n2\n")
        assert result.output.endswith("1999999\n2000000\n")
        assert result.raw.startswith(b"1\n2\n")
        result = await sandbox.run("seq 100", timeout_s=TIMEOUT_S, max_output_bytes=50)
        assert len(result.raw) == 50
        assert result.output_bytes == 292
        result = await sh(sandbox, r"printf '\377\376\000ok'")
        assert result.raw == b"\xff\xfe\x00ok"
        assert result.output.endswith("ok")
        result = await sh(sandbox, "echo out; echo err >&2; echo out2; echo e >/dev/stderr")
        assert result.output == "out\nerr\nout2\ne\n"


async def survives_a_flood(backend: SandboxBackend) -> None:
    """A gigabyte of output is counted, not kept."""
    async with leased(backend) as sandbox:
        result = await sh(sandbox, "head -c 1000000000 /dev/zero", timeout_s=120)
        assert (result.output_bytes, result.exit_code) == (1_000_000_000, 0)
        assert len(result.raw) == 50_000
        await expect(sandbox, "echo after", "after\n")


async def separates_background_output(backend: SandboxBackend) -> None:
    """What a background job prints late is not in the next command's output; the job lives on."""
    sleep, count = _sleep()
    late = f"(sleep 0.3; echo late; touch done; {sleep}) & echo started"
    async with leased(backend) as sandbox:
        await expect(sandbox, late, "started\n")
        await expect(sandbox, "sleep 0.8; echo next; ls", "next\ndone\n")
        await expect(sandbox, count, "1\n")


TIMEOUTS = (
    "SLEEP",
    "while :; do :; done",
    "trap '' TERM; SLEEP; SLEEP",
    "setsid SLEEP & SLEEP",
    "(setsid SLEEP &) ; SLEEP",
    "SLEEP | cat",
    "yes >/dev/null",
    "SLEEP & SLEEP & wait",
    "(trap '' TERM; while :; do SLEEP; done) & SLEEP",
)


def _sleep() -> tuple[str, str]:
    """A long sleep that no other process on the machine has, and how to count those that run."""
    seconds = f"9{secrets.randbelow(10**7):07}"
    return f"sleep {seconds}", f"pgrep -fc '^sleep {seconds}' || true"


async def ends_what_takes_too_long(backend: SandboxBackend) -> None:
    """A timeout ends the whole tree, keeps state and older background jobs, returns the output."""
    (short, count), (older, count_older) = _sleep(), _sleep()
    async with leased(backend) as sandbox:
        await expect(sandbox, f"export KEPT=yes; mkdir -p d; cd d; {older} & true", "")
        for template in TIMEOUTS:
            command = template.replace("SLEEP", short)
            started = time.monotonic()
            result = await sh(sandbox, f"echo begin; export LOST=1; cd /; {command}", timeout_s=0.3)
            assert result.timed_out, command
            assert (result.exit_code, result.output) == (124, "begin\n"), command
            assert time.monotonic() - started < 10, command
            await expect(sandbox, 'echo $KEPT ${LOST-none}; basename "$PWD"', "yes none\nd\n")
            await expect(sandbox, count, "0\n")
        await expect(sandbox, count_older, "1\n")


async def many_timeouts_leave_nothing(backend: SandboxBackend) -> None:
    """Twenty timeouts of trees with escaped children: the number of processes stays flat."""
    sleep, count = _sleep()
    async with leased(backend) as sandbox:
        for _ in range(20):
            await sh(
                sandbox, f"for i in 1 2 3; do (setsid {sleep} &); done; {sleep}", timeout_s=0.05
            )
        await expect(sandbox, count, "0\n")


async def cancelled_commands_end(backend: SandboxBackend) -> None:
    """A cancelled call ends its command; the session goes on."""
    sleep, count = _sleep()
    async with leased(backend) as sandbox:
        await expect(sandbox, "export A=1", "")
        task = asyncio.create_task(sh(sandbox, f"echo x >mark; {sleep}"))
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await expect(sandbox, f"echo $A; cat mark; {count}", "1\nx\n0\n")


async def many_cancels_leave_nothing(backend: SandboxBackend) -> None:
    """Commands cancelled at any moment, also the wait for the one before: answers stay in order."""
    sleep, count = _sleep()
    async with leased(backend) as sandbox:
        for number in range(20):
            first = asyncio.create_task(sh(sandbox, f"(setsid {sleep} &); {sleep}"))
            await asyncio.sleep(number / 2000)
            first.cancel()
            second = asyncio.create_task(sh(sandbox, f"echo {number}; {sleep}"))
            await asyncio.wait([first])
            second.cancel()
            await asyncio.wait([second])
            await expect(sandbox, f"echo then {number}", f"then {number}\n")
        await expect(sandbox, count, "0\n")


async def timeouts_spare_background_processes(backend: SandboxBackend) -> None:
    """A timeout ends its own command only, even one that had not begun."""
    async with leased(backend) as sandbox:
        process = await sandbox.start_process("while read line; do echo got $line; done")
        for number in range(20):
            await sh(sandbox, "sleep 900", timeout_s=number / 2000)
        await process.write(b"hello\n")
        said = b""
        while not said and await process.poll() is None:
            said += await process.read()
            await asyncio.sleep(0.02)
        assert said == b"got hello\n"


async def waits_for_stopped_commands(backend: SandboxBackend) -> None:
    """A command that stops itself has not ended; codes that look like a stop are codes."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "exit 147", "", 147)
        wake = "(sleep 0.2; kill -CONT $me) & kill -STOP $me; echo awake; exit 148"
        await expect(sandbox, f"me=$BASHPID; {wake}", "awake\n", 148)
        result = await sh(sandbox, "kill -STOP $BASHPID", timeout_s=0.2)
        assert result.timed_out
        await expect(sandbox, "echo after", "after\n")


async def takes_a_directory_per_command(backend: SandboxBackend) -> None:
    """`cwd` holds for one command; a command that moves on is followed."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "mkdir -p one two", "")
        result = await sandbox.run('basename "$PWD"', timeout_s=TIMEOUT_S, cwd="one")
        assert result.output == "one\n"
        await expect(sandbox, "ls", "one\ntwo\n")
        result = await sandbox.run("cd ../two", timeout_s=TIMEOUT_S, cwd="one")
        await expect(sandbox, 'basename "$PWD"', "two\n")


async def runs_background_processes(backend: SandboxBackend) -> None:
    """Start, write, read, poll, kill; the exit code of one that ends by itself."""
    async with leased(backend) as sandbox:
        process = await sandbox.start_process('while read line; do echo "got $line"; done; exit 5')
        await process.write(b"hello\n")
        said = b""
        for _ in range(200):
            said += await process.read()
            if said:
                break
            await asyncio.sleep(0.02)
        assert said == b"got hello\n"
        assert await process.poll() is None
        await expect(sandbox, "echo meanwhile", "meanwhile\n")
        await process.kill()
        assert await process.poll() is not None
        short = await sandbox.start_process("echo one; exit 5")
        for _ in range(200):
            if await short.poll() is not None:
                break
            await asyncio.sleep(0.02)
        assert await short.poll() == 5
        assert await short.read() == b"one\n"
        try:
            await short.write(b"late")
        except BrokenPipeError:
            pass
        else:
            raise AssertionError("writing to a process that has ended must fail")


KILL_SHELL = "read -r _ _ _ shell _ </proc/$BASHPID/stat; kill -9 $shell"
"""A command that kills the shell of its session."""


async def names_the_culprit(backend: SandboxBackend) -> None:
    """A shell that its own commands kill is the agent's deed, and stays dead."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "echo left >result", "")
        for command in (KILL_SHELL, "echo not revived"):
            try:
                await sh(sandbox, command)
            except SandboxKilled:
                continue
            raise AssertionError("a killed sandbox must say so")


async def ends_when_closed(backend: SandboxBackend) -> None:
    """Closing in mid-command ends the command with an error, twice is fine, verbs fail after."""
    async with leased(backend) as sandbox:
        task = asyncio.create_task(sh(sandbox, "sleep 100"))
        await asyncio.sleep(0.2)
        await sandbox.aclose()
        await sandbox.aclose()
        for attempt in (task, asyncio.create_task(sh(sandbox, "true"))):
            try:
                await attempt
            except (SandboxDied, SandboxKilled):
                continue
            raise AssertionError("a closed sandbox must refuse")


async def keeps_neighbours_apart(backend: SandboxBackend) -> None:
    """64 sandboxes at once, each reading back only its own."""

    async def one(number: int) -> None:
        async with leased(backend, str(number)) as sandbox:
            await sh(sandbox, f"export ME={number}; echo {number} >own")
            for _ in range(3):
                result = await sh(sandbox, "echo $ME; cat own; ls | wc -l")
                assert result.output == f"{number}\n{number}\n1\n", result

    await asyncio.gather(*(one(number) for number in range(64)))


SESSION_CHECKS: tuple[Check, ...] = (
    keeps_state,
    survives_exits,
    survives_syntax,
    stdin_is_given_or_empty,
    bounds_output,
    survives_a_flood,
    separates_background_output,
    ends_what_takes_too_long,
    many_timeouts_leave_nothing,
    cancelled_commands_end,
    many_cancels_leave_nothing,
    timeouts_spare_background_processes,
    waits_for_stopped_commands,
    takes_a_directory_per_command,
    runs_background_processes,
    names_the_culprit,
    ends_when_closed,
    keeps_neighbours_apart,
)
