"""Starts `hermes-rl` in milliseconds (see forked_runs.py)."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path


class Forked:
    """A process that the fork server started, with the methods of `subprocess.Popen`.

    Args:
        terminal: what it reads from and writes to, in place of a pipe.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        terminal: int | None = None,
    ) -> None:
        readable, writable = os.pipe()
        outputs = [writable, os.dup(2)]
        if terminal is not None:
            os.close(writable)
            outputs = [os.dup(terminal) for _ in range(3)]
        self.pid, self._end = ForkServer.of_this_process().fork(arguments, env, outputs, cwd)
        self.stdout = os.fdopen(readable)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            self.returncode = int(self._end.recv(64))
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProcess:
    """A process that the fork server started, with the methods of asyncio's subprocesses."""

    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, pid: int, exit_code: asyncio.Task[bytes]) -> None:
        self.pid = pid
        self._exit_code = exit_code

    @property
    def returncode(self) -> int | None:
        return int(self._exit_code.result()) if self._exit_code.done() else None

    async def wait(self) -> int:
        return int(await asyncio.shield(self._exit_code))

    async def communicate(self) -> tuple[bytes, bytes]:
        out, errors = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """It is started once and ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/requests"
        program = Path(__file__).with_name("forked_runs.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(
            [sys.executable, str(program), self._address], start_new_session=True, **pipes
        )
        assert self._server.stdout
        assert self._server.stdout.readline() == b"listening\n"
        atexit.register(self.close)

    def close(self) -> None:
        self._server.communicate()
        self._folder.cleanup()

    def fork(
        self, arguments: Sequence[str], env: Mapping[str, str], outputs: Sequence[int], cwd: Path
    ) -> tuple[int, socket.socket]:
        """Start `hermes-rl ARGUMENTS`; takes over the descriptors for its output.

        Returns: its id, and what its exit code can be received from.
        """
        wanted = {"arguments": arguments, "env": {**env}, "cwd": str(cwd)}
        request = json.dumps(wanted).encode() + b"\n"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        sent = socket.send_fds(connection, [request], outputs)
        connection.sendall(request[sent:])
        for descriptor in outputs:
            os.close(descriptor)
        with connection.makefile("rb", buffering=0) as replies:
            return int(replies.readline()), connection

    async def start(
        self, arguments: Sequence[str], env: Mapping[str, str], outputs: Sequence[int]
    ) -> ForkedProcess:
        """Start `hermes-rl ARGUMENTS`; takes over the descriptors for its output."""
        found = await asyncio.to_thread(self.fork, arguments, env, outputs, Path.cwd())
        pid, connection = found
        reader, writer = await asyncio.open_unix_connection(sock=connection)

        async def wait_for_end() -> bytes:
            try:
                return await reader.readline()
            finally:
                writer.close()

        return ForkedProcess(pid, asyncio.create_task(wait_for_end()))

    @classmethod
    @cache
    def of_this_process(cls) -> ForkServer:
        return cls()


def call(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str] = os.environ, typed: str = ""
) -> tuple[int, str, str]:
    """Run `hermes-rl ARGUMENTS` to its end, with an input. Returns its exit code and its output."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        entered, out, errors = files
        entered.write(typed)
        entered.seek(0)
        outputs = [os.dup(file.fileno()) for file in files]
        _, end = ForkServer.of_this_process().fork(arguments, env, outputs, cwd)
        with end:
            code = int(end.recv(64))
        for file in (out, errors):
            file.seek(0)
        return code, out.read(), errors.read()


async def start(arguments: Sequence[str], env: Mapping[str, str]) -> ForkedProcess:
    """Start `hermes-rl ARGUMENTS`, in a process group of its own."""
    (out, out_end), (errors, errors_end) = await output_pipe(), await output_pipe()
    ends = [out_end, errors_end]
    process = await ForkServer.of_this_process().start(arguments, env, ends)
    process.stdout, process.stderr = out, errors
    return process


async def output_pipe() -> tuple[asyncio.StreamReader, int]:
    """A stream and the descriptor that writes to it."""
    readable, writable = os.pipe()
    stream = asyncio.StreamReader(2**22)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb")
    )
    return stream, writable
