"""The contract of transports: one POST, one reply, no retry, typed errors.

A transport knows nothing of the body. It maps what went wrong below HTTP to typed errors; statuses
are the client's matter.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from hermes_rl.errors import AuthError, ConnectionLost, ModelError, ModelTimeout, ProtocolError

_ERRNO = re.compile(r"\[Errno (\d+)\]")

LINGER_S = 0.25
"""How long an answer that said it is complete may take to end, so that its connection is reused."""


def connection_fault(error: Exception) -> str:
    """Why a connection failed, in the words of the system: `connection refused`.

    aiohttp's own text speaks of ssl for plain http too.
    """
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLError):  # its numbers are not the system's
        plain = inner.reason == "WRONG_VERSION_NUMBER"
        return "the server does not speak TLS (use http:// there)" if plain else str(inner)
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    number = getattr(inner, "errno", None) or 0
    if number <= 0 and (found := _ERRNO.search(text)):  # several addresses were tried
        number = int(found[1])
    if number > 0:
        text = os.strerror(number)
    return text[0].lower() + text[1:]


WATCH_S, WATCHES = 0.05, 25
"""How long and how often the end of a stream is watched: whoever hangs up after one does so at
once."""


class Reply(Protocol):
    """The head of an answer, and its body piece by piece."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    first_byte_s: float
    """Seconds from the start of the request to this head."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes in. Raises: ModelTimeout, ProtocolError."""
        ...


class Transport(Protocol):
    """Posts bytes."""

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Reply]:
        """One request. Raises: ModelTimeout, ConnectionLost."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class KeepAlive:
    """Whether a server keeps its connections after a stream. Some engines (llama.cpp) close them
    without a word, and a request that meets the closing one is lost: so the first stream's end is
    watched, and where the server hangs up, connections are used once.

    Args:
        plain: without TLS; with it nothing is watched.
    """

    def __init__(self, *, plain: bool) -> None:
        self.once = False
        """Use each connection for one request."""
        self._plain = plain
        self._known = not plain

    def lost(self) -> None:
        """A request was lost before any byte came back: watch again."""
        self._known = not self._plain

    async def watch(self, headers: Mapping[str, str], closed: Callable[[], bool]) -> None:
        """Look whether a server hangs up after its answer.

        Args:
            headers: of the answer.
            closed: whether its connection is closed by now.
        """
        streamed = "event-stream" in headers.get("content-type", "")
        if self._known or self.once or not streamed:
            return
        for _ in range(WATCHES):
            if closed():
                break
            await asyncio.sleep(WATCH_S / WATCHES)
        self.once = self.once or closed()
        self._known = True


def connect_timeout(host: str, seconds: float) -> ModelTimeout:
    """No connection in time: nothing was served."""
    return ModelTimeout(f"no connection to {host} within {seconds:g} s")


def first_byte_timeout(host: str, seconds: float) -> ModelTimeout:
    """A request was sent and nothing came back: it may be served, and billed."""
    return ModelTimeout(f"no answer from {host} within {seconds:g} s", served=True)


def idle_timeout(host: str, seconds: float) -> ModelTimeout:
    """An answer began and then stood still."""
    return ModelTimeout(f"the answer of {host} stood still for {seconds:g} s", served=True)


def not_connected(host: str, reason: str) -> ConnectionLost:
    """The connection could not be made: nothing was served."""
    return ConnectionLost(f"cannot reach {host}: {reason}")


def proxy_refused(host: str, status: int) -> ModelError:
    """The proxy let nothing through. What the packages say of it may hold its password."""
    if status == 407:
        text = f"the proxy for {host} refuses its user and password (407). Check endpoint.proxy"
        return AuthError(text, status=status)
    return not_connected(host, f"the proxy answered {status}")


def untrusted(host: str, reason: str) -> AuthError:
    """The server cannot prove who it is: no key was sent, and no other attempt could do better."""
    return AuthError(
        f"cannot trust {host}: {reason}. Set endpoint.ca_file if its certificate is your own",
        reason="ssl_cert_verification",
    )


def broken(host: str, reason: str) -> ConnectionLost:
    """The connection broke off after the request was sent."""
    return ConnectionLost(f"connection to {host} broke off: {reason}", served=True)


def cut(host: str, reason: str) -> ProtocolError:
    """An answer broke off in the middle of its body."""
    return ProtocolError(f"the answer of {host} broke off: {reason}", served=True)
