"""Background processes of a sandbox: their pipes on the host, and what the supervisor reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from hermes_rl.sandboxes.shell import (
    CHUNK,
    END_S,
    HeadTail,
    Pipe,
    Shell,
    ShellSession,
    make_fifo,
)

KEPT = 200_000
"""Bytes of unread output that are kept: the beginning and the end."""
PAUSE_S = 0.02


class BackgroundProcess:
    """One of them (see `base.Process`)."""

    def __init__(
        self,
        shell: Shell,
        number: int,
        end: Callable[[int], None],
        forget: Callable[[int], object],
        *,
        lossless: bool = False,
    ) -> None:
        self.pid = 0
        self._forget = forget
        self._shell = shell
        self._number = number
        self._end = end
        self._lossless = lossless
        self._code: int | None = None
        self._done = asyncio.Event()
        self._printed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._output = HeadTail(KEPT)
        control, any_user = shell.paths.control, shell.paths.any_user
        mode = 0o644 if any_user else 0o640
        self._in = make_fifo(control / f"p{number}.in", os.O_RDWR, mode)
        self._pipe = Pipe(control, f"p{number}.out", any_user=any_user)

    def take(self, kind: bytes, value: int) -> None:
        """Take what the supervisor reports: P with the process id, X with the exit code.

        Raises: ValueError when it has reported that already.
        """
        if kind == b"P" and not self.started.done():
            self.pid = value
            self.started.set_result(None)
            self._resume()  # from here on a writer holds the pipe
        elif kind == b"X" and self.started.done() and self._code is None:
            self._code = value
            self._done.set()
            self._close_input()
            self._end_if_read()
        else:
            raise ValueError(f"process {self._number} once more")

    def lost(self) -> None:
        """The sandbox is gone."""
        if self._code is None:
            self._code = 137
        if not self.started.done():
            self.started.cancel()
        self._done.set()

    def _resume(self) -> None:
        if self._pipe.fd >= 0:
            self._loop.add_reader(self._pipe.fd, self._readable)

    def _readable(self) -> None:
        """Take output when there is some: at most a chunk per pause, so that nobody can keep the
        loop busy."""
        before = self._output.total
        more = self._take_output(CHUNK)
        if self._output.total > before:
            self._printed.set()
        if more is None:  # nobody can write any more
            self._close_output()
        elif more or self._full:
            self._loop.remove_reader(self._pipe.fd)
            self._loop.call_later(PAUSE_S, self._resume)

    @property
    def _full(self) -> bool:
        """Whether a lossless process has to wait until its output is read."""
        return self._lossless and self._output.total >= KEPT - CHUNK

    def _take_output(self, most: int) -> bool | None:
        """Take up to `most` bytes; of a lossless process no more than are kept. Returns what
        `Pipe.read_into` does."""
        if self._full:
            return False
        if self._lossless:
            most = min(most, KEPT - CHUNK - self._output.total)
        return self._pipe.read_into(self._output, most)

    async def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self._shell.lost.is_set():
            self.lost()
        return self._code

    async def wait(self, timeout_s: float, *, output: bool = False) -> int | None:
        """See `base.Process.wait`."""
        events = [self._done, self._shell.lost, *([self._printed] if output else [])]
        if not any(event.is_set() for event in events):
            tasks = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        return await self.poll()

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises: BrokenPipeError when it has ended, or its input was
        closed."""
        view = memoryview(data)
        while view:
            if await self.poll() is not None:
                raise BrokenPipeError("the process has ended")
            if self._in < 0:
                raise BrokenPipeError("its input was closed")
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                await asyncio.sleep(PAUSE_S)

    async def close_input(self) -> None:
        """End its stdin: it reads what was written, then the end."""
        self._close_input()

    async def read(self) -> bytes:
        """Output since the last read."""
        self._take_output(16 * CHUNK)
        output, self._output = self._output, HeadTail(KEPT)
        self._printed.clear()
        mark = f"\n[... {output.dropped} bytes omitted ...]\n".encode() if output.dropped else b""
        return mark.join(output.parts())

    async def kill(self) -> None:
        """End its whole process tree."""
        if await self.poll() is None:
            await asyncio.to_thread(self._end, self.pid)
            try:
                async with asyncio.timeout(END_S):
                    await self._done.wait()
            except TimeoutError:  # the agent ended what would have reported it
                self.lost()

    def _close_input(self) -> None:
        if self._in >= 0:
            os.close(self._in)
            self._in = -1

    def _close_output(self) -> None:
        if self._pipe.fd >= 0:
            self._loop.remove_reader(self._pipe.fd)
            self._pipe.close()
        self._end_if_read()

    def _end_if_read(self) -> None:
        """Remove its files once it has ended and nothing can print any more: an agent may start
        thousands."""
        if self._done.is_set() and self._pipe.fd < 0:
            self.close()

    def close(self) -> None:
        """Close and remove its pipes. Idempotent."""
        if self._pipe.fd >= 0:
            self._loop.remove_reader(self._pipe.fd)
            self._pipe.close()
        self._close_input()
        for kind in ("in", "cmd"):
            (self._shell.paths.control / f"p{self._number}.{kind}").unlink(missing_ok=True)
        self._forget(self._number)


class Background:
    """All background processes of one session."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._processes: dict[int, BackgroundProcess] = {}
        self._made = 0
        shell.on_process = self._take

    def _take(self, kind: bytes, number: int, value: int) -> None:
        process = self._processes.get(number)
        if process is None:
            raise ValueError(f"process {number} is unknown")
        process.take(kind, value)

    async def start(
        self,
        text: bytes,
        end: Callable[[int], None],
        session: ShellSession | None = None,
        *,
        lossless: bool = False,
    ) -> BackgroundProcess:
        """Start one in the session's present state. Raises: ShellLost."""
        self._shell.check_control()
        self._made += 1
        number = self._made
        command = self._shell.paths.control / f"p{number}.cmd"
        command.write_bytes(text)
        command.chmod(0o644)
        process = self._processes[number] = BackgroundProcess(
            self._shell, number, end, self._forget, lossless=lossless
        )
        await self._shell.background(number, process.started, session)
        return process

    def _forget(self, number: int) -> None:
        self._processes.pop(number, None)

    def close(self) -> None:
        """The session is over."""
        for process in list(self._processes.values()):
            process.lost()
            process.close()
