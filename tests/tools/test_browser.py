"""The tools `browser_*`: a real Chromium in a real sandbox, on pages that the sandbox serves."""

import asyncio
import http.server
import os
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import SandboxKilled, ToolError
from hermes_rl.sandboxes import Bubblewrap, SandboxLimits
from hermes_rl.tools import TOOLS, chromium

SHOP = """<title>Shop</title><h1>Shop</h1><p>Welcome, <b>dear</b> guest</p>
<form action=/bought><label>Name <input name=n></label>
<select name=c><option>red<option>green<option>blue</select>
<label><input type=checkbox name=k>Keep</label><button>Buy</button></form>
<a href=/more>More</a> <a href=/more target=_blank>Elsewhere</a>
<div onclick="document.title = 'clicked'">a plain area</div>
<button onclick="document.title = confirm('Sure?')">Ask</button>
<iframe srcdoc="<button onclick=&quot;parent.document.title = 'inner'&quot;>Inner</button>">
</iframe><img src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
alt="a dot">
<div style="height: 5000px"></div><a download href=/shop id=d>Get</a>
<script>console.log('hello', {a: 1}); setTimeout(() => { null.x }, 0)</script>"""
PAGES = {
    "shop": SHOP,
    "more": "<title>More</title><h1>More</h1>",
    "bought": "<title>Bought</title>",
    "long": "<title>Long</title><script>for (let i = 0; i < 900; i++) document.write("
    "'<a href=/' + i + '>Number ' + i + '</a><br>')</script>",
    "covered": "<button>Under</button><div style='position: fixed; inset: 0'>over it</div>",
    "popups": "<button onclick='for (let i = 0; i < 50; i++) window.open(\"/more\")'>Pop</button>",
    "vast": "<title>Vast</title><pre>The beginning</pre><script>let s = '<b>x</b>'.repeat(40000); "
    "document.body.insertAdjacentHTML('beforeend', s)</script>",
    "hangs": "<script>setTimeout(() => { for (;;); }, 50)</script>",
    "asks": "<script>for (;;) alert('again')</script>",
    "eats": "<script>for (;;) { const p = document.createElement('p'); "
    "p.textContent = 'x'.repeat(1000) + Math.random(); document.lastChild.append(p) }</script>",
    "floods": "<title>Floods</title><script>setInterval(() => { for (let i = 0; i < 500; i++) "
    "console.log('x'.repeat(2000), i) }, 1)</script>",
}
SERVER = """
import http.server
class Pages(http.server.SimpleHTTPRequestHandler):
    extensions_map = {"": "text/html"}
    def log_message(self, *values): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Pages).serve_forever()
"""
READY = "until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"


@contextmanager
def web_server(text: str) -> Iterator[int]:
    """A server on the machine's loopback that answers with a text. Yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *values: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def site(open_bench: Callable[..., Any]) -> Callable[..., Any]:
    """A context with the tools in a sandbox that serves the pages."""

    @asynccontextmanager
    async def opened(backend: Bubblewrap | None = None, **spec: Any) -> AsyncIterator[Any]:
        async with open_bench(backend or Bubblewrap(), **spec) as bench:
            for name, page in PAGES.items():
                await bench.sandbox.write_file(f"pages/{name}", f"<!doctype html>{page}".encode())
            await bench.sandbox.write_file("serve.py", SERVER.encode())
            await bench.sandbox.start_process("python3 -I ../serve.py", cwd="pages")
            assert (await bench.sandbox.run(READY, timeout_s=60)).exit_code == 0
            yield bench

    return opened


@pytest.fixture
async def pages(site: Callable[..., Any]) -> AsyncIterator[Any]:
    """The tools in a sandbox without a network, in which a server has the pages."""
    async with site() as bench:
        yield bench


async def until_refused(bench: Any, page: str, times: int = 200) -> str:
    """Go to a page and look at it until a call fails. Returns why."""
    for _ in range(times):
        try:
            if page:
                await visit(bench, page)
            await shown(bench, "snapshot")
        except ToolError as error:
            return str(error)
    return ""


async def shown(bench: Any, name: str, **arguments: Any) -> str:
    return (await bench.result(f"browser_{name}", **arguments)).text


async def visit(bench: Any, page: str) -> str:
    return await shown(bench, "navigate", url=f"http://127.0.0.1:8000/{page}")


def ref(text: str, element: str) -> str:
    """The reference of the element whose line begins so."""
    found = re.search(rf"- {re.escape(element)}[^\n]*?\[ref=(e\d+)\]", text)
    assert found, f"no {element} in {text}"
    return found[1]


async def test_a_page_is_read_filled_in_and_sent(pages: Any) -> None:
    await visit(pages, "more")
    text = await visit(pages, "shop")
    assert text.startswith('{"url":"http://127.0.0.1:8000/shop","title":"Shop"}\n- heading "Shop"')
    assert "- text: dear" in text
    assert re.search(r'- link "More" \[ref=e\d+\] -> http://127.0.0.1:8000/more\n', text)
    text = await shown(pages, "type", ref=ref(text, 'textbox "Name"'), text="Zoë & co")
    assert '- textbox "Name"' in text
    assert "[focused]: Zoë & co" in text
    with pytest.raises(ToolError, match="no such option; there are: red, green, blue"):
        await shown(pages, "type", ref=ref(text, "combobox"), text="pink")
    await shown(pages, "type", ref=ref(text, "combobox"), text="green")
    text = await shown(pages, "click", ref=ref(text, 'checkbox "Keep"'))
    assert re.search(r'checkbox "Keep" \[ref=e\d+\] \[checked\]', text)
    assert '- option "green"' in text
    text = await shown(pages, "click", ref=ref(text, 'option "blue"'))
    text = await shown(pages, "press", key="Control+a")
    text = await shown(pages, "type", ref=ref(text, 'textbox "Name"'), text="Ann", submit=True)
    assert "/bought?n=Ann&c=blue&k=on" in text
    assert '"title":"Shop"' in await shown(pages, "back")
    assert '"title":"More"' in await shown(pages, "back")
    with suppress(ToolError):  # the first page may have replaced the blank one
        assert '"url":"about:blank"' in await shown(pages, "back")
    with pytest.raises(ToolError, match="there is no page before this one"):
        await shown(pages, "back")


async def test_frames_areas_dialogs_tabs_and_keys(pages: Any) -> None:
    text = await visit(pages, "shop")
    assert '"title":"inner"' in await shown(pages, "click", ref=ref(text, 'button "Inner"'))
    accepted = await shown(pages, "click", ref=ref(text, 'button "Ask"'))
    assert '"title":"true"' in accepted
    assert "the page showed a dialog (confirm), which was accepted: Sure?" in accepted
    refused = await shown(pages, "click", ref=ref(text, 'button "Ask"'), dialog="dismiss")
    assert '"title":"false"' in refused
    whole = await shown(pages, "snapshot", full=True)
    area = re.search(r"text \[ref=(e\d+)\]: a plain area", whole)
    assert area
    text = await shown(pages, "click", ref=area[1])
    assert '"title":"clicked"' in text
    tab = await shown(pages, "click", ref=ref(text, 'link "Elsewhere"'))
    assert '"title":"More"' in tab
    assert "a new tab opened" in tab
    back = await shown(pages, "back")
    assert '"title":"clicked"' in back
    with pytest.raises(ToolError, match="unknown key 'Hyper\\+x'"):
        await shown(pages, "press", key="Hyper+x")
    await shown(pages, "console", expression="document.querySelector('a').focus()")
    assert '"title":"More"' in await shown(pages, "press", key="Enter")


async def test_console_pictures_images_and_scrolling(pages: Any, tmp_path: Path) -> None:
    await visit(pages, "shop")
    found = await pages("browser_console", expression="({a: [1, document.title]})")
    assert found["value"] == {"a": [1, "Shop"]}
    assert found["messages"][0] == "log: hello Object"
    assert any("TypeError: Cannot read properties of null" in m for m in found["messages"])
    with pytest.raises(ToolError, match="the expression failed: ReferenceError: nobody"):
        await pages("browser_console", expression="nobody", clear=True)
    await pages("browser_console", clear=True)
    assert (await pages("browser_console"))["messages"] == []
    assert len(await shown(pages, "console", expression="'x'.repeat(1e6)")) < 12_000
    images = (await pages("browser_get_images"))["images"]
    assert [(i["alt"], i["width"]) for i in images] == [("a dot", 1)]
    first = await pages("browser_scroll")
    assert first["visible"]["top"] > 300
    assert first["page_height"] > 5_000
    assert (await pages("browser_scroll", direction="up"))["visible"]["top"] == 0
    taken = await pages("browser_screenshot", path="shot.png", full=True)
    assert taken["height"] == first["page_height"]
    await pages.sandbox.download("shot.png", tmp_path / "shot.png")
    assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
    assert (await pages("browser_screenshot"))["path"].startswith(pages.sandbox.scratch)


async def test_references_hold_for_one_snapshot(pages: Any) -> None:
    with pytest.raises(ToolError, match="no page is open; use browser_navigate"):
        await shown(pages, "snapshot")
    text = await visit(pages, "shop")
    more, name = ref(text, 'link "More"'), ref(text, 'textbox "Name"')
    again = await shown(pages, "snapshot")
    assert ref(again, 'link "More"') == more
    await shown(pages, "console", expression="document.querySelector('input').remove()")
    with pytest.raises(ToolError, match="no longer on the page; take a new snapshot"):
        await shown(pages, "click", ref=name)
    await shown(pages, "click", ref=more)
    with pytest.raises(ToolError, match=f"'{more}' is not in the last snapshot"):
        await shown(pages, "click", ref=more)
    covered = await visit(pages, "covered")
    with pytest.raises(ToolError, match="covered by another one: <div"):
        await shown(pages, "click", ref=ref(covered, 'button "Under"'))


async def test_snapshots_are_bounded(pages: Any) -> None:
    text = await visit(pages, "long")
    seen = re.findall(r'link "Number (\d+)"', text)
    while more := re.search(r"continue with browser_snapshot and offset=(\d+)", text):
        assert len(text) < 16_000
        text = await shown(pages, "snapshot", offset=int(more[1]))
        seen += re.findall(r'link "Number (\d+)"', text)
    assert seen == [str(i) for i in range(900)]
    vast = await visit(pages, "vast")
    assert "too many for a snapshot" in vast
    assert "The beginning" in vast
    assert len(vast) < 17_000


@pytest.mark.parametrize(
    ("page", "why"),
    [
        pytest.param("hangs", "the page did not respond within 5 s", marks=pytest.mark.slow),
        ("asks", "the page opens one dialog after the other"),
        ("eats", "the page crashed; it may need too much memory|did not respond"),
    ],
)
async def test_a_bad_page_costs_the_browser_alone(
    pages: Any, page: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await visit(pages, "more")
    if page != "asks":
        monkeypatch.setattr(chromium, "COMMAND_S", 5.0)
    assert re.search(why, await until_refused(pages, page))
    monkeypatch.undo()
    assert await pages.sh("pgrep -c chromium; ls -d /tmp/browser-*; false") == (
        "0\nls: cannot access '/tmp/browser-*': No such file or directory\n"
    )
    assert '"title":"More"' in await visit(pages, "more")


@pytest.mark.slow
async def test_floods_popups_and_downloads_are_contained(pages: Any) -> None:
    text = await visit(pages, "popups")
    text = await shown(pages, "click", ref=ref(text, 'button "Pop"'))
    assert 'heading "More"' in text  # its title may come later
    await visit(pages, "shop")
    await shown(pages, "console", expression="document.querySelector('#d').click()")
    assert await pages.sh("find / -newer serve.py -name 'shop*' -not -path '/proc/*' 2>/dev/null "
                          "| grep -v pages") == ""  # fmt: skip
    assert '"title":"Floods"' in await visit(pages, "floods")
    with suppress(ToolError):  # when it floods faster than the browser can keep
        messages = (await pages("browser_console"))["messages"]
        assert 0 < len(messages) <= 50
        assert all(len(message) <= 500 for message in messages)
    assert '"title":"More"' in await visit(pages, "more")


FORGE = """for fd in /proc/[0-9]*/fd/4; do
  command=$(tr '\\0' ' ' <${fd%/fd/4}/cmdline)
  [[ $(readlink $fd) = */p*.out && $command = *pipe* ]] && { MESSAGE; } >$fd
done; true"""


@pytest.mark.parametrize(
    "message",
    [
        "printf 'nonsense\\0'",
        "printf '[[[%s' \"$(head -c 200000 /dev/zero | tr '\\0' '[')\"; printf '\\0'",
        "printf '{\"method\":7}\\0'",
        "head -c 40M /dev/zero | tr '\\0' x",
        'while :; do for i in {1..300}; do printf \'{"id":%d,"result":{"nodes":7}}\\0\' $i; done; '
        "done",
    ],
)
async def test_messages_that_the_agent_forges_end_the_browser_alone(
    pages: Any, message: str
) -> None:
    await visit(pages, "more")
    await pages.sandbox.start_process(FORGE.replace("MESSAGE", message))
    assert "The browser was ended" in await until_refused(pages, "")
    assert '"title":"More"' in await visit(pages, "more")


async def test_a_killed_browser_is_replaced(pages: Any) -> None:
    await visit(pages, "more")
    await pages.sh("pkill -9 chromium")
    with pytest.raises(ToolError, match="the browser has ended"):
        await shown(pages, "snapshot")
    assert '"title":"More"' in await visit(pages, "more")


async def test_it_ends_with_its_sandbox(pages: Any) -> None:
    await visit(pages, "more")
    folder = (await pages.sh("echo /tmp/browser-*")).strip().encode()
    assert any(folder in line for line in command_lines())
    await pages.sandbox.aclose()
    assert not any(folder in line for line in command_lines())
    with pytest.raises(Exception, match="closed"):
        await shown(pages, "snapshot")


def command_lines() -> list[bytes]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return found


async def test_a_browser_without_a_bound_of_memory_ends_the_sandbox_at_most(
    site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose process has no bound takes the sandbox with it, not the machine."""
    monkeypatch.setattr(chromium, "PROCESS_BYTES", 64 << 30)
    async with site(limits=SandboxLimits(memory_bytes=700 << 20)) as bench:
        with suppress(SandboxKilled):
            assert await until_refused(bench, "eats")
            assert await bench.sh("echo here") == "here\n"


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file of the machine that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "key.txt").write_text("canary-51c2")
        yield Path(folder, "key.txt")


async def test_no_file_of_the_machine_and_no_port_of_the_browser(pages: Any, secret: Path) -> None:
    for url in (f"file://{secret}", f"file:///proc/1/root{secret}"):
        with pytest.raises(ToolError, match="net::ERR_"):
            await shown(pages, "navigate", url=url)
    await visit(pages, "more")
    for script in ("location = 'chrome://version'; 1", f"window.open('file://{secret}'); 1"):
        await shown(pages, "console", expression=script)
        text = await shown(pages, "snapshot")
        assert "canary-51c2" not in text
        assert "chrome://version" not in text
    listening = await pages.sh("cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A '")
    assert listening == "1\n", "the server of the pages, and no debugging port"


async def test_no_network_but_the_sandbox(pages: Any) -> None:
    with web_server("from the machine") as port:
        for address in (f"127.0.0.1:{port}", "169.254.169.254", "example.com"):
            with pytest.raises(ToolError, match=r"cannot open .*net::ERR_"):
                await shown(pages, "navigate", url=f"http://{address}/")
    assert "daemon" not in await shown(pages, "navigate", url="file:///etc/passwd")
    for url in ("chrome://version", "view-source:file:///etc/passwd", "devtools://devtools/",
                "javascript:alert(1)", "ftp://localhost/"):  # fmt: skip
        with pytest.raises(ToolError, match="the url must start with one of"):
            await shown(pages, "navigate", url=url)


async def test_a_list_of_hosts_holds_for_pages_too(site: Callable[..., Any]) -> None:
    with web_server("allowed") as good, web_server("refused") as bad:
        async with site(network=(f"127.0.0.1:{good}",)) as bench:
            assert "allowed" in await shown(bench, "navigate", url=f"http://127.0.0.1:{good}/")
            for address in (f"127.0.0.1:{bad}", f"localhost:{good}", "169.254.169.254"):
                text = ""
                try:
                    text = await shown(bench, "navigate", url=f"http://{address}/")
                except ToolError as error:
                    text = str(error)
                assert "refused" not in text.replace("ERR_CONNECTION_REFUSED", "").split("\n")
                assert "text: allowed" not in text
            script = f"fetch('http://127.0.0.1:{bad}/').then(r => r.text()).catch(String)"
            await shown(bench, "navigate", url=f"http://127.0.0.1:{good}/")
            got = await bench("browser_console", expression=script)
            assert got["value"] != "refused"


async def test_no_secret_of_the_launcher_is_in_the_browser(
    site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-51c2")
    async with site() as bench:
        await visit(bench, "more")
        # Chromium's other processes write their titles over their variables.
        script = "for p in $(pgrep crashpad); do tr '\\0' '\\n' </proc/$p/environ; done"
        found = await bench.sh(script)
        assert "FONTCONFIG_FILE" in found
        assert "canary" not in found


async def test_what_is_absent_is_explained(
    site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(Bubblewrap(cgroups=False)) as bench:
        with pytest.raises(ToolError, match="limits the address space of each process"):
            await visit(bench, "more")
        monkeypatch.setattr(chromium, "PROGRAMS", ("no-such-browser",))
        with pytest.raises(ToolError, match=r"no Chromium. Install it .*apt-get install chromium"):
            await visit(bench, "more")


async def test_results_are_untrusted_and_calls_wait_for_each_other(pages: Any) -> None:
    assert all(TOOLS[name].untrusted for name in TOOLS if name.startswith("browser_"))
    await visit(pages, "shop")
    found = await asyncio.gather(*(shown(pages, "snapshot") for _ in range(4)))
    assert len(set(found)) == 1
