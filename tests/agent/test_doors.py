"""From synchronous code into the async path."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from hermes_rl.aio import LoopThread, run_sync
from hermes_rl.errors import UserError


async def name_of_thread() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise LookupError("inside")


def test_run_sync_from_a_script() -> None:
    assert run_sync(name_of_thread()) == threading.current_thread().name
    with pytest.raises(LookupError, match="inside"):
        run_sync(fail())


async def test_run_sync_where_a_loop_is_running() -> None:
    assert run_sync(name_of_thread()) == "hermes-rl"
    with pytest.raises(LookupError, match="inside"):
        run_sync(fail())


def test_a_home_keeps_one_loop_until_it_is_closed() -> None:
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    home = LoopThread()
    assert home.run(loop_id()) == home.run(loop_id()) == asyncio.run(home.arun(loop_id()))
    home.close()
    home.close()
    assert not [t for t in threading.enumerate() if t.name == "hermes-rl"]
    assert home.run(name_of_thread()) == "hermes-rl"
    home.close()


def test_closing_cancels_what_runs() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up")

    home = LoopThread()

    def outside() -> None:
        with pytest.raises(asyncio.CancelledError):
            home.run(wait())

    thread = threading.Thread(target=outside)
    thread.start()
    time.sleep(0.2)
    home.close()
    thread.join(5)
    assert ended == ["cleaned up"]


async def test_cancelling_arun_goes_through() -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with LoopThread() as home:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await home.arun(wait())
        assert await asyncio.to_thread(ended.wait, 5)


def test_waiting_for_oneself_is_refused() -> None:
    with LoopThread() as home:

        async def inner() -> None:
            home.run(name_of_thread())

        with pytest.raises(UserError, match="callback"):
            home.run(inner())


PROGRAM = """
import asyncio, signal, sys
from hermes_rl.aio import LoopThread, run_sync

# A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def work():
    print("started", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        print("cleaned up", flush=True)


try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("call", ["run_sync(work())", "LoopThread().run(work())"])
def test_ctrl_c_cancels_and_waits_for_the_clean_up(call: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(call=call)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert out == "cleaned up\ninterrupted\n"
    assert process.returncode == 0
