"""The engine of the embedded models: llama.cpp's server in this process, and a client for it.

It listens on loopback with a key that only this process knows. Requests beyond its slots wait.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError
from hermes_rl.models.local.client import ServerSettings, missing_extra
from hermes_rl.models.local.requests import BadChatRequest

if TYPE_CHECKING:
    import aiohttp

_WARNINGS = 2
"""llama.cpp's verbosity: no line per request."""
_HEALTH_S = 10.0


def start_engine(settings: ServerSettings) -> EngineClient:
    """Load the weights (1.5 s on an idle machine) and listen on a free port of loopback. The engine
    lives as long as its client is referenced.

    Raises:
        UserError: the file cannot be loaded, or xllamacpp is not installed.
    """
    try:
        import xllamacpp
    except ImportError as error:
        raise missing_extra() from error
    key = secrets.token_urlsafe(32)
    p = xllamacpp.CommonParams()
    p.model.path = str(settings.weights)
    p.hostnames, p.port = ["127.0.0.1"], 0
    p.api_keys = [key]
    p.cors_origins, p.cors_origins_explicit = "", True
    p.n_parallel = settings.slots
    p.n_ctx = settings.context * settings.slots
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = settings.threads
    p.use_jinja, p.prefill_assistant = True, False
    p.ui = p.endpoint_slots = False
    p.cache_ram_mib = 0
    p.verbosity = _WARNINGS
    try:
        return EngineClient(xllamacpp.Server(p), key)
    except RuntimeError as error:
        raise UserError(
            f"the engine cannot load {settings.weights}: the file is damaged, or "
            "its kind of model is not supported"
        ) from error


class EngineClient:
    """A client for a running engine. An async context manager."""

    def __init__(self, server: Any, key: str) -> None:
        self._server, self._key = server, key
        self._http: aiohttp.ClientSession
        self.template_has_tools = False

    async def __aenter__(self) -> EngineClient:
        import aiohttp

        self._http = aiohttp.ClientSession(
            base_url=self._server.listening_address,
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=aiohttp.ClientTimeout(total=None),
            # The engine drops idle connections, so none is reused.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        props = await self._ask("/props")
        self.template_has_tools = bool(props["chat_template_caps"]["supports_tools"])
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def is_healthy(self) -> bool:
        """Return whether the engine answers."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
        try:
            async with self._http.get("/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return the prompt that the model's own chat template renders."""
        body = {"messages": messages} | ({"tools": tools} if tools else {})
        return str((await self._ask("/apply-template", body))["prompt"])

    async def tokenize(self, text: str, *, rendered: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            rendered: whether the text is a prompt, which gets the tokens that begin every prompt.
        """
        body = {"content": text, "add_special": rendered, "parse_special": True}
        return [int(token) for token in (await self._ask("/tokenize", body))["tokens"]]

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a completion; closing the generator stops the generation.

        Tokens that end inside a character are missing until the engine can show the character.

        Raises:
            BadChatRequest: the engine refuses the request.
        """
        async with self._http.post("/completion", json={**body, "stream": True}) as response:
            if response.status != 200:
                raise _refusal(await response.read(), response.status)
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
                elif line.startswith(b"error: "):
                    raise _refusal(line[7:], 500)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a completion as a whole, with all its ids.

        Raises:
            BadChatRequest: the engine refuses the request.
        """
        answer = await self._ask("/completion", {**body, "stream": False})
        if not isinstance(answer, dict):
            raise BadChatRequest("the engine gave no answer", status=502)
        return answer

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        method = "GET" if body is None else "POST"
        async with self._http.request(method, path, json=body) as response:
            raw = await response.read()
            if response.status != 200:
                raise _refusal(raw, response.status)
            return json.loads(raw)


def _refusal(raw: bytes, status: int) -> BadChatRequest:
    """Convert the engine's error response."""
    try:
        inner = json.loads(raw)
        error = inner.get("error", inner)
        message, kind = str(error["message"]), str(error.get("type", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        message, kind = raw.decode(errors="replace")[:200], ""
    if kind == "exceed_context_size_error":
        return BadChatRequest(message, code="context_length_exceeded")
    return BadChatRequest(message, status=status)
