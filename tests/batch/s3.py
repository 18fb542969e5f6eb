"""An S3 server (moto, a real socket) behind a proxy that fails on request."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "3",
}
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/x"}

Failure = Callable[[str, str], str | None]
"""Method and path of a request -> None, or what happens to it: a status such as `503`; `lost` and
`cut` (carried out, but nothing or half of the answer arrives); `down` (not carried out); `late`
(carried out after its client gave up); `twice` (carried out again later); `overwrite` (without its
condition). It may block, and is called in a thread."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server during this context. Yields its address."""
    command = [sys.executable, "-m", "moto.server", "-p", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    address = next(m[1] for line in server.stderr if (m := re.search(r"on (http://\S+)", line)))
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    try:
        yield address
    finally:
        server.terminate()
        server.wait()


class Proxy:
    """Passes requests to the S3 server, except for those that `failure` names."""

    def __init__(self, target: str, late_s: float = 4.0) -> None:
        self.target = target
        self.late_s = late_s
        """When requests that are `late` or sent `twice` arrive."""
        self.failure: Failure = lambda method, path: None
        self.failed = 0
        self.address = ""
        self._later: set[asyncio.Task[Any]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        fails = await asyncio.to_thread(self.failure, request.method, request.path)
        self.failed += fails is not None
        if fails and fails.isdigit():
            return web.Response(status=int(fails))
        headers = {k: v for k, v in request.headers.items() if k not in ("Host", "Expect")}
        if fails == "overwrite":
            headers.pop("If-None-Match", None)
        body = await request.read() if fails != "down" else b""
        if fails in ("late", "twice"):
            self._pass_later(request, headers, body)
        if fails == "late":
            await asyncio.sleep(self.late_s + 1)
        if fails in ("down", "late"):
            return _close(request)
        status, found, content = await self._pass(request, headers, body)
        if fails == "lost":
            return _close(request)
        passed = {k: v for k, v in found.items() if k != "Transfer-Encoding"}
        if fails == "cut" and len(content) > 1:
            answer = web.StreamResponse(status=status, headers=passed)
            answer.content_length = len(content)
            await answer.prepare(request)
            await answer.write(content[: len(content) // 2])
            return _close(request)
        return web.Response(status=status, headers=passed, body=content)

    def _pass_later(self, request: web.Request, headers: Any, body: bytes) -> None:
        async def work() -> None:
            await asyncio.sleep(self.late_s)
            await self._pass(request, headers, body)

        task = asyncio.get_running_loop().create_task(work())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _pass(
        self, request: web.Request, headers: Any, body: bytes
    ) -> tuple[int, Any, bytes]:
        url = self.target + request.raw_path
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, headers=headers, data=body) as answer,
        ):
            return answer.status, answer.headers, await answer.read()

    async def make_bucket(self) -> str:
        """Make a bucket, and return its name."""
        bucket = f"b-{uuid.uuid4().hex}"
        async with (
            aiohttp.ClientSession() as session,
            session.put(f"{self.target}/{bucket}", headers=SIGNED) as answer,
        ):
            assert answer.status == 200
        return bucket

    async def objects(self, url: str) -> list[str]:
        """The keys below a URL."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.target}/{bucket}?prefix={prefix}/", headers=SIGNED) as answer,
        ):
            keys = re.findall("<Key>(.*?)</Key>", await answer.text())
        return [key.removeprefix(f"{prefix}/") for key in keys]


def _close(request: web.Request) -> web.Response:
    if request.transport:
        request.transport.close()
    return web.Response()


@contextmanager
def s3_proxy(target: str) -> Iterator[Proxy]:
    """Run a proxy in a thread of its own, since readers block the caller's."""
    proxy, loop = Proxy(target), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def stop() -> None:
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    proxy.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
