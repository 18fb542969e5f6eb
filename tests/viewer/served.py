"""`hermes-rl view` in a process of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from forks import Forked

COMMAND = str(Path(sys.executable).parent / "hermes-rl")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    address: str
    """As it was printed, with the token."""
    pid: int

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    def page(self, name: str, **query: Any) -> str:
        """The address of a page, which a browser with the cookie can open."""
        return f"http://127.0.0.1:{self.port}/#{name}?{urlencode(query)}"

    def ask(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Answer:
        """One request with these headers, and a right Host header unless they have one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            head = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, head, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **query: Any) -> Any:
        """The data of an address under /api, with the token."""
        target = f"/api/{path}?{urlencode(query)}"
        answer = self.ask(target, {"Authorization": f"Bearer {self.token}"})
        assert answer.status == 200, answer.body
        return answer.json()


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Served]:
    """Start `hermes-rl view` on a free port."""
    command = ["view", *map(str, arguments), "--port", "0", "--no-browser"]
    environment = {k: v for k, v in os.environ.items() if k != "BROWSER"}
    process = Forked(command, environment, Path.cwd())
    with process.stdout:
        try:
            yield Served(process.stdout.readline().strip(), process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
