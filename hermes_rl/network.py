"""What sandboxes may reach: nothing, everything, or a list of hosts (`sandbox.network`).

Hosts are names, names below a suffix, and addresses. A name is compared as it is written in a
request. An address counts as one only in its usual form: `127.1`, `0177.0.0.1` and `2130706433`,
which some resolvers take for addresses, are refused everywhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

from hermes_rl.errors import UserError

Network = bool | tuple[str, ...]
"""Off, on, or the hosts that can be reached through the egress proxy."""

Address = IPv4Address | IPv6Address

PORTS = (80, 443)
"""Of an entry that names no port."""

PROXY_PORT = 3128
"""Where the egress proxy listens, on the loopback of each sandbox."""

PROXY_CONNECTIONS = 16
"""Of one sandbox to its egress proxy at a time; further ones wait."""

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,254}))(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAT64 = IPv6Network("64:ff9b::/96")
_MORE_REFUSED = (
    IPv4Network("168.63.129.16/32"),  # a cloud's metadata service at a public address
    IPv4Network("192.0.0.0/24"),  # and one at an address for protocols, which Python calls global
    IPv4Network("192.88.99.0/24"),  # the rest are ways to other addresses: 6to4, Teredo
    IPv6Network("2001::/32"),
    IPv6Network("2002::/16"),
)


@dataclass(frozen=True)
class Host:
    """A host and a port, as a request or an entry names them."""

    name: str
    """Lower case, without a final dot; an address in its canonical form."""
    address: Address | None
    """Where the name is one."""
    port: int | None

    def __str__(self) -> str:
        name = f"[{self.name}]" if isinstance(self.address, IPv6Address) else self.name
        return name if self.port is None else f"{name}:{self.port}"


def parse_host(text: str) -> Host:
    """Read `NAME`, `NAME:PORT`, `ADDRESS`, `[IPV6]:PORT`. Raises: ValueError."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a host, or host:port")
    port = None if found[3] is None else int(found[3])
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{text[:80]!r} does not have a valid port")
    if found[1] is not None:
        six = IPv6Address(found[1])
        plain: Address = six.ipv4_mapped or six
        return Host(str(plain), plain, port)
    name = found[2].lower().removesuffix(".")
    labels = name.split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text[:80]!r} is not a valid host name")
    if not _NUMBER.fullmatch(labels[-1]):
        return Host(name, None, port)
    try:
        four = IPv4Address(name)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not an address of four decimal numbers") from None
    return Host(name, four, port)


def parse_network(value: Any) -> Network:
    """What a user wrote: a boolean, `on`, `off`, or hosts as a list or separated by commas.

    Returns the hosts in canonical form, sorted; no hosts are the same as off. Raises: ValueError.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if (switch := _SWITCHES.get(value.strip().lower())) is not None:
            return switch
        value = [part for part in value.split(",") if part.strip()]
        if not value:
            raise ValueError("must be on, off, or hosts such as pypi.example,*.example.org:8080")
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise ValueError("must be on, off, or a list of hosts")
    return tuple(sorted({str(_Entry.parse(part.strip())) for part in value})) or False


_SWITCHES = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True)
class _Entry:
    """One host of the list."""

    host: Host
    below: bool
    """The entry is `*.SUFFIX`: every name below it, and not itself."""

    @classmethod
    def parse(cls, text: str) -> _Entry:
        below = text.startswith("*.")
        try:
            host = parse_host(text[2:] if below else text)
        except ValueError:
            host = None
        if host is None or (below and host.address is not None):
            raise ValueError(
                f"entry {text[:80]!r} is not a host: write NAME, *.SUFFIX or ADDRESS, and :PORT "
                f"for another port than {PORTS[0]} and {PORTS[1]}"
            )
        return cls(host, below)

    def __str__(self) -> str:
        return f"*.{self.host}" if self.below else str(self.host)

    def covers(self, name: str, port: int) -> bool:
        if port not in (PORTS if self.host.port is None else (self.host.port,)):
            return False
        return name.endswith(f".{self.host.name}") if self.below else name == self.host.name


class AllowedHosts:
    """A list of hosts.

    Args:
        hosts: entries as `parse_network` returns them.

    Raises: ValueError.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._entries = [_Entry.parse(text) for text in hosts]

    def allow(self, host: Host, port: int) -> bool:
        """Whether an entry names this host and port."""
        literal = host.address is not None
        return any(e.covers(host.name, port) and not (literal and e.below) for e in self._entries)

    def allow_address(self, address: Address, port: int) -> bool:
        """Whether an allowed host may be at this address: on the public internet, or one that an
        entry names."""
        plain = (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
        named = any(e.covers(str(plain), port) for e in self._entries if e.host.address)
        return named or is_public(plain)

    def variables(self) -> dict[str, str]:
        """What leads the programs of a sandbox to its proxy. Addresses of the loopback that an
        entry names are not excepted: there the entry means this machine, not the sandbox."""
        named = {entry.host.name for entry in self._entries}
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        names = ("http_proxy", "https_proxy", "all_proxy")
        found = {spelled: proxy for name in names for spelled in (name, name.upper())}
        direct = ",".join(name for name in _LOOPBACK if name not in named)
        return {**found, "no_proxy": direct, "NO_PROXY": direct}


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local,
    multicast, reserved, or a metadata service."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if any(address.version == net.version and address in net for net in _MORE_REFUSED):
        return False
    if isinstance(address, IPv6Address) and address.is_site_local:
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def is_loopback(host: str) -> bool:
    """Whether a server that listens at this name or address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local_name(host: str, more: Iterable[str] = ()) -> bool:
    """Whether a Host header has a name of this machine, or an address: no site can have one.

    Args:
        more: further names of this machine.
    """
    name = host.lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        known = ("localhost", socket.gethostname(), *more)
        return name in {one.lower() for one in known}
    return True


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or on all IPv4 addresses if `host` is empty.

    Args:
        host: of a name's addresses, the first IPv4 one is taken, or the first IPv6 one if it has
            no other.
        port: 0 takes a free one.

    Raises: UserError when the address or the port cannot be used.
    """
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)
        family, _, _, _, (address, _, *scope) = min(found, key=lambda one: one[0] != socket.AF_INET)
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port, *scope))
            listener.listen(2048)
            undo.pop_all()
            return listener
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        shown = f"[{host}]" if ":" in host else host
        raise UserError(
            f"{shown}:{port} cannot be used: {why}. Choose another --host or --port"
        ) from error
