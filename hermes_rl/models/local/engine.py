"""The engine of the embedded models: llama.cpp's server in this process, and a client for it.

It listens on loopback with a key that only this process knows. Requests beyond its slots wait.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError
from hermes_rl.models.local.requests import BadChatRequest

if TYPE_CHECKING:
    import aiohttp

_WARNINGS = 2
"""llama.cpp's verbosity: no line per request."""
_HEALTH_S = 10.0


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine."""

    weights: Path
    slots: int = 4
    """Number of requests that are decoded in parallel."""
    context: int = 4096
    """Tokens of prompt and answer together, per slot."""
    threads: int = 1


@dataclass(frozen=True)
class RunningEngine:
    """A loaded engine. It lives as long as its process."""

    address: str
    key: str = field(repr=False)
    server: Any = field(repr=False)


def start_engine(settings: EngineSettings) -> RunningEngine:
    """Load the weights (1.5 s on an idle machine) and listen on a free port of loopback.

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
        server = xllamacpp.Server(p)
    except RuntimeError as error:
        raise UserError(
            f"the engine cannot load {settings.weights}: the file is damaged, or "
            "its kind of model is not supported"
        ) from error
    return RunningEngine(address=server.listening_address, key=key, server=server)


def missing_extra() -> UserError:
    """Return the error for an installation without the engine."""
    return UserError(
        "the embedded model needs the package xllamacpp: pip install 'hermes-rl[local]'"
    )


class EngineClient:
    """A client for the engine. An async context manager."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._session: aiohttp.ClientSession | None = None
        self.template_has_tools = False

    async def __aenter__(self) -> EngineClient:
        import aiohttp

        self._session = aiohttp.ClientSession(
            base_url=self._engine.address,
            headers={"Authorization": f"Bearer {self._engine.key}"},
            timeout=aiohttp.ClientTimeout(total=None),
            # The engine drops idle connections, so none is reused.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        props = await self._ask("/props")
        self.template_has_tools = bool(props["chat_template_caps"]["supports_tools"])
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

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
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = tools
        return str((await self._ask("/apply-template", body))["prompt"])

    async def tokenize(self, text: str, *, rendered: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            rendered: whether the text is a prompt, which gets the tokens that begin every prompt.
        """
        body = {"content": text, "add_special": rendered, "parse_special": True}
        return [int(token) for token in (await self._ask("/tokenize", body))["tokens"]]

    async def generate(
        self, prompt: str | list[int], sampling: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a completion; closing the generator stops the generation.

        Raises:
            BadChatRequest: the engine refuses the request.
        """
        body = {**sampling, "prompt": prompt, "stream": True}
        async with self._http.post("/completion", json=body) as response:
            if response.status != 200:
                raise _refusal(await response.read(), response.status)
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
                elif line.startswith(b"error: "):
                    raise _refusal(line[7:], 500)

    async def whole(
        self, prompt: str | list[int], sampling: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a completion in one chunk, with all its ids. Those of a stream are incomplete: the
        engine leaves out tokens that end inside a character until it can show the character.

        Raises:
            BadChatRequest: the engine refuses the request.
        """
        yield await self.complete({**sampling, "prompt": prompt})

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's answer to a request of `/completion`.

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

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use EngineClient as an async context manager")
        return self._session


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
