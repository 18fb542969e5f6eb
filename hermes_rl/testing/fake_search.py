"""The search services of `web_search` over a real socket: Tavily, Exa, Brave and SearXNG, below
`/tavily`, `/exa`, `/brave` and `/searxng`. A request that the real service would refuse is refused.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hermes_rl.testing.http_server import Connection, Incoming, Server, head

_ROUTES = {
    "/tavily/search": ("POST", "authorization", "Bearer ", "query", "max_results", "content"),
    "/exa/search": ("POST", "x-api-key", "", "query", "numResults", "text"),
    "/brave/res/v1/web/search": ("GET", "x-subscription-token", "", "q", "count", "description"),
    "/searxng/search": ("GET", "", "", "q", "", "content"),
}


class FakeSearch(Server):
    """The services, as an async context manager: `root_url` + `/tavily` is the address of one.

    Args:
        key: what they take.
    """

    def __init__(self, key: str) -> None:
        super().__init__(0)
        self.key = key
        self.results = [
            {"title": f"Result {n}", "url": f"https://site{n}.example/", "text": f"About {n}."}
            for n in range(1, 9)
        ]
        """What is found; Brave leaves `web` out where it is empty."""
        self.status = 200
        """Another one is answered to each request."""
        self.body: bytes | None = None
        """Answered in place of results."""
        self.queries: list[str] = []

    def handle(self, connection: Connection, request: Incoming) -> None:
        """See `Server.handle`."""
        status, answer = self._answer(request)
        body = self.body if self.body is not None else json.dumps(answer).encode()
        headers = {"content-type": "application/json"}
        if status in (301, 302):
            headers["location"] = f"{self.root_url}/stolen"
        connection.send(head(status, headers, len(body)) + body)

    def lost(self, connection: Connection) -> None:
        """See `Server.lost`."""

    def _answer(self, request: Incoming) -> tuple[int, Any]:
        url = urlsplit(request.path)
        self.requests += 1
        if self.status != 200 or url.path not in _ROUTES:
            wrong = {"error": "refused", "headers": dict(request.headers)}
            return (self.status if self.status != 200 else 404), wrong
        method, header, prefix, query, number, text = _ROUTES[url.path]
        if header and request.headers.get(header) != prefix + self.key:
            return 401, {"error": "not a valid key", "headers": dict(request.headers)}
        fields = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if method == "POST":
            fields = json.loads(request.body)
        if request.method != method or not fields.get(query):
            return 422, {"error": "not a valid request"}
        if not header and fields.get("format") != "json":
            return 403, {"error": "no such format"}
        self.queries.append(str(fields[query]))
        count = int(fields.get(number, len(self.results)))
        found = [
            {"title": one["title"], "url": one["url"], text: one["text"]}
            for one in self.results[:count]
        ]
        if "brave" in url.path:
            return 200, {"type": "search", **({"web": {"results": found}} if found else {})}
        return 200, {"query": fields[query], "results": found}
