"""What every sandbox backend must do, as checks that anybody can run against theirs.

    from hermes_rl.sandboxes.conformance import CHECKS
    for check in CHECKS:
        await check(backend)

Each check leases what it needs, asserts, and closes it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from hermes_rl.errors import SandboxDied, SandboxError, SandboxKilled, SnapshotLost
from hermes_rl.sandboxes.base import (
    CommandResult,
    GradingSpec,
    Process,
    Sandbox,
    SandboxBackend,
    SandboxSnapshot,
    SandboxSpec,
)

Check = Callable[[SandboxBackend], Awaitable[None]]
TIMEOUT_S = 30.0
BIG = 20 << 20
E = TypeVar("E", bound=BaseException)


@contextlib.asynccontextmanager
async def leased_sandbox(backend: SandboxBackend, name: str = "check") -> AsyncIterator[Sandbox]:
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


async def fails(attempt: Awaitable[object], kind: type[E]) -> E:
    """The attempt must raise an error of this kind. Returns it."""
    try:
        await attempt
    except kind as error:
        return error
    raise AssertionError(f"expected {kind}")


async def printed_by(process: Process, least: int) -> bytes:
    """What a process prints, until there are so many bytes of it, or it has ended."""
    output = b""
    async with asyncio.timeout(TIMEOUT_S):
        while len(output) < least and await process.poll() is None:
            output += await process.read()
            await asyncio.sleep(0.02)
    return output + await process.read()


async def keeps_state(backend: SandboxBackend) -> None:
    """Directory, exports, functions, aliases, options and umask live on; plain output is exact."""
    async with leased_sandbox(backend) as sandbox:
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
    async with leased_sandbox(backend) as sandbox:
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
    async with leased_sandbox(backend) as sandbox:
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
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, 'cat; read x; echo "[$x]"', "[]\n")
        result = await sandbox.run("cat; wc -c </dev/null", timeout_s=TIMEOUT_S, stdin=b"in\0put\n")
        assert result.raw == b"in\0put\n0\n"
        big = bytes(range(256)) * 4096
        result = await sandbox.run("wc -c", timeout_s=TIMEOUT_S, stdin=big)
        assert result.output.strip() == "1048576"


async def bounds_output(backend: SandboxBackend) -> None:
    """Head and tail are kept, the count is true, bytes that are no UTF-8 survive in `raw`."""
    async with leased_sandbox(backend) as sandbox:
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
    async with leased_sandbox(backend) as sandbox:
        result = await sh(sandbox, "head -c 1000000000 /dev/zero", timeout_s=120)
        assert (result.output_bytes, result.exit_code) == (1_000_000_000, 0)
        assert len(result.raw) == 50_000
        await expect(sandbox, "echo after", "after\n")


async def separates_background_output(backend: SandboxBackend) -> None:
    """What a background job prints late is not in the next command's output; the job lives on."""
    sleep, count = _sleep()
    late = f"(sleep 0.3; echo late; touch done; {sleep}) & echo started"
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, late, "started\n")
        next_one = "until [ -e done ]; do sleep 0.05; done; echo next; ls"
        await expect(sandbox, next_one, "next\ndone\n")
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
    (short, count), (older, count_older), outputs = _sleep(), _sleep(), set[str]()
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, f"export KEPT=yes; mkdir -p d; cd d; {older} & true", "")
        for template in TIMEOUTS:
            command = template.replace("SLEEP", short)
            started = time.monotonic()
            result = await sh(sandbox, f"echo begin; export LOST=1; cd /; {command}", timeout_s=0.3)
            assert result.timed_out, command
            assert result.exit_code == 124, command
            outputs.add(result.output)
            assert time.monotonic() - started < TIMEOUT_S, command
            await expect(sandbox, 'echo $KEPT ${LOST-none}; basename "$PWD"', "yes none\nd\n")
            await expect(sandbox, count, "0\n")
        await expect(sandbox, count_older, "1\n")
        assert {"begin\n"} <= outputs <= {"begin\n", ""}, "on a busy machine some print nothing"


MANY = 20
"""Timeouts of one check."""
_FEW = 20
"""A sandbox that sees fewer processes than this sees only those inside it."""


async def many_timeouts_leave_nothing(backend: SandboxBackend, rounds: int = MANY) -> None:
    """Timeouts of a command that forks without end: the number of processes stays flat."""
    sleep, count = _sleep()
    forks = f"while :; do (setsid {sleep} &); {sleep} & {sleep} | {sleep} & done"
    number = "set -- /proc/[0-9]*; echo $#"
    async with leased_sandbox(backend) as sandbox:
        before = (await sh(sandbox, number)).output
        for _ in range(rounds):
            assert (await sh(sandbox, forks, timeout_s=0.05)).timed_out
        await expect(sandbox, count, "0\n")
        if int(before) < _FEW:  # ended processes may wait for a moment on a busy machine
            again = f"[ $# -gt {int(before)} ] && [ $((n += 1)) -lt 50 ]"
            await expect(
                sandbox,
                f"n=0; while set -- /proc/[0-9]*; {again}; do sleep 0.1; done; echo $#",
                before,
            )


async def cancelled_commands_end(backend: SandboxBackend) -> None:
    """A cancelled call ends its command; the session goes on."""
    sleep, count = _sleep()
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, "export A=1", "")
        begun = await sandbox.start_process("until [ -s mark ]; do sleep 0.05; done")
        task = asyncio.create_task(sh(sandbox, f"echo x >mark; {sleep}"))
        assert await begun.wait(TIMEOUT_S) == 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await expect(sandbox, f"echo $A; cat mark; {count}", "1\nx\n0\n")


async def many_cancels_leave_nothing(backend: SandboxBackend) -> None:
    """Commands cancelled at any moment, also the wait for the one before: answers stay in order."""
    sleep, count = _sleep()
    async with leased_sandbox(backend) as sandbox:
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
    async with leased_sandbox(backend) as sandbox:
        process = await sandbox.start_process("while read line; do echo got $line; done")
        for number in range(20):
            await sh(sandbox, "sleep 900", timeout_s=number / 2000)
        await process.write(b"hello\n")
        assert await printed_by(process, 10) == b"got hello\n"


async def waits_for_stopped_commands(backend: SandboxBackend) -> None:
    """A command that stops itself has not ended; codes that look like a stop are codes."""
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, "exit 147", "", 147)
        stopped = "read -r _ _ state _ </proc/$me/stat && [ $state = T ]"
        wake = f"(until {stopped}; do sleep 0.05; done; kill -CONT $me) & kill -STOP $me"
        await expect(sandbox, f"me=$BASHPID; {wake}; echo awake; exit 148", "awake\n", 148)
        result = await sh(sandbox, "kill -STOP $BASHPID", timeout_s=0.2)
        assert result.timed_out
        await expect(sandbox, "echo after", "after\n")


async def takes_a_directory_per_command(backend: SandboxBackend) -> None:
    """`cwd` holds for one command; a command that moves on is followed."""
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, "mkdir -p one two", "")
        result = await sandbox.run('basename "$PWD"', timeout_s=TIMEOUT_S, cwd="one")
        assert result.output == "one\n"
        await expect(sandbox, "ls", "one\ntwo\n")
        result = await sandbox.run("cd ../two", timeout_s=TIMEOUT_S, cwd="one")
        await expect(sandbox, 'basename "$PWD"', "two\n")


async def runs_background_processes(backend: SandboxBackend) -> None:
    """Start, write, read, poll, kill; the exit code of one that ends by itself."""
    async with leased_sandbox(backend) as sandbox:
        process = await sandbox.start_process('while read line; do echo "got $line"; done; exit 5')
        await process.write(b"hello\n")
        assert await printed_by(process, 10) == b"got hello\n"
        assert await process.poll() is None
        await expect(sandbox, "echo meanwhile", "meanwhile\n")
        await process.kill()
        assert await process.poll() is not None
        short = await sandbox.start_process("echo one; exit 5")
        assert await printed_by(short, 100) == b"one\n"
        assert await short.poll() == 5
        await fails(short.write(b"late"), BrokenPipeError)


async def waits_for_background_processes(backend: SandboxBackend) -> None:
    """Wait for output and for the end; the end of input; a flood is bounded; one that is left
    alone costs nothing and keeps nothing alive."""
    async with leased_sandbox(backend) as sandbox:
        upper = await sandbox.start_process("echo ready; tr a-z A-Z; echo end; exit 3")
        assert await upper.wait(TIMEOUT_S, output=True) is None
        assert await printed_by(upper, 6) == b"ready\n"
        assert await upper.wait(0.01) is None, "it waits for input"
        await upper.write(b"some text\n")
        await upper.close_input()
        assert await upper.wait(TIMEOUT_S) == 3
        assert await upper.read() == b"SOME TEXT\nend\n"
        await fails(upper.write(b"late"), BrokenPipeError)
        early = await sandbox.start_process("wc -c")
        await early.close_input()
        assert await early.wait(TIMEOUT_S) == 0
        assert (await early.read()).strip() == b"0"
        flood = await sandbox.start_process(
            "yes 0123456789 | head -c 1000000; echo last; sleep 900"
        )
        await flood.wait(TIMEOUT_S, output=True)
        async with asyncio.timeout(TIMEOUT_S):
            kept = b""
            while not kept.endswith(b"last\n"):
                await asyncio.sleep(0.1)
                piece = await flood.read()
                assert len(piece) < 250_000
                kept += piece
        assert kept.startswith(b"0123456789\n")
        server = await sandbox.start_process("(sleep 900; echo never) & echo parent")
        assert await server.wait(TIMEOUT_S) == 0
        assert await server.read() == b"parent\n"
        await expect(sandbox, "echo still", "still\n")


KILL_SHELL = "read -r _ _ _ shell _ </proc/$BASHPID/stat; kill -9 $shell"
"""A command that kills the shell of its session."""


async def keeps_all_output_of_a_lossless_process(backend: SandboxBackend) -> None:
    """It waits while its output is not read, and every byte arrives."""
    async with leased_sandbox(backend) as sandbox, asyncio.timeout(TIMEOUT_S):
        process = await sandbox.start_process(
            "head -c 1000000 /dev/zero | tr '\\0' x; echo end", lossless=True
        )
        await asyncio.sleep(0.5)
        output = b""
        while not output.endswith(b"end\n"):
            output += await process.read()
            await asyncio.sleep(0.01)
        assert output == b"x" * 1_000_000 + b"end\n", len(output)


async def names_the_culprit(backend: SandboxBackend) -> None:
    """A shell that its own commands kill is the agent's deed, and stays dead."""
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, "echo left >result", "")
        for command in (KILL_SHELL, "echo not revived"):
            await fails(sh(sandbox, command), SandboxKilled)


async def ends_when_closed(backend: SandboxBackend) -> None:
    """Closing in mid-command ends the command with an error, twice is fine, verbs fail after."""
    async with leased_sandbox(backend) as sandbox:
        task = asyncio.create_task(sh(sandbox, "sleep 100"))
        await asyncio.sleep(0.2)
        await sandbox.aclose()
        await sandbox.aclose()
        for attempt in (task, sh(sandbox, "true")):
            await fails(attempt, SandboxError)


async def keeps_neighbours_apart(backend: SandboxBackend) -> None:
    """Eight sandboxes at once, each reading back only its own."""

    async def one(number: int) -> None:
        async with leased_sandbox(backend, str(number)) as sandbox:
            await sh(sandbox, f"export ME={number}; echo {number} >own")
            for _ in range(3):
                result = await sh(sandbox, "echo $ME; cat own; ls | wc -l")
                assert result.output == f"{number}\n{number}\n1\n", result

    await asyncio.gather(*(one(number) for number in range(8)))


async def moves_bytes(backend: SandboxBackend) -> None:
    """Binary data and unicode paths, relative, absolute and outside the workspace."""
    data = bytes(range(256)) * 100 + b"\xff\xfe\0\r\n"
    async with leased_sandbox(backend) as sandbox:
        scratch = (await sh(sandbox, "mktemp -d")).output.strip()
        for path in ("a.bin", "dir/ü 漢字/new\nline.bin", f"{scratch}/x/ü.bin"):
            await sandbox.write_file(path, data)
            assert await sandbox.read_file(path) == data
            await sandbox.write_file(path, b"short")
            assert await sandbox.read_file(path) == b"short"
        await sandbox.write_file("empty", b"")
        assert await sandbox.read_file("empty") == b""
        await expect(sandbox, "echo made >>a.bin; cat a.bin; rm a.bin", "shortmade\n")
        await sh(sandbox, "echo real >real; ln -s real link; mkdir -p deep/er; ln -s deep/er hop")
        assert await sandbox.read_file("link") == b"real\n"
        await sandbox.write_file("hop/here", b"1")
        await expect(sandbox, "cat deep/er/here", "1")
        await sh(sandbox, f"rm -rf {scratch}")


async def says_what_is_wrong_with_a_path(backend: SandboxBackend) -> None:
    """Missing, folder, pipe: typed errors, and nothing blocks."""
    async with leased_sandbox(backend) as sandbox:
        await sh(sandbox, "mkdir folder; mkfifo pipe; ln -s nowhere dangling")
        for path in ("missing", "folder/missing", "dangling", "/nonexistent/x"):
            await fails(sandbox.read_file(path), FileNotFoundError)
        for path in ("folder", "/tmp"):
            await fails(sandbox.read_file(path), IsADirectoryError)
            await fails(sandbox.write_file(path, b"x"), IsADirectoryError)
        await fails(sandbox.read_file("pipe"), OSError)


async def reads_while_a_command_runs(backend: SandboxBackend) -> None:
    """Files of the workspace are read before the command ends."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        async with leased_sandbox(backend) as sandbox:
            await sandbox.write_file("dir/a", b"one")
            running = asyncio.create_task(sh(sandbox, "touch begun; sleep 600", timeout_s=600.0))
            async with asyncio.timeout(300):
                while True:
                    with contextlib.suppress(FileNotFoundError):
                        await sandbox.read_file("begun")
                        break
                    await asyncio.sleep(0.05)
                assert await sandbox.read_file("dir/a") == b"one"
                await sandbox.download("dir/a", target)
            assert target.read_bytes() == b"one"
            assert not running.done()
            running.cancel()
            await fails(running, asyncio.CancelledError)


async def bounds_what_it_reads(backend: SandboxBackend) -> None:
    """A file without an end is refused in seconds, over a link too, and leaves no half of it."""
    endless = "/proc/self/pagemap"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        async with leased_sandbox(backend) as sandbox:
            await sh(sandbox, f"ln -s {endless} link; ln -s /dev/zero zero")
            async with asyncio.timeout(120):
                for path in ("link", "zero", endless, "/dev/zero"):
                    await fails(sandbox.read_file(path), OSError)
                    await fails(sandbox.download(path, target), OSError)
                    assert not target.exists()
                version = await sandbox.read_file("/proc/version")
                assert version.startswith(b"Linux")
                await sandbox.download("/proc/version", target)
                assert target.read_bytes() == version
            await expect(sandbox, "echo still here", "still here\n")


async def moves_large_files(backend: SandboxBackend) -> None:
    """20 MB up, changed inside, and down again."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        block = hashlib.sha256(b"block").digest() * 32768
        with open(source, "wb") as file:  # noqa: ASYNC230  (a test's own data)
            for _ in range(BIG // len(block)):
                file.write(block)
        async with leased_sandbox(backend) as sandbox:
            await sandbox.upload(source, "big/file.bin")
            await expect(sandbox, "wc -c <big/file.bin; printf end >>big/file.bin", f"{BIG}\n")
            await sandbox.download("big/file.bin", target)
            assert target.stat().st_size == BIG + 3
            whole = await sandbox.read_file("big/file.bin")
            assert hashlib.sha256(whole[:BIG]).digest() == _digest(source)
            assert _digest(target) == hashlib.sha256(whole).digest()
            await sandbox.write_file("copy.bin", whole)
            await expect(sandbox, "cmp copy.bin big/file.bin && echo same", "same\n")


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


GRADED = """
cd /workspace || exit 90
test "$(cat answer)" = 42 || exit 91
test "$HOME" != "$PWD" || exit 92
test -z "$(ls -A "$HOME")" || exit 93
test -z "$LEAK$BASH_ENV" || exit 94
test "$(cat /verify/sub/expected)" = data || exit 95
python3 -c 'raise SystemExit(7)'
test $? = 7 || exit 96
echo changed >answer
exit 0
"""


async def grades_what_was_left(backend: SandboxBackend) -> None:
    """A clean stage over the workspace; the same again for a second verifier."""
    async with leased_sandbox(backend) as sandbox:
        await sh(sandbox, "echo 42 >answer; export LEAK=1 BASH_ENV=/workspace/x; mkdir -p .local")
        await sh(
            sandbox,
            'd=$(python3 -m site --user-site); mkdir -p "$d" && '
            'echo "import os; os._exit(0)" >"$d/usercustomize.py"; '
            'cp "$d/usercustomize.py" sitecustomize.py',
        )
        spec = GradingSpec(script=GRADED, files={"sub/expected": b"data"})
        for _ in range(2):
            result = await sandbox.grade(spec)
            assert (result.exit_code, result.timed_out) == (0, False), result
        await fails(sandbox.run("true", timeout_s=5), SandboxDied)


async def reports_and_times_out(backend: SandboxBackend) -> None:
    """Descriptor 3 is the report, output is not; a slow verifier is ended."""
    async with leased_sandbox(backend) as sandbox:
        said = await sandbox.grade(
            GradingSpec("echo reward=1; echo reward=0.5 >&3; exit 1", score=True)
        )
        assert (said.report, said.exit_code) == (b"reward=0.5\n", 1)
        assert "reward=1\n" in said.output
        none = await sandbox.grade(GradingSpec("{ echo reward=1 >&3; } 2>/dev/null; exit 4"))
        assert (none.report, none.exit_code) == (b"", 4)
        slow = await sandbox.grade(GradingSpec("echo here; sleep 100", timeout_s=0.5))
        assert slow.timed_out
        assert "here" in slow.output
        assert slow.seconds < 5


LEFT = r"""
mkdir locked locked/in; echo secret >locked/in/file; echo text >$'new\nline \xff'; ln -s . loop
ln locked/in/file twin; mkfifo pipe; mkdir $'sub\xff'; : >$'sub\xff/empty'
truncate -s 100M sparse $'sub\xff/hole'
printf middle | dd of=sparse bs=1M seek=50 conv=notrunc status=none || exit 2
chmod 640 sparse; chmod 000 locked/in/file; chmod 000 locked/in locked
"""
FOUND = r"""
test "$(stat -c '%s %a' sparse)" = '104857600 640' && test $(stat -c %b sparse) -lt 30000 || exit 2
test "$(dd if=sparse bs=1M skip=50 count=1 status=none | head -c 6)" = middle || exit 3
test "$(stat -c %s $'sub\xff/hole')" = 104857600 && test -f $'sub\xff/empty' || exit 4
test "$(stat -c %a locked)" = 0 || exit 5
chmod 700 locked && chmod 700 locked/in && chmod 600 twin || exit 5
test "$(cat locked/in/file)" = secret && test locked/in/file -ef twin || exit 6
test "$(cat $'new\nline \xff')" = text && test -p pipe && test -L loop || exit 7
"""


async def keeps_whatever_was_left(backend: SandboxBackend) -> None:
    """Locked folders, files that are nothing but holes, odd names: in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "archive")
        async with leased_sandbox(backend) as sandbox:
            done = await sh(sandbox, LEFT)
            assert done.exit_code == 0, done
            async with asyncio.timeout(120):
                await sandbox.pack_left(archive)
            assert archive.stat().st_size < 1 << 20
            verdict = await sandbox.grade(GradingSpec("exit $(stat -c %a /workspace/locked)"))
            assert verdict.exit_code == 0, "locked again"
        async with leased_sandbox(backend) as sandbox:
            await sandbox.unpack(archive)
            found = await sh(sandbox, FOUND)
            assert found.exit_code == 0, found


DEEP = "python3 -c 'import os; [{0} for _ in range(1050)]'"
"""Deeper than Python recurses."""
IN = 'os.chdir("d")'


async def keeps_deep_folders(backend: SandboxBackend) -> None:
    """They are packed, graded, removed and unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "archive")
        async with leased_sandbox(backend) as sandbox:
            made = await sh(sandbox, DEEP.format(f'(os.mkdir("d"), {IN})'))
            assert made.exit_code == 0, made
            async with asyncio.timeout(120):
                await sandbox.pack_left(archive)
            verdict = await sandbox.grade(GradingSpec("test -d /workspace/d/d"))
            assert verdict.exit_code == 0, verdict
        async with leased_sandbox(backend) as sandbox:
            await sandbox.unpack(archive)
            found = await sh(sandbox, DEEP.format(IN))
            assert found.exit_code == 0, found


async def grades_after_a_kill(backend: SandboxBackend) -> None:
    """What an agent left is graded even when it killed its own sandbox."""
    async with leased_sandbox(backend) as sandbox:
        await fails(sh(sandbox, f"echo 42 >answer; {KILL_SHELL}"), SandboxKilled)
        result = await sandbox.grade(GradingSpec("grep -qx 42 /workspace/answer"))
        assert result.exit_code == 0, result


async def nothing_runs_during_grading(backend: SandboxBackend) -> None:
    """Background jobs of the agent, setsid ones too, are gone before the verifier starts."""
    loop = "while :; do echo x >>/workspace/log; sleep 0.01; done"
    async with leased_sandbox(backend) as sandbox:
        where = getattr(sandbox, "workspace", "/workspace")
        await sh(
            sandbox, f"(setsid bash -c '{loop.replace('/workspace', where)}' >/dev/null 2>&1 &)"
        )
        await sh(sandbox, "sleep 0.2")
        script = "a=$(wc -c </workspace/log); sleep 0.3; test $a = $(wc -c </workspace/log)"
        result = await sandbox.grade(GradingSpec(script))
        assert result.exit_code == 0, result


async def starts_from_a_snapshot(backend: SandboxBackend) -> None:
    """Files, modes, links and the session's state come back, once or for many; none sees another's
    changes; while a process runs nothing is saved."""
    made = "mkdir -p 'a b'; cd 'a b'; echo one >f; chmod 640 f; ln -s f l; mkfifo p; ln f hard"
    state = "export V='x y'; g() { echo \"g$V\"; }; echo gone >../gone; umask 027"
    look = 'basename "$PWD"; g; umask; cat l; stat -c %a f; test -p p && ls ..'
    there, changed = "a b\ngx y\n0027\none\n640\n", "rm l; echo two >>f; touch ../new; V=z; cd .."
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        async with leased_sandbox(backend) as sandbox:
            process = await sandbox.start_process("sleep 100")
            assert not await sandbox.snapshot(first), "a process was running"
            assert not first.exists()
            await process.kill()
            await expect(sandbox, f"{made}; {state}", "")
            assert await sandbox.snapshot(first)
            await expect(sandbox, "echo later >f; rm ../gone", "")
        for shared in (False, True, True):
            spec = SandboxSpec("conformance-fork", snapshot=SandboxSnapshot(first, shared))
            async with await backend.lease(spec) as fork:
                await expect(fork, look, f"{there}a b\ngone\n")
                await expect(fork, changed, "")
                assert (await fork.read_file("a b/hard")).startswith(b"one\n")
                assert await fork.snapshot(Path(folder, f"third{secrets.token_hex(4)}"))
                if not second.exists():
                    assert await fork.snapshot(second)
                script = "cd /workspace; test -e new -a ! -e 'a b/l' && grep -q two 'a b/f'"
                assert (await fork.grade(GradingSpec(script))).exit_code == 0
        spec = SandboxSpec("conformance-again", snapshot=SandboxSnapshot(second))
        async with await backend.lease(spec) as again:
            await expect(again, "echo $V; ls; cat 'a b/f'", "z\na b\ngone\nnew\none\ntwo\n")
        (second / "workspace.tar").write_bytes(b"torn" * 300)
        (second / "root.tar").write_bytes(b"torn" * 300)
        await fails(backend.lease(spec), SnapshotLost)


CHECKS: tuple[Check, ...] = (
    *(keeps_state, survives_exits, survives_syntax, stdin_is_given_or_empty, bounds_output),
    *(survives_a_flood, separates_background_output, ends_what_takes_too_long),
    *(many_timeouts_leave_nothing, cancelled_commands_end, many_cancels_leave_nothing),
    *(timeouts_spare_background_processes, waits_for_stopped_commands),
    *(takes_a_directory_per_command, runs_background_processes, waits_for_background_processes),
    names_the_culprit,
    keeps_all_output_of_a_lossless_process,
    *(ends_when_closed, keeps_neighbours_apart, moves_bytes, says_what_is_wrong_with_a_path),
    *(reads_while_a_command_runs, bounds_what_it_reads, moves_large_files),
    *(grades_what_was_left, reports_and_times_out),
    *(grades_after_a_kill, keeps_whatever_was_left, keeps_deep_folders),
    *(nothing_runs_during_grading, starts_from_a_snapshot),
)
"""The whole suite."""

Fault = Callable[[Sandbox], None]


async def tells_a_host_fault(backend: SandboxBackend, strike: Fault) -> None:
    """A sandbox that `strike` takes away from outside, in mid-command, is not the agent's deed."""
    async with leased_sandbox(backend) as sandbox:
        await expect(sandbox, "echo before", "before\n")
        task = asyncio.create_task(sh(sandbox, "sleep 100"))
        await asyncio.sleep(0.3)
        strike(sandbox)
        assert (await fails(task, SandboxDied)).in_command
        assert not (await fails(sh(sandbox, "true"), SandboxDied)).in_command, "it never ran"
