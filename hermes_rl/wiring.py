"""The only file that knows all variants by name: from a configuration to parts that work together.

A `RunContext` is what one process needs for its rollouts: routes to its models, a sandbox backend
and the tools, opened once and shared by all rollouts of the process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hermes_rl.agent import (
    AuxiliaryModel,
    Caller,
    ContextParts,
    HookTable,
    Limits,
    Policy,
    load_engine,
    load_plugins,
)
from hermes_rl.checkpoints import Checkpoints
from hermes_rl.config import (
    BACKENDS as BACKENDS,
)
from hermes_rl.config import (
    PLAYED_MODELS,
    SANDBOX_GROUP,
    HostSection,
    ModelConfig,
    RunConfig,
)
from hermes_rl.config_agent import ContextConfig
from hermes_rl.config_endpoint import ConnectionSection, EndpointSection, ModelPlace
from hermes_rl.definitions import (
    catalogue_of,
    extra_body_of,
    first_memory,
    image_digest,
    limits_of,
    programs_here,
    sampling_of,
    sent_seed,
    services_of,
    system_text,
    toolsets_of,
)
from hermes_rl.definitions import identity_of as identity_of
from hermes_rl.definitions import policy_of as policy_of
from hermes_rl.errors import UserError
from hermes_rl.identity import digest
from hermes_rl.input_errors import unknown
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import ModelClient, NoopClient, OracleClient, Sampling, no_cost
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.models.providers import (
    EndpointReport,
    Keys,
    ModelSource,
    Routes,
    Target,
    calls_endpoint,
    check_endpoints,
    collect_keys,
    draw_model,
    embedded_clients,
    exact_clients,
    find_keys,
    find_plan,
    place_targets,
    resolve_env_targets,
    resolve_targets,
    resolve_targets_by_model,
)
from hermes_rl.models.rate import NANO, NO_UNIT, UNIT_TOKENS, UNIT_USD, Budget, Share
from hermes_rl.models.tokens import TokenPlan, with_explicit_filters
from hermes_rl.models.wire import supported_sampling
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.sandboxes import Sandbox, SandboxBackend, SandboxSpec
from hermes_rl.scorers import ScorerPool
from hermes_rl.setups import Setups
from hermes_rl.tasks import Task
from hermes_rl.telemetry import Telemetry, open_telemetry
from hermes_rl.text import SECRETS, mask
from hermes_rl.tools import (
    OpenParts,
    Services,
    Tool,
    answer_tool,
    mcp_tools,
    read_offers,
    with_timeout,
    with_wording,
)

_CALLS_AT_ONCE = 8
_EXPLICIT_KEY = "api_key"
"""Stands for a variable's name where the key itself was passed."""

REFUSALS = 10
"""Calls refused in the same words, with no answer between them, after which a run stops."""


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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`{"extra_body": ...}` where requests have further body fields; recorded beside the sampling.
    """


@dataclass(frozen=True)
class RunContext:
    """What one process has for all its rollouts."""

    config: RunConfig
    run_id: str
    config_hash: str
    backend: SandboxBackend
    models: Routes | None
    """None for played models, whose clients are made per rollout."""
    share: Share
    """Limiters, cooldowns of accounts, and budgets; shared by the workers of a run."""
    setups: Setups
    """Snapshots of tasks' setups."""
    others: Mapping[str, Routes] = field(default_factory=dict)
    """To the models that an environment asks beside the policy, by purpose."""
    workspaces: Path | None = None
    """Where workspaces are kept; None keeps none."""
    checkpoints: Checkpoints | None = None
    """Where checkpoints of rollouts are kept; None keeps none."""
    network_log: Callable[[bytes], None] | None = None
    """Takes a line for each connection of a sandbox through its egress proxy; None keeps none."""
    hooks: HookTable | None = None
    """Of the run's plugins; None where there are none."""
    telemetry: Telemetry | None = None
    """Takes the events of each rollout that has ended; None makes no spans."""
    scorer_pools: list[ScorerPool] = field(default_factory=list)
    """For scorers that may take any time: one pool, once it is needed."""
    services: Services = field(default_factory=Services)
    """What tools of the agent itself work with."""
    first_memory: Mapping[str, list[str]] = field(default_factory=dict)
    """What the memory of each unit begins with."""
    mcp_tools: Mapping[str, Tool] = field(default_factory=dict)
    """Those of the run's MCP servers, which every unit has."""
    exact: bool = False
    """Calls bring token ids: clients that do so say all of the sampling."""
    _digests: dict[str, str | None] = field(default_factory=dict, repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no record may show."""
        every = [*([self.models] if self.models else []), *self.others.values()]
        return tuple(dict.fromkeys(secret for routes in every for secret in routes.secrets))

    def draw(self, item: WorkItem, env_tools: Mapping[str, Tool] | None = None) -> Draw:
        """The parts of one unit.

        Args:
            env_tools: tools of the unit's environment, beside those of the toolsets.

        Raises: UserError for a toolset or distribution unknown here, or a tool of both kinds.
        """
        more = {**self.mcp_tools, **(env_tools or {})}
        return self._draw(item, toolsets_of(self.config, item.task, item.seed), more)

    def no_draw(self, item: WorkItem) -> Draw:
        """The parts recorded for a unit that cannot be run."""
        return self._draw(item, (), {})

    def _draw(self, item: WorkItem, toolsets: tuple[str, ...], more: Mapping[str, Tool]) -> Draw:
        policy = policy_of(self.config)
        catalogue, here = (
            catalogue_of(self.config.agent),
            programs_here(self.config.sandbox, item.task),
        )
        missing = catalogue.missing(toolsets, here)
        found = {n: tool for n, tool in catalogue.resolve(toolsets).items() if n not in missing}
        tools = with_timeout(with_wording(found, policy.wording), policy.command_timeout_s)
        forms = item.task.answer_tools if item.task else ()
        for place, added in (
            ("the environment's", more),
            ("in 'answer_tools'", {form["name"]: answer_tool(form) for form in forms}),
        ):
            if twice := sorted(tools.keys() & added.keys()):
                raise UserError(f"tool {twice[0]!r} is in a toolset and {place}: rename it")
            tools = {**tools, **added}
        name = draw_model(self.config, item.seed)
        of_task = item.task.system if item.task else None
        extra = extra_body_of(self.config, name) if self.models else {}
        seen = self.models.seen(name) if self.models else ModelSource("played", name)
        sampling = sampling_of(self.config.model, sent_seed(self.config, item.seed))
        return Draw(
            model=name,
            api_mode=seen.api_mode,
            endpoint=seen.endpoint,
            toolsets=toolsets,
            tools=tools,
            sampling=policy.complete(sampling),
            policy=policy,
            limits=limits_of(self.config.agent.limits, item.task),
            system=of_task or system_text(self.config, tools),
            extra={"extra_body": extra} if extra else {},
        )

    def sent(self, draw: Draw) -> Sampling:
        """The sampling of a draw as its model is sent it."""
        if self.exact:
            return with_explicit_filters(draw.sampling)
        if self.models is None:
            return draw.sampling
        seen = self.models.seen(draw.model)
        return supported_sampling(draw.sampling, seen.api_mode, seen.quirks)

    def caller(
        self, task: Task, recorder: Recorder, model: str, budget: Budget | None
    ) -> ModelCaller:
        """The model calls of one rollout.

        Args:
            model: as it was drawn for the unit.
            budget: the attempt's.
        """
        models = self.models or Routes.to(_played(model, task), self.share)
        price = no_cost if self.models is None else None
        in_process = not calls_endpoint(self.config.model.name, self.config.endpoint)
        patience = self._patience(in_process=in_process)
        return ModelCaller(models.routes(model), recorder, patience, price=price, budget=budget)

    def context_parts(
        self, policy: Policy, recorder: Recorder, budget: Budget | None
    ) -> ContextParts | None:
        """How one rollout's context is compressed; None where the policy does not."""
        section = self.config.agent.context
        if not policy.compress_context:
            return None
        return context_parts(section, self._auxiliary("summary", section.summary, recorder, budget))

    def vision(self, recorder: Recorder, budget: Budget | None) -> AuxiliaryModel | None:
        """The model that looks at images for one rollout."""
        return self._auxiliary("vision", self.config.agent.vision, recorder, budget)

    def _auxiliary(
        self, purpose: str, named: ModelPlace | None, recorder: Recorder, budget: Budget | None
    ) -> AuxiliaryModel | None:
        if named is None:
            return None
        return auxiliary_model(named, self.other_caller(purpose, recorder, named.name, budget))

    def other_caller(
        self, purpose: str, recorder: Recorder, model: str, budget: Budget | None
    ) -> ModelCaller:
        """The calls of one rollout to a model beside the agent's, whose answers are short."""
        routes = self.others[purpose].routes(model)
        patience = replace(self._patience(), answer_s=self.config.endpoint.first_byte_seconds)
        return ModelCaller(routes, recorder, patience, budget=budget)

    def _patience(self, *, in_process: bool = False) -> RetryPolicy:
        """How long calls go on.

        Args:
            in_process: the model computes on this machine, under our eyes: it may be slow.
        """
        where = self.config.endpoint
        return RetryPolicy(
            outage_s=where.outage_seconds,
            first_answer_s=where.first_answer_seconds,
            silence_s=None if in_process else where.first_answer_seconds,
            refusals=REFUSALS,
        )

    def budget(self, item: WorkItem | None = None) -> Budget | None:
        """What one attempt may spend: its own budget and the run's."""
        place = NO_UNIT if item is None else item.row_index << 20 | item.repeat
        run, limits = self.config.run, dict[str, int]()
        if run.unit_budget_tokens is not None:
            limits[UNIT_TOKENS] = run.unit_budget_tokens
        if run.unit_budget_usd is not None:
            limits[UNIT_USD] = round(run.unit_budget_usd * NANO)
        return self.share.budget(place, limits)

    async def digest_of(self, image: str | None) -> str | None:
        """See `image_digest`; each image is looked at once, off the loop."""
        if image is not None and image not in self._digests:
            name = self.config.sandbox.backend
            self._digests[image] = await asyncio.to_thread(image_digest, image, name)
        return self._digests[image] if image is not None else None

    @property
    def scorer_pool(self) -> ScorerPool:
        """The processes for scorers that may take any time."""
        if not self.scorer_pools:
            self.scorer_pools.append(ScorerPool())
        return self.scorer_pools[0]

    def scrub(self, text: str) -> str:
        """A text without secrets of this process."""
        return mask(SECRETS.scrub(text), self.secrets, "[secret]")


def judge_purpose(number: int) -> str:
    """The purpose of the calls to a judge of `scoring.judges`, in `RunContext.others`."""
    return f"scoring.judges.{number}"


def auxiliary_model(named: ModelPlace, caller: Caller) -> AuxiliaryModel:
    """A model beside the agent's, with the caller of one rollout."""
    return AuxiliaryModel(caller, named.name, sampling_of(named))


def context_parts(
    section: ContextConfig | None, summariser: AuxiliaryModel | None
) -> ContextParts | None:
    """How contexts are compressed; None without a section.

    Args:
        summariser: writes summaries, where the section names one.

    Raises: UserError for an engine that no plugin offers.
    """
    if section is None:
        return None
    engine = section.engine
    return ContextParts(
        engine=load_engine(engine) if isinstance(engine, str) else engine,
        window=section.window,
        share=section.threshold,
        summariser=summariser,
        seconds=section.seconds,
    )


def _played(name: str, task: Task) -> ModelClient:
    if name != "oracle":
        return NoopClient()
    given = sum(isinstance(message, AssistantMessage) for message in task.prompt)
    answers = bool(task.score) and task.verify is None
    return OracleClient(task.oracle, prompt_answers=given, answers=answers)


@asynccontextmanager
async def open_run_context(
    config: RunConfig,
    *,
    run_id: str,
    concurrency: int,
    config_hash: str | None = None,
    state_dir: Path | None = None,
    keys: Mapping[str, str] | None = None,
    share: Share | None = None,
    tokens: TokenPlan | None = None,
) -> AsyncIterator[RunContext]:
    """Open what this process needs, and close it all at the end.

    Args:
        run_id: of the run, for the leases of sandboxes. concurrency: rollouts in this process.
        config_hash: as the driver found it; None computes it here.
        state_dir: where sandboxes keep their folders; None is the backend's default.
        keys: API keys by variable, where they were sent here rather than set here.
        share: limiters and rests that are shared with other workers; None shares with nobody.
        tokens: how token ids are had; None finds it here, where they are wanted.

    Raises: UserError when the model or a key cannot be had.
    """
    together = share or Share(maximum=concurrency)
    async with AsyncExitStack() as stack:
        if policy_of(config).compress_context:
            context_parts(config.agent.context, None)  # an engine that does not exist: say so now
        backend = backend_of(config, state_dir)
        stack.push_async_callback(backend.aclose)
        scorer_pools: list[ScorerPool] = []
        stack.push_async_callback(_close_all, scorer_pools)
        held = await asyncio.to_thread(collect_keys, config) if keys is None else keys
        keyring = Keys.renewed_by(config.endpoint.key_commands, held)
        config = await with_offers(config, held, backend)
        stack.push_async_callback((shared := OpenParts()).aclose)
        targets = resolve_targets_by_model(config)
        plan = tokens or await find_plan(config, keyring)
        together.version = None if plan is None else plan.version
        models = await open_models(
            config.model.name, config.endpoint, targets, stack, keyring, together, plan
        )
        if models and policy_of(config).compress_context and config.agent.context.window is None:
            models.ask_windows()
        yield RunContext(
            setups=Setups(stack.callback),
            config=config,
            run_id=run_id,
            config_hash=config_hash or digest(identity_of(config)),
            backend=backend,
            models=models,
            share=together,
            exact=plan is not None and plan.exact,
            hooks=await asyncio.to_thread(_hooks, config) if config.agent.plugins else None,
            telemetry=await _telemetry(config, stack) if config.run.otel != "off" else None,
            others=_open_others(config, stack, keyring, together),
            scorer_pools=scorer_pools,
            services=services_of(config.agent),
            first_memory=first_memory(config.agent),
            mcp_tools=mcp_tools(config.mcp, held, shared) if config.mcp else {},
        )


async def with_offers(
    config: RunConfig, keys: Mapping[str, str], backend: SandboxBackend | None = None
) -> RunConfig:
    """A configuration with what its MCP servers offer.

    Args:
        backend: of the run, which asks servers that have no offer yet; None asks all of them again,
            as a run does when it starts or resumes.

    Raises: UserError; SandboxStartError.
    """
    if not config.mcp:
        return config
    if backend is not None and all(server.offered is not None for server in config.mcp.values()):
        return config
    section, opened = config.sandbox, backend or backend_of(config)

    async def lease() -> Sandbox:
        if section.image is None and section.backend in _NEED_IMAGES:
            raise UserError("'mcp': programs in the sandbox need --image, or 'where: host'")
        spec = SandboxSpec(lease="mcp", image=section.image, network=section.network)
        return await opened.lease(spec)

    try:
        servers = await read_offers(config.mcp, keys, lease)
    finally:
        if backend is None:
            await opened.aclose()
    return config.model_copy(update={"mcp": servers})


async def _close_all(pools: Sequence[ScorerPool]) -> None:
    for pool in pools:
        await pool.aclose()


async def _telemetry(config: RunConfig, stack: AsyncExitStack) -> Telemetry | None:
    """Where spans go, flushed by `stack`. Raises: UserError."""
    telemetry = await asyncio.to_thread(open_telemetry, config.run.otel)
    if telemetry is not None:
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
    return telemetry


def _hooks(config: RunConfig) -> HookTable | None:
    """Those of the run's plugins. Raises: UserError."""
    return HookTable.of(None, load_plugins(config.agent.plugins))


def _open_others(
    config: RunConfig, stack: AsyncExitStack, keys: Keys, share: Share
) -> dict[str, Routes]:
    """The routes to the models that an environment asks, closed by `stack`."""
    opened: dict[str, Routes] = {}
    for use, targets in resolve_env_targets(config).items():
        opened[use] = Routes({use: targets}, keys, share, config.endpoint)
        stack.push_async_callback(opened[use].aclose)
    return opened


@dataclass(frozen=True)
class Link:
    """An open connection to a model, kept for the life of an agent."""

    model: str
    sampling: Sampling
    routes: Routes
    others: Mapping[str, Routes] = field(default_factory=dict)
    """To the models beside it, by purpose (`summary`, `vision`), where they are configured."""


@asynccontextmanager
async def open_link(
    model: object,
    more_keys: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[str, ModelPlace] = MappingProxyType({}),
    calls: int = _CALLS_AT_ONCE,
    *,
    ask_windows: bool = False,
) -> AsyncIterator[Link]:
    """Connect to a model: a name or a `ModelConfig`.

    Args:
        more_keys: keys by the name of a variable, beside those of the environment.
        others: models beside it, by purpose.
        calls: how many may be in flight.
        ask_windows: ask the endpoint for the size of the context window.

    Raises: UserError.
    """
    config = ModelConfig(name=model) if isinstance(model, str) else model
    if not isinstance(config, ModelConfig):
        raise UserError(f"model {model!r}: give a name or a ModelConfig")
    if config.name == "oracle":
        raise UserError("model 'oracle' plays a task's solution; use `hermes-rl run` for it")
    key = config.api_key.get_secret_value() if config.api_key else None
    has_key = bool(key) or config.key_command is not None
    shared = config.model_dump(include=set(ConnectionSection.model_fields), exclude_defaults=True)
    if has_key or key is not None:
        shared["api_key_env"] = _EXPLICIT_KEY if has_key else ""
    if config.key_command is not None:
        shared["key_commands"] = {_EXPLICIT_KEY: config.key_command}
    where = EndpointSection(**shared)
    targets = resolve_targets(where, extra=config.extra_body, stop=config.stop)
    beside = {use: place_targets(place, where, key=use) for use, place in others.items()}
    keys: dict[str, str] = {}
    if calls_endpoint(config.name, where) or beside:
        remote = [targets] if calls_endpoint(config.name, where) else []
        places = [target.place for some in (*remote, *beside.values()) for target in some]
        environ = {**os.environ, **more_keys, **({_EXPLICIT_KEY: key} if key else {})}
        keys = await asyncio.to_thread(find_keys, places, environ, where.key_commands)
    held = Keys.renewed_by(where.key_commands, keys)
    share = Share(maximum=calls)
    async with AsyncExitStack() as stack:
        routes = await open_models(config.name, where, {config.name: targets}, stack, held, share)
        if routes is not None and ask_windows:
            routes.ask_windows()
        opened = {use: Routes({use: some}, held, share, where) for use, some in beside.items()}
        for one in opened.values():
            stack.push_async_callback(one.aclose)
        found = routes or Routes.to(NoopClient(), share)
        yield Link(config.name, sampling_of(config), found, opened)


def backend_of(config: RunConfig, state_dir: Path | None = None) -> SandboxBackend:
    """The sandbox backend of a configuration. Raises: UserError."""
    section = config.sandbox
    plain = config.run.allow_unsandboxed
    return make_backend(section.backend, state_dir, hosts=section.hosts, allow_plain=plain)


def make_backend(
    name: str,
    state_dir: Path | None = None,
    *,
    hosts: Sequence[HostSection] = (),
    allow_plain: bool = False,
) -> SandboxBackend:
    """A sandbox backend by name.

    Args:
        state_dir: where it keeps its folders on this machine.
        hosts: the machines of `ssh`.
        allow_plain: on machines without bubblewrap, `ssh` may run commands outside any sandbox.

    Raises: UserError for an unknown one, or one that cannot be loaded.
    """
    from hermes_rl import sandboxes

    match name:
        case "bubblewrap":
            return sandboxes.Bubblewrap(state_dir=state_dir)
        case "none":
            return sandboxes.Subprocess(state_dir=state_dir)
        case "docker" | "podman":
            return sandboxes.Containers(name, state_dir=state_dir)
        case "apptainer":
            return sandboxes.Apptainer(state_dir=state_dir)
        case "modal":
            return sandboxes.Modal()
        case "ssh":
            if not hosts:
                raise UserError("sandbox 'ssh' needs machines: pass SshHosts([SshHost(...)])")
            pool = [sandboxes.SshHost(**dict(host)) for host in hosts]
            return sandboxes.SshHosts(pool, allow_plain=allow_plain)
    return _foreign_backend(name, state_dir)


def _foreign_backend(name: str, state_dir: Path | None) -> SandboxBackend:
    """One that another package brings, by its entry point. Raises: UserError."""
    found = {entry.name: entry for entry in entry_points(group=SANDBOX_GROUP)}
    if name not in found:
        raise UserError(unknown("sandbox", name, (*BACKENDS, *found)))
    entry = found[name]
    package = entry.dist.name if entry.dist else entry.value
    try:
        made: SandboxBackend = entry.load()(state_dir=state_dir)
    except Exception as error:  # the code of another package, which may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"sandbox {name!r} of the package {package} cannot be loaded: {why}"
        ) from error
    if not callable(getattr(made, "lease", None)) or not callable(getattr(made, "aclose", None)):
        raise UserError(
            f"sandbox {name!r} of the package {package} makes a {type(made).__name__}, "
            "which is not a SandboxBackend: it needs lease and aclose"
        )
    return made


async def open_models(
    name: str,
    where: EndpointSection,
    targets: Mapping[str, Sequence[Target]],
    stack: AsyncExitStack,
    keys: Keys,
    share: Share,
    tokens: TokenPlan | None = None,
) -> Routes | None:
    """The routes to a model or a mix, closed by `stack`; None for played models.

    Args:
        targets: model -> where its calls go.
        tokens: how token ids are had; None asks for none.

    Raises: UserError when the embedded model cannot be had, or an address or a key cannot work.
    """
    if name in PLAYED_MODELS:
        return None
    if not calls_endpoint(name, where):
        client = await _embedded(name, where, stack, tokens)
        return Routes.to(client, share, targets[name][0].prices.user_prices_only())
    first = min(targets)
    base_url = targets[first][0].place.base_url
    make = await asyncio.to_thread(exact_clients, where, tokens, base_url)
    routes = Routes(targets, keys, share, where, make)
    stack.push_async_callback(routes.aclose)
    return routes


async def reach(config: RunConfig, keys: Mapping[str, str] | None = None) -> EndpointReport | None:
    """Look whether a sandbox starts and the endpoint answers. Costs no token, but for a few where
    token ids are wanted (see `check_endpoints`).

    A key that is refused is not said here: the run itself stops for it, resumable. Where workers
    stand on the machines of a cluster, their sandboxes are not tried here.

    Args:
        keys: by variable; None finds them.

    Returns what the endpoint says of itself; None when it was not asked or refused the key.
    Raises: UserError when nobody answers at its address, or the key is not set; SandboxStartError.
    """
    if config.endpoint.model_path is not None:
        from hermes_rl.models.local import check_gguf

        await asyncio.to_thread(check_gguf, Path(config.endpoint.model_path))
    if not (config.run.workers != 0 and os.environ.get("RAY_ADDRESS")):
        await _start_a_sandbox(config)
    held = Keys(await asyncio.to_thread(collect_keys, config) if keys is None else keys)
    return await check_endpoints(config, held)


_NEED_IMAGES = ("docker", "podman", "apptainer")
"""Backends without a default image."""


async def _start_a_sandbox(config: RunConfig) -> None:
    section = config.sandbox
    if section.backend == "none":
        return
    if section.image is None and section.backend in _NEED_IMAGES:  # then each row names its own
        from hermes_rl import sandboxes

        if section.backend == "apptainer":
            sandboxes.find_program()
        else:
            await asyncio.to_thread(lambda: sandboxes.Engine(section.backend).version())
        return
    backend = backend_of(config)
    spec = SandboxSpec(lease="try-out", image=section.image, network=section.network)
    try:
        async with await backend.lease(spec):
            pass
    finally:
        await backend.aclose()


async def _embedded(
    name: str, where: EndpointSection, stack: AsyncExitStack, tokens: TokenPlan | None
) -> ModelClient:
    from hermes_rl.models.local import EmbeddedClient, local_server

    path = Path(where.model_path) if where.model_path else None
    server = await stack.enter_async_context(local_server(name, model_path=path))
    connect = await embedded_clients(name, where, tokens, server)
    client = EmbeddedClient(name, server, connect)
    stack.push_async_callback(client.aclose)
    await client.open()
    return client
