"""The tools `browser_*`: pages in a Chromium that runs in the sandbox (see `chromium`).

A page is shown as its accessibility tree, whose elements have references. The references of a
snapshot hold until the next one, or until the page leaves.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec

from hermes_rl.errors import ToolError
from hermes_rl.sandboxes import Sandbox
from hermes_rl.text import cut_middle, to_json
from hermes_rl.tools import chromium
from hermes_rl.tools.accessibility import Node, Refs, lines_of
from hermes_rl.tools.base import Tool, ToolContext, ToolResult, schema, tool
from hermes_rl.tools.chromium import Browser, Params, Refused
from hermes_rl.tools.shell import write_bytes

MAX_SNAPSHOT_CHARS = 15_000
MAX_RESULT_CHARS = 60_000
MAX_NODES = 30_000
"""Of a page whose tree is shown; of a larger one only its text is."""
MAX_FRAMES = 10
MAX_MESSAGES = 50
"""Of the console, the latest."""
MAX_MESSAGE_CHARS = 500
MAX_VALUE_CHARS = 10_000
MAX_IMAGES = 100
MAX_TEXT_CHARS = 100_000
"""That are typed at once."""
MAX_SCREENSHOT_PIXELS = 8_000
"""Height of a picture of a whole page."""
_SCHEMES = ("http", "https", "file", "data", "about")

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, msgspec.MsgspecError)
"""Errors of reading what the browser sent, for which the sandbox answers."""
_browsers: WeakKeyDictionary[Sandbox, Browser] = WeakKeyDictionary()
_turns: WeakKeyDictionary[Sandbox, asyncio.Lock] = WeakKeyDictionary()
"""Calls on a browser wait for each other."""

Handler = Callable[[ToolContext, Browser, dict[str, Any]], Awaitable[dict[str, Any]]]


def browser_tool(name: str) -> Callable[[Handler], Tool]:
    """Make a tool of a handler that works on the unit's browser."""

    def make(handler: Handler) -> Tool:
        async def run(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
            assert ctx.sandbox is not None, "the agent refuses tools that lack their sandbox"
            async with _turns.setdefault(ctx.sandbox, asyncio.Lock()):
                browser = await _browser(ctx.sandbox, may_start=name == "browser_navigate")
                browser.begin(accept_dialogs=args.get("dialog") != "dismiss")
                try:
                    fields = await handler(ctx, browser, args)
                except _MALFORMED:
                    await browser.fail("the browser gave an answer of an unexpected form")
                if browser.notes:
                    fields["notes"] = list(dict.fromkeys(browser.notes))[-10:]
            return ToolResult(text=_text(fields), data=fields)

        made = tool(name=name, **schema(name), toolset="browser", max_chars=MAX_RESULT_CHARS)(run)
        return replace(made, untrusted=True, programs=chromium.PROGRAMS, install=chromium.INSTALL)

    return make


async def _browser(sandbox: Sandbox, *, may_start: bool) -> Browser:
    browser = _browsers.get(sandbox)
    if browser is None or browser.ended:
        if not may_start:
            raise ToolError("no page is open; use browser_navigate")
        browser = _browsers[sandbox] = await chromium.start(sandbox)
    return browser


def _text(fields: dict[str, Any]) -> str:
    """JSON of the fields, and after it the snapshot as it is: easier to read than in JSON."""
    rest = {name: value for name, value in fields.items() if name != "snapshot"}
    text = cut_middle(to_json(rest), MAX_RESULT_CHARS - MAX_SNAPSHOT_CHARS - 100)
    return f"{text}\n{fields['snapshot']}" if "snapshot" in fields else text


@browser_tool("browser_navigate")
async def browser_navigate(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Open `url`."""
    url = args["url"].strip()
    if re.match(r"[\w.-]+(:\d+)?(/|$)", url):
        url = f"http://{url}"
    if urlsplit(url).scheme not in _SCHEMES:
        raise ToolError(f"the url must start with one of {', '.join(_SCHEMES)}")
    found = await browser.call("Page.navigate", {"url": url}, 2 * chromium.COMMAND_S)
    if problem := found.get("errorText"):
        raise ToolError(f"cannot open {url[:300]}: {_explained(str(problem)[:100])}")
    return await _shown(browser)


def _explained(problem: str) -> str:
    if problem == "net::ERR_ABORTED":
        return f"{problem} (it is a download, or has no content: use the terminal)"
    if problem in ("net::ERR_INTERNET_DISCONNECTED", "net::ERR_NAME_NOT_RESOLVED"):
        return f"{problem} (the sandbox may have no network: then only its servers answer)"
    return problem


async def _shown(browser: Browser) -> dict[str, Any]:
    """Where the browser is after an action, with a snapshot."""
    loaded = await browser.settle()
    if not loaded:
        browser.notes.append(f"the page was still loading after {chromium.LOAD_S:g} s")
    return await _snapshot(browser)


async def _place(browser: Browser) -> dict[str, Any]:
    history = await browser.call("Page.getNavigationHistory")
    entry = history["entries"][history["currentIndex"]]
    return {"url": str(entry["url"])[:1_000], "title": str(entry["title"])[:300]}


async def _snapshot(browser: Browser, *, full: bool = False, offset: int = 1) -> dict[str, Any]:
    fields = await _place(browser)
    await browser.call("Performance.enable")
    metrics = (await browser.call("Performance.getMetrics"))["metrics"]
    count = next((m["value"] for m in metrics if m["name"] == "Nodes"), 0)
    if count > MAX_NODES:
        browser.notes.append(
            f"the page has {count:.0f} nodes, too many for a snapshot: this is the beginning of "
            "its text. Look further with an expression of browser_console, or with the terminal"
        )
        script = f"document.body.innerText.slice(0, {MAX_SNAPSHOT_CHARS})"
        text = await _evaluate(browser, script)
        return {**fields, "snapshot": str(text)[:MAX_SNAPSHOT_CHARS]}
    refs = Refs(browser.known, len(browser.known) + 1)
    page, frames = await _tree(browser), await _frames(browser)
    lines = list(lines_of(page, refs, frames, full=full))
    browser.refs = refs.shown
    shown, left = [], MAX_SNAPSHOT_CHARS - 200
    for line in lines[offset - 1 :]:
        left -= len(line) + 1
        if left < 0:
            break
        shown.append(line)
    last = offset - 1 + len(shown)
    if last < len(lines):
        shown.append(
            f"[lines {offset} to {last} of {len(lines)}; continue with browser_snapshot "
            f"and offset={last + 1}]"
        )
    return {**fields, "snapshot": "\n".join(shown) or "(the page is empty)"}


async def _tree(browser: Browser, frame: str | None = None) -> list[Node]:
    params = {"frameId": frame} if frame else {}
    found = await browser.call("Accessibility.getFullAXTree", params)
    return msgspec.convert(found["nodes"], list[Node])


async def _frames(browser: Browser) -> dict[int, list[Node]]:
    """Frame element -> the tree in it."""
    found: dict[int, list[Node]] = {}
    todo = [(await browser.call("Page.getFrameTree"))["frameTree"]]
    while todo and len(found) < MAX_FRAMES:
        for child in todo.pop().get("childFrames", ()):
            todo.append(child)
            frame = child["frame"]["id"]
            try:
                owner = (await browser.call("DOM.getFrameOwner", {"frameId": frame}))[
                    "backendNodeId"
                ]
                found[owner] = await _tree(browser, frame)
            except Refused:  # it is gone meanwhile
                continue
    return {owner: tree for owner, tree in found.items() if tree}


@browser_tool("browser_snapshot")
async def browser_snapshot(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Show the page."""
    await browser.settle()
    return await _snapshot(browser, full=args.get("full", False), offset=args.get("offset", 1))


def _node(browser: Browser, ref: str) -> dict[str, int]:
    """The node of a reference. Raises: ToolError for one that the last snapshot does not have."""
    ref = ref.strip().removeprefix("@").removeprefix("ref=")
    if ref not in browser.refs:
        raise ToolError(
            f"the reference '{ref[:40]}' is not in the last snapshot of this page; take a new one "
            "with browser_snapshot"
        )
    return {"backendNodeId": browser.refs[ref]}


async def _on(browser: Browser, node: Params, script: str, *values: Any) -> Any:
    """The value of a JavaScript function with a node as `this`."""
    try:
        found = (await browser.call("DOM.resolveNode", node))["object"]["objectId"]
    except Refused:
        raise _gone() from None
    arguments = [v if isinstance(v, dict) else {"value": v} for v in values]
    params = {"objectId": found, "functionDeclaration": script, "returnByValue": True}
    result = await browser.call("Runtime.callFunctionOn", {**params, "arguments": arguments})
    return result["result"].get("value")


def _gone() -> ToolError:
    return ToolError(
        "the element is no longer on the page; take a new snapshot with browser_snapshot"
    )


_CHOOSE = """function(text) {
  const e = this, list = e.closest('select');
  const named = o => o.label.trim() === text || o.value === text;
  const one = e === list ? [...list.options].find(named) : e;
  if (!one) return [...list.options].map(o => o.label.trim()).slice(0, 50);
  one.selected = true;
  for (const kind of ['input', 'change']) list.dispatchEvent(new Event(kind, {bubbles: true}));
}"""
_COVERED = """function(hit) {
  const element = n => n.nodeType === 3 ? n.parentNode : n, up = element(hit), mine = element(this);
  if (mine.contains(up) || up.contains(mine) || up.getRootNode() !== mine.getRootNode()) return '';
  if ((up.closest('label') || {}).control === mine) return '';
  return up.outerHTML.slice(0, 150);
}"""


async def _kind(browser: Browser, node: Params) -> str:
    try:
        return str((await browser.call("DOM.describeNode", node))["node"]["nodeName"]).lower()
    except Refused:
        raise _gone() from None


async def _point(browser: Browser, node: Params) -> tuple[float, float]:
    """Where an element can be clicked. Raises: ToolError for one that is hidden or covered."""
    try:
        await browser.call("DOM.scrollIntoViewIfNeeded", node)
        quads = (await browser.call("DOM.getContentQuads", node))["quads"]
    except Refused as error:
        if any(part in str(error) for part in ("Could not find", "No node", "detached")):
            raise _gone() from None
        raise ToolError(f"the element is not visible: {error}") from None
    if not quads:
        raise ToolError("the element is not visible")
    quad = quads[0]
    x, y = sum(quad[0::2]) / 4, sum(quad[1::2]) / 4
    try:
        where = {"x": int(x), "y": int(y), "includeUserAgentShadowDOM": False}
        hit = (await browser.call("DOM.getNodeForLocation", where))["backendNodeId"]
        hit = (await browser.call("DOM.resolveNode", {"backendNodeId": hit}))["object"]["objectId"]
    except Refused:
        return x, y
    if covering := await _on(browser, node, _COVERED, {"objectId": hit}):
        raise ToolError(f"the element is covered by another one: {str(covering)[:200]}")
    return x, y


@browser_tool("browser_click")
async def browser_click(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Click on the element `ref`, or choose it if it is an option."""
    node = _node(browser, args["ref"])
    if await _kind(browser, node) == "option":
        await _on(browser, node, _CHOOSE, "")
        return await _shown(browser)
    x, y = await _point(browser, node)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        mouse: dict[str, Any] = {"type": kind, "x": x, "y": y}
        if kind != "mouseMoved":
            mouse |= {"button": "left", "clickCount": 1}
        browser.post("Input.dispatchMouseEvent", mouse)
    return await _shown(browser)


@browser_tool("browser_type")
async def browser_type(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Replace the text of the field `ref`."""
    node, text = _node(browser, args["ref"]), args["text"]
    if len(text) > MAX_TEXT_CHARS:
        raise ToolError(f"the text has more than {MAX_TEXT_CHARS:,} characters")
    if await _kind(browser, node) == "select":
        if options := await _on(browser, node, _CHOOSE, text):
            raise ToolError(f"no such option; there are: {', '.join(map(str, options))[:1_000]}")
        return await _shown(browser)
    try:
        await browser.call("DOM.focus", node)
    except Refused as error:
        raise ToolError(f"cannot type into the element: {error}") from None
    select = "function() { this.select ? this.select() : getSelection().selectAllChildren(this) }"
    await _on(browser, node, select)
    if text:
        await browser.call("Input.insertText", {"text": text})
    else:
        _press(browser, "Delete")
    if args.get("submit"):
        _press(browser, "Enter")
    return await _shown(browser)


_CODES = (
    ("Enter", 13), ("Tab", 9), ("Escape", 27), ("Backspace", 8), ("Delete", 46), ("Home", 36),
    ("End", 35), ("ArrowLeft", 37), ("ArrowUp", 38), ("ArrowRight", 39), ("ArrowDown", 40),
    ("Space", 32), ("PageUp", 33), ("PageDown", 34), ("Insert", 45),
)  # fmt: skip
_KEYS = {**dict(_CODES), **{f"F{number}": 111 + number for number in range(1, 13)}}
_MODIFIERS = {"Alt": 1, "Control": 2, "Ctrl": 2, "Meta": 4, "Shift": 8}
_TEXTS = {"Enter": "\r", "Space": " "}


def _press(browser: Browser, keys: str) -> None:
    *held, key = keys.split("+") if len(keys) > 1 else [keys]
    key = next((name for name in _KEYS if name.lower() == key.lower()), key)
    if (len(key) != 1 and key not in _KEYS) or any(name not in _MODIFIERS for name in held):
        raise ToolError(
            f"unknown key '{keys[:40]}'; keys are single characters and {', '.join(_KEYS)}, "
            "with Control, Shift, Alt or Meta before them, as in Control+a"
        )
    modifiers = sum({_MODIFIERS[name] for name in held})
    code = _KEYS.get(key) or ord(key.upper())
    event: dict[str, Any] = {"key": " " if key == "Space" else key, "modifiers": modifiers}
    event |= {"windowsVirtualKeyCode": code, "code": key if key in _KEYS else f"Key{key.upper()}"}
    text = "" if modifiers & 6 else _TEXTS.get(key, key if len(key) == 1 else "")
    down = {**event, "type": "keyDown" if text else "rawKeyDown", "text": text}
    if modifiers & 6 and key.lower() == "a":
        down["commands"] = ["selectAll"]
    browser.post("Input.dispatchKeyEvent", down)
    browser.post("Input.dispatchKeyEvent", {**event, "type": "keyUp"})


@browser_tool("browser_press")
async def browser_press(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Press `key`."""
    _press(browser, args["key"])
    return await _shown(browser)


@browser_tool("browser_scroll")
async def browser_scroll(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Scroll by most of a screen, or to the element `ref`."""
    if ref := args.get("ref"):
        try:
            await browser.call("DOM.scrollIntoViewIfNeeded", _node(browser, ref))
        except Refused as error:
            raise ToolError(f"cannot scroll to the element: {error}") from None
    else:
        sign = -1 if args.get("direction", "down") == "up" else 1
        await _evaluate(browser, f"scrollBy({{top: {sign} * innerHeight * 0.8}})")
    await browser.settle()
    view = (await browser.call("Page.getLayoutMetrics"))["cssVisualViewport"]
    size = (await browser.call("Page.getLayoutMetrics"))["cssContentSize"]
    where = {"top": view["pageY"], "bottom": view["pageY"] + view["clientHeight"]}
    where = {name: round(value) for name, value in where.items()}
    return {**await _place(browser), "visible": where, "page_height": round(size["height"])}


@browser_tool("browser_back")
async def browser_back(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Go back by one page, or close a tab that has none before it."""
    history = await browser.call("Page.getNavigationHistory")
    at = history["currentIndex"]
    if at > 0:
        entry = history["entries"][at - 1]["id"]
        await browser.call("Page.navigateToHistoryEntry", {"entryId": entry})
    elif len(browser.tabs) > 1:
        await browser.close_tab()
    else:
        raise ToolError("there is no page before this one")
    return await _shown(browser)


async def _evaluate(browser: Browser, expression: str) -> Any:
    """The value of an expression in the page. Raises: ToolError with what the page threw."""
    params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
    params |= {"userGesture": True, "replMode": True}
    found = await browser.call("Runtime.evaluate", params)
    if thrown := found.get("exceptionDetails"):
        what = thrown.get("exception", {}).get("description") or thrown.get("text", "")
        raise ToolError(f"the expression failed: {str(what)[:MAX_MESSAGE_CHARS]}")
    result = found["result"]
    return result["value"] if "value" in result else result.get("description")


@browser_tool("browser_console")
async def browser_console(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """The console's messages and uncaught errors, and the value of `expression`."""
    fields: dict[str, Any] = {}
    if expression := args.get("expression"):
        value = await _evaluate(browser, expression)
        fields["value"] = _bounded(value)
    messages: list[str] = []

    def listen(method: str, params: Params) -> None:
        if line := _console_line(method, params):
            messages.append(line)
            del messages[:-MAX_MESSAGES]

    browser.listeners.append(listen)
    try:
        for verb in ("enable", "disable"):  # the browser keeps them, and repeats them when asked
            await browser.call(f"Runtime.{verb}")
            await browser.call(f"Log.{verb}")
        if args.get("clear"):
            await browser.call("Runtime.discardConsoleEntries")
            await browser.call("Log.clear")
    finally:
        browser.listeners.remove(listen)
    return {**fields, "messages": messages}


def _bounded(value: Any) -> Any:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return value if len(text) <= MAX_VALUE_CHARS else cut_middle(text, MAX_VALUE_CHARS)


def _console_line(method: str, params: Params) -> str:
    if method == "Runtime.consoleAPICalled":
        parts = [a.get("value", a.get("description", a.get("type"))) for a in params["args"][:20]]
        text = " ".join(part if isinstance(part, str) else str(part) for part in parts)
        kind = params["type"]
    elif method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        kind, text = "error", details.get("exception", {}).get("description") or details["text"]
    elif method == "Log.entryAdded":
        entry = params["entry"]
        kind, text = entry["level"], f"{entry['text']} {entry.get('url', '')}"
    else:
        return ""
    return f"{kind}: {text}"[:MAX_MESSAGE_CHARS]


@browser_tool("browser_screenshot")
async def browser_screenshot(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """Write a picture of the page to a PNG file of the sandbox."""
    params: dict[str, Any] = {"format": "png"}
    if args.get("full"):
        size = (await browser.call("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(size["height"], MAX_SCREENSHOT_PIXELS)
        params["captureBeyondViewport"] = True
        params["clip"] = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
    found = await browser.call("Page.captureScreenshot", params)
    try:
        data = base64.b64decode(found["data"], validate=True)
        width, height = struct.unpack(">II", data[16:24])
    except (binascii.Error, struct.error):
        raise ToolError("the browser gave no picture") from None
    assert ctx.sandbox is not None
    path = args.get("path") or f"{ctx.sandbox.scratch}/screenshot.png"
    await write_bytes(ctx, path, data)
    return {**await _place(browser), "path": path, "width": width, "height": height}


_IMAGES = """[...document.images].slice(0, %d).map(i => ({src: i.currentSrc.slice(0, 300),
alt: i.alt.slice(0, 200), width: i.naturalWidth, height: i.naturalHeight}))"""


@browser_tool("browser_get_images")
async def browser_get_images(ctx: ToolContext, browser: Browser, args: dict[str, Any]) -> Any:
    """The images of the page."""
    return {**await _place(browser), "images": await _evaluate(browser, _IMAGES % MAX_IMAGES)}


BROWSER_TOOLS: dict[str, Tool] = {
    made.name: made
    for made in (
        *(browser_navigate, browser_snapshot, browser_click, browser_type, browser_press),
        *(browser_scroll, browser_back, browser_console, browser_screenshot, browser_get_images),
    )
}
