"""CPU-bound rewards run in other processes; one that dies fails only its own call."""

import asyncio
import pickle
import sys
import time
from pathlib import Path

import cpu_jobs
import pytest

from hermes_rl.errors import CannotJudge, UserError
from hermes_rl.rl import Pool


def has_exited(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def wait_until_exited(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not has_exited(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_workers_return_values_and_exceptions() -> None:
    async with Pool(1) as pool:
        assert await pool.run(cpu_jobs.add, 2, 3, timeout_s=30) == 5
        assert await pool.run(cpu_jobs.print_and_upper, "a", timeout_s=30) == "A"
        with pytest.raises(KeyError, match="why") as raised:
            await pool.run(cpu_jobs.fail, "why", timeout_s=30)
        assert "cpu_jobs.py" in "".join(raised.value.__notes__)
        with pytest.raises(CannotJudge, match="UnpicklableError: odd"):
            await pool.run(cpu_jobs.raise_unpicklable, timeout_s=30)
        with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
            await pool.run(cpu_jobs.return_unpicklable, timeout_s=30)
        with pytest.raises(CannotJudge, match="SystemExit"):
            await pool.run(cpu_jobs.exit_process, timeout_s=30)
        first = await pool.run(cpu_jobs.get_pid, timeout_s=30)
        assert first == await pool.run(cpu_jobs.get_pid, timeout_s=30), "one process ran all calls"
    await wait_until_exited(first)


async def test_a_worker_that_dies_fails_only_its_own_call() -> None:
    async with Pool(2) as pool:
        jobs = [
            pool.run(cpu_jobs.kill_self if n % 3 == 0 else cpu_jobs.get_pid, timeout_s=30)
            for n in range(9)
        ]
        ended = await asyncio.gather(*jobs, return_exceptions=True)
        for n, result in enumerate(ended):
            if n % 3 == 0:
                assert isinstance(result, CannotJudge)
                assert "kill_self died (signal 9)" in str(result)
            else:
                assert isinstance(result, int)
        assert await pool.run(cpu_jobs.add, 1, 1, timeout_s=30) == 2


async def test_a_call_that_runs_too_long_is_killed(tmp_path: Path) -> None:
    async with Pool(1) as pool:
        with pytest.raises(CannotJudge, match=r"block_forever ran for more than 1 s"):
            await pool.run(cpu_jobs.block_forever, str(tmp_path / "pid"), timeout_s=1)
        pid = int((tmp_path / "pid").read_text() or 0) if (tmp_path / "pid").exists() else 0
        assert pid == 0 or has_exited(pid)
        assert await pool.run(cpu_jobs.add, 1, 1, timeout_s=30) == 2


async def test_concurrent_calls_are_limited_and_cancelled_ones_are_killed(tmp_path: Path) -> None:
    async with Pool(2) as pool:
        path = tmp_path / "pids"
        running = [
            asyncio.create_task(pool.run(cpu_jobs.block_forever, str(path), timeout_s=60))
            for _ in range(5)
        ]
        deadline = time.monotonic() + 60
        while not path.exists() or len(path.read_text().split()) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert len(pool._all) == 2
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        pids = [int(p) for p in path.read_text().split()]
        assert all(has_exited(pid) for pid in pids), "no process of a cancelled call is left"
        assert await pool.run(cpu_jobs.add, 1, 1, timeout_s=30) == 2


async def test_functions_without_an_import_name_are_refused() -> None:
    def local() -> None: ...

    async with Pool(1) as pool:
        for function in (
            local,
            lambda: 1,
            cpu_jobs.UnpicklableError(1, 2).with_traceback,
            print.__call__,
        ):
            with pytest.raises(UserError, match="at the top of an imported module"):
                await pool.run(function, timeout_s=30)
        with pytest.raises(UserError, match="do not pickle"):
            await pool.run(cpu_jobs.add, local, 1, timeout_s=30)
        assert pool._all == set(), "no process was started"


CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import cpu_jobs
from hermes_rl.rl.cpu import Pool
async def main():
    async with Pool(1) as pool:
        await pool.run(cpu_jobs.block_forever, sys.argv[2], timeout_s=60)
asyncio.run(main())
"""


async def test_workers_exit_when_their_parent_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    here = str(Path(__file__).parent)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, here, str(path))
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    parent.kill()
    await parent.wait()
    await wait_until_exited(int(path.read_text()))
