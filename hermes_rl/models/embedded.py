"""A client for the embedded model, which joins a new server when the old one has died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hermes_rl.errors import ConnectionLost, UserError
from hermes_rl.models.base import Completion, ModelClient, ModelRequest
from hermes_rl.models.endpoint import EMBEDDED
from hermes_rl.models.local import LocalEndpoint, LocalServer, StepClient

Connect = Callable[[LocalEndpoint], ModelClient]


class EmbeddedClient:
    """A client whose address follows the machine's one server.

    Args:
        connect: makes the client of an address.
    """

    api_mode = "chat_completions"

    def __init__(self, name: str, server: LocalServer, connect: Connect = StepClient) -> None:
        self.endpoint = f"{EMBEDDED}{name}"
        self._server, self._connect = server, connect
        self._client: ModelClient | None = None
        self._address = ""
        self._joining = asyncio.Lock()  # invariant: one client, for the current address

    async def _current(self) -> ModelClient:
        where = await self._server.endpoint()
        async with self._joining:
            if self._client is None or where.base_url != self._address:
                if self._client is not None:
                    await self._client.aclose()
                self._client, self._address = self._connect(where), where.base_url
                self.api_mode = self._client.api_mode
            return self._client

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        try:
            client = await self._current()
        except (
            UserError
        ) as error:  # it ran at the start, so this is a failure, not a mistake of the user
            raise ConnectionLost(f"the embedded model is gone: {error}") from error
        return await client.complete(request)

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return self._client.bound(request) if self._client else 0

    async def open(self) -> None:
        """Start or join the server now, so that a missing engine is reported at once."""
        await self._current()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        if self._client is not None:
            await self._client.aclose()
