"""A trajectory API server in a process of its own, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from atropos_requests import Call, call
from forks import Forked


def free_port() -> int:
    """One below those that the kernel gives, and above those of the fake servers of tests."""
    while True:
        port = 32_000 + secrets.randbelow(700)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


class Api:
    """Runs `hermes-rl api` in a folder; an object can be started again after a kill, on the same
    port, which the kernel gives to no other process meanwhile."""

    def __init__(self, folder: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.folder, self.options, self.env = folder, options, env
        self.port = free_port()

    def start(self) -> Self:
        """Start it; on the same port as before."""
        command = ["api", "--port", str(self.port), *self.options]
        self.process = Forked(command, self.env or os.environ, self.folder)
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[2]
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname, parts.port
        return self

    def kill(self) -> None:
        """As a failing machine does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As an operator does; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.process.stdout.close()

    @contextlib.contextmanager
    def connection(self) -> Any:
        """A connection for many requests."""
        assert self.host is not None
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def send(self, request: Call, **headers: str) -> tuple[int, bytes]:
        """Status and body of the reply to one request on a connection of its own."""
        with self.connection() as connection:
            return exchange(connection, request, **headers)

    def get(self, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON that answers a GET, which must succeed."""
        status, data = self.send(call("GET", path, body), **headers)
        assert status == 200, (status, data)
        return json.loads(data)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the reply to a POST."""
        status, data = self.send(call("POST", path, body), **headers)
        return status, json.loads(data)


def exchange(
    connection: http.client.HTTPConnection, request: Call, **headers: str
) -> tuple[int, bytes]:
    """Send a request; headers are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(
        request.method, request.path, request.body, {**dict(request.headers), **named}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()
