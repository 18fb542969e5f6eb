"""A client of docker's or podman's local socket.

API: https://docs.docker.com/reference/api/engine/version/v1.41/, which podman serves too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import posixpath
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hermes_rl.errors import SandboxStartError, TaskFault
from hermes_rl.sandboxes import recipe

ENGINES = ("docker", "podman")
API = "/v1.41"
_HEADER = 8
"""Bytes before each piece of a container's output: its stream, three zeros, its length."""


class EngineError(OSError):
    """An engine refused a request.

    Args:
        status: of HTTP; 0 when it did not answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class EngineImage:
    """An image as its engine knows it."""

    id: str
    root: recipe.Root

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> EngineImage:
        config = found.get("Config") or {}
        env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        user = str(config.get("User") or "").partition(":")[0]
        workdir = config.get("WorkingDir") or None
        root = recipe.Root(
            env=env,
            workdir=None if workdir == "/" else workdir,
            superuser=user in ("", "root", "0"),
        )
        return cls(str(found["Id"]), root)


class Engine:
    """A client of one engine. Blocking, but for `attach`.

    Args:
        name: `docker` or `podman`.
        path: its socket; None finds it.
    """

    def __init__(self, name: str, path: str | None = None) -> None:
        self.name = name
        self.path = path or _find_socket(name)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, object] | None = None,
        into: Path | None = None,
        most: int | None = None,
    ) -> Any:
        """Make a request.

        Args:
            body: JSON, or an open file with a tar archive.
            query: parameters in the address.
            into: a file that takes the body of the answer.
            most: bytes of that, at most.

        Returns the answer's JSON, or its headers where it has none. Raises: EngineError.
        """
        connection = _Connection(self.path)
        headers = {"Content-Type": "application/json"}
        if isinstance(body, io.BufferedReader | io.BytesIO):
            headers = {"Content-Type": "application/x-tar"}
            data: Any = body
        else:
            data = b"" if body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, f"{API}{path}?{urlencode(query or {}, doseq=True)}", data, headers
            )
            answer = connection.getresponse()
            if answer.status < 300 and into is not None:
                with into.open("wb") as file:
                    while data := answer.read(1 << 20):
                        file.write(data)
                        if most is not None and file.tell() > most:
                            raise EngineError(0, f"more than {most} bytes")
                return None
            text = answer.read()
        except EngineError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(0, f"{self.name} does not answer at {self.path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise EngineError(answer.status, _message(text))
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return dict(answer.headers) if not text else _progress(text)

    def version(self) -> str:
        """Its version. Raises: SandboxStartError when it does not answer."""
        try:
            return str(self.request("GET", "/version")["Version"])
        except EngineError as error:
            raise SandboxStartError(str(error)) from error

    def image(self, name: str) -> EngineImage:
        """An image, pulled when the engine does not have it.

        Raises: TaskFault when it cannot be had; SandboxStartError when the engine does not answer.
        """
        if (image := self.find(name)) is not None:
            return image
        repository, tag = name, "latest"
        if ":" in posixpath.basename(name) and "@" not in name:
            repository, _, tag = name.rpartition(":")
        try:
            self.request("POST", "/images/create", query={"fromImage": repository, "tag": tag})
            return EngineImage.read(self.request("GET", _image_path(name)))
        except EngineError as error:
            raise TaskFault(
                f"image {name!r} is not in {self.name} and cannot be pulled: {error}"
            ) from error

    def find(self, name: str) -> EngineImage | None:
        """An image that the engine has; None for none. Raises: SandboxStartError when it does not
        answer."""
        try:
            return EngineImage.read(self.request("GET", _image_path(name)))
        except EngineError as error:
            if error.status == 0:
                raise SandboxStartError(str(error)) from error
            return None

    def load(self, archive: Path) -> None:
        """Take over an archive of `docker save`. Raises: EngineError."""
        with archive.open("rb") as file:
            self.request("POST", "/images/load", file)

    @contextlib.asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[Attached]:
        """The standard input and output of a container that has not started yet."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.path)
        except OSError as error:
            raise EngineError(0, f"{self.name} does not answer at {self.path}: {error}") from error
        try:
            query = "stream=1&stdin=1&stdout=1&stderr=1"
            writer.write(
                f"POST {API}/containers/{container}/attach?{query} HTTP/1.1\r\nHost: engine\r\n"
                "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            if head.split()[1:2] not in (["101"], ["200"]):
                raise EngineError(
                    0, f"{self.name} attaches to no container: {head.splitlines()[0]}"
                )
            yield Attached(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EngineError(0, f"{self.name} closed a connection: {error}") from error
        finally:
            writer.close()


def _image_path(name: str) -> str:
    return f"/images/{quote(name, safe='/:@')}/json"


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=3600)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _find_socket(name: str) -> str:
    """The socket of a local engine. Raises: SandboxStartError."""
    named = os.environ.get("CONTAINER_HOST" if name == "podman" else "DOCKER_HOST", "")
    if named.startswith("unix://"):
        return named.removeprefix("unix://")
    if named:
        raise SandboxStartError(
            f"{named} is not on this machine: sandboxes need an engine with a local socket. "
            f"Set {'CONTAINER_HOST' if name == 'podman' else 'DOCKER_HOST'} to unix:///PATH"
        )
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    places = [f"{runtime}/{name}", f"/run/{name}"]
    suffix = "/podman.sock" if name == "podman" else ".sock"
    found = next((place + suffix for place in places if os.access(place + suffix, os.W_OK)), None)
    if found is None:
        start = "podman system service --time=0" if name == "podman" else "systemctl start docker"
        raise SandboxStartError(
            f"no {name} that you may use: none of {', '.join(p + suffix for p in places)} can be "
            f"written. Start it ({start}), or set "
            f"{'CONTAINER_HOST' if name == 'podman' else 'DOCKER_HOST'}"
        )
    return found


def _message(text: bytes) -> str:
    """What an engine says of an error, in one line."""
    try:
        found = json.loads(text)
        message = str(found.get("message") or found.get("cause") or found)
    except (ValueError, AttributeError):
        message = text.decode("utf-8", "replace")
    return " ".join(message.split())[:500]


def _progress(text: bytes) -> str:
    """What a pull or build printed, from one JSON object per line. Raises: EngineError when it
    failed."""
    printed = []
    for line in text.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                if error := found.get("error"):
                    raise EngineError(500, " ".join(str(error).split())[:500])
                printed.append(str(found.get("stream") or found.get("status") or ""))
    return "".join(printed)


class Attached:
    """Both directions of an attached container."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        """The next piece of output; empty at the end."""
        try:
            head = await self._reader.readexactly(_HEADER)
            return await self._reader.readexactly(int.from_bytes(head[4:], "big"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return b""

    async def send(self, data: bytes) -> None:
        """Write to the input. Raises: OSError."""
        self._writer.write(data)
        await self._writer.drain()
