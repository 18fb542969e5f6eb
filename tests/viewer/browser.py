"""Drive Debian's Chromium by the devtools protocol: open pages, press keys, take screenshots."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

LONG_S = 120.0
"""What is waited for at most; only a failing test waits so long."""


class Browser:
    """One tab. Collects errors of scripts, and requests that the page's policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(message["params"]))
            elif message["method"] == "Page.javascriptDialogOpening":
                self.problems.append("a dialog was opened")

    async def send(self, method: str, **parameters: Any) -> Any:
        """Send a command of the protocol, and return its result."""
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        message = await asyncio.wait_for(answer, LONG_S)
        assert "error" not in message, message
        return message["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true; return its value."""
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    if value := await self.run(script):
                        return value
                except AssertionError:  # the page is being replaced
                    pass
                await asyncio.sleep(0.05)

    async def go(self, address: str) -> None:
        """Open an address, and wait until its page is shown."""
        await self.send("Page.navigate", url=address)
        await self.until(
            "document.body?.dataset.shown === location.hash && "
            "document.getElementById('live').textContent != 'loading…'"
        )

    async def forget(self, origin: str) -> None:
        """Leave the page, its data and its cookies, and what was collected."""
        await self.send("Page.navigate", url="about:blank")
        await self.until("location.href == 'about:blank'")
        await self.send("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        await self.send("Network.clearBrowserCookies")
        await self.send("Emulation.clearDeviceMetricsOverride")
        await self.send("Emulation.setEmulatedMedia", features=[])
        self.problems.clear()
        self.requests.clear()

    async def text(self) -> str:
        return str(await self.run("document.getElementById('page').innerText"))

    async def press(self, key: str) -> None:
        """Press a key, as on a keyboard."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start a browser with a new profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "HOME": profile},
        )  # fmt: skip
        try:
            port = await _port(Path(profile, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                tab = next(tab for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(
                    tab["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    browser = Browser(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await browser.send(f"{domain}.enable")
                    yield browser
                await browser.reader
        finally:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(LONG_S):
        while True:
            if file.exists() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            await asyncio.sleep(0.05)
