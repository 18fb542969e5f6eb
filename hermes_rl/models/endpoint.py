"""The endpoint of a model: address, key and timeouts."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from hermes_rl.errors import UserError
from hermes_rl.models.key_command import RenewableKey
from hermes_rl.models.wire import Quirks

TransportName = Literal["http", "sdk"]

EMBEDDED = "embedded:"
"""Prefix of the embedded model's endpoint in rows and messages; other endpoints are hosts."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds by phase. A complete call has no limit, because long answers are
    valid."""

    connect_s: float = 10.0
    """Name look-up, TCP and TLS."""
    first_byte_s: float = 600.0
    """From the start of the request to the head of the answer, including the server's queue."""
    idle_s: float = 120.0
    """Between two chunks of the answer."""


@dataclass(frozen=True)
class Secrets:
    """Texts that must not appear in messages, including later ones."""

    fixed: tuple[str, ...] = field(default=(), repr=False)
    live: RenewableKey | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[str]:
        yield from self.fixed
        if self.live is not None:
            yield from filter(_is_distinctive, self.live.seen)


@dataclass(frozen=True)
class Endpoint:
    """One address and account. Its repr never shows the key."""

    base_url: str
    """For example `https://api.example.com/v1`; the dialect adds its path. For Anthropic's Messages
    API with or without `/v1` at its end."""
    api_key: str | None = field(default=None, repr=False)
    live_key: RenewableKey | None = field(default=None, repr=False, compare=False)
    """Replaces `api_key` where a command prints renewed keys."""
    transport: TransportName = "http"
    api_mode: str = "chat_completions"
    quirks: Quirks | None = None
    """None takes the quirks of the host's provider."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every request."""
    timeouts: Timeouts = Timeouts()
    answer_bytes: int = 256 << 20
    """Maximum size of an answer: an endless one would fill the memory."""
    ca_file: str | None = None
    """Certificates to trust instead of the system's."""
    proxy: str | None = field(default=None, repr=False)
    """URL of an HTTP proxy. Proxy variables of the environment are ignored."""

    @property
    def host(self) -> str:
        """Host and port, for records: never user, password or path."""
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{parts.port}" if parts.port else host

    @property
    def local(self) -> bool:
        """Whether the address is loopback or private: a server of the user."""
        name = urlsplit(self.base_url).hostname or ""
        with suppress(ValueError):
            return ip_address(name).is_private
        return name == "localhost"

    @property
    def secrets(self) -> Secrets:
        """Texts that no message may show."""
        values = [self.api_key, urlsplit(self.base_url).password, *self.headers.values()]
        if self.proxy:
            values.append(urlsplit(self.proxy).password)
        return Secrets(tuple(v for v in values if v and _is_distinctive(v)), self.live_key)

    def url(self, path: str) -> str:
        """Return the address of one route, without repeating what `base_url` already ends with.

        For `/v1/messages`, the addresses `https://host`, `https://host/v1` and
        `https://host/v1/messages` give the same result.
        """
        base = self.base_url.rstrip("/")
        base_path = urlsplit(base).path
        for end in range(len(path), 1, -1):
            if path[end : end + 1] in ("", "/") and base_path.endswith(path[:end]):
                return base + path[end:]
        return base + path

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings of one client; None for plain HTTP."""
        if not self.base_url.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # ssl.SSLError is one
            invalid = isinstance(error, ssl.SSLError)
            why = "not a file of certificates" if invalid else error.strerror
            raise UserError(f"{self.ca_file}: {why}. Check endpoint.ca_file") from None

    def check(self) -> None:
        """Raises: UserError when the address or a header can never work."""
        check_address(self.base_url)
        if self.api_key is not None and not _printable(self.api_key):
            raise UserError(
                "the API key contains characters that no header can carry (a line break, a space?)."
                " Set it again without them"
            )
        if self.ca_file is not None:
            self.tls()
        for name, value in self.headers.items():
            if not _printable(name) or any(c in value for c in "\r\n\0"):
                raise UserError(f"header {name!r} contains characters that no header can carry")


def check_address(base_url: str) -> None:
    """Raises: UserError if the text is not the address of a server."""
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        known = False
    if not known:
        raise UserError(
            f"base_url {base_url!r} is not an address. Use for example http://127.0.0.1:8000/v1"
        )


def _is_distinctive(text: str) -> bool:
    """Whether a secret is long enough to be distinguished from ordinary text."""
    return len(text) >= 6


def _printable(text: str) -> bool:
    return bool(text) and all("!" <= c <= "~" for c in text)
