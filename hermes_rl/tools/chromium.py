"""A Chromium inside the sandbox, driven over its debugging pipe.

It is a background process of the sandbox: the sandbox's network, files and limits are all that it
has, and it ends with the sandbox. The protocol is JSON messages with a NUL after each
(https://chromedevtools.github.io/devtools-protocol). Commands of the agent run as the same user and
could write to that pipe, so what arrives is checked like any input: sizes, types and time.

Nothing reads the pipe between two calls; Chromium then waits. A browser that breaks a bound, or
that does not answer, is ended as a whole, and the next page gets a new one.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from hermes_rl.errors import ToolError
from hermes_rl.sandboxes import Process, Sandbox

START_S = 60.0
"""How long the browser may take to start."""
COMMAND_S = 30.0
"""How long a page may take to answer."""
LOAD_S = 20.0
"""How long a page may load before it is shown as it is."""
SETTLE_S = 0.3
"""What an action starts, such as a navigation, begins within this time."""
MAX_MESSAGE_BYTES = 32 << 20
PROCESS_BYTES = 800 << 20
"""Memory that each process of the browser may write: a page ends by it before the sandbox does."""
VIEW = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
"""What is seen of a page, in pixels."""
MAX_TABS = 5
MAX_DIALOGS = 20
"""Dialogs of a page that are answered during one call."""
_POLL_S = 0.005
_ABSENT, _BOUNDED = 127, 126

PROGRAMS = (
    "/usr/lib/chromium/chromium",
    "/usr/lib/chromium-browser/chromium-browser",
    "/opt/google/chrome/chrome",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chrome",
    "chrome-headless-shell",
    "/ms-playwright/chromium-*/chrome-linux*/chrome",
)
"""Where Chromium is looked for, in the sandbox. The first are programs to which the others are
scripts that need files of /etc."""
INSTALL = "apt-get install chromium fonts-liberation"
NO_BROWSER = (
    "The sandbox has no Chromium. Install it in the image of the sandbox (Debian and Ubuntu: "
    "`apt-get install chromium fonts-liberation`); without an image, on the machine itself."
)
_NO_MEMORY = (
    "Chromium cannot start: this sandbox limits the address space of each process, and the machine "
    "does not let hermes_rl make control groups, which would limit its memory instead."
)
_FEATURES = (
    *("IsolateOrigins", "site-per-process", "Translate", "OptimizationHints", "MediaRouter"),
    *("DialMediaRouteProvider", "AutofillServerCommunication", "WebUIOmniboxPopup"),
    *(
        "WebUIOmniboxAimPopup",
        "WebUIOmniboxFullPopup",
        "OmniboxPopupWebUI",
        "AiModeOmniboxEntryPoint",
    ),
)
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--in-process-gpu"),
    *("--remote-debugging-pipe", "--disable-dev-shm-usage", "--renderer-process-limit=1"),
    *("--disable-site-isolation-trials", f"--disable-features={','.join(_FEATURES)}"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-breakpad", "--disable-domain-reliability", "--no-pings", "--mute-audio"),
    *("--deny-permission-prompts", "--password-store=basic", "--disk-cache-size=4000000"),
    *("--window-size=1280,800", "--hide-scrollbars", "--force-color-profile=srgb"),
)
# The sandbox is what locks Chromium in, so Chromium's own (--no-sandbox) is off: it needs system
# calls that the sandbox denies.
_START = """
hx=
for p in {programs}; do
  for q in $p; do hx=$(command -v "$q") && break 2; done
done
[[ $hx ]] || exit {absent}
ulimit -Sv "$(ulimit -Hv)"
[[ $(ulimit -Sv) = unlimited ]] || exit {bounded}
ulimit -d {kilobytes}
mkdir -p {folder} || exit 125
export HOME={folder} TMPDIR={folder} XDG_CONFIG_HOME={folder} XDG_CACHE_HOME={folder}
export FONTCONFIG_FILE={folder}/fonts DBUS_SESSION_BUS_ADDRESS=disabled:
export DBUS_SYSTEM_BUS_ADDRESS=disabled:
printf '<fontconfig><dir>/usr/share/fonts</dir><cachedir>%s</cachedir></fontconfig>' {folder} \
>{folder}/fonts
hx_proxy=()
[[ ${{http_proxy-}} ]] && hx_proxy=("--proxy-server=$http_proxy" \
"--proxy-bypass-list=<-loopback>;${{no_proxy//,/;}}")
exec "$hx" {flags} --user-data-dir={folder} "${{hx_proxy[@]}}" about:blank \
3<&0 4>&1 </dev/null >/dev/null 2>&1
"""

Params = Mapping[str, Any]


class Refused(ToolError):
    """The browser refuses a command."""


class _Message(msgspec.Struct):
    id: int = 0
    method: str = ""
    params: dict[str, Any] = {}
    result: dict[str, Any] = {}
    error: dict[str, Any] | None = None
    sessionId: str = ""


_decoder = msgspec.json.Decoder(_Message)


@dataclass
class Tab:
    """A page that is open."""

    session: str
    target: str
    opener: str = ""
    """The session of the page that opened it."""
    frame: str = ""
    """Its main frame."""
    loading: bool = False
    problem: str = ""
    """Why it cannot be used any more."""


@dataclass
class Browser:
    """One running Chromium and its pages; `start` makes it."""

    sandbox: Sandbox
    process: Process
    folder: str
    tabs: list[Tab] = field(default_factory=list)
    """The last one is the page that is shown."""
    refs: dict[str, int] = field(default_factory=dict)
    """References of the last snapshot -> nodes of the page."""
    notes: list[str] = field(default_factory=list)
    """What happened during a call: dialogs, new tabs."""
    accept_dialogs: bool = True
    known: dict[int, str] = field(default_factory=dict)
    """Nodes of the page -> their references in all snapshots of it."""
    listeners: list[Callable[[str, Params], None]] = field(default_factory=list)
    """Take the events of the page that is shown."""
    ended: bool = False
    _buffer: bytearray = field(default_factory=bytearray)
    _outgoing: bytearray = field(default_factory=bytearray)
    _answers: dict[int, _Message | None] = field(default_factory=dict)
    """Calls that wait -> their answers."""
    _number: int = 0
    _dialogs: int = 0

    @property
    def tab(self) -> Tab:
        """The page that is shown. Raises: ToolError."""
        if not self.tabs:
            raise ToolError("no page is open; use browser_navigate")
        return self.tabs[-1]

    async def call(
        self, method: str, params: Params | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Have the page that is shown do something.

        Returns: the result of the protocol's method.

        Raises: Refused; ToolError when it does not answer in time or breaks a bound: the browser is
            then ended. SandboxDied, SandboxKilled.
        """
        return await self._call(method, params, self.tab, timeout_s or COMMAND_S)

    async def _call(
        self, method: str, params: Params | None, tab: Tab | None, timeout_s: float
    ) -> dict[str, Any]:
        number = self._queue(method, params, tab)
        self._answers[number] = None
        try:
            async with asyncio.timeout(timeout_s):
                while (answer := self._answers[number]) is None:
                    await self._receive()
        except TimeoutError:
            await self.fail(f"the page did not respond within {timeout_s:g} s")
        finally:
            del self._answers[number]
        if answer.error is not None:
            raise Refused(str(answer.error.get("message", "refused"))[:300])
        return answer.result

    def post(self, method: str, params: Params) -> None:
        """Have the page that is shown do something, without an answer: a page in the background
        acknowledges no input. Raises: ToolError."""
        self._queue(method, params, self.tab)

    def _queue(self, method: str, params: Params | None = None, tab: Tab | None = None) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if tab is not None:
            message["sessionId"] = tab.session
        self._outgoing += msgspec.json.encode(message) + b"\0"
        return self._number

    async def _send(self) -> None:
        if data := bytes(self._outgoing):
            self._outgoing.clear()
            try:
                await self.process.write(data)
            except BrokenPipeError:
                code = await self.process.poll()
                await self.fail(_why(-1 if code is None else code))

    async def _receive(self) -> None:
        """Send what is queued; take what has arrived, or wait a moment."""
        await self._send()
        data = await self.process.read()
        if not data:
            if (code := await self.process.poll()) is not None:
                await self.fail(_why(code))
            await asyncio.sleep(_POLL_S)
            return
        *whole, rest = data.split(b"\0")
        for part in whole:
            await self._take(bytes(self._buffer) + part)
            self._buffer.clear()
        self._buffer += rest
        if len(self._buffer) > MAX_MESSAGE_BYTES:
            await self.fail("the page is too large")
        if self.tabs and self.tab.problem:
            await self.fail(self.tab.problem)

    async def _take(self, data: bytes) -> None:
        try:
            message = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            await self.fail("the browser sent something that is not its protocol")
        if message.id in self._answers:
            self._answers[message.id] = message
        elif message.method:
            self._event(message)

    def _event(self, message: _Message) -> None:
        params, tab = message.params, self._tab_of(message.sessionId)
        text = {name: str(value) for name, value in params.items() if isinstance(value, str)}
        if message.method == "Target.attachedToTarget":
            self._attached(params)
        elif message.method == "Target.detachedFromTarget":
            self.tabs = [tab for tab in self.tabs if tab.session != text.get("sessionId")]
        elif tab is None:
            return
        elif message.method == "Inspector.targetCrashed":
            tab.problem = "the page crashed; it may need too much memory"
        elif message.method == "Page.frameStartedLoading":
            tab.loading |= text.get("frameId") == tab.frame
        elif message.method == "Page.frameStoppedLoading":
            tab.loading &= text.get("frameId") != tab.frame
        elif message.method == "Page.javascriptDialogOpening":
            self._answer_dialog(tab, text)
        elif tab is self.tabs[-1]:
            for listen in self.listeners:
                listen(message.method, params)

    def _tab_of(self, session: str) -> Tab | None:
        return next((tab for tab in self.tabs if tab.session == session), None)

    def _attached(self, params: Params) -> None:
        """A page opened. The oldest are closed when there are too many."""
        session, info = params.get("sessionId"), params.get("targetInfo")
        if not isinstance(session, str) or not isinstance(info, dict):
            return
        if info.get("type") != "page":
            return
        target = str(info.get("targetId"))
        opener = next((t.session for t in self.tabs if t.target == info.get("openerId")), "")
        tab = Tab(session, target, opener, frame=target)
        if self.tabs:
            self.notes.append("a new tab opened and is shown now; browser_back closes it")
        self.tabs.append(tab)
        self.refs.clear()
        self._queue("Page.enable", tab=tab)
        self._queue("Inspector.enable", tab=tab)
        self._queue("Emulation.setDeviceMetricsOverride", VIEW, tab)
        self._queue("Runtime.runIfWaitingForDebugger", tab=tab)
        if len(self.tabs) > MAX_TABS:
            self._queue("Target.closeTarget", {"targetId": self.tabs.pop(0).target})

    def _answer_dialog(self, tab: Tab, text: Mapping[str, str]) -> None:
        """Answer a dialog, which stops its page until then."""
        self._dialogs += 1
        if self._dialogs > MAX_DIALOGS:
            tab.problem = "the page opens one dialog after the other"
            return
        kind = text.get("type", "")
        accept = self.accept_dialogs or kind in ("alert", "beforeunload")
        reply = {"accept": accept, "promptText": text.get("defaultPrompt", "")}
        self._queue("Page.handleJavaScriptDialog", reply, tab)
        how = "accepted" if accept else "dismissed"
        self.notes.append(
            f"the page showed a dialog ({kind[:20]}), which was {how}: "
            f"{text.get('message', '')[:500]}"
        )

    async def settle(self) -> bool:
        """Wait for what an action has started, and for the page to load. Returns: whether it has
        loaded. Raises: as `call`."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < LOAD_S:
            await self._receive()
            if passed > SETTLE_S and not (self.tabs and self.tab.loading):
                return True
        return False

    def begin(self, *, accept_dialogs: bool = True) -> None:
        """Begin a call: what happens from here on is in its notes."""
        self.notes.clear()
        self._dialogs, self.accept_dialogs = 0, accept_dialogs

    async def close_tab(self) -> None:
        """Close the page that is shown; the one before it is shown again."""
        tab = self.tab
        await self._call("Target.closeTarget", {"targetId": tab.target}, None, COMMAND_S)
        self.tabs = [other for other in self.tabs if other is not tab]
        self.refs.clear()
        await self.call("Page.bringToFront")

    async def end(self) -> None:
        """End the browser. Its files go, too."""
        self.ended = True
        await self.process.kill()
        await self.sandbox.run(f"command rm -rf -- {shlex.quote(self.folder)}", timeout_s=60)

    async def fail(self, why: str) -> NoReturn:
        """End the browser. Raises: ToolError; SandboxDied or SandboxKilled where that is why."""
        await self.end()  # raises the reason, if the sandbox ended
        raise ToolError(
            f"{why}. The browser was ended, with its cookies. Open a page with browser_navigate"
        )


def _why(code: int) -> str:
    return {_ABSENT: NO_BROWSER, _BOUNDED: _NO_MEMORY}.get(code, "the browser has ended")


async def start(sandbox: Sandbox) -> Browser:
    """Start a Chromium in a sandbox.

    Raises: ToolError with the fix where there is none; SandboxDied, SandboxKilled.
    """
    folder = f"{sandbox.scratch}/browser-{secrets.token_hex(4)}"
    command = _START.format(
        programs=" ".join(PROGRAMS),
        absent=_ABSENT,
        bounded=_BOUNDED,
        kilobytes=PROCESS_BYTES >> 10,
        folder=shlex.quote(folder),
        flags=" ".join(_FLAGS),
    )
    process = await sandbox.start_process(command, cwd=sandbox.scratch, lossless=True)
    browser = Browser(sandbox, process, folder)
    attach = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
    downloads = {"behavior": "deny"}
    await browser._call("Browser.setDownloadBehavior", downloads, None, START_S)
    await browser._call("Target.setAutoAttach", attach, None, COMMAND_S)
    await browser.settle()
    browser.notes.clear()
    return browser
