"""Fetch pages of the public internet for the harness, however hostile addresses and pages are.

1. Every hop is checked: the address of the request and of each redirect.
2. A name is resolved once for each connection, all its addresses must be allowed, and the
   connection goes to one of them: no second lookup can lead elsewhere (DNS rebinding).
3. Bytes are bounded both as sent and as decompressed, and the time of a fetch as a whole.

Proxies of the environment are not used: a proxy would resolve the name again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from hermes_rl.errors import ToolError
from hermes_rl.network import Address, is_public, parse_host
from hermes_rl.text import scrub

ALLOW_PRIVATE = "HERMES_RL_WEB_ALLOW_PRIVATE"
"""The variable that, when 1, allows addresses that are not public: for tests and local pages."""
MAX_PAGE_BYTES = 5_000_000
MAX_REDIRECTS = 5
FETCH_S = 30.0
_MAX_URL_CHARS = 4_000
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; hermes-rl)",
    "Accept": "text/html,application/xhtml+xml,application/json;q=0.9,text/*;q=0.8,*/*;q=0.1",
    "Accept-Encoding": "gzip, deflate",
}
# Names that nothing answers for must not take the threads of other work.
_THREADS = ThreadPoolExecutor(4, thread_name_prefix="web-resolve")

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name, for a port. Raises: OSError."""


async def system_lookup(name: str, port: int) -> list[str]:
    """The addresses of a name, as the system finds them. Raises: OSError."""
    loop = asyncio.get_running_loop()
    kind = socket.SOCK_STREAM
    found = await loop.run_in_executor(_THREADS, socket.getaddrinfo, name, port, 0, kind)
    return [str(entry[4][0]) for entry in found]


def default_allowed(address: Address) -> bool:
    """Whether the address is public, or the user allows others (`ALLOW_PRIVATE`)."""
    return os.environ.get(ALLOW_PRIVATE) == "1" or is_public(address)


@dataclass(frozen=True)
class Page:
    """What a server answered."""

    url: str
    """Of the last hop."""
    content_type: str
    """In lower case, without parameters; empty where the server names none."""
    charset: str
    """Empty where the server names none that Python knows."""
    body: bytes
    """Decompressed."""


@dataclass(frozen=True)
class Fetcher:
    """Fetches pages.

    Args:
        lookup: resolves names.
        allowed: whether an address may be connected to.
    """

    lookup: Lookup = system_lookup
    allowed: Callable[[Address], bool] = default_allowed

    async def fetch(self, url: str, timeout_s: float = FETCH_S) -> Page:
        """Fetch a page by GET, with its redirects.

        Args:
            url: absolute, http or https.
            timeout_s: seconds for all of it.

        Raises: ToolError that says why there is no page.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch(_parsed(url))
        except TimeoutError:
            raise ToolError(f"no complete answer within {timeout_s:g} s") from None
        except _Forbidden as error:
            raise ToolError(str(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ToolError(f"cannot be fetched: {_reason(error)}") from None

    async def _fetch(self, url: URL) -> Page:
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self), use_dns_cache=False, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,  # ours is bounded
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        ) as session:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url)
                async with session.get(url, allow_redirects=False) as answer:
                    if answer.status not in _REDIRECTS:
                        return await _read(answer)
                    location = answer.headers.get("Location", "")
                url = _parsed(location, url)
        raise ToolError(f"more than {MAX_REDIRECTS} redirects")

    def _check(self, url: URL) -> None:
        """Check an address literal, which no lookup sees. Raises: _Forbidden."""
        raw = url.raw_host or ""
        try:
            host = parse_host(f"[{raw}]" if ":" in raw else raw)
        except ValueError as error:
            raise _Forbidden(f"refused: {error}") from None
        if host.address is not None:
            self.check_address(host.name, host.address)

    def check_address(self, host: str, address: Address) -> None:
        """Check an address that a host has. Raises: _Forbidden."""
        if not self.allowed(getattr(address, "ipv4_mapped", None) or address):
            raise _Forbidden(f"refused: {host} is not at a public address")


class _Forbidden(Exception):
    """An address that may not be connected to. aiohttp passes it through."""


class _Resolver(AbstractResolver):
    """Gives a connection the addresses that were checked, and no others."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = [ipaddress.ip_address(a) for a in await self._fetcher.lookup(host, port)]
        if not found:
            raise OSError("the name has no address")
        for address in found:
            self._fetcher.check_address(host, address)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in dict.fromkeys(found)
        ]

    async def close(self) -> None:
        pass


def _parsed(text: str, base: URL | None = None) -> URL:
    """The address of a request, or of a redirect from `base`. Raises: ToolError."""
    where = "the redirect" if base else "the URL"
    if len(text) > _MAX_URL_CHARS or re.search(r"[\x00-\x20\x7f\\]", text.strip()):
        raise ToolError(f"{where} is too long, or has spaces, backslashes or control characters")
    try:
        url = base.join(URL(text.strip())) if base else URL(text.strip())
        port = url.port
    except (ValueError, TypeError):
        raise ToolError(f"{where} is not valid") from None
    if url.scheme not in ("http", "https") or not url.raw_host or not port or not text.strip():
        raise ToolError(f"{where} must be a full address that begins with http:// or https://")
    if url.raw_user is not None or url.raw_password is not None:
        raise ToolError(f"{where} has a user name or password, which is refused")
    return url


async def _read(answer: aiohttp.ClientResponse) -> Page:
    if answer.status != 200:
        raise ToolError(f"the server answered with HTTP status {answer.status}")
    coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise ToolError("the server compressed the page in a way that was not requested")
    body = bytearray()
    async for chunk in answer.content.iter_chunked(65_536):
        body += chunk
        _check_size(len(body))
    plain = bytes(body) if coding in ("identity", "") else _decompressed(bytes(body))
    charset = answer.charset or ""
    try:
        b"".decode(charset or "utf-8")
    except (LookupError, ValueError):
        charset = ""
    declared = answer.headers.get("Content-Type", "").partition(";")[0]
    return Page(str(answer.url), declared.strip().lower(), charset, plain)


def _decompressed(body: bytes) -> bytes:
    """Raises: ToolError."""
    for bits in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # gzip or zlib, then without a header
        reader = zlib.decompressobj(bits)
        try:
            plain = reader.decompress(body, MAX_PAGE_BYTES + 1)
        except zlib.error:
            continue
        _check_size(len(plain))
        return plain
    raise ToolError("the page is not compressed as the server says")


def _check_size(size: int) -> None:
    if size > MAX_PAGE_BYTES:
        raise ToolError(f"the page is larger than {MAX_PAGE_BYTES // 1_000_000} MB")


def _reason(error: Exception) -> str:
    cause: Any = getattr(error, "os_error", None) or error
    return scrub(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
