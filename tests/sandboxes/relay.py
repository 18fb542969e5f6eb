"""A relay between a client and a local port that can be slow, or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Self

from hermes_rl.sandboxes import SshHost


class Relay:
    """Passes connections on.

    Args:
        port: where they go, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.delay_s = 0.0
        """How much later what comes is passed on, each way."""
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def host(self, host: SshHost) -> SshHost:
        """A machine as it is reached through this."""
        with open(str(host.known_hosts)) as known, open(f"{host.known_hosts}-relay", "w") as file:
            file.write(known.read().replace(f":{host.port} ", f":{self.port} "))
        return replace(host, port=self.port, known_hosts=f"{host.known_hosts}-relay")

    def stall(self) -> None:
        """Pass nothing on any more, and close nothing."""
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, back))
                    both.create_task(self._pass(there, writer))
            finally:
                back.close()
        except* OSError:
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._open.wait()
                if not data:
                    with contextlib.suppress(OSError):
                        target.write_eof()
                    return
                target.write(data)

        writing = asyncio.create_task(write())
        try:
            while data := await source.read(1 << 16):
                queue.put_nowait((loop.time() + self.delay_s, data))
            queue.put_nowait((loop.time() + self.delay_s, b""))
            await writing
        finally:
            writing.cancel()
