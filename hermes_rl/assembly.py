"""The real `Assembly` of `AIAgent`: clients and sandboxes from what people write."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import AsyncExitStack
from typing import Any, cast

from hermes_rl.agent.agent import AIAgent as UnboundAgent
from hermes_rl.config import ModelConfig
from hermes_rl.config_endpoint import EndpointSection, given_reach
from hermes_rl.errors import UserError
from hermes_rl.models.base import Sampling
from hermes_rl.models.calls.retry import ModelCaller, RetryPolicy
from hermes_rl.models.played import NoopClient
from hermes_rl.models.providers.routing import Keys, Routes, Sole, find_keys
from hermes_rl.models.providers.targets import asks_endpoint, targets_of
from hermes_rl.models.rate.share import Share
from hermes_rl.ports import Recorder
from hermes_rl.sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from hermes_rl.wiring import BACKENDS, make_backend, open_models

FIRST_ANSWER_S = 5.0
"""Somebody waits: an endpoint that fails from the start is told soon."""
_CALLS_AT_ONCE = 8
_GIVEN_KEY = "api_key"
"""Stands for a variable's name where the key itself is given."""


class OpenLink:
    """An open connection to a model (`hermes_rl.agent.assembly.Link`)."""

    def __init__(self, config: ModelConfig, models: Routes, stack: AsyncExitStack) -> None:
        self.model = config.name
        seen = models.seen(config.name)
        self.api_mode, self.endpoint = seen.api_mode, seen.endpoint
        self.sampling = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
            reasoning=config.reasoning,
            stop=config.stop,
        )
        self._models, self._stack = models, stack

    def caller(self, recorder: Recorder) -> ModelCaller:
        """See `Link.caller`."""
        patience = RetryPolicy(first_answer_s=FIRST_ANSWER_S)
        return ModelCaller(self._models.routes(self.model), recorder, patience)

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        await self._stack.aclose()


class _WithBackend:
    """A sandbox that takes its backend with it when it closes."""

    def __init__(self, sandbox: Sandbox, backend: SandboxBackend) -> None:
        self._sandbox, self._backend = sandbox, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def aclose(self) -> None:
        try:
            await self._sandbox.aclose()
        finally:
            await self._backend.aclose()


class RealAssembly:
    """Makes the parts of an agent (`hermes_rl.agent.assembly.Assembly`)."""

    async def connect(self, model: object) -> OpenLink:
        """See `Assembly.connect`."""
        config = ModelConfig(name=model) if isinstance(model, str) else model
        if not isinstance(config, ModelConfig):
            raise UserError(f"model {model!r}: give a name or a ModelConfig")
        if config.name == "oracle":
            raise UserError("model 'oracle' plays a task's solution; use `hermes-rl run` for it")
        key = config.api_key.get_secret_value() if config.api_key else None
        own = bool(key) or config.key_command is not None
        where = EndpointSection(
            provider=config.provider,
            base_url=config.base_url,
            api_key_env=_GIVEN_KEY if own else config.api_key_env if key is None else "",
            key_commands={_GIVEN_KEY: config.key_command} if config.key_command else {},
            api_mode=config.api_mode,
            transport=config.transport,
            fallbacks=config.fallbacks,
            first_byte_seconds=config.first_byte_seconds,
            idle_seconds=config.idle_seconds,
            **given_reach(config),
        )
        targets = targets_of(where, extra=config.extra_body, stop=config.stop)
        keys: dict[str, str] = {}
        if asks_endpoint(config.name, where):
            places = [target.place for target in targets]
            environ = {**os.environ, **({_GIVEN_KEY: key} if key else {})}
            keys = await asyncio.to_thread(find_keys, places, environ, where.key_commands)
        held = Keys.renewed_by(where.key_commands, keys)
        share = Share(maximum=_CALLS_AT_ONCE)
        async with AsyncExitStack() as stack:
            routes = {config.name: targets}
            models = await open_models(config.name, where, routes, stack, held, share)
            return OpenLink(config, models or Sole(NoopClient(), share), stack.pop_all())

    async def lease(self, sandbox: object) -> Sandbox:
        """See `Assembly.lease`."""
        spec = SandboxSpec(lease=f"agent-{uuid.uuid4().hex[:16]}")
        if isinstance(sandbox, SandboxSpec):
            spec, sandbox = sandbox, None
        if sandbox is None or isinstance(sandbox, str):
            backend = make_backend(sandbox or BACKENDS[0])
            try:
                leased = await backend.lease(spec)
            except BaseException:
                await backend.aclose()
                raise
            return cast(Sandbox, _WithBackend(leased, backend))
        if not hasattr(sandbox, "lease"):
            raise UserError(f"sandbox {sandbox!r}: give a backend, a SandboxSpec or a name")
        # A backend lives on the loop that opened it, so it ends with its agent.
        own = cast(SandboxBackend, sandbox)
        return cast(Sandbox, _WithBackend(await own.lease(spec), own))


class AIAgent(UnboundAgent):
    """The agent with its parts made by `hermes_rl.wiring`."""

    __doc__ = UnboundAgent.__doc__
    assembly = RealAssembly()
