"""The model servers of `hermes_rl.rl.compat.BaseEnv`: chat, completions, and exact tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from hermes_rl.errors import UserError
from hermes_rl.models.tokens import detect_ids_format, read_token_ids

IGNORED = -100
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before a request is repeated."""
LONGEST_S = 60.0
"""Longest Retry-After to obey."""
_log = logging.getLogger(__name__)


class ServerBaseline(BaseModel):
    """A model server."""

    timeout: int = 1200
    """Seconds of a request."""
    num_max_requests_at_once: int = 512
    num_requests_for_eval: int = 64
    """Not used: evaluation shares the first limit."""
    model_name: str = "default"
    rolling_buffer_length: int = 1000
    """Not used."""
    server_type: Literal["openai", "trl", "sglang", "vllm"] = "openai"
    """Not used: all are spoken to by the API of OpenAI."""
    tokenizer_name: str = "none"


class APIServerConfig(ServerBaseline):
    """A model server at an address."""

    api_key: str | None = ""
    base_url: str | None = ""
    n_kwarg_is_ignored: bool = False
    """Send n requests in place of one with `n`."""
    health_check: bool = True
    """Not used: a request that fails is repeated."""


class Server:
    """One model server."""

    def __init__(self, config: APIServerConfig) -> None:
        import openai  # half a second

        self.config = config
        self.in_flight = 0
        self._free = asyncio.Semaphore(config.num_max_requests_at_once)
        self._client = openai.AsyncOpenAI(
            api_key=config.api_key or "none",
            base_url=config.base_url or None,
            timeout=config.timeout,
            max_retries=0,
        )
        self._failing = False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def call(self, kind: Literal["chat", "completion"], wanted: dict[str, Any]) -> Any:
        """Make a request of OpenAI's package, and return its answer."""
        wanted = {"model": self.config.model_name, **wanted}
        wanted.pop("split", None)
        create = partial(self._retried, kind)
        count = wanted.get("n") or 1
        self.in_flight += 1
        try:
            async with self._free:
                if count == 1 or not self.config.n_kwarg_is_ignored:
                    return await create(**wanted)
                answers = await asyncio.gather(
                    *(create(**{**wanted, "n": 1}) for _ in range(count))
                )
        finally:
            self.in_flight -= 1
        first = answers[0]
        first.choices = [choice for answer in answers for choice in answer.choices]
        return first

    async def _retried(self, kind: Literal["chat", "completion"], **wanted: Any) -> Any:
        """Make a request, and repeat it after faults of the server. The first one is logged."""
        import openai

        client: Any = self._client
        create = (client.chat if kind == "chat" else client).completions.create
        for wait in (*RETRY_S, None):
            try:
                answer = await create(**wanted)
            except openai.APIError as error:
                status = getattr(error, "status_code", 500)  # none: no connection, or a timeout
                if wait is None or (status < 500 and status not in (408, 409, 429)):
                    raise
                if not self._failing:
                    text = " ".join(str(error).split())
                    _log.warning("%s: %s; trying again", self.config.base_url, text)
                self._failing = True
                head = getattr(error, "response", None)
                after = "" if head is None else head.headers.get("Retry-After", "")
                await asyncio.sleep(min(float(after), LONGEST_S) if after.isdecimal() else wait)
            else:
                self._failing = False
                return answer
        raise AssertionError


@dataclass
class SequenceNode:
    """Tokens of a conversation. Prompt positions have mask -100 and log-probability 1.0."""

    full_text: str
    """Of its last answer."""
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = field(default_factory=dict)


class ManagedServer:
    """A server whose answers are kept with the ids that were sampled.

    A call whose prompt begins with the ids of a node continues that node; all others begin one. So
    a conversation of a template that rewrites earlier turns has several nodes.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.nodes: list[SequenceNode] = []

    async def chat_completion(self, **wanted: Any) -> Any:
        """Request chat answers. Raises: UserError when the server returns no token ids."""
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": False}
        extra |= wanted.pop("extra_body", None) or {}
        answer = await self.server.call("chat", {"logprobs": True, **wanted, "extra_body": extra})
        body = answer.model_dump()
        if detect_ids_format(body) != "vllm":
            raise UserError(
                f"{self.server.config.base_url}: returns no token ids with chat answers, which"
                " managed_server needs. vLLM does since 0.10"
            )
        prompt = read_token_ids(body["prompt_token_ids"]) or ()
        known = list(self.nodes)
        for choice in body["choices"]:
            ids = read_token_ids(choice["token_ids"]) or ()
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [entry["logprob"] for entry in content]
            if len(logprobs) != len(ids):
                raise UserError(f"{len(ids)} token ids came with {len(logprobs)} logprobs")
            text = (choice["message"] or {}).get("content") or ""
            self._keep(known, prompt, ids, logprobs, text, str(choice.get("finish_reason")))
        return answer

    def _keep(
        self,
        known: Sequence[SequenceNode],
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        text: str,
        finish_reason: str,
    ) -> None:
        extended = [n for n in known if n.tokens == list(prompt[: len(n.tokens)])]
        before = max(extended, key=lambda node: len(node.tokens), default=None)
        start = len(before.tokens) if before is not None else 0
        masks = before.masked_tokens if before is not None else []
        earlier = before.logprobs if before is not None else []
        between = len(prompt) - start
        if before in self.nodes:
            self.nodes.remove(before)
        self.nodes.append(
            SequenceNode(
                full_text=text,
                tokens=[*prompt, *ids],
                masked_tokens=[*masks, *[IGNORED] * between, *ids],
                logprobs=[*earlier, *[1.0] * between, *logprobs],
                metadata={"finish_reason": finish_reason},
            )
        )

    def get_state(self) -> dict[str, Any]:
        """Return `nodes`."""
        return {"nodes": list(self.nodes)}

    def reset(self) -> None:
        """Forget all nodes."""
        self.nodes.clear()


class ServerManager:
    """All model servers; a request goes to the one with the fewest in flight."""

    def __init__(self, configs: ServerBaseline | Sequence[APIServerConfig]) -> None:
        listed = [configs] if isinstance(configs, ServerBaseline) else configs
        self.servers = [Server(APIServerConfig(**config.model_dump())) for config in listed]
        if not self.servers or not self.servers[0].config.base_url:
            raise UserError("no model server. Name one with --openai.base_url URL")

    async def aclose(self) -> None:
        """Close the connections to all servers."""
        for server in self.servers:
            await server.aclose()

    def _next(self) -> Server:
        return min(self.servers, key=lambda server: server.in_flight)

    async def chat_completion(self, **wanted: Any) -> Any:
        """Request chat answers; keywords are those of OpenAI's package."""
        return await self._next().call("chat", wanted)

    async def completion(self, **wanted: Any) -> Any:
        """Request completions."""
        return await self._next().call("completion", wanted)

    @contextlib.asynccontextmanager
    async def managed_server(self, tokenizer: Any = None) -> AsyncIterator[ManagedServer]:
        """Keep the ids of the calls inside of the block. A tokenizer is not needed."""
        yield ManagedServer(self._next())
