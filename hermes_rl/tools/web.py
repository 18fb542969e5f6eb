"""The tools `web_extract` and `web_search`. They run in the harness, not in the sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import ToolError
from hermes_rl.text import clean, decode_json, mask, one_line, scrub, strip_ansi, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool

if TYPE_CHECKING:
    from hermes_rl.tools.web_fetch import Page

WEB_EXTRACT, WEB_SEARCH = "web_extract", "web_search"
MAX_URLS = 5
MAX_PAGE_CHARS = 15_000
MAX_RESULTS = 20
_RESULT_CHARS = 100_000
_SHOWN_URL = 1_000
_EXTRACT_S = 20.0
_MAX_HTML_BYTES = 1_500_000
"""The extraction needs about 2.5 s for each MB."""
_MAX_ANSWER_BYTES = 2_000_000
_SNIPPET_CHARS = 1_000
_HTML = ("text/html", "application/xhtml+xml", "")
_TEXTS = ("application/json", "application/xml", "application/javascript", "application/yaml")


@tool(name=WEB_EXTRACT, **schema(WEB_EXTRACT), toolset="web", parallel=True)
async def _web_extract(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {pages}: {url, title, content, truncated} or {url, error} for each URL."""
    from hermes_rl.tools.web_fetch import FETCH_S

    urls = [clean(url) for url in args["urls"]]
    limit = args.get("char_limit") or MAX_PAGE_CHARS
    if not 0 < len(urls) <= MAX_URLS:
        raise ToolError(f"give 1 to {MAX_URLS} URLs")
    seconds = min(FETCH_S, ctx.max_timeout_s)
    fetched = await asyncio.gather(*(_fetched(url, seconds) for url in urls))
    # One page after the other, so that many rollouts do not start many processes each.
    pages = [
        {"url": url[:_SHOWN_URL], "error": found}
        if isinstance(found, str)
        else await _shown(url, found, limit)
        for url, found in zip(urls, fetched, strict=True)
    ]
    return _fitted(pages, limit)


async def _fetched(url: str, seconds: float) -> Page | str:
    from hermes_rl.tools.web_fetch import Fetcher

    try:
        return await Fetcher().fetch(url, seconds)
    except ToolError as error:
        return str(error)


async def _shown(url: str, page: Page, limit: int) -> dict[str, Any]:
    try:
        title, text = await page_text(page, limit)
    except ToolError as error:
        return {"url": url[:_SHOWN_URL], "error": str(error)}
    text = strip_ansi(clean(text)).strip()
    fields: dict[str, Any] = {"url": url[:_SHOWN_URL]}
    if page.url != url:
        fields["redirected_to"] = page.url[:_SHOWN_URL]
    if title:
        fields["title"] = one_line(clean(title))
    fields["content"] = text[:limit]
    if len(text) > limit:
        fields["truncated"] = True
    return fields


def _fitted(pages: list[dict[str, Any]], limit: int) -> ToolResult:
    """Shorten texts until all of them fit: escaping can make them longer."""
    while len(text := to_json({"pages": pages})) > _RESULT_CHARS:
        limit = limit * 3 // 4
        for page in pages:
            if len(page.get("content", "")) > limit:
                page.update(content=page["content"][:limit], truncated=True)
    return ToolResult(text, data={"pages": pages})


async def page_text(page: Page, limit: int) -> tuple[str, str]:
    """Title and text of a page.

    Args:
        limit: characters; a longer text has more than that, though not all of it.

    Raises: ToolError where it has no text.
    """
    kind = page.content_type
    if page.body.startswith(b"%PDF-") or kind == "application/pdf":
        raise ToolError(f"a PDF file of {len(page.body):,} bytes, which this tool does not read")
    named = (
        kind.startswith("text/") or kind in (*_TEXTS, *_HTML) or kind.endswith(("+json", "+xml"))
    )
    if not named or (b"\0" in page.body[:1024] and not page.charset):
        shown = scrub(kind) or "unknown type"
        raise ToolError(f"not text: {shown}, {len(page.body):,} bytes")
    if kind in _HTML:
        title, text = await _extracted(page, limit)
    else:
        title, text = "", page.body.decode(page.charset or "utf-8", "replace")[: limit + 1]
    if not text.strip():
        raise ToolError("the page has no text (it may need a browser)")
    return title, text


async def _extracted(page: Page, limit: int) -> tuple[str, str]:
    """Title and text of HTML, by another process: see `web_page`. Raises: ToolError."""
    options = [str(limit), *([page.charset] if page.charset else [])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes_rl.tools.web_page", *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"},
    )
    try:
        async with asyncio.timeout(_EXTRACT_S):
            out, _ = await process.communicate(page.body[:_MAX_HTML_BYTES])
    except TimeoutError:
        out = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ToolError("the page is too complicated: its text was not found in time")
    found = json.loads(out)
    return found["title"], found["text"]


def _lacks_library() -> str | None:
    absent = importlib.util.find_spec("trafilatura") is None
    return "not installed: pip install 'hermes-rl[web]'" if absent else None


web_extract = replace(
    _web_extract,
    needs_sandbox=False,
    untrusted=True,
    missing=_lacks_library,
    present=lambda: "the package trafilatura is installed",
)


@dataclass(frozen=True)
class Provider:
    """A search service, of which a variable has the key or, for SearXNG, the address."""

    name: str
    variable: str
    address: str
    """Empty where the variable has it. NAME_BASE_URL replaces its part before the path."""
    path: str
    header: str
    """The header with the key, as `NAME: PREFIX`."""
    request: Callable[[str, int], dict[str, Any]]
    """Query and number of results -> the body of a POST, or the query string of a GET."""
    posts: bool
    results: tuple[str, ...]
    """Where the list of results is."""
    text: str
    """The field of a result that has its text; `title` and `url` are the same everywhere."""

    def base_url(self) -> str:
        changed = os.environ.get(f"{self.name.upper()}_BASE_URL")
        return (changed or self.address or os.environ[self.variable]).rstrip("/")


PROVIDERS = (
    Provider(
        *("Tavily", "TAVILY_API_KEY", "https://api.tavily.com", "/search"),
        *("Authorization: Bearer ", lambda q, n: {"query": q, "max_results": n}, True),
        *(("results",), "content"),
    ),
    Provider(
        *("Exa", "EXA_API_KEY", "https://api.exa.ai", "/search", "x-api-key: "),
        lambda q, n: {
            "query": q,
            "numResults": n,
            "contents": {"text": {"maxCharacters": _SNIPPET_CHARS}},
        },
        *(True, ("results",), "text"),
    ),
    Provider(
        *("Brave", "BRAVE_API_KEY", "https://api.search.brave.com", "/res/v1/web/search"),
        "X-Subscription-Token: ",
        lambda q, n: {"q": q, "count": n, "text_decorations": "false"},
        *(False, ("web", "results"), "description"),
    ),
    Provider(
        *("SearXNG", "SEARXNG_URL", "", "/search", ""),
        lambda q, n: {"q": q, "format": "json"},
        *(False, ("results",), "content"),
    ),
)
"""The first whose variable is set is used."""


def _provider() -> Provider | None:
    return next((one for one in PROVIDERS if os.environ.get(one.variable)), None)


@tool(name=WEB_SEARCH, **schema(WEB_SEARCH), toolset="web", parallel=True)
async def _web_search(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {results}: {title, url, text} for each."""
    import aiohttp

    from hermes_rl.tools.web_fetch import FETCH_S

    provider, query = _provider(), one_line(clean(args["query"]))
    if provider is None:
        raise ToolError(str(_lacks_key()))
    if not 0 < len(query) <= 400:
        raise ToolError("query must have 1 to 400 characters")
    limit = min(args.get("limit") or 5, MAX_RESULTS)
    secret = os.environ[provider.variable]
    try:
        async with asyncio.timeout(min(FETCH_S, ctx.max_timeout_s)):
            answer = await _answer(provider, secret, query, limit)
    except TimeoutError:
        raise ToolError(f"{provider.name} did not answer in time") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # Only the kind: messages of clients can repeat the address or a header.
        raise ToolError(f"{provider.name} cannot be asked: {type(error).__name__}") from None
    results = [_result(one, provider, secret) for one in _listed(answer, provider)[:limit]]
    fields = {"results": results}
    return ToolResult(to_json(fields), data=fields)


async def _answer(provider: Provider, secret: str, query: str, limit: int) -> Any:
    """Raises: ToolError, aiohttp.ClientError, OSError, ValueError."""
    import aiohttp

    header, _, prefix = provider.header.partition(": ")
    asking = provider.request(query, limit)
    # No redirects: one could lead the key elsewhere.
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.request(
            "POST" if provider.posts else "GET",
            provider.base_url() + provider.path,
            headers={header: prefix + secret} if header else {},
            allow_redirects=False,
            json=asking if provider.posts else None,
            params=None if provider.posts else asking,
        ) as answer,
    ):
        if answer.status != 200:
            hint = {
                401: f": check {provider.variable}",
                403: ": formats in its settings must contain json"
                if provider.name == "SearXNG"
                else f": check {provider.variable}",
                429: ": too many searches; wait, or continue without",
            }
            status = f"{provider.name} answered with HTTP status {answer.status}"
            raise ToolError(status + hint.get(answer.status, ""))
        body = bytearray()
        async for chunk in answer.content.iter_chunked(65_536):
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise ToolError(f"the answer of {provider.name} is too large")
        return decode_json(bytes(body))


def _listed(answer: Any, provider: Provider) -> list[Mapping[str, Any]]:
    for key in provider.results:
        answer = answer.get(key, {}) if isinstance(answer, dict) else None
    if isinstance(answer, dict) and not answer:  # Brave leaves `web` out where nothing is found
        return []
    if not isinstance(answer, list):
        raise ToolError(f"{provider.name} gave an answer of an unexpected form")
    return [one for one in answer if isinstance(one, dict)]


def _result(one: Mapping[str, Any], provider: Provider, secret: str) -> dict[str, str]:
    fields = {
        "title": ("title", 300),
        "url": ("url", 2_000),
        "text": (provider.text, _SNIPPET_CHARS),
    }
    found = {name: (str(one.get(key) or ""), most) for name, (key, most) in fields.items()}
    secrets = [secret] if provider.header else []
    return {n: mask(one_line(clean(text)), secrets)[:most] for n, (text, most) in found.items()}


def _lacks_key() -> str | None:
    if _provider() is not None:
        return None
    *names, last = (one.variable for one in PROVIDERS)
    return f"no search service: set {', '.join(names)} or {last}"


def _has_key() -> str:
    provider = _provider()
    return "no search service is set" if provider is None else f"{provider.variable} is set"


web_search = replace(
    _web_search, needs_sandbox=False, untrusted=True, missing=_lacks_key, present=_has_key
)
