"""Attempts to get out of a bubblewrap sandbox, and on what bounds it: its limits, and the ways to
change or avoid them. Each function of a backend makes one kind and asserts that it fails.

Run by test_escapes in processes of their own, as root and as an ordinary user, with a canary key in
the launcher's environment. Only planted targets: decoy files, own processes, own sockets.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import tempfile
from pathlib import Path

from hermes_rl.errors import SandboxKilled
from hermes_rl.sandboxes import (
    Bubblewrap,
    GradingSpec,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    zygote,
)

SECRET = "decoy-secret-5b21"
MB = 1 << 20


async def lease(backend: Bubblewrap, **limits: int) -> Sandbox:
    return await backend.lease(SandboxSpec(lease="escape", limits=SandboxLimits(**limits)))


async def sh(sandbox: Sandbox, command: str, timeout_s: float = 60) -> str:
    result = await sandbox.run(command, timeout_s=timeout_s)
    return f"{result.output.rstrip()}\n[{result.exit_code}]"


async def python(sandbox: Sandbox, program: str) -> str:
    await sandbox.write_file("/tmp/attempt.py", program.encode())
    return await sh(sandbox, "python3 /tmp/attempt.py")


async def no_capabilities(backend: Bubblewrap) -> None:
    async with await lease(backend) as sandbox:
        said = await sh(
            sandbox, "grep -E 'Cap|NoNewPrivs|Seccomp:|Groups' /proc/self/status; id -u"
        )
        for line in said.splitlines():
            name, _, value = line.partition(":")
            if name.startswith("Cap"):
                assert int(value, 16) == 0, line
        assert "NoNewPrivs:\t1" in said
        assert "Seccomp:\t2" in said
        assert "1000\n[0]" in said


async def never_host_root(backend: Bubblewrap) -> None:
    """Two sandboxes of root have two user ids, neither ours; an ordinary user's have his."""
    async with await lease(backend) as one, await lease(backend) as two:
        uids = [os.stat(f"/proc/{sandbox.host_pid}").st_uid for sandbox in (one, two)]
        if os.geteuid() == 0:
            assert 0 not in uids
            assert uids[0] != uids[1]
        else:
            assert uids == [os.geteuid()] * 2


async def launched_as_chosen(backend: Bubblewrap) -> None:
    """By the zygote, which is never root; the reference by bubblewrap."""
    async with await lease(backend) as sandbox:
        status = Path(f"/proc/{sandbox.host_pid}/status").read_text()
        parent = next(line for line in status.splitlines() if line.startswith("PPid")).split()[1]
        launcher = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0]
        if os.environ[zygote.SWITCH] == "bubblewrap":
            assert int(parent) == os.getpid()
        else:
            assert launcher == b"hermes-rl-zygote", launcher
            assert os.stat(f"/proc/{parent}").st_uid != 0 or os.geteuid() != 0


async def no_files_of_the_host(backend: Bubblewrap) -> None:
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "key")
        secret.write_text(SECRET)
        secret.chmod(0o644)
        async with await lease(backend) as sandbox:
            for path in (secret, "/etc/shadow", "/root", "/home", "/var", "/sys", "/dev/kvm"):
                assert "[1]" in await sh(sandbox, f"test -e {path}"), path
            found = await sh(
                sandbox, "grep -rsl decoy-secre[t] /etc /tmp /run /hx /workspace /dev/shm"
            )
            assert found == "\n[1]", found
            assert "root:x" in await sh(sandbox, "cat /etc/passwd")
            assert len((await sh(sandbox, "cat /etc/passwd")).splitlines()) == 4


async def no_keys(backend: Bubblewrap) -> None:
    """The launcher's environment is nowhere, the host's paths are in no command line."""
    canary = os.environ["CANARY_KEY"]
    async with await lease(backend) as sandbox:
        said = await sh(sandbox, "env; cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ")
        assert canary not in said
        assert "boxes/" not in said
        assert "/.venv/" not in said
        first = await sh(sandbox, "tr '\\0' '\\n' </proc/1/environ")
        assert sorted(first.splitlines()) == [  # bash without HOME and SHELL asks the C library
            "HOME=/", "LANG=C.UTF-8", "PWD=/workspace", "SHELL=/bin/bash", "[0]",
        ], first  # fmt: skip


async def no_host_processes(backend: Bubblewrap) -> None:
    victim = subprocess.Popen(["sleep", "987654"])  # noqa: ASYNC220  (it is only a target)
    try:
        async with await lease(backend) as sandbox:
            assert "987654" not in await sh(sandbox, "cat /proc/*/cmdline")
            assert "[1]" in await sh(sandbox, f"kill -9 {victim.pid}")
            await sh(sandbox, "for i in $(seq 3 4000); do kill -9 $i 2>/dev/null; done")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def no_host_network(backend: Bubblewrap) -> None:
    name = f"escape-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        named.bind(f"{folder}/socket")
        named.listen()
        os.chmod(folder, 0o755)
        os.chmod(f"{folder}/socket", 0o777)
        program = f"""
import socket
def attempt(*how, to):
    try:
        with socket.socket(*how) as s:
            s.settimeout(3)
            s.connect(to)
        print("OPEN", to)
    except OSError as error:
        print("closed", type(error).__name__)
attempt(socket.AF_INET, to=("127.0.0.1", {tcp.getsockname()[1]}))
attempt(socket.AF_UNIX, to="\\0{name}")
attempt(socket.AF_UNIX, to="{folder}/socket")
attempt(socket.AF_INET, to=("10.255.255.1", 80))
"""
        async with await lease(backend) as sandbox:
            said = await python(sandbox, program)
            assert said.count("closed") == 4, said
            assert "OPEN" not in said


async def only_plain_sockets(backend: Bubblewrap) -> None:
    program = """
import socket
for family in range(0, 48):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind).close()
            print("made", family)
        except OSError:
            pass
"""
    async with await lease(backend) as sandbox:
        said = await python(sandbox, program)
        made = {line.split()[1] for line in said.splitlines() if line.startswith("made")}
        assert made <= {"1", "2", "10", "16"}, made  # not AF_VSOCK, AF_PACKET, AF_ALG ...
        assert "1" in made


CALLS_X86 = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "ptrace": 101, "bpf": 321, "setns": 308,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "keyctl": 250,
    "add_key": 248, "unshare": 272, "open_by_handle_at": 304, "init_module": 175,
    "kexec_load": 246, "process_vm_readv": 310, "pidfd_getfd": 438, "fsopen": 430,
    "move_mount": 429, "open_tree": 428, "kcmp": 312, "swapon": 167, "reboot": 169,
    "settimeofday": 164, "sethostname": 170, "syslog": 103, "mbind": 237, "chroot": 161,
}  # fmt: skip
CALLS_ARM = {
    "mount": 40, "umount2": 39, "pivot_root": 41, "ptrace": 117, "bpf": 280, "setns": 268,
    "perf_event_open": 241, "userfaultfd": 282, "io_uring_setup": 425, "keyctl": 219,
    "add_key": 217, "unshare": 97, "open_by_handle_at": 265, "init_module": 105,
    "kexec_load": 104, "process_vm_readv": 270, "pidfd_getfd": 438, "fsopen": 430,
    "move_mount": 429, "open_tree": 428, "kcmp": 272, "swapon": 224, "reboot": 142,
    "settimeofday": 170, "sethostname": 161, "syslog": 116, "mbind": 235, "chroot": 51,
}  # fmt: skip


async def no_privileged_calls(backend: Bubblewrap) -> None:
    """Each answers EPERM, clone with a new namespace too; clone3 answers ENOSYS."""
    calls = CALLS_ARM if platform.machine() in ("aarch64", "arm64") else CALLS_X86
    clone = 220 if calls is CALLS_ARM else 56
    program = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    code = libc.syscall(number, *args)
    return errno.errorcode.get(ctypes.get_errno(), "OPEN") if code < 0 else "OPEN"
for name, number in {calls!r}.items():
    print(name, call(number, 0, 0, 0, 0, 0, 0))
for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
    print("clone", call({clone}, flag | 17, 0, 0, 0, 0))
print("clone3", call(435, 0, 0))
"""
    async with await lease(backend) as sandbox:
        said = (await python(sandbox, program)).splitlines()
        assert len(said) == len(calls) + 9, said
        for line in said[:-1]:
            name, answer = line.split()
            assert answer == ("ENOSYS" if name == "clone3" else "EPERM"), line
        assert "[0]" not in await sh(sandbox, "unshare -U true; echo $?; unshare -Ur true")


async def no_old_calls(backend: Bubblewrap) -> None:
    """The 32-bit door to the kernel, where another table of calls is behind, kills."""
    if platform.machine() != "x86_64":
        return
    program = r"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("OPEN", ctypes.CFUNCTYPE(ctypes.c_long)(address)())
"""
    async with await lease(backend) as sandbox:
        said = await python(sandbox, program)
        assert "OPEN" not in said
        assert "[0]" not in said


async def no_kernel_settings(backend: Bubblewrap) -> None:
    async with await lease(backend) as sandbox:
        for path in ("kernel/core_pattern", "vm/drop_caches", "kernel/modprobe", "vm/panic_on_oom"):
            said = await sh(sandbox, f"exec 5>>/proc/sys/{path} && echo OPEN")
            assert "OPEN" not in said, path
        assert "OPEN" not in await sh(sandbox, "echo b >/proc/sysrq-trigger && echo OPEN")


async def nothing_else_is_writable(backend: Bubblewrap) -> None:
    async with await lease(backend) as sandbox:
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/hx", "/proc"):
            assert "OPEN" not in await sh(sandbox, f"touch {folder}/x && echo OPEN"), folder
        for attempt in ("ln -sf /etc/passwd /hx/o1", "rm -f /hx/cmd", "echo x >/hx/cmd",
                        "mv /hx/env /hx/x", "chmod 777 /hx", "mknod /hx/p p",
                        "mknod /tmp/disk b 8 0"):  # fmt: skip
            assert "OPEN" not in await sh(sandbox, f"{attempt} && echo OPEN"), attempt


async def memory_file_systems_are_bounded(backend: Bubblewrap) -> None:
    async with await lease(backend, tmp_bytes=32 * MB, shm_bytes=16 * MB) as sandbox:
        for folder, most in (("/tmp", 32), ("/dev/shm", 16), ("/run", 16)):
            said = await sh(sandbox, f"head -c 100M /dev/zero >{folder}/x; stat -c %s {folder}/x")
            assert "No space left" in said, said
            assert int(said.splitlines()[-2]) <= most * MB
            await sh(sandbox, f"rm {folder}/x")


async def disk_is_bounded(backend: Bubblewrap) -> None:
    async with await lease(backend, file_bytes=8 * MB) as sandbox:
        said = await sh(sandbox, "head -c 20M /dev/zero >big; stat -c %s big")
        assert int(said.splitlines()[-2]) <= 8 * MB
    many = "for i in 1 2 3 4 5; do head -c 6M /dev/zero >f$i; done; chmod 000 ."
    hidden = "mkdir h; for i in 1 2 3 4 5; do head -c 6M /dev/zero >h/f$i; done; chmod 000 h"
    for command in (many, hidden):
        await stopped(backend, command, workspace_bytes=20 * MB)


async def files_are_bounded(backend: Bubblewrap) -> None:
    """Empty files cost kernel memory: in the workspace and in the temporary file systems."""
    for folder in (".", "/tmp", "/dev/shm"):
        program = f"import os\nfor i in range(8000): open('{folder}/f%d' % i, 'w').close()"
        await stopped(backend, f'python3 -c "{program}"', workspace_files=5_000)


async def limits_hold_in_mid_command(backend: Bubblewrap) -> None:
    """One command that goes on writing is ended within seconds, without reaching its end."""
    loop = "while head -c 1M /dev/zero >f$i; do i=$((i+1)); done"
    await stopped(backend, f"i=0; {loop}", workspace_bytes=20 * MB)


async def stopped(backend: Bubblewrap, command: str, **limits: int) -> None:
    """The kernel refuses to write more, or a look finds too much and the sandbox ends."""
    async with await lease(backend, **limits) as sandbox:
        try:
            result = await sandbox.run(command, timeout_s=45)
        except SandboxKilled:
            return
        assert "No space left" in result.output, f"not stopped: {command}: {result}"
        assert sandbox.info.limits["workspace_held_by"] == "kernel"


async def memory_is_bounded(backend: Bubblewrap) -> None:
    async with await lease(backend, memory_bytes=1 << 30) as sandbox:
        said = await sh(sandbox, "python3 -c 'bytearray(1536 << 20)'")
        assert "MemoryError" in said, said
        assert "1000" in await sh(sandbox, "cat /proc/self/oom_score_adj")
        if "memory_bytes" not in sandbox.info.limits:
            assert "cannot modify limit" in await sh(sandbox, "ulimit -v unlimited")
            return
        # Then that limit may be raised, and the memory of the whole sandbox is bounded.
        try:
            result = await sandbox.run(
                "ulimit -v unlimited; python3 -c 'bytearray(1536 << 20)'", timeout_s=60
            )
        except SandboxKilled:
            return
        assert result.exit_code == 137, result


async def processes_are_bounded(backend: Bubblewrap) -> None:
    """Per sandbox: a neighbour of the same user has all of its own."""
    program = """
import os, time
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    pass
print("made", made, flush=True)
os.kill(0, 9)
"""
    async with await lease(backend, processes=50) as one, await lease(backend, processes=50) as two:
        for said in await asyncio.gather(python(one, program), python(two, program)):
            made = int(said.split()[1])
            assert 30 <= made < 50, said


async def no_descriptors_no_terminal(backend: Bubblewrap) -> None:
    async with await lease(backend) as sandbox:
        assert (await sh(sandbox, "ls /proc/self/fd")).split() == ["0", "1", "2", "3", "[0]"]
        space = "" if "memory_bytes" in sandbox.info.limits else "ulimit -Hv unlimited"
        for attempt in ("exec 5<>/dev/tty", "ulimit -Hn 100000", space or "ulimit -Hf unlimited",
                        "ulimit -Hu 4096", "chrt -f 10 true", "chrt -r 10 true",
                        "echo 3 >/proc/$$/fd/4", "cat /proc/$$/fd/3"):  # fmt: skip
            said = await sh(sandbox, f"{attempt} && echo OPEN", timeout_s=5)
            assert "OPEN" not in said, attempt
        assert "OPEN" not in await sh(sandbox, "echo -1000 >/proc/self/oom_score_adj && echo OPEN")


async def symlinks_lead_nowhere(backend: Bubblewrap) -> None:
    """The host never follows a link of the sandbox, not even one that changes while it looks."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "key")
        secret.write_text(SECRET)
        secret.chmod(0o666)
        async with await lease(backend) as sandbox:
            await sh(
                sandbox, f"ln -s {secret} a; ln -s {folder} d; ln -s /proc/1/root r; mkdir real"
            )
            for path in ("a", "d/key", f"r{secret}", f"../../..{secret}", str(secret)):
                try:
                    assert SECRET.encode() not in await sandbox.read_file(path)
                except OSError:
                    pass
                try:
                    await sandbox.write_file(path, b"overwritten")
                except OSError:
                    pass
            assert secret.read_text() == SECRET
            swap = f"rm -rf x; ln -s {folder} x; rm x; mkdir x; echo 1 >x/key"
            swap = f"cd real; while :; do {swap}; done"
            await sh(sandbox, f"({swap}) >/dev/null 2>&1 &")
            for _ in range(300):
                try:
                    assert SECRET.encode() not in await sandbox.read_file("real/x/key")
                    await sandbox.write_file("real/x/key", b"2")
                except OSError:
                    pass
            assert secret.read_text() == SECRET


async def no_code_in_the_verifier(backend: Bubblewrap) -> None:
    """What an agent leaves where interpreters, shells and git look does not run in the verifier."""
    cheat = "import os; os._exit(0)"
    async with await lease(backend) as sandbox:
        await sh(sandbox, 'd=$(python3 -m site --user-site); mkdir -p "$d" ~/.config/git bin')
        await sh(sandbox, f"for f in json sitecustomize; do echo '{cheat}' >~/$f.py; done")
        await sh(sandbox, f"d=$(python3 -m site --user-site); echo '{cheat}' >$d/usercustomize.py")
        await sh(
            sandbox, "printf 'exit 0\\n' | tee ~/.bashrc ~/.profile ~/.bash_profile >~/.bash_env"
        )
        await sh(
            sandbox, "export BASH_ENV=~/.bash_env ENV=~/.bash_env PATH=~/bin:$PATH PYTHONPATH=~"
        )
        await sh(
            sandbox,
            "printf '[alias]\\n status = !exit 0\\n' | tee ~/.gitconfig >~/.config/git/config",
        )
        await sh(
            sandbox,
            "printf '#!/bin/sh\\nexit 0\\n' >bin/test; chmod +x bin/test; cp bin/test bin/grep",
        )
        for script in ("python3 -c 'import json; raise SystemExit(5)'", "bash -c 'exit 5'",
                       "sh -c 'exit 5'", "cd /workspace && python3 -c 'import json; exit(5)'",
                       "env test 1 = 2 || exit 5"):  # fmt: skip
            result = await sandbox.grade(GradingSpec(script))
            assert result.exit_code == 5, (script, result)


async def no_memory_of_other_processes(backend: Bubblewrap) -> None:
    """Code written into process 1, which bubblewrap gives no limits, would run without them."""
    program = """
import os
for pid in (1, 2, os.getppid(), "self"):
    for name in ("mem", "oom_score_adj", "clear_refs", "timerslack_ns", "coredump_filter"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDWR))
            print("OPEN", pid, name)
        except OSError:
            pass
"""
    async with await lease(backend, processes=77) as sandbox:
        assert await python(sandbox, program) == "\n[0]"
        names = "processes|file size|core"
        if "memory_bytes" not in sandbox.info.limits:  # else that is what bounds it
            names += "|address"
        limits = await sh(sandbox, f"grep -E '{names}' /proc/1/limits")
        assert "unlimited" not in limits, limits
        assert "77" in limits


async def proc_still_serves(backend: Bubblewrap) -> None:
    """What shells and interpreters do with a read-only /proc."""
    program = """
import multiprocessing, threading
if __name__ == "__main__":
    threading.Thread(target=print, name="named", args=("thread",)).start()
    with multiprocessing.Pool(2) as pool:
        print(sum(pool.map(abs, range(10))))
    print(open("/dev/fd/0").read(), end="")
"""
    async with await lease(backend) as sandbox:
        await sandbox.write_file("program.py", program.encode())
        said = await sh(
            sandbox,
            "cat <(echo substituted); echo out >/dev/stdout; echo err >/proc/self/fd/2; "
            "echo piped | tee >(cat) >/dev/null; wait; echo text | python3 program.py; "
            "grep -c Name /proc/self/status; grep -c processor /proc/cpuinfo >/dev/null",
        )
        expected = ["substituted", "out", "err", "piped", "thread", "45", "text", "1", "[0]"]
        assert said.split() == expected, said


async def no_limits_of_other_processes(backend: Bubblewrap) -> None:
    program = """
import os, resource
for pid in (1, 2, os.getppid(), os.getpid()):
    for number in range(16):
        try:
            resource.prlimit(pid, number, (0, 0))
            print("OPEN", pid, number)
        except PermissionError:
            pass
print(resource.prlimit(0, resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NPROC))
resource.setrlimit(resource.RLIMIT_NPROC, (5, 5))
"""
    async with await lease(backend, processes=50) as sandbox:
        assert await python(sandbox, program) == "(0, 0) (50, 50)\n[0]"


async def no_space_without_writing(backend: Bubblewrap) -> None:
    """fallocate by each of its names; programs that ask libc for it get their space by writing."""
    program = """
import ctypes, errno, fcntl, os, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
number = 47 if platform.machine() in ("aarch64", "arm64") else 285
file = os.open("reserved", os.O_RDWR | os.O_CREAT)
for mode in (0, 1, 16, 17):
    libc.syscall(number, file, mode, ctypes.c_long(0), ctypes.c_long(50 << 20))
    print(ctypes.get_errno() == errno.EOPNOTSUPP)
space = struct.pack("hxxxxxxqqiI4i", 0, 0, 50 << 20, 0, 0, 0, 0, 0, 0)
for request in (0x40305828, 0x4030582A, 0x40305839):
    try:
        fcntl.ioctl(file, request, space)
        print("OPEN")
    except OSError as error:
        print(error.errno == errno.EOPNOTSUPP)
print(os.fstat(file).st_blocks)
os.posix_fallocate(file, 0, 1 << 20)
print(os.fstat(file).st_size)
"""
    async with await lease(backend) as sandbox:
        said = await python(sandbox, program)
        assert said.split() == ["True"] * 7 + ["0", "1048576", "[0]"], said


async def shared_segments_are_bounded(backend: Bubblewrap) -> None:
    """System V shared memory belongs to no process and no file system."""
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
print(libc.shmget(0, 1 << 30, 0o1600), libc.shmget(0, (64 << 10) + 1, 0o1600))
print(libc.shmget(0, 64 << 10, 0o1600) >= 0)
"""
    async with await lease(backend) as sandbox:
        assert (await python(sandbox, program)).split() == ["-1", "-1", "True", "[0]"]


async def files_without_a_name_are_bounded(backend: Bubblewrap) -> None:
    """A file that was unlinked is in no folder."""
    program = """
import os, time
opened = [os.open(f"f{i}", os.O_CREAT | os.O_RDWR) for i in range(6)]
for i, file in enumerate(opened):
    os.unlink(f"f{i}")
    os.write(file, bytes(8 << 20))
    os.posix_fallocate(file, 0, 8 << 20)
time.sleep(40)
"""
    await stopped(backend, f"python3 -c '{program}'", workspace_bytes=30 << 20)
