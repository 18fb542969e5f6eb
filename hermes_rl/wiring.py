"""The only file that knows all variants by name: from a configuration to parts that work together.

A `Workshop` is what one process needs for its rollouts: a client, a limiter, a sandbox backend and
the tools, opened once and shared by all rollouts of the process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hermes_rl.agent.policy import Limits, Policy, preset
from hermes_rl.agent.prompt import SUMMARY_REQUEST, system_prompt
from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, LimitsSection, RunConfig
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import AuthError, TaskFault, UserError
from hermes_rl.identity import digest
from hermes_rl.models.base import ModelClient, Sampling
from hermes_rl.models.limiter import InProcessLimiter
from hermes_rl.models.played import NoopClient, OracleClient, free
from hermes_rl.models.retry import ModelCaller, RetryPolicy
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.sandboxes.base import SandboxBackend, SandboxSpec
from hermes_rl.tasks import Task
from hermes_rl.tools.base import Tool
from hermes_rl.tools.distributions import draw_toolsets, get_distribution
from hermes_rl.tools.registry import schema_digest
from hermes_rl.tools.toolsets import DEFAULT_TOOLSETS, resolve

if TYPE_CHECKING:
    from hermes_rl.models.endpoint import Endpoint

DEFAULT_BASE_URL = "https://api.openai.com/v1"
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
BACKENDS = ("bubblewrap", "none")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Draw:
    """What one unit works with: drawn by its own seed, recorded in its row."""

    model: str
    api_mode: str
    endpoint: str
    toolsets: tuple[str, ...]
    tools: Mapping[str, Tool]
    sampling: Sampling
    policy: Policy
    limits: Limits
    system: str | None


@dataclass(frozen=True)
class Workshop:
    """What one process has for all its rollouts."""

    config: RunConfig
    run_id: str
    config_hash: str
    backend: SandboxBackend
    client: ModelClient | None
    """None for played models, which are made per rollout."""
    limiter: InProcessLimiter
    secrets: tuple[str, ...] = field(default=(), repr=False)
    free: bool = False
    """Calls cost nothing: played models."""
    _digests: dict[str, str | None] = field(default_factory=dict, repr=False)

    def draw(self, item: WorkItem) -> Draw:
        """The parts of one unit. Raises: UserError for a toolset or distribution unknown here."""
        return self._draw(item, toolsets_of(self.config, item.task, item.seed))

    def no_draw(self, item: WorkItem) -> Draw:
        """The parts recorded for a unit that cannot be run."""
        return self._draw(item, ())

    def _draw(self, item: WorkItem, toolsets: tuple[str, ...]) -> Draw:
        policy = preset(self.config.agent.preset)
        tools = resolve(toolsets)
        name = self.config.model.name
        own = item.task.system if item.task else None
        client = self.client
        return Draw(
            model=name,
            api_mode=client.api_mode if client else "played",
            endpoint=client.endpoint if client else name,
            toolsets=toolsets,
            tools=tools,
            sampling=policy.complete(sampling_of(self.config, item.seed)),
            policy=policy,
            limits=limits_of(self.config.agent.limits, item.task),
            system=own or system_text(self.config, tools),
        )

    def caller(self, task: Task, recorder: Recorder) -> ModelCaller:
        """The model for one rollout."""
        patience = RetryPolicy(outage_s=self.config.endpoint.outage_seconds)
        client = self.client or _played(self.config.model.name, task)
        price = free if self.free else None
        return ModelCaller(client, self.limiter, recorder, patience, price=price)

    async def digest_of(self, image: str | None) -> str | None:
        """See `image_digest`; each image is looked at once, off the loop."""
        if image is not None and image not in self._digests:
            self._digests[image] = await asyncio.to_thread(image_digest, image)
        return self._digests[image] if image is not None else None

    def scrub(self, text: str) -> str:
        """A text without the secrets of this run."""
        for secret in self.secrets:
            for form in (secret, base64.b64encode(secret.encode()).decode()):
                text = text.replace(form, "[secret]")
        return text


def _played(name: str, task: Task) -> ModelClient:
    return OracleClient(task.oracle) if name == "oracle" else NoopClient()


@asynccontextmanager
async def open_workshop(
    config: RunConfig,
    *,
    run_id: str,
    concurrency: int,
    config_hash: str | None = None,
    state_dir: Path | None = None,
    key: str | None = None,
) -> AsyncIterator[Workshop]:
    """Open what this process needs, and close it all at the end.

    Args:
        run_id: of the run; stands in the lease of every sandbox.
        concurrency: rollouts in flight in this process.
        config_hash: as the driver found it; None computes it here.
        state_dir: where sandboxes keep their folders; None is the backend's default.
        key: the endpoint's key, where it was sent here rather than named.

    Raises: UserError when the model or the key cannot be had.
    """
    async with AsyncExitStack() as stack:
        backend = make_backend(config.sandbox.backend, state_dir)
        stack.push_async_callback(backend.aclose)
        client, secrets = await open_client(config.model.name, config.endpoint, stack, key)
        yield Workshop(
            config=config,
            run_id=run_id,
            config_hash=config_hash or digest(identity_of(config)),
            backend=backend,
            client=client,
            limiter=InProcessLimiter(concurrency),
            secrets=secrets,
            free=client is None,
        )


def make_backend(name: str, state_dir: Path | None = None) -> SandboxBackend:
    """A sandbox backend by name. Raises: UserError for an unknown one."""
    if name not in BACKENDS:
        raise UserError(f"unknown sandbox {name!r} (known: {', '.join(BACKENDS)})")
    if name == "none":
        from hermes_rl.sandboxes.none import Subprocess

        return Subprocess(state_dir=state_dir)
    from hermes_rl.sandboxes.bubblewrap import Bubblewrap

    return Bubblewrap(state_dir=state_dir)


async def open_client(
    name: str, where: EndpointSection, stack: AsyncExitStack, key: str | None = None
) -> tuple[ModelClient | None, tuple[str, ...]]:
    """A client for a model, closed by `stack`, and the texts that no record may show.

    Args:
        key: the endpoint's key, where it is given rather than named.

    Returns: None for played models, which are made per rollout.

    Raises: UserError when the key or the embedded model cannot be had.
    """
    if name in PLAYED_MODELS:
        return None, ()
    if name in LOCAL_MODELS and where.base_url is None:
        return await _embedded(name, where, stack), ()
    from hermes_rl.models.client import connect

    endpoint = _endpoint(where, key)
    client = connect(endpoint)
    stack.push_async_callback(client.aclose)
    return client, endpoint.secrets


def _endpoint(where: EndpointSection, key: str | None = None) -> Endpoint:
    from hermes_rl.models.endpoint import Endpoint, Timeouts

    return Endpoint(
        base_url=where.base_url or DEFAULT_BASE_URL,
        api_key=key or api_key(where),
        transport=where.transport,
        api_mode=where.api_mode or "chat_completions",
        timeouts=Timeouts(first_byte_s=where.first_byte_seconds),
    )


async def reach(config: RunConfig) -> None:
    """Look whether a sandbox starts and the endpoint answers; costs no token.

    A key that is refused is not said here: the run itself stops for it, resumable. Where workers
    stand on the machines of a cluster, their sandboxes are not tried here.

    Raises: UserError when nobody answers at its address, or the key is not set; SandboxStartError.
    """
    if not (config.run.workers != 0 and os.environ.get("RAY_ADDRESS")):
        await _start_a_sandbox(config.sandbox.backend)
    name = config.model.name
    if name in PLAYED_MODELS or (name in LOCAL_MODELS and config.endpoint.base_url is None):
        return
    from hermes_rl.models.probe import probe

    with contextlib.suppress(AuthError):
        await probe(_endpoint(config.endpoint))


async def _start_a_sandbox(backend_name: str) -> None:
    if backend_name == "none":
        return
    backend = make_backend(backend_name)
    try:
        async with await backend.lease(SandboxSpec(lease="try-out")):
            pass
    finally:
        await backend.aclose()


async def _embedded(name: str, where: EndpointSection, stack: AsyncExitStack) -> ModelClient:
    from hermes_rl.models.embedded import EmbeddedClient
    from hermes_rl.models.local import local_server

    path = Path(where.model_path) if where.model_path else None
    server = await stack.enter_async_context(local_server(name, model_path=path))
    client = EmbeddedClient(name, server)
    stack.push_async_callback(client.aclose)
    await client.open()
    return client


def api_key(where: EndpointSection) -> str | None:
    """The endpoint's key, from the variable that the configuration names.

    Raises: UserError when an endpoint that is not on this machine has no key.
    """
    host = urlsplit(where.base_url or DEFAULT_BASE_URL).hostname or ""
    name = where.api_key_env or (None if where.base_url else DEFAULT_KEY_ENV)
    if name is not None:
        key = os.environ.get(name)
        if key:
            return key
        raise UserError(f"no key: the variable {name} is not set. Set it, then run again")
    if host in LOOPBACK:
        return None
    raise UserError(
        f"no key for {host}: name the variable that holds it with --api-key-env NAME "
        "(a loopback endpoint needs none)"
    )


def toolsets_of(config: RunConfig, task: Task | None, seed: int) -> tuple[str, ...]:
    """The toolsets of a unit: the task's own, or the run's, or drawn from a distribution."""
    if task is not None and task.toolsets is not None:
        return task.toolsets
    if task is not None and task.distribution is not None:
        return draw_toolsets(task.distribution, seed)
    if config.agent.toolsets is not None:
        return config.agent.toolsets
    if config.agent.distribution is not None:
        return draw_toolsets(config.agent.distribution, seed)
    return DEFAULT_TOOLSETS


def sampling_of(config: RunConfig, seed: int) -> Sampling:
    """What the configuration says of sampling, with the unit's seed."""
    model = config.model
    return Sampling(
        temperature=model.temperature,
        top_p=model.top_p,
        max_tokens=model.max_tokens,
        reasoning=model.reasoning,
        seed=seed,
    )


def limits_of(run: LimitsSection, task: Task | None) -> Limits:
    """The run's limits, with the task's own in their place."""
    own = task.limits if task else {}
    return Limits(
        max_turns=int(own.get("max_turns", run.max_turns)),
        max_tokens=int(own["max_tokens"]) if "max_tokens" in own else run.max_tokens,
        max_seconds=own.get("max_seconds", run.max_seconds),
        wall_seconds=own.get("wall_seconds", run.wall_seconds),
    )


def system_text(config: RunConfig, tools: Mapping[str, Tool]) -> str:
    """The run's system prompt."""
    own = config.agent.system_prompt
    if own is None and config.model.name in LOCAL_MODELS and set(tools) == {"terminal"}:
        from hermes_rl.models.local.catalogue import SYSTEM_PROMPT

        return SYSTEM_PROMPT
    return system_prompt(config.agent.preset, tools) if own is None else own


def identity_of(config: RunConfig) -> dict[str, Any]:
    """The identity sections as definitions (DESIGN 5.2); its digest is the config_hash.

    Raises: UserError for a toolset, distribution or image that does not exist.
    """
    agent, model = config.agent, config.model
    toolsets = DEFAULT_TOOLSETS if agent.toolsets is None else agent.toolsets
    if agent.distribution is not None and agent.toolsets is None:
        toolsets = tuple(get_distribution(agent.distribution))
    tools = resolve(toolsets)
    drawn = agent.distribution and dict(get_distribution(agent.distribution))
    switches = {k: v for k, v in vars(preset(agent.preset)).items() if k != "sampling"}
    return {
        "model": {
            "name": model.name,
            **sampling_of(config, 0).as_dict(),
            "seed": None,  # the unit's seed follows from agent.seed
        },
        "agent": {
            "preset": switches,
            "sampling": preset(agent.preset).sampling.as_dict(),
            "toolsets": sorted(toolsets),
            "distribution": drawn,
            "tools": schema_digest(tools.values()),
            "system_prompt": digest(system_text(config, tools)),
            "summary_request": digest(SUMMARY_REQUEST),
            "limits": agent.limits.model_dump(),
            "seed": agent.seed,
        },
        "sandbox": {
            "backend": config.sandbox.backend,
            "image": image_digest(config.sandbox.image),
            "network": config.sandbox.network,
        },
    }


def image_digest(image: str | None) -> str | None:
    """What names the content of an image; None for the default image.

    Raises: UserError when the image does not exist.
    """
    if image is None:
        return None
    from hermes_rl.sandboxes.images import digest_of

    try:
        return digest_of(image)
    except TaskFault as error:
        raise UserError(f"--image {image}: {error}") from None
