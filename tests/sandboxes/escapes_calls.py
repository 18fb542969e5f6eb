"""Attempts on what bounds a sandbox: its limits, and the ways to change or avoid them.

Run by test_escapes as those of `escapes` are.
"""

from __future__ import annotations

from escapes import lease, python, sh, stopped

from hermes_rl.sandboxes.bubblewrap import Bubblewrap


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
        limits = await sh(sandbox, "grep -E 'processes|file size|address|core' /proc/1/limits")
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


CHECKS = (
    no_memory_of_other_processes,
    proc_still_serves,
    no_limits_of_other_processes,
    no_space_without_writing,
    shared_segments_are_bounded,
    files_without_a_name_are_bounded,
)
