"""The tools `web_extract` and `web_search`, against real servers of this machine."""

import asyncio
import gzip
import ipaddress
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import ToolError
from hermes_rl.network import is_public
from hermes_rl.testing import FakeSearch
from hermes_rl.tools import (
    ALLOW_PRIVATE,
    MAX_PAGE_BYTES,
    MAX_PAGE_CHARS,
    PROVIDERS,
    TOOLS,
    Fetcher,
    Page,
    ToolContext,
    lacks,
    page_text,
    read_arguments,
)

ARTICLE = (
    "<html><head><title>Tides</title></head><body><nav><a href=/a>Menu</a></nav><article>"
    "<h1>Tides</h1><p>The sea rises twice a day, and a <a href='https://moon.example/'>moon</a> "
    "is the reason for it, as sailors have known for a long time.</p><table><tr><td>high</td>"
    "<td>6:12</td></tr></table></article><script>alert('no')</script></body></html>"
)
OPEN, CLOSED = "127.0.0.2", "127.0.0.1"
"""Two addresses of this machine: tests allow the first, as if it were public."""
SECRET = "canary-key-71f3a9"


class Site:
    """Answers by path, with raw bytes, at both addresses and one port."""

    def __init__(self) -> None:
        self.port = 0
        self.answers: dict[str, bytes] = {}
        self.seen: list[tuple[str, str]] = []
        """Address and path of each request."""
        self.heads: list[str] = []

    def add(self, path: str, body: bytes | str, *headers: str, status: int = 200) -> None:
        body = body.encode() if isinstance(body, str) else body
        lines = (f"HTTP/1.1 {status} X", *headers, f"Content-Length: {len(body)}", "", "")
        self.answers[path] = "\r\n".join(lines).encode() + body

    def redirect(self, path: str, to: str) -> None:
        self.add(path, "", f"Location: {to}", status=302)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.seen.append((writer.get_extra_info("sockname")[0], path))
            self.heads.append(head)
            if path == "/silent":
                await reader.read()
            writer.write(self.answers.get(path, b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    first = await asyncio.start_server(site.serve, CLOSED, 0)
    site.port = first.sockets[0].getsockname()[1]
    second = await asyncio.start_server(site.serve, OPEN, site.port)
    site.add("/", ARTICLE, "Content-Type: text/html")
    async with first, second:
        yield site


def at(site: Site, path: str = "/", host: str = OPEN) -> str:
    return f"http://{host}:{site.port}{path}"


def fetcher(*lookups: list[str]) -> Fetcher:
    """One whose lookups give these addresses in turn; it may reach `OPEN` alone."""
    turns = iter(lookups)

    async def lookup(name: str, port: int) -> list[str]:
        return next(turns)

    return Fetcher(lookup, lambda address: str(address) == OPEN)


async def call(name: str, /, **arguments: Any) -> Any:
    """A call as a model makes it: the JSON that it reads."""
    tool = TOOLS[name]
    read = read_arguments(json.dumps(arguments), tool.parameters)
    result = await tool.handler(ToolContext(sandbox=None), read)
    assert len(result.text) <= tool.max_chars
    return json.loads(result.text)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_PRIVATE, "1")


async def test_pages_are_read_as_text(site: Site, local: None) -> None:
    site.add("/t", "plain\ntext", "Content-Type: text/plain")
    site.add("/j", '{"a": [1]}', "Content-Type: application/json; charset=utf-8")
    site.add("/z", gzip.compress(ARTICLE.encode()), "Content-Encoding: gzip")
    site.redirect("/r", "/t")
    urls = [at(site, path) for path in ("/", "/t", "/j", "/z", "/r")]
    page, text, data, packed, moved = (await call("web_extract", urls=urls))["pages"]
    assert (page["title"], page["url"]) == ("Tides", urls[0])
    assert "[moon](https://moon.example/)" in page["content"]
    assert "6:12" in page["content"]
    assert "alert" not in page["content"]
    assert "<" not in page["content"]
    assert text == {"url": urls[1], "content": "plain\ntext"}
    assert data["content"] == '{"a": [1]}'
    assert packed["content"] == page["content"]
    assert moved == {"url": urls[4], "redirected_to": urls[1], "content": "plain\ntext"}
    assert not any("cookie" in head.lower() or "authorization" in head for head in site.heads)
    assert TOOLS["web_extract"].untrusted
    assert not TOOLS["web_extract"].needs_sandbox


async def test_what_cannot_be_read_is_one_line_each(site: Site, local: None) -> None:
    site.add("/pdf", b"%PDF-1.7 \0\1", "Content-Type: application/pdf")
    site.add("/png", b"\x89PNG\0\0", "Content-Type: image/png")
    site.add("/bytes", b"\0\1\2", "Content-Type: text/plain")
    site.add("/empty", "<html><script>1</script></html>", "Content-Type: text/html")
    paths = ("/pdf", "/png", "/bytes", "/empty", "/absent")
    pages = (await call("web_extract", urls=[at(site, path) for path in paths]))["pages"]
    assert [page["error"] for page in pages] == [
        "a PDF file of 11 bytes, which this tool does not read",
        "not text: image/png, 6 bytes",
        "not text: text/plain, 3 bytes",
        "the page has no text (it may need a browser)",
        "the server answered with HTTP status 404",
    ]
    for wrong in ([], [at(site)] * 6):
        with pytest.raises(ToolError, match="give 1 to 5 URLs"):
            await call("web_extract", urls=wrong)


async def test_addresses_that_are_not_public_are_refused(site: Site) -> None:
    urls = [at(site, "/", host) for host in (CLOSED, "localhost", "[::ffff:127.0.0.1]")]
    urls += ["http://169.254.169.254/latest/", "http://[64:ff9b::7f00:1]/"]
    pages = (await call("web_extract", urls=urls))["pages"]
    assert all("not at a public address" in page["error"] for page in pages), pages
    assert site.seen == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.com/", "http://"),
        ("file:///etc/passwd", "http://"),
        ("example.com", "http://"),
        ("http://", "http://"),
        ("http://user@example.com/", "user name"),
        ("http://:pass@example.com/", "user name"),
        ("http://127.1/", "four decimal numbers"),
        ("http://0x7f000001/", "four decimal numbers"),
        ("http://0177.0.0.1/", "four decimal numbers"),
        ("http://1.1.1.1:99999/", "not valid"),
        ("http://a b/", "spaces"),
        ("http://8.8.8.8\\@127.0.0.1/", "backslashes"),
        ("http://[fe80::1%25eth0]/", "refused|not valid"),
        ("http://a/" + "x" * 5000, "too long"),
    ],
)
async def test_unusual_addresses_are_refused(url: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        await Fetcher().fetch(url)


def notations(value: int) -> list[str]:
    """How an address of four numbers is written, as some programs read it."""
    a, b, c, d = value.to_bytes(4)
    dotted, mapped = f"{a}.{b}.{c}.{d}", f"{a:02x}{b:02x}:{c:02x}{d:02x}"
    wide = dotted.translate({ord(str(n)): 0xFF10 + n for n in range(10)})
    return [
        *(dotted, f"{dotted}.", str(value), hex(value), oct(value).replace("o", "")),
        *(f"{a:#x}.{b}.{c}.{d}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"{a}.{b}.{c * 256 + d}", wide),
        *(f"[::ffff:{dotted}]", f"[::ffff:{mapped}]", f"[64:ff9b::{mapped}]", f"[::{mapped}]"),
        *(f"[2002:{mapped}::1]", f"{dotted}%00", f"%31{dotted[1:]}", f"{a}%2e{b}.{c}.{d}"),
    ]


NETS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
MORE = ("0.0.0.0/8", "100.64.0.0/10", "224.0.0.0/4", "240.0.0.0/4", "198.18.0.0/15")


@given(st.data())
async def test_no_notation_of_a_private_address_is_fetched(data: st.DataObject) -> None:
    net = ipaddress.IPv4Network(data.draw(st.sampled_from(NETS + MORE)))
    value = int(net[0]) + data.draw(st.integers(0, net.num_addresses - 1))
    host = data.draw(st.sampled_from(notations(value)))
    reached = []

    async def lookup(name: str, port: int) -> list[str]:
        reached.append(name)
        return [str(ipaddress.IPv4Address(value))]  # as the C library may read it

    with pytest.raises(ToolError, match=r"refused|not valid"):
        await Fetcher(lookup, is_public).fetch(f"http://{host}:9/")


async def test_each_redirect_is_checked(site: Site) -> None:
    goals = [at(site, "/", CLOSED), "http://inside.example/", "file:///etc/passwd", ""]
    goals += [f"http://u:p@{OPEN}/", "http://169.254.169.254/"]
    for n, goal in enumerate(goals):
        site.redirect(f"/{n}", goal)
        with pytest.raises(ToolError, match=r"refused|must be a full address"):
            await fetcher([CLOSED]).fetch(at(site, f"/{n}"))
    site.redirect("/loop", "/loop")
    with pytest.raises(ToolError, match="more than 5 redirects"):
        await fetcher().fetch(at(site, "/loop"))
    assert {address for address, _ in site.seen} == {OPEN}


async def test_a_name_that_changes_its_address_reaches_what_was_checked(site: Site) -> None:
    name = at(site, "/", "changing.example")
    page = await fetcher([OPEN], [CLOSED]).fetch(name)
    assert (page.url, page.body) == (name, ARTICLE.encode())
    site.redirect("/again", name)
    with pytest.raises(ToolError, match=r"changing\.example is not at a public address"):
        await fetcher([OPEN], [CLOSED]).fetch(at(site, "/again", "changing.example"))
    for mixed in ([OPEN, CLOSED], [OPEN, "::1"], ["::ffff:127.0.0.1"]):
        with pytest.raises(ToolError, match="not at a public address"):
            await fetcher(mixed).fetch(name)
    with pytest.raises(ToolError, match="no address"):
        await fetcher([]).fetch(name)
    assert {address for address, _ in site.seen} == {OPEN}


async def test_proxies_of_the_environment_are_not_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, at(site, "/proxy", CLOSED))
    assert (await fetcher([OPEN]).fetch(at(site, "/", "a.example"))).body == ARTICLE.encode()
    assert site.seen == [(OPEN, "/")]


async def test_sizes_and_times_are_bounded(site: Site) -> None:
    bomb = b"\0" * (MAX_PAGE_BYTES * 10)
    site.add("/large", b"x" * (MAX_PAGE_BYTES + 1))
    site.add("/gzip", gzip.compress(bomb), "Content-Encoding: gzip")
    site.add("/deflate", zlib.compress(bomb), "Content-Encoding: deflate")
    for path in ("/large", "/gzip", "/deflate"):
        with pytest.raises(ToolError, match="larger than 5 MB"):
            await fetcher().fetch(at(site, path))
    site.add("/broken", b"not packed", "Content-Encoding: gzip")
    site.add("/other", b"x", "Content-Encoding: br")
    site.answers["/head"] = b"HTTP/1.1 200 X\r\n" + b"A: b\r\n" * 100_000 + b"\r\n"
    site.answers["/odd"] = b"\0\1\2 no HTTP\r\n\r\n"
    site.answers["/half"] = b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nhalf"
    for path in ("/broken", "/other", "/head", "/odd", "/half"):
        with pytest.raises(ToolError):
            await fetcher().fetch(at(site, path))
    with pytest.raises(ToolError, match=r"within 0.2 s"):
        await fetcher().fetch(at(site, "/silent"), timeout_s=0.2)


async def test_hostile_pages_give_bounded_text_or_an_error(site: Site, local: None) -> None:
    site.add("/long", "\x01\x02" * 50_000, "Content-Type: text/plain")
    urls = [at(site, "/long")] * 5
    for page in (await call("web_extract", urls=urls))["pages"]:
        assert page["truncated"]
        assert 1_000 < len(page["content"]) <= MAX_PAGE_CHARS
    (short,) = (await call("web_extract", urls=urls[:1], char_limit=100))["pages"]
    assert (len(short["content"]), short["truncated"]) == (100, True)
    many = b"".join(b"<p>Line %d of a page that is very long.</p>" % n for n in range(100_000))
    title, text = await page_text(Page("http://a/", "text/html", "", many), 1000)
    assert (title, len(text)) == ("", 1001)
    for body in (
        b"<div>" * 200_000 + b"deep",
        b"<table><tr><td>" * 20_000,
        b"<p " + b"a=1 " * 200_000 + b">x",
        b"<p>" + bytes(range(1, 256)) * 50,
        b"<!ENTITY a 'b'><!DOCTYPE x [<!ENTITY f SYSTEM 'file:///etc/passwd'>]><p>&f;</p>",
    ):
        try:
            title, text = await page_text(Page("http://a/", "text/html", "", body), 1000)
        except ToolError:
            continue
        assert len(title) <= 300
        assert len(text) <= 1001
        assert "root:" not in text


@pytest.fixture
async def search(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeSearch]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for provider in PROVIDERS:
        monkeypatch.delenv(provider.variable, raising=False)
    async with FakeSearch(SECRET) as server:
        for name in ("tavily", "exa", "brave"):
            monkeypatch.setenv(f"{name.upper()}_BASE_URL", f"{server.root_url}/{name}")
        yield server


@pytest.fixture(params=[provider.variable for provider in PROVIDERS])
def variable(
    request: pytest.FixtureRequest, search: FakeSearch, monkeypatch: pytest.MonkeyPatch
) -> str:
    name = str(request.param)
    keyless = name == "SEARXNG_URL"
    monkeypatch.setenv(name, f"{search.root_url}/searxng/" if keyless else SECRET)
    return name


async def test_each_provider_finds_pages(search: FakeSearch, variable: str) -> None:
    assert lacks(TOOLS["web_search"]) is None
    found = (await call("web_search", query="high  tide & moon"))["results"]
    assert [one["title"] for one in found] == [f"Result {n}" for n in range(1, 6)]
    assert found[0] == {"title": "Result 1", "url": "https://site1.example/", "text": "About 1."}
    assert len((await call("web_search", query="tide", limit=2))["results"]) == 2
    assert search.queries == ["high tide & moon", "tide"]
    search.results = []
    assert await call("web_search", query="tide") == {"results": []}


async def test_no_key_is_in_results_or_errors(
    search: FakeSearch, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.results = [{"title": SECRET, "url": f"http://a/?k={SECRET}", "text": f"is {SECRET}"}]
    if variable != "SEARXNG_URL":
        assert SECRET not in str(await call("web_search", query="key"))
    errors = []
    for status in (301, 401, 403, 429, 500):
        search.status = status
        with pytest.raises(ToolError, match=str(status)) as caught:
            await call("web_search", query="tide")
        errors.append(str(caught.value))
    search.status = 200
    for body in (b"", b"[]", b'{"results": 1, "web": 2}', b"[" * 99_999, b" " * 2_000_001):
        search.body = body
        with pytest.raises(ToolError) as caught:
            await call("web_search", query="tide")
        errors.append(str(caught.value))
    await search.aclose()
    with pytest.raises(ToolError, match="cannot be asked") as caught:
        await call("web_search", query="tide")
    assert not any(SECRET in text for text in [*errors, str(caught.value)])


async def test_without_a_service_the_variables_are_named(search: FakeSearch) -> None:
    why = "no search service: set TAVILY_API_KEY, EXA_API_KEY, BRAVE_API_KEY or SEARXNG_URL"
    assert lacks(TOOLS["web_search"]) == why
    with pytest.raises(ToolError, match=why):
        await call("web_search", query="tide")
    assert search.requests == 0
