"""The part of the conformance suite about files and grading (see `conformance`)."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from hermes_rl.errors import SandboxDied, SandboxKilled
from hermes_rl.sandboxes.base import GradingSpec, Sandbox, SandboxBackend
from hermes_rl.sandboxes.conformance import (
    KILL_SHELL,
    SESSION_CHECKS,
    Check,
    expect,
    leased,
    sh,
)

BIG = 100 << 20


async def fails(attempt: Awaitable[object], *kinds: type[BaseException]) -> None:
    """The attempt must raise one of these."""
    try:
        await attempt
    except kinds:
        return
    raise AssertionError(f"expected {kinds}")


async def moves_bytes(backend: SandboxBackend) -> None:
    """Binary data and unicode paths, relative, absolute and outside the workspace."""
    data = bytes(range(256)) * 100 + b"\xff\xfe\0\r\n"
    async with leased(backend) as sandbox:
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
    async with leased(backend) as sandbox:
        await sh(sandbox, "mkdir folder; mkfifo pipe; ln -s nowhere dangling")
        for path in ("missing", "folder/missing", "dangling", "/nonexistent/x"):
            await fails(sandbox.read_file(path), FileNotFoundError)
        for path in ("folder", "/tmp"):
            await fails(sandbox.read_file(path), IsADirectoryError)
            await fails(sandbox.write_file(path, b"x"), IsADirectoryError)
        await fails(sandbox.read_file("pipe"), OSError)


async def bounds_what_it_reads(backend: SandboxBackend) -> None:
    """A file without an end is refused in seconds, over a link too, and leaves no half of it."""
    endless = "/proc/self/pagemap"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        async with leased(backend) as sandbox:
            await sh(sandbox, f"ln -s {endless} link; ln -s /dev/zero zero")
            async with asyncio.timeout(30):
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
    """100 MB up, changed inside, and down again."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        block = hashlib.sha256(b"block").digest() * 32768
        with open(source, "wb") as file:  # noqa: ASYNC230  (a test's own data)
            for _ in range(BIG // len(block)):
                file.write(block)
        async with leased(backend) as sandbox:
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
    async with leased(backend) as sandbox:
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
    async with leased(backend) as sandbox:
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
python3 -c 'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(1500)]' || exit 1
mkdir locked locked/in; echo secret >locked/in/file; echo text >$'new\nline \xff'; ln -s . loop
ln locked/in/file twin; mkfifo pipe; mkdir $'sub\xff'; : >$'sub\xff/empty'
truncate -s 900M sparse $'sub\xff/hole'
printf middle | dd of=sparse bs=1M seek=400 conv=notrunc status=none || exit 2
chmod 640 sparse; chmod 000 locked/in/file; chmod 000 locked/in locked
"""
FOUND = r"""
python3 -c 'import os; [os.chdir("d") for _ in range(1500)]' || exit 1
test "$(stat -c '%s %a' sparse)" = '943718400 640' && test $(stat -c %b sparse) -lt 100000 || exit 2
test "$(dd if=sparse bs=1M skip=400 count=1 status=none | head -c 6)" = middle || exit 3
test "$(stat -c %s $'sub\xff/hole')" = 943718400 && test -f $'sub\xff/empty' || exit 4
test "$(stat -c %a locked)" = 0 || exit 5
chmod 700 locked && chmod 700 locked/in && chmod 600 twin || exit 5
test "$(cat locked/in/file)" = secret && test locked/in/file -ef twin || exit 6
test "$(cat $'new\nline \xff')" = text && test -p pipe && test -L loop || exit 7
"""


async def keeps_whatever_was_left(backend: SandboxBackend) -> None:
    """Deep folders, locked ones, files that are nothing but holes, odd names: in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "archive")
        async with leased(backend) as sandbox:
            done = await sh(sandbox, LEFT)
            assert done.exit_code == 0, done
            async with asyncio.timeout(30):
                await sandbox.pack_left(archive)
            assert archive.stat().st_size < 1 << 20
            verdict = await sandbox.grade(GradingSpec("exit $(stat -c %a /workspace/locked)"))
            assert verdict.exit_code == 0, "locked again"
        async with leased(backend) as sandbox:
            await sandbox.unpack(archive)
            found = await sh(sandbox, FOUND)
            assert found.exit_code == 0, found


async def grades_after_a_kill(backend: SandboxBackend) -> None:
    """What an agent left is graded even when it killed its own sandbox."""
    async with leased(backend) as sandbox:
        await fails(sh(sandbox, f"echo 42 >answer; {KILL_SHELL}"), SandboxKilled)
        result = await sandbox.grade(GradingSpec("grep -qx 42 /workspace/answer"))
        assert result.exit_code == 0, result


async def nothing_runs_during_grading(backend: SandboxBackend) -> None:
    """Background jobs of the agent, setsid ones too, are gone before the verifier starts."""
    loop = "while :; do echo x >>/workspace/log; sleep 0.01; done"
    async with leased(backend) as sandbox:
        where = getattr(sandbox, "workspace", "/workspace")
        await sh(
            sandbox, f"(setsid bash -c '{loop.replace('/workspace', where)}' >/dev/null 2>&1 &)"
        )
        await sh(sandbox, "sleep 0.2")
        script = "a=$(wc -c </workspace/log); sleep 0.3; test $a = $(wc -c </workspace/log)"
        result = await sandbox.grade(GradingSpec(script))
        assert result.exit_code == 0, result


FILE_CHECKS: tuple[Check, ...] = (
    moves_bytes,
    says_what_is_wrong_with_a_path,
    bounds_what_it_reads,
    moves_large_files,
    grades_what_was_left,
    reports_and_times_out,
    grades_after_a_kill,
    keeps_whatever_was_left,
    nothing_runs_during_grading,
)
CHECKS: tuple[Check, ...] = SESSION_CHECKS + FILE_CHECKS
"""The whole suite."""

Fault = Callable[[Sandbox], None]


async def tells_a_host_fault(backend: SandboxBackend, strike: Fault) -> None:
    """A sandbox that `strike` takes away from outside, in mid-command, is not the agent's deed."""
    async with leased(backend) as sandbox:
        await expect(sandbox, "echo before", "before\n")
        task = asyncio.create_task(sh(sandbox, "sleep 100"))
        await asyncio.sleep(0.3)
        strike(sandbox)
        await fails(task, SandboxDied)
        await fails(sh(sandbox, "true"), SandboxDied)
