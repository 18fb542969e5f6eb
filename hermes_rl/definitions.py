"""Derives the settings of a unit and the identity of a run from the configuration, without I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hermes_rl.agent import WORDINGS, Limits, Policy, load_plugins, preset, system_prompt
from hermes_rl.config import (
    LOCAL_MODELS,
    PLAYED_MODELS,
    RunConfig,
    SandboxLimitsSection,
    SandboxSection,
)
from hermes_rl.config_agent import AgentSection, ContextConfig, LimitsSection
from hermes_rl.config_endpoint import SamplingSection, extra_of
from hermes_rl.errors import SandboxStartError, TaskFault, UserError
from hermes_rl.identity import digest
from hermes_rl.models import Sampling
from hermes_rl.network import Network
from hermes_rl.sandboxes import SandboxLimits
from hermes_rl.tasks import Task
from hermes_rl.tools import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_TOOLSETS,
    SKILL_VIEW,
    VISION_ANALYZE,
    Catalogue,
    Memory,
    Services,
    Tool,
    Toolset,
    lacks,
    lacks_program,
    open_skills,
    schema_digest,
    with_wording,
)

LOCAL_SWITCHES: dict[str, bool | int] = {
    "continue_output": False,
    "reask_cut_calls": False,
    "compress_context": False,
    "command_timeout_s": 30,
    "wording": 2,
}
"""Cut answers of a tiny model are repetitions, which more tokens would only prolong, and so would
another context; its long-running commands wait for input or never end (`tail -f`); the tool
`process`, which `terminal` has since wording 3, is more than it can use."""


def toolsets_of(config: RunConfig, task: Task | None, seed: int) -> tuple[str, ...]:
    """The toolsets of a unit: the task's own, or the run's, or drawn from a distribution."""
    if task is not None and task.toolsets is not None:
        return task.toolsets
    catalogue = catalogue_of(config.agent)
    if task is not None and task.distribution is not None:
        return catalogue.draw(task.distribution, seed)
    if config.agent.toolsets is not None:
        return config.agent.toolsets
    if config.agent.distribution is not None:
        return catalogue.draw(config.agent.distribution, seed)
    return DEFAULT_TOOLSETS


def policy_of(config: RunConfig) -> Policy:
    """The preset with the switches that the configuration sets. Raises: UserError."""
    defaults: dict[str, bool | int] = {}
    if config.model.name in LOCAL_MODELS:
        defaults = LOCAL_SWITCHES
    elif config.model.name in PLAYED_MODELS:
        defaults = {"command_timeout_s": DEFAULT_TIMEOUT_S}  # a solution may take long
    return preset(config.agent.preset).switched({**defaults, **config.agent.switches})


def sampling_of(section: SamplingSection, seed: int | None = None) -> Sampling:
    """The sampling that a section of the configuration sets."""
    names = {field.name for field in fields(Sampling)}
    return Sampling(**section.model_dump(include=names), seed=seed)


def sent_seed(config: RunConfig, seed: int) -> int | None:
    """A unit's seed where the user set one; None otherwise, since many endpoints refuse the
    parameter. The embedded model always gets it."""
    embedded = config.model.name in LOCAL_MODELS and config.endpoint.base_url is None
    return seed if embedded or config.agent.seed is not None else None


def extra_body_of(config: RunConfig, model: str) -> dict[str, Any]:
    """Further body fields of calls to a model of the run; fallbacks have their own."""
    return dict(extra_of(config.model.extra_body, config.endpoint.places.get(model)))


def limits_of(run: LimitsSection, task: Task | None) -> Limits:
    """The run's limits, with the task's own in their place."""
    limits = task.limits if task else {}
    return Limits(
        max_turns=int(limits.get("max_turns", run.max_turns)),
        max_tokens=int(limits["max_tokens"]) if "max_tokens" in limits else run.max_tokens,
        max_seconds=limits.get("max_seconds", run.max_seconds),
        wall_seconds=limits.get("wall_seconds", run.wall_seconds),
    )


def sandbox_limits_of(section: SandboxLimitsSection, task: Task) -> SandboxLimits:
    """The limits of a task's sandbox: its own ones, none beyond what the run sets."""

    def least(name: str) -> float | None:
        found = (task.limits.get(name), getattr(section, name))
        return min((value for value in found if value is not None), default=None)

    limits, memory, storage = SandboxLimits(), least("memory_bytes"), least("storage_bytes")
    return replace(
        limits,
        cpus=least("cpus"),
        memory_bytes=limits.memory_bytes if memory is None else int(memory),
        workspace_bytes=limits.workspace_bytes if storage is None else int(storage),
    )


def catalogue_of(agent: AgentSection) -> Catalogue:
    """All toolsets and distributions of a run. Raises: UserError."""
    defined = {
        name: Toolset(one.description, one.tools, one.includes)
        for name, one in agent.user_toolsets.items()
    }
    provided = frozenset[str]() if agent.vision is None else frozenset({VISION_ANALYZE})
    return Catalogue.of(defined, agent.user_distributions, provided)


def services_of(agent: AgentSection) -> Services:
    """What tools of the agent itself work with. Blocking. Raises: UserError."""
    return Services(skills=open_skills(agent.skills) if agent.skills else None)


def first_memory(agent: AgentSection) -> dict[str, list[str]]:
    """What the memory of each unit begins with. Blocking. Raises: UserError."""
    if agent.memory is None:
        return {}
    folder = Path(agent.memory)
    if not folder.is_dir():
        raise UserError(f"'agent.memory': no folder {folder}")
    return Memory(folder).read({})


def toolsets_in(agent: AgentSection) -> tuple[str, ...]:
    """All toolsets that units of a run may have, but for those that tasks name. Raises:
    UserError."""
    if agent.toolsets is not None:
        return agent.toolsets
    if agent.distribution is not None:
        return tuple(catalogue_of(agent).distribution(agent.distribution))
    return DEFAULT_TOOLSETS


def programs_here(section: SandboxSection, task: Task | None = None) -> bool:
    """Whether the sandbox of a task has the programs of this machine."""
    image = section.image if task is None or task.image is None else task.image
    return image is None and section.backend in _LOCAL


def missing_tools(config: RunConfig) -> list[str]:
    """What units of a run are not offered, though their toolsets have it, for people.

    Raises: UserError for a toolset of `agent.toolsets` that has no tools, or of which each lacks
    something here.
    """
    agent, catalogue = config.agent, catalogue_of(config.agent)
    missing = catalogue.missing(toolsets_in(agent), programs_here(config.sandbox))
    for toolset in agent.toolsets or ():
        names = catalogue.tool_names([toolset])
        if names and names <= missing.keys():
            name = next(name for name in missing if name in names)
            raise UserError(
                f"--toolsets: the tool {name!r} cannot be offered here ({missing[name]}). Provide "
                "it, or leave its toolset out"
            )
    lines = [f"not offered: {name} ({why})" for name, why in missing.items()]
    empty = catalogue.empty(toolsets_in(agent))
    if agent.toolsets is not None and empty:
        raise UserError(
            f"--toolsets: the toolset {empty[0]!r} has no tools. Leave it out, or use none"
        )
    lines += [f"not offered: the toolset {name} has no tools" for name in empty]
    return lines + (open_skills(agent.skills).notes() if agent.skills else [])


def changed_tools(config: RunConfig, before: Mapping[str, Any]) -> str | None:
    """Why units of a run would now be offered other tools of the same toolsets than those that the
    run began with: a key, package or program that came or went. None where that is not so.

    Args:
        before: the identity with which the run was started.
    """
    agent = before.get("agent", {})
    toolsets = toolsets_in(config.agent)
    if not agent or agent.get("toolsets") != sorted(toolsets):
        return None
    policy, catalogue = policy_of(config), catalogue_of(config.agent)
    every = with_wording(catalogue.possible(toolsets), policy.wording)
    now = every.keys() & catalogue.resolve(toolsets).keys()
    then = _offered_then(every, agent.get("tools")) or now
    absent = _without(config, every).get("without", [])
    if "without" in agent:  # runs of earlier versions do not know
        now, then = now - set(absent), then - set(agent["without"])
    parts = [
        f"without {name}, which can be offered here now ({_present(every[name])})"
        for name in every
        if name in now - then
    ]
    for name in (name for name in every if name in then - now):
        why = lacks(every[name]) or lacks_program(every[name])
        parts.append(f"with {name}, which cannot be offered here ({why})")
    return " and ".join(parts) or None


def _present(tool: Tool) -> str:
    return "its program is installed" if tool.present is None else tool.present()


def _offered_then(every: Mapping[str, Tool], known: object) -> set[str] | None:
    """The tools that have a digest of schemas: some of those that can lack something were there."""
    optional = [name for name, tool in every.items() if tool.missing is not None]
    for number in range(len(optional) + 1):
        for absent in itertools.combinations(optional, number):
            names = every.keys() - set(absent)
            if schema_digest(tool for name, tool in every.items() if name in names) == known:
                return names
    return None


def _without(config: RunConfig, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """The tools whose programs are not on this machine; absent where none needs one here."""
    needing = [name for name, tool in tools.items() if tool.programs]
    if not needing or not programs_here(config.sandbox):
        return {}
    return {"without": [name for name in needing if lacks_program(tools[name])]}


def _kept(agent: AgentSection, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """What the system prompt has of skills and of a memory. Raises: UserError."""
    found: dict[str, Any] = {}
    if SKILL_VIEW in tools or agent.skills:
        found["skills"] = open_skills(agent.skills).digest()
    if agent.memory is not None:
        found["memory"] = digest(first_memory(agent))
    return found


def system_text(config: RunConfig, tools: Mapping[str, Tool]) -> str:
    """The run's system prompt."""
    prompt = config.agent.system_prompt
    if prompt is None and config.model.name in LOCAL_MODELS and set(tools) == {"terminal"}:
        from hermes_rl.models.local import SYSTEM_PROMPT

        return SYSTEM_PROMPT
    if prompt is not None:
        return prompt
    return system_prompt(config.agent.preset, tools, policy_of(config).wording)


def identity_of(config: RunConfig) -> dict[str, Any]:
    """The identity of a run; its digest is the config_hash.

    Raises: UserError for a toolset, distribution or image that does not exist.
    """
    agent, catalogue = config.agent, catalogue_of(config.agent)
    toolsets = toolsets_in(agent)
    policy = policy_of(config)
    tools = with_wording(catalogue.resolve(toolsets), policy.wording)
    drawn = agent.distribution and dict(catalogue.distribution(agent.distribution))
    switches = {k: v for k, v in vars(policy).items() if k != "sampling"}
    if not policy.compress_context:
        del switches["compress_context"]  # a run without it is what it was before there was such
    return {
        "model": {
            **_named(config),
            **sampling_of(config.model).as_dict(),
            "seed": None,  # the unit's seed follows from agent.seed
            **_extra(config),
        },
        "agent": {
            "preset": switches,
            "sampling": policy.sampling.as_dict(),
            "toolsets": sorted(toolsets),
            "distribution": drawn,
            "tools": schema_digest(tools.values()),
            "system_prompt": digest(system_text(config, tools)),
            "texts": digest(WORDINGS[policy.wording].messages.as_list()),
            **_sent_only(agent),
            **_context(agent.context, policy),
            **_plugins(agent),
            **_kept(agent, tools),
            **_without(config, tools),
            **({} if agent.vision is None else {"vision": agent.vision.identity}),
            "limits": agent.limits.model_dump(),
            "seed": agent.base_seed,
        },
        "sandbox": {
            "backend": config.sandbox.backend,
            "image": image_digest(config.sandbox.image, config.sandbox.backend),
            "network": _network(config.sandbox.network),
            **_sandbox_limits(config.sandbox.limits),
        },
        **_scoring(config),
        **_mcp(config),
    }


def _mcp(config: RunConfig) -> dict[str, Any]:
    """Digests of the tools of MCP servers, by name; absent without any, as in older runs."""
    found = {
        f"mcp_{name}_{tool.name}": tool.identity
        for name, server in config.mcp.items()
        for tool in server.offered or ()
    }
    return {"mcp": found} if found else {}


def _scoring(config: RunConfig) -> dict[str, Any]:
    """The judges, where there are any."""
    judges = [judge.identity for judge in config.scoring.judges]
    return {"scoring": {"judges": judges}} if judges else {}


def adapt_switches(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """Adapt the switches to a run of another version: switches that it did not have get the default
    of that version unless the user sets them; removed switches are left out.

    Args:
        before: the identity with which the run was started.
    """
    known = before.get("agent", {}).get("preset", {})
    if not known:
        return config
    off = {k: v for k, v in _NO_SWITCH.items() if k not in known}
    chosen = {k: v for k, v in config.agent.switches.items() if k in _NO_SWITCH or k not in known}
    agent = config.agent.model_copy(update={"switches": {**off, **chosen}})
    return config.model_copy(update={"agent": agent})


def adapt_identity(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Express an identity with the keys of an earlier version: unset keys that it did not have are
    left out, and removed keys keep their value. A run without other changes keeps its hash."""

    def section(old: Any, new: Any, unset: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: new.get(k, v) for k, v in (old or {}).items()}
        return kept | {k: v for k, v in new.items() if k not in kept and v != unset.get(k)}

    then, agent = before.get("agent", {}), now["agent"]
    inner = {
        "preset": section(then.get("preset"), agent["preset"], _NO_SWITCH),
        "limits": section(then.get("limits"), agent["limits"], LimitsSection().model_dump()),
    }
    sandbox = section(before.get("sandbox"), now["sandbox"], SandboxSection().model_dump())
    if "without" not in then:
        agent = {k: v for k, v in agent.items() if k != "without"}
    return {**now, "agent": {**agent, **inner}, "sandbox": sandbox}


_NO_SWITCH = {
    **{k: v for k, v in vars(Policy("")).items() if k not in ("name", "sampling")},
    "wording": 1,
}
"""Switch -> the behaviour before it was added."""


def _sent_only(agent: AgentSection) -> dict[str, Any]:
    """Digests of prompts that are sent but not stored; keys without a value are absent, as in older
    runs."""
    parts = {"ephemeral_system_prompt": agent.ephemeral_system_prompt, "prefill": agent.prefill}
    return {name: digest(part) for name, part in parts.items() if part}


def _context(section: ContextConfig, policy: Policy) -> dict[str, Any]:
    """How contexts are compressed, where they are. Raises: UserError."""
    if not policy.compress_context:
        return {}
    from hermes_rl.agent import COMPRESSION_TEXTS, load_engine

    if isinstance(section.engine, str):
        load_engine(section.engine)  # refuses an unknown one before there is a run directory
    summary = section.summary.identity if section.summary is not None else None
    rest = section.model_dump(include={"window", "threshold", "engine"})
    found = {**rest, "summary": summary, "texts": digest(COMPRESSION_TEXTS)}
    return {"context": {k: v for k, v in found.items() if v is not None}}


def _plugins(agent: AgentSection) -> dict[str, Any]:
    """Digests of the plugins that may change what the model sees; without any, a run is what it
    was before there were plugins. Raises: UserError."""
    plugins = load_plugins(agent.plugins) if agent.plugins else []
    found = [plugin.digest for plugin in plugins if plugin.changes_input]
    return {"plugins": found} if found else {}


def _network(network: Network) -> bool | list[str]:
    return network if isinstance(network, bool) else list(network)


def _sandbox_limits(section: SandboxLimitsSection) -> dict[str, Any]:
    """Limits that are set; absent without any, as in older runs."""
    found = section.model_dump(exclude_none=True)
    return {"limits": found} if found else {}


def _extra(config: RunConfig) -> dict[str, Any]:
    """Further body fields by model; absent without any, as in older runs."""
    models = config.model.mix or (config.model.name,)
    found = {name: extra for name in models if (extra := extra_body_of(config, name))}
    return {"extra_body": found} if found else {}


def _named(config: RunConfig) -> dict[str, Any]:
    """The model by name, or a mix by its weights."""
    mix = config.model.mix
    named: dict[str, Any] = {"mix": dict(mix)} if mix else {"name": config.model.name}
    return {**named, "images": True} if config.model.images else named


_LOCAL = ("bubblewrap", "none")
"""Backends whose images are folders, or stored images, of this machine."""


def image_digest(image: str | None, backend: str) -> str | None:
    """The digest of an image of a sandbox backend; None for the default image.

    Raises: UserError when the image does not exist.
    """
    if image is None:
        return None
    from hermes_rl.sandboxes import ENGINES, Engine, digest_of

    try:
        if backend in ENGINES:
            return Engine(backend).image(image).id
        # Images of other backends are not on this machine: there the name is all that is known.
        return digest_of(image) if backend in _LOCAL else image
    except (TaskFault, SandboxStartError) as error:
        raise UserError(f"--image {image}: {error}") from None
