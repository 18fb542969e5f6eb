"""From synchronous code into the async path."""

import asyncio
import signal
import subprocess
import sys
import threading
from types import FrameType

import pytest

from hermes_rl.aio import LoopThread
from hermes_rl.errors import UserError


def test_closing_cancels_what_runs() -> None:
    ended: list[str] = []
    started = threading.Event()

    async def wait() -> None:
        started.set()
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
    assert started.wait(60)
    home.close()
    thread.join(30)
    assert ended == ["cleaned up"]


def test_a_call_that_meets_a_close_ends() -> None:
    home = LoopThread()
    home.run(asyncio.sleep(0))
    closing = threading.Thread(target=home.close)

    def close(frame: FrameType, now: str, _: object) -> None:
        if now == "call" and frame.f_code.co_name == "call_soon_threadsafe":
            sys.setprofile(None)
            closing.start()
            closing.join(0.2)  # closed by then, unless the close waits for this call's beginning

    before = sys.getprofile()
    try:
        sys.setprofile(close)
        with pytest.raises(asyncio.CancelledError):
            home.run(asyncio.sleep(60))
    finally:
        sys.setprofile(before)
    closing.join(30)
    assert not closing.is_alive()


def test_a_callback_cannot_wait_for_the_loop_that_runs_it() -> None:
    with LoopThread() as home:

        async def callback() -> None:
            home.run(asyncio.sleep(0))

        with pytest.raises(UserError, match="Call `steer` or `interrupt` there"):
            home.run(callback())


async def test_cancelling_arun_goes_through() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with LoopThread() as home:
        running = asyncio.create_task(home.arun(wait()))
        assert await asyncio.to_thread(begun.wait, 240)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(ended.wait, 240)


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
    out, _ = process.communicate(timeout=60)
    assert out == "cleaned up\ninterrupted\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("event", "begun"), [("call", False), ("return", True)])
def test_ctrl_c_while_the_loop_begins(event: str, begun: bool) -> None:
    """The first moments of a call count too: the coroutine is cancelled, or has never begun."""
    seen: list[str] = []
    started = threading.Event()

    async def work() -> None:
        seen.append("begun")
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cleaned up")

    def interrupt(frame: FrameType, now: str, _: object) -> None:
        if now == event and frame.f_code.co_name == "call_soon_threadsafe":
            sys.setprofile(None)
            assert not begun or started.wait(60)
            raise KeyboardInterrupt

    with LoopThread() as home:
        home.run(asyncio.sleep(0))
        before = sys.getprofile()
        try:
            sys.setprofile(interrupt)
            with pytest.raises(KeyboardInterrupt):
                home.run(work())
        finally:
            sys.setprofile(before)
        assert seen == (["begun", "cleaned up"] if begun else [])
