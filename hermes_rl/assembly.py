"""The real `Assembly` of `AIAgent`: clients and sandboxes from what people write."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from typing import Any, cast

from hermes_rl.agent.agent import AIAgent as UnboundAgent
from hermes_rl.config import ModelConfig
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import UserError
from hermes_rl.models.base import ModelClient, Sampling
from hermes_rl.models.limiter import InProcessLimiter
from hermes_rl.models.played import NoopClient
from hermes_rl.models.retry import ModelCaller
from hermes_rl.ports import Recorder
from hermes_rl.sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from hermes_rl.wiring import BACKENDS, make_backend, open_client

_CALLS_AT_ONCE = 8


class OpenLink:
    """An open connection to a model (`hermes_rl.agent.assembly.Link`)."""

    def __init__(self, config: ModelConfig, client: ModelClient, stack: AsyncExitStack) -> None:
        self.model = config.name
        self.api_mode, self.endpoint = client.api_mode, client.endpoint
        self.sampling = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            reasoning=config.reasoning,
        )
        self._client, self._stack = client, stack
        self._limiter = InProcessLimiter(_CALLS_AT_ONCE)

    def caller(self, recorder: Recorder) -> ModelCaller:
        """See `Link.caller`."""
        return ModelCaller(self._client, self._limiter, recorder)

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
        if config.provider is not None:
            raise UserError("'provider' is not available in this version; give base_url")
        where = EndpointSection(
            base_url=config.base_url,
            api_key_env=config.api_key_env,
            api_mode=config.api_mode,
            transport=config.transport,
        )
        key = config.api_key.get_secret_value() if config.api_key else None
        async with AsyncExitStack() as stack:
            client, _ = await open_client(config.name, where, stack, key)
            return OpenLink(config, client or NoopClient(), stack.pop_all())

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
