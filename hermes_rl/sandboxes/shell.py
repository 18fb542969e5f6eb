"""The host side of the shell protocol; `supervisor.sh` is the side in the sandbox.

The supervisor is a bash that forks a subshell per command. Between the two stand

- the *channel*, a socket pair: one line per command in, one line per end out. No command holds it,
  and a socket cannot be reopened through /proc, so the end of a command is never confused with
  something that was printed;
- the *control directory*, made by the host and read-only in the sandbox: `cmd`, the text to run,
  and named pipes that take the output. The host opens each of them before a command runs and never
  again, so no command can lead the host to another file.

A pipe that a background job still holds after its command is set aside and drained, so that late
output never lands in the result of another command. State (directory, exports, functions, aliases,
options, umask) is written inside the sandbox to one of two files; the host says which one the next
command starts from and moves on only after a command that ended by itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hermes_rl.sandboxes.processes import Jobs

HEAD_SHARE = 0.4
"""Share of the kept bytes that comes from the beginning; errors stand at the end."""


class Sink(Protocol):
    """Takes output as it arrives."""

    total: int
    """Bytes taken so far."""
    limit: int | None
    """The command is ended when it has printed more bytes; None lets it go on."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        ...


class HeadTail:
    """Keeps the first 40 % and the last 60 % of `kept` bytes, whatever arrives between them."""

    limit: int | None = None

    def __init__(self, kept: int) -> None:
        self.total = 0
        self._head_limit = int(kept * HEAD_SHARE)
        self._tail_limit = kept - self._head_limit
        self._head = b""
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes; memory stays below twice the limit."""
        self.total += len(data)
        left = self._head_limit - len(self._head)
        if left > 0:
            self._head += data[:left]
            data = data[left:]
        if not data:
            return
        self._tail += data[-self._tail_limit :] if self._tail_limit else b""
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: -self._tail_limit]

    @property
    def dropped(self) -> int:
        """Bytes of the middle that are not kept."""
        return max(0, self.total - self._head_limit - self._tail_limit)

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail; together the whole output when nothing was dropped."""
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        return self._head, bytes(tail)

    def text(self) -> str:
        """The kept output as text, with a mark in place of the omitted middle."""
        head, tail = self.parts()
        if not self.dropped:
            return (head + tail).decode("utf-8", "replace")
        mark = f"\n[... {self.dropped} bytes omitted ...]\n"
        return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")


class Everything:
    """Keeps every byte: for files, which are wanted whole."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self.limit: int | None = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        self._data += data

    def value(self) -> bytes:
        """All bytes."""
        return bytes(self._data)


class IntoFile:
    """Writes every byte to a new file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.total = 0
        self.limit: int | None = limit
        self._path = path
        path.write_bytes(b"")

    def feed(self, data: bytes) -> None:
        """Write the next bytes."""
        self.total += len(data)
        with open(self._path, "ab") as file:
            file.write(data)


CHUNK = 1 << 16
"""Bytes read at once: what a pipe holds."""
DRAIN_PAUSE_S = 0.05
"""Between two looks at a pipe whose writer is silent, or whose output nobody wants."""


LINE_MAX = 4096
"""Bytes of one line of a control channel."""


def make_fifo(path: Path, how: int, mode: int) -> int:
    """Make a named pipe and open it without waiting for its other end."""
    os.mkfifo(path)
    os.chmod(path, mode)
    return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)


class Pipe:
    """A named pipe that takes a command's output, open for reading on the host."""

    def __init__(self, control: Path, name: str, *, any_user: bool = False) -> None:
        self.name = name
        self.path = control / name
        self.fd = make_fifo(self.path, os.O_RDONLY, 0o622 if any_user else 0o620)

    def read_into(self, sink: Sink, most: int) -> bool | None:
        """Move up to `most` bytes to the sink.

        Returns None at the end (no writer) and after `close`, False when a writer is silent, True
        when more may come.
        """
        if self.fd < 0:
            return None
        while most > 0:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return None
            sink.feed(data)
            most -= len(data)
        return True

    def close(self) -> None:
        """Remove the pipe. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.path.unlink(missing_ok=True)


QUIET_S = 0.005
"""A command that ends sooner is read once, at its end; a longer one as it prints."""


class Watch:
    """Reads a command's pipe while it runs, and tells its waiter when the time is up, or more was
    printed than the sink takes (False)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pipe: Pipe,
        sink: Sink,
        waiter: asyncio.Future[bool],
        timeout_s: float | None,
    ) -> None:
        self._loop, self._pipe, self._sink, self._waiter = loop, pipe, sink, waiter
        self._end = None if timeout_s is None else loop.time() + timeout_s
        self._reading = False
        self._stopped = False
        first = QUIET_S if timeout_s is None else min(QUIET_S, timeout_s)
        self._timer: asyncio.TimerHandle | None = loop.call_later(first, self._tick)

    def _tick(self) -> None:
        """The quiet time is over, or the command's time."""
        self._timer = None
        if self._end is not None and self._loop.time() >= self._end:
            if not self._waiter.done():
                self._waiter.set_result(False)
            return
        self.resume()
        if self._end is not None:
            self._timer = self._loop.call_at(self._end, self._tick)

    def resume(self) -> None:
        """Read whenever there is something to read, until `stop`."""
        if not self._reading and not self._stopped:
            self._reading = True
            self._loop.add_reader(self._pipe.fd, self._read)

    def _read(self) -> None:
        more = self._pipe.read_into(self._sink, 16 * CHUNK)
        if self._sink.limit is not None and self._sink.total > self._sink.limit:
            self._unread()
            if not self._waiter.done():
                self._waiter.set_result(False)
        elif more is None:
            # No writer, yet or any more: the selector would report that without end.
            self._unread()
            self._loop.call_later(DRAIN_PAUSE_S, self.resume)

    def _unread(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._pipe.fd)

    def stop(self) -> None:
        """No more reading, no more timer."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unread()

    def finish(self) -> bool | None:
        """Take what is in the pipe now; None when nobody holds it any more."""
        self.stop()
        return self._pipe.read_into(self._sink, 4 << 20)


END_S = 10.0
"""How long a killed command may take to be reported before the sandbox is given up."""
LOOK_S = 2.0
"""The most of it that one look for a killed command's processes counts."""
START_S = 30.0
_COMMAND_ENDED = re.compile(rb"E (\d{1,3}) ([-s0]?)")
_PROCESS_EVENT = re.compile(rb"([PX]) (\d{1,9}) (\d{1,9})")

Kind = Literal["r", "i"]
"""r: a command of the session; i: a command of the host's own, outside the session."""


class ShellLost(Exception):
    """The supervisor is gone, or it can run no command any more."""

    unsent = False
    """The command did not reach it."""
    vanished = False
    """Somebody removed files of the control directory."""


@dataclass(frozen=True)
class Ended:
    """A command's end."""

    exit_code: int
    timed_out: bool = False


@dataclass(frozen=True)
class ShellPaths:
    """Where both sides meet."""

    control: Path
    """The control directory on the host."""
    inside: str
    """The same directory as the sandbox sees it."""
    state: str
    """A directory that only the sandbox uses."""
    any_user: bool = False
    """Whoever reaches the control directory may write to its pipes: the sandbox's user is not
    known, and the directory is closed to all users of the host."""
    inputs: Path | None = None
    """Where commands' inputs go when not in the control directory: a path that both sides share."""


@dataclass
class ShellSession:
    """One of the sessions of a shell: the state that its next command starts from."""

    name: str = ""
    """Beginning of the names of its state files."""
    source: str = "-"
    """The file with its state; `-` is the state of the start."""
    flip: bool = False
    """Which of its two files takes the next state."""


def supervisor_text() -> str:
    """The supervisor as bash runs it: comments left out, saving put in its places."""
    here = Path(__file__)
    save, stopped, text = (
        "\n".join(
            line
            for line in here.with_name(name).read_text().splitlines()
            if not line.lstrip().startswith("#")
        )
        for name in ("save.sh", "stopped.sh", "supervisor.sh")
    )
    return text.replace("@SAVE@", save).replace("@STOPPED@", stopped) + "\n"


class Shell:
    """Drives one supervisor. One command at a time; the rest wait their turn.

    Args:
        channel: our end of the socket pair; owned from here on.
        paths: where both sides meet.
        jobs: finds and ends the running command.
    """

    def __init__(self, channel: socket.socket, paths: ShellPaths, jobs: Jobs) -> None:
        self.paths = paths
        self.lost = asyncio.Event()
        self.on_process: Callable[[bytes, int, int], None] | None = None
        self._channel = channel
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._messages = b""
        self._turn = asyncio.Lock()
        self._waiter: asyncio.Future[bool] | None = None
        self._answer: tuple[int, bytes] | None = None
        self._awaited = False
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Task[bool] | None = None
        self._watch: Watch | None = None
        self._pipes = 0
        self._pipe = self._new_pipe()
        self._aside: set[Pipe] = set()
        self._command = os.open(
            paths.control / "cmd", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
        os.fchmod(self._command, 0o644)  # whatever the umask took
        self._main = ShellSession()
        self._sessions = 0
        self._files = 0
        channel.setblocking(False)
        self._loop.add_reader(channel.fileno(), self._readable)

    def _new_pipe(self) -> Pipe:
        self._pipes += 1
        return Pipe(self.paths.control, f"o{self._pipes}", any_user=self.paths.any_user)

    @property
    def source(self) -> str | None:
        """The file in the sandbox with the state that the next command starts from; None where it
        is that of the start."""
        return None if self._main.source == "-" else self._main.source

    def new_session(self, like: ShellSession | None = None) -> ShellSession:
        """Begin another session, in the present state of one; None is the first session."""
        self._sessions += 1
        return ShellSession(f"s{self._sessions}", (like or self._main).source)

    def start_from(self, state: Path) -> None:
        """Have the first command start from a state that an earlier session saved.

        Args:
            state: a file of the control directory.
        """
        self._main.source = f"{self.paths.inside}/{state.name}"

    @property
    def busy(self) -> bool:
        """A command is running, or a background job still holds the pipe of its own."""
        return self._turn.locked() or bool(self._aside)

    @property
    def idle(self) -> bool:
        """The supervisor waits for a line: whatever was sent to it is done."""
        ending = self._ending is not None and not self._ending.done()
        return not (self._turn.locked() or ending or self.lost.is_set())

    async def ready(self) -> None:
        """Wait for the supervisor. Raises: ShellLost with what came instead; TimeoutError."""
        async with asyncio.timeout(START_S):
            await self._ready

    async def execute(
        self,
        kind: Kind,
        command: bytes,
        sink: Sink,
        *,
        timeout_s: float | None = None,
        stdin: bytes | Path | None = None,
        session: ShellSession | None = None,
    ) -> Ended:
        """Run a command and move its output to the sink.

        Args:
            session: whose state it sees and changes; None is the first session.

        Raises: ShellLost when the supervisor is gone, or had to be given up after a timeout.
        """
        async with self._turn:
            await self._idle()
            given = self._give(stdin) if stdin is not None else None
            os.pwrite(self._command, command, 0)
            os.ftruncate(self._command, len(command))
            state = session or self._main
            out = f"{state.name}b" if state.flip else f"{state.name}a"
            source = "/dev/null" if given is None else self._inside(given)
            line = f"{kind} {self._pipe.name} {source} {state.source} {out}\n"
            try:
                ended, saved = await self._converse(line.encode(), sink, timeout_s)
                if kind == "r" and saved and not ended.timed_out:
                    state.source = "-" if saved == b"-" else f"{self.paths.state}/{out}"
                    state.flip = not state.flip
                self.check_control()
                return ended
            finally:
                if given is not None:
                    given.unlink(missing_ok=True)

    async def _idle(self) -> None:
        """Wait for the end of what a caller that was cancelled left. Raises: ShellLost."""
        if self._ending is not None:
            await asyncio.wait([self._ending])  # never awaited itself: that would pass on a cancel
            if not self._ending.result():
                raise ShellLost("a command could not be ended")
            self._ending = None
        if self.lost.is_set():
            raise ShellLost(self._last_words())
        self.check_control()

    def _vanished(self) -> bool:
        return not (os.fstat(self._command).st_nlink and os.fstat(self._pipe.fd).st_nlink)

    def check_control(self) -> None:
        """Raises: ShellLost when a file that commands need was removed. The supervisor would report
        every command as one that failed without a word."""
        if self._vanished():
            lost = ShellLost("the control directory was removed")
            lost.vanished = True
            raise lost

    async def _surely(self, work: Coroutine[None, None, bool]) -> None:
        """Do something that goes on when the caller is cancelled. Raises: ShellLost on False."""
        self._ending = self._loop.create_task(work)
        if not await asyncio.shield(self._ending):
            raise ShellLost("a command could not be ended")
        self._ending = None

    async def background(
        self, number: int, started: asyncio.Future[None], session: ShellSession | None = None
    ) -> None:
        """Have the supervisor start background process `number`; `on_process` hears of it.

        Until `started` is done no command can begin, so that the two are never mistaken for each
        other. Raises: ShellLost.
        """
        async with self._turn:
            await self._idle()
            source = (session or self._main).source
            self.send(f"b {number} - {source} -\n".encode())
            await self._surely(self._begun(started))

    async def _begun(self, started: asyncio.Future[None]) -> bool:
        lost = self._loop.create_task(self.lost.wait())
        waits: list[asyncio.Future[None] | asyncio.Task[bool]] = [started, lost]
        await asyncio.wait(waits, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not started.done() or started.cancelled() or self.lost.is_set():
            return False
        self._jobs.keep()
        return True

    async def _converse(
        self, line: bytes, sink: Sink, timeout_s: float | None
    ) -> tuple[Ended, bytes]:
        """Have a command run: its end, and the first letter of its state."""
        self._answer, self._awaited = None, True
        waiter = self._waiter = self._loop.create_future()
        watch = self._watch = Watch(self._loop, self._pipe, sink, waiter, timeout_s)
        try:
            self.send(line)
            in_time = await waiter
        except asyncio.CancelledError:
            self._ending = self._loop.create_task(self._end(watch))
            raise
        except ShellLost:
            watch.finish()
            raise
        if self._answer is None:
            await self._surely(self._end(watch))
        else:
            self._settle(watch)
        code, saved = self._said()
        return Ended(code if in_time else 124, not in_time), saved

    def _said(self) -> tuple[int, bytes]:
        """How the command ended: exit code, first letter of its state. Raises: ShellLost."""
        if self._answer is None:
            raise ShellLost(self._last_words())
        return self._answer

    def send(self, line: bytes) -> None:
        """Write one line to the supervisor. Raises: ShellLost."""
        try:
            self._channel.send(line)
        except OSError as error:
            if isinstance(error, ConnectionError):  # it ended, and the loop has not heard of it yet
                self.close()
            lost = ShellLost(str(error))
            lost.unsent = True
            raise lost from error

    async def _end(self, watch: Watch) -> bool:
        """Kill the running command's tree until the supervisor has told its end, and settle.

        A task of its own: the next command must not begin, whoever is cancelled, while a thread
        still looks for processes of this one. Returns False when that did not come.
        """
        waiter = self._waiter = self._loop.create_future()
        watch.resume()
        waited, pause, gone = 0.0, 0.002, self._answer is not None
        while not (self._answer is not None and gone):
            if self.lost.is_set() or waited > END_S:
                break
            began = self._loop.time()
            gone = await asyncio.to_thread(self._jobs.end)
            if self._answer is None and not self.lost.is_set():
                # Killed a moment ago; or, on a busy machine, not even forked when we looked.
                await asyncio.wait([waiter], timeout=pause)
                pause = min(2 * pause, 0.05)
            # A look that took longer says that we were stopped, and nothing about the sandbox.
            waited += min(self._loop.time() - began, LOOK_S)
        if self._answer is None or not gone:
            watch.finish()
            return False
        self._settle(watch)
        return True

    def _settle(self, watch: Watch) -> None:
        """Take what is left in the pipe; set it aside when a background job still holds it."""
        if watch.finish() is not None and not self.lost.is_set() and not self._vanished():
            held, self._pipe = self._pipe, self._new_pipe()
            self._aside.add(held)
            self._drain(held)

    def _drain(self, pipe: Pipe) -> None:
        """Drop what a background job prints, at most a chunk per pause: it must never block."""
        if pipe not in self._aside:
            return
        if pipe.read_into(HeadTail(0), CHUNK) is None:
            self._aside.discard(pipe)
            pipe.close()
            return
        self._loop.call_later(DRAIN_PAUSE_S, self._drain, pipe)

    def _give(self, stdin: bytes | Path) -> Path:
        """Put a command's input into the control directory."""
        self._files += 1
        path = self.inputs / f"in{self._files}"
        if isinstance(stdin, Path):
            stdin.rename(path)
        else:
            path.write_bytes(stdin)
        path.chmod(0o644)
        return path

    @property
    def inputs(self) -> Path:
        """The folder of the host for what commands read."""
        return self.paths.inputs or self.paths.control

    def _inside(self, given: Path) -> str:
        """Where a command finds its input."""
        return str(given) if self.paths.inputs else f"{self.paths.inside}/{given.name}"

    def _readable(self) -> None:
        try:
            data = self._channel.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                self._take(line)
            if len(self._messages) + len(self._buffer) > LINE_MAX:
                raise ValueError("a line without an end")
        except ValueError as error:
            self._buffer = f"not the supervisor on the control channel: {error}".encode()
            self.close()

    def _take(self, line: bytes) -> None:
        """One line of the supervisor. Raises: ValueError for any that it would not write now."""
        if not self._ready.done():
            if line == b"R":
                self._ready.set_result(None)
            else:  # what a sandbox that does not start has to say
                self._messages += line + b"\n"
        elif self._awaited and (ended := _COMMAND_ENDED.fullmatch(line)):
            self._answer, self._awaited = (int(ended[1]), ended[2]), False
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(True)
        elif self.on_process is not None and (event := _PROCESS_EVENT.fullmatch(line)):
            self.on_process(event[1], int(event[2]), int(event[3]))
        else:
            raise ValueError(repr(line[:40]))

    def _last_words(self) -> str:
        return (self._messages + self._buffer).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Give the supervisor up: every wait ends with ShellLost. Idempotent."""
        if self.lost.is_set():
            return
        self.lost.set()
        self._loop.remove_reader(self._channel.fileno())
        error = ShellLost(self._last_words())
        for future in (self._ready, self._waiter):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more
        for pipe in [*self._aside]:
            self._aside.discard(pipe)
            pipe.close()

    def release(self) -> None:
        """Close what is left; after `close`, when no command waits any more.

        The channel among it, at whose end the supervisor ends: its children are anybody's then, so
        they are ended before.
        """
        self.close()
        self._channel.close()
        if self._watch is not None:
            self._watch.stop()
        self._pipe.close()
        os.close(self._command)
