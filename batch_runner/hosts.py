"""Environments of one process: each is set up once, whoever asks for it, and closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

from hermes_rl.config_endpoint import EnvSection

if TYPE_CHECKING:
    from hermes_rl.rl.episodes import Host


class Hosts:
    """An async context manager; leaving it closes all. For one event loop."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._open: dict[str, Host] = {}
        self._turn = asyncio.Lock()  # an environment that is being set up is not set up twice

    @asynccontextmanager
    async def open(self, section: EnvSection) -> AsyncIterator[Host]:
        """As `hermes_rl.rl.episodes.open_host`, but what is open already is shared, and leaving
        this leaves it open.

        Raises: UserError when its code cannot be loaded, or `setup` fails.
        """
        from hermes_rl.rl.episodes import open_host

        name = section.model_dump_json()
        async with self._turn:
            if name not in self._open:
                self._open[name] = await self._stack.enter_async_context(open_host(section))
        yield self._open[name]

    async def aclose(self) -> None:
        """Close them all. Idempotent."""
        self._open.clear()
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


@asynccontextmanager
async def own_or(hosts: Hosts | None) -> AsyncIterator[Hosts]:
    """Those of the caller's, who closes them; without any, some that are closed on leaving."""
    if hosts is not None:
        yield hosts
        return
    async with Hosts() as own:
        yield own
