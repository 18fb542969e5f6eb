"""Sandboxes on other machines over ssh: a pool of hosts, one connection to each.

On a host the helper of `remote` runs the sandboxes, in that machine's bubblewrap; what it needs is
Python 3.11, bash and bubblewrap. Host keys are checked against known_hosts and never accepted
otherwise; keys, agents and ~/.ssh/config are used as by OpenSSH.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.remote import Link, RemoteSandbox, Start
from hermes_rl.sandboxes.remote_frames import NoPlace

_log = logging.getLogger(__name__)

CONNECT_S = 30.0
KEEPALIVE_S = 15
COOLDOWN_S = 30.0
"""How long a host is left alone after it could not be used, while others can."""
WAIT_S = 0.5
"""Between two looks for a free place, when all are taken."""


@dataclass(frozen=True)
class SshHost:
    """One machine of the pool; None and empty fields are as ~/.ssh/config has them."""

    host: str
    user: str | None = None
    port: int | None = None
    slots: int = 16
    """Sandboxes at a time, of all workers."""
    key: str | None = None
    """File with the private key."""
    known_hosts: str | None = None
    python: str = "python3"
    folder: str | None = None
    """Where it keeps sandboxes; None is its temporary folder."""

    def __str__(self) -> str:
        who = f"{self.user}@" if self.user else ""
        return f"{who}{self.host}{f':{self.port}' if self.port else ''}"


class SshChannel:
    """A process of asyncssh (see `remote.Channel`)."""

    def __init__(self, process: Any) -> None:
        self._process = process

    async def read(self, size: int) -> bytes:
        """See `remote.Channel`."""
        from asyncssh import Error

        try:
            data: bytes = await self._process.stdout.readexactly(size)
        except Error as error:
            raise ConnectionResetError(str(error)) from error
        return data

    async def write(self, data: bytes) -> None:
        """See `remote.Channel`."""
        from asyncssh import Error

        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except Error as error:
            raise ConnectionResetError(str(error)) from error

    async def failure(self) -> str:
        """See `remote.Channel`."""
        from asyncssh import Error

        try:
            async with asyncio.timeout(5):
                printed: bytes = await self._process.stderr.read()
        except (Error, TimeoutError):
            return ""
        return printed.decode("utf-8", "replace")

    async def aclose(self) -> None:
        """See `remote.Channel`."""
        self._process.stdin.write_eof()
        self._process.close()


def asyncssh_of(name: str) -> Any:
    """Something of asyncssh. Raises: SandboxStartError when it is not installed."""
    try:
        import asyncssh

        return getattr(asyncssh, name)
    except (ImportError, AttributeError):
        raise SandboxStartError(
            "--sandbox ssh needs asyncssh: pip install 'hermes-rl[ssh]'"
        ) from None


class _Machine:
    """A host of the pool, as this worker uses it."""

    def __init__(self, host: SshHost, plain: str | None) -> None:
        self.host = host
        self.leases = 0
        self.failed_at = float("-inf")
        self._plain = plain
        self._link: Link | None = None
        self._connection: Any = None
        self._opening = asyncio.Lock()

    async def link(self) -> Link:
        """The link to its helper, opened when there is none. Raises: SandboxStartError."""
        async with self._opening:
            if self._link is None or self._link.lost:
                await self._drop()
                try:
                    self._link = await self._open()
                except SandboxStartError:
                    self.failed_at = time.monotonic()
                    await self._drop()
                    raise
            return self._link

    async def _open(self) -> Link:
        try:
            self._connection = await self._connect()
            start = Start(self.host.python, self.host.folder)
            process = await self._connection.create_process(
                start.command, encoding=None, stderr=asyncssh_of("PIPE")
            )
        except (asyncssh_of("Error"), OSError, ValueError, TimeoutError) as error:
            raise SandboxStartError(f"ssh {self.host}: {explain(error, self.host)}") from error
        channel = SshChannel(process)
        try:
            await start.ready(channel)
            link = Link(str(self.host), channel)
            if self._plain is not None:
                await link.open(self.host.slots, self._plain)
        except SandboxStartError as error:
            raise SandboxStartError(f"ssh {self.host}: {error}") from error
        return link

    async def _connect(self) -> Any:
        host = self.host
        options: dict[str, Any] = {
            "username": host.user,
            "port": host.port,
            "client_keys": [host.key] if host.key else None,
            "known_hosts": host.known_hosts,
        }
        return await asyncssh_of("connect")(
            host.host,
            **{name: value for name, value in options.items() if value is not None},
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=3,
            connect_timeout=CONNECT_S,
            login_timeout=CONNECT_S,
            compression_algs=["none"],
        )

    async def _drop(self) -> None:
        if self._link is not None:
            await self._link.aclose()
            self._link = None
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()
            self._connection = None

    async def aclose(self) -> None:
        """End the helper, and the connection."""
        async with self._opening:
            await self._drop()


def explain(error: Exception, host: SshHost) -> str:
    """Why there is no connection, and what to do about it, in one line."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, asyncssh_of("HostKeyNotVerifiable")):
        where = host.known_hosts or "~/.ssh/known_hosts"
        return (
            f"its host key is not that of {where} ({text}). If the host is yours, add the key "
            "that it shows to an administrator there"
        )
    if isinstance(error, asyncssh_of("PermissionDenied")):
        return f"it refused your key ({text}): see that `ssh {host}` works without a password"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return text


class SshHosts:
    """The backend `ssh`: one per process.

    Args:
        hosts: the pool.
        allow_plain: on a host without bubblewrap commands run as plain processes of its user.
        only_look: start no sandboxes, and clean up nothing.
    """

    name = "ssh"

    def __init__(
        self, hosts: Sequence[SshHost], *, allow_plain: bool = False, only_look: bool = False
    ) -> None:
        plain = None if only_look else "allowed" if allow_plain else "never"
        self._machines = [_Machine(host, plain) for host in hosts]

    async def lease(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox on the host that has the most places free; waits for one.

        Raises: SandboxStartError when no host can be used; TaskFault, SnapshotLost.
        """
        while True:
            last: SandboxStartError | None = None
            taken = False
            for machine in self._order():
                try:
                    return await self._lease(machine, spec)
                except NoPlace:
                    taken = True
                except SandboxStartError as error:
                    if not machine.failed_at > float("-inf"):
                        raise
                    last = error
                    if len(self._machines) > 1:
                        _log.warning("%s", error)
            if not taken:
                raise last or SandboxStartError("sandbox.hosts names no host")
            await asyncio.sleep(WAIT_S)

    def _order(self) -> list[_Machine]:
        """Those that can be used, the least used first; all, when none can."""
        now = time.monotonic()
        fit = [m for m in self._machines if now - m.failed_at > COOLDOWN_S]
        return sorted(fit or self._machines, key=lambda m: m.leases / m.host.slots)

    async def _lease(self, machine: _Machine, spec: SandboxSpec) -> RemoteSandbox:
        link = await machine.link()
        machine.failed_at = float("-inf")
        machine.leases += 1

        async def closed() -> None:
            machine.leases -= 1

        try:
            sandbox = await link.lease(spec, self.name)
        except BaseException:
            machine.leases -= 1
            raise
        sandbox.on_close = closed
        return sandbox

    async def connect(self) -> list[tuple[SshHost, Link | SandboxStartError]]:
        """Connect to all hosts at once: for each what is there, or why it cannot be used."""

        async def one(machine: _Machine) -> Link | SandboxStartError:
            try:
                return await machine.link()
            except SandboxStartError as error:
                return error

        found = await asyncio.gather(*map(one, self._machines))
        return [
            (machine.host, result) for machine, result in zip(self._machines, found, strict=True)
        ]

    async def aclose(self) -> None:
        """End all connections, and with them all sandboxes of this process."""
        await asyncio.gather(*(machine.aclose() for machine in self._machines))
