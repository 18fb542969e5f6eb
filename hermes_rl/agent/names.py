"""The keywords of `AIAgent` that have another name in hermes-agent, and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast, get_args

from pydantic import SecretStr

from hermes_rl.agent.callbacks import Callbacks
from hermes_rl.agent.hooks import Hooks
from hermes_rl.agent.policy import Budget, IterationBudget, Limits, Policy
from hermes_rl.config import ModelConfig
from hermes_rl.config_agent import ContextConfig, check_prefill
from hermes_rl.config_endpoint import ModelPlace
from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.messages import Message, conversation_from_openai
from hermes_rl.sessions import SessionStore, default_store_path
from hermes_rl.text import clean
from hermes_rl.tools import (
    DEFAULT_TOOLSETS,
    SESSION_SEARCH,
    SKILL_VIEW,
    VISION_ANALYZE,
    Approval,
    Ask,
    Catalogue,
    Clarify,
    Memory,
    Mode,
    Services,
    Tool,
    function_tool,
    open_skills,
    tool_names,
    with_timeout,
    with_wording,
)

INTERACTIVE_TURNS = 90
SAVED = Path("trajectories")
"""The run directory of `save_trajectories=True`."""
_MODEL = ("base_url", "api_key", "provider", "api_mode")


class OtherNames(TypedDict, total=False):
    """Keywords of hermes-agent's `AIAgent`; None counts as left out."""

    base_url: str | None
    """This and the next three: as in `ModelConfig`."""
    api_key: str | None
    provider: str | None
    api_mode: str | None
    max_iterations: int | None
    """`Limits.max_turns`."""
    iteration_budget: int | Budget | None
    """Turns that this agent may take in its life, or an `IterationBudget` that several share."""
    enabled_toolsets: Sequence[str] | None
    """`toolsets`."""
    disabled_toolsets: Sequence[str] | None
    """Toolsets whose tools are left out."""
    quiet_mode: bool | None
    """False prints a line to standard error for each tool call."""
    save_trajectories: bool | str | Path | None
    """Save the row of each run in this run directory; True is `trajectories`."""
    ephemeral_system_prompt: str | None
    """Joined to the system prompt of every request, and in no row, message or session."""
    prefill_messages: Sequence[Mapping[str, Any]] | None
    """OpenAI messages that every request has behind the system prompt, and that are stored nowhere.
    """
    fallback_model: Any
    """`fallbacks`; also `{"model": ..., "provider": ..., "base_url": ..., "api_key": ...}`."""
    session_id: str | None
    """Names the agent in results and rows."""
    approval: str | Approval | None
    """`ask`, `allow` or `deny` dangerous commands, or an `Approval`; None is `allow` in a sandbox
    and `ask` without one."""
    approval_callback: Ask | None
    """Is asked about dangerous commands; without it, `ask` denies them."""
    clarify_callback: Clarify | None
    """Answers the tool `clarify`; see `hermes_rl.tools.Clarify`."""
    memory: str | Path | None
    """Folder of the tool `memory`; None is that of this user."""
    skills: Sequence[str | Path] | None
    """Folders with skills, beside those that the agent makes, which are kept for this user; none
    are the bundled ones."""
    vision: Any
    """The model that the tool `vision_analyze` asks: a name, or fields as those of a run's
    `agent.vision`."""
    tool_progress_callback: Callable[..., Any] | None
    """This and the next eight: see `Callbacks`."""
    tool_start_callback: Callable[..., Any] | None
    tool_complete_callback: Callable[..., Any] | None
    thinking_callback: Callable[..., Any] | None
    reasoning_callback: Callable[..., Any] | None
    step_callback: Callable[..., Any] | None
    stream_delta_callback: Callable[..., Any] | None
    interim_assistant_callback: Callable[..., Any] | None
    status_callback: Callable[..., Any] | None


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, bytes)


def _are_names(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(one, str) for one in value)


def _is_session(value: object) -> bool:
    return isinstance(value, str | Path | SessionStore) or hasattr(value, "load")


_CALLBACKS = tuple(n for n in OtherNames.__annotations__ if n.endswith("_callback"))
_KINDS: tuple[tuple[Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (_is_list, "a list", ("tools", "plugins", "prefill_messages", "skills")),
    (lambda v: isinstance(v, str | Path), "a path", ("memory",)),
    (_are_names, "a list of names", ("toolsets", "enabled_toolsets", "disabled_toolsets")),
    (lambda v: isinstance(v, str), "text", ("system", "ephemeral_system_prompt", "session_id")),
    (lambda v: isinstance(v, bool), "True or False", ("allow_unsandboxed", "quiet_mode")),
    (lambda v: isinstance(v, bool | str | Path), "True or a path", ("save_trajectories",)),
    (lambda v: isinstance(v, Limits), "Limits(...)", ("limits",)),
    (lambda v: isinstance(v, Hooks), "Hooks(...)", ("hooks",)),
    (_is_session, "a name, a path, a SessionStore or a session of one", ("session",)),
    (callable, "a function", ("on_event", "on_delta", *_CALLBACKS)),
)
"""Arguments of `AIAgent`, and what they must be; None is left out."""


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raises: UserError for an argument of `AIAgent` of another kind."""
    for is_kind, kind, names in _KINDS:
        for name in names:
            value = arguments.get(name)
            if value is not None and not is_kind(value):
                raise UserError(f"{name} must be {kind}, not {value!r:.80}")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What an agent works with, whatever names it was written with."""

    model: object
    keys: Mapping[str, str] = field(repr=False)
    """Keys of fallbacks, by the name of a variable that is not in the environment."""
    toolsets: tuple[str, ...]
    tools: Mapping[str, Tool]
    limits: Limits
    budget: Budget | None
    ephemeral: str | None
    prefill: tuple[Message, ...]
    session_id: str | None
    save_to: Path | None
    callbacks: Callbacks | None
    approval: Approval | None
    context: ContextConfig | None
    """How a full context is compressed; None where the policy does not."""
    others: Mapping[str, ModelPlace]
    """Models beside the agent's, by purpose: `summary`, `vision`."""
    services: Services
    """What tools of the agent itself work with."""

    @property
    def asks_window(self) -> bool:
        """The endpoint has to say how large the context window is."""
        return self.context is not None and self.context.window is None


def settle(
    model: object,
    names: Mapping[str, Any],
    *,
    policy: Policy,
    toolsets: Sequence[str] | None,
    tools: Sequence[Callable[..., Any] | Tool],
    limits: Limits | None,
    fallbacks: Any,
    session: object,
    approval: Approval,
    context: object = None,
) -> AgentSettings:
    """Settle the keywords of `AIAgent`.

    Args:
        names: those of `OtherNames`.
        policy: its wording and timeout are those of the tools of toolsets.
        approval: decides about dangerous commands where `names` does not say who does.

    Raises: UserError for an unknown name or tool, and for two names that contradict each other.
    """
    for name in names:
        if name not in OtherNames.__annotations__:
            raise UserError("AIAgent: " + unknown("argument", name, OtherNames.__annotations__))
    if session is not None and names.get("session_id") is not None:
        raise UserError("session_id and session contradict each other: a session has its own id")
    configured, keys = _model(model, names, fallbacks)
    chosen, offered = _tools(names, policy, toolsets, tools)
    compression = _context(context, policy)
    others = {
        "summary": None if compression is None else compression.summary,
        "vision": _vision(names),
    }
    save = names.get("save_trajectories")
    ephemeral = names.get("ephemeral_system_prompt")
    prefill = names.get("prefill_messages") or ()
    check_prefill(prefill, "prefill_messages")
    return AgentSettings(
        model=configured,
        keys=keys,
        toolsets=chosen,
        tools=offered,
        limits=_limits(names.get("max_iterations"), limits),
        budget=_budget(names.get("iteration_budget")),
        ephemeral=clean(ephemeral) if ephemeral and ephemeral.strip() else None,
        prefill=tuple(conversation_from_openai(prefill)),
        session_id=names.get("session_id"),
        save_to=(SAVED if save is True else Path(save)) if save else None,
        callbacks=Callbacks.of(names),
        approval=_approval(names, policy, approval),
        context=compression,
        others={use: place for use, place in others.items() if place is not None},
        services=_services(names, offered),
    )


def _services(names: Mapping[str, Any], tools: Mapping[str, Tool]) -> Services:
    """Those that the offered tools need. Raises: UserError for an invalid skill."""
    store = default_store_path()
    kept = store.parent
    skills = None
    if SKILL_VIEW in tools:
        skills = open_skills(names.get("skills") or (), kept / "skills")
    return Services(
        memory=Memory(Path(names.get("memory") or kept / "memory").expanduser()),
        skills=skills,
        sessions=SessionStore(store) if SESSION_SEARCH in tools and store.exists() else None,
        clarify=names.get("clarify_callback"),
    )


def _vision(names: Mapping[str, Any]) -> ModelPlace | None:
    """Raises: UserError for what is not a model."""
    named = names.get("vision")
    if named is None or isinstance(named, ModelPlace):
        return named
    if not isinstance(named, str | Mapping):
        raise UserError(f"vision must be a model's name or its fields, not {named!r:.80}")
    return ModelPlace(**({"name": named} if isinstance(named, str) else named))


def _context(context: object, policy: Policy) -> ContextConfig | None:
    """Raises: UserError for what is no configuration, or has no effect."""
    if context is not None and not policy.compress_context:
        raise UserError(
            f"context has no effect: the preset {policy.name} does not compress contexts. Take it "
            f"out, or pass preset('{policy.name}').switched({{'compress_context': True}})"
        )
    if isinstance(context, ContextConfig):
        return context
    if context is None:
        return ContextConfig() if policy.compress_context else None
    if isinstance(context, Mapping):
        return ContextConfig(**context)
    return ContextConfig(engine=context)


def _one_of(choices: Mapping[str, Any]) -> Any:
    """The value that is set. Raises: UserError when two names have different ones."""
    values = {name: value for name, value in choices.items() if value is not None}
    for name, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise UserError(f"{first} and {name} contradict each other. Use one of them")
    return next(iter(values.values()), None)


def _approval(names: Mapping[str, Any], policy: Policy, default: Approval) -> Approval | None:
    """Who decides about dangerous commands. Raises: UserError."""
    chosen, ask = names.get("approval"), names.get("approval_callback")
    if isinstance(chosen, Approval):
        if ask is not None:
            raise UserError("approval and approval_callback contradict each other. Use one of them")
        return chosen
    if chosen is None and ask is None:
        return default if policy.check_commands else None
    mode = chosen or "ask"
    if mode not in get_args(Mode):
        raise UserError(unknown("approval mode", str(mode), get_args(Mode)))
    return Approval(cast("Mode", mode), ask)


def _model(
    model: object, names: Mapping[str, Any], fallbacks: Any
) -> tuple[object, dict[str, str]]:
    """The model, and the keys of its fallbacks. Raises: UserError."""
    values = {name: names[name] for name in _MODEL if names.get(name) is not None}
    chain = _one_of({"fallbacks": fallbacks, "fallback_model": names.get("fallback_model")})
    if not values and not chain:
        return model, {}
    if isinstance(model, ModelConfig):
        fields = {name: getattr(model, name) for name in model.model_fields_set}
    elif isinstance(model, str):
        fields = {"name": model}
    else:
        raise UserError(f"model {model!r}: give a name or a ModelConfig")
    for name, value in values.items():
        before = fields.get(name)
        plain = before.get_secret_value() if isinstance(before, SecretStr) else before
        if plain not in (None, value):
            raise UserError(f"{name} and that of the ModelConfig contradict each other. Use one")
        fields[name] = value
    if not chain:
        return ModelConfig(**fields), {}
    if fields.get("fallbacks"):
        raise UserError("fallbacks and those of the ModelConfig contradict each other. Use one")
    keys: dict[str, str] = {}
    fields["fallbacks"] = [_fallback(one, keys) for one in _listed(chain)]
    return ModelConfig(**fields), keys


def _listed(chain: Any) -> list[Any]:
    return list(chain) if isinstance(chain, list | tuple) else [chain]


def _fallback(one: Any, keys: dict[str, str]) -> Any:
    """A fallback as `ModelConfig` takes it; a key that is written out goes to `keys`."""
    if not isinstance(one, Mapping) or not one.get("api_key"):
        return one
    if one.get("api_key_env"):
        raise UserError("fallback: api_key and api_key_env contradict each other. Use one of them")
    name = f"fallback_{len(keys) + 1}_api_key"
    keys[name] = str(one["api_key"])
    return {**{k: v for k, v in one.items() if k != "api_key"}, "api_key_env": name}


def _tools(
    names: Mapping[str, Any],
    policy: Policy,
    toolsets: Sequence[str] | None,
    functions: Sequence[Callable[..., Any] | Tool],
) -> tuple[tuple[str, ...], dict[str, Tool]]:
    """The toolsets and all tools by name. Raises: UserError."""
    listed = {"toolsets": toolsets, "enabled_toolsets": names.get("enabled_toolsets")}
    listed["disabled_toolsets"] = names.get("disabled_toolsets")
    for name, value in listed.items():
        if isinstance(value, str):
            raise UserError(f"{name}={value!r} must be a list of names: [{value!r}]")
    sets = {name: None if value is None else tuple(value) for name, value in listed.items()}
    disabled = sets.pop("disabled_toolsets") or ()
    enabled = _one_of(sets)
    if both := sorted(set(enabled or ()) & set(disabled)):
        raise UserError(f"toolset {both[0]!r} is both enabled and disabled. Take it out of one")
    if enabled is None:
        enabled = DEFAULT_TOOLSETS
    if empty := Catalogue().empty(enabled):
        raise UserError(f"the toolset {empty[0]!r} has no tools. Leave it out, or pass toolsets=[]")
    left_out = tool_names(disabled)
    seen = frozenset[str]() if names.get("vision") is None else frozenset({VISION_ANALYZE})
    found = Catalogue(provided=seen).resolve(enabled)
    worded = with_timeout(with_wording(found, policy.wording), policy.command_timeout_s)
    tools = {name: tool for name, tool in worded.items() if name not in left_out}
    for function in functions:
        tool = function_tool(function)
        if tool.name in tools:
            raise UserError(f"tools: there are two tools named {tool.name!r}. Rename one of them")
        tools[tool.name] = tool
    return tuple(name for name in enabled if name not in disabled), tools


def _limits(turns: int | None, limits: Limits | None) -> Limits:
    if turns is None:
        return limits or Limits(max_turns=INTERACTIVE_TURNS)
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise UserError(f"max_iterations must be a whole number from 1, not {turns!r}")
    if limits is not None and limits.max_turns != turns:
        raise UserError(
            "max_iterations and limits contradict each other. Use limits=Limits(max_turns=...)"
        )
    return replace(limits or Limits(), max_turns=turns)


def _budget(budget: int | Budget | None) -> Budget | None:
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise UserError(
            f"iteration_budget must be an IterationBudget or a whole number from 1, not {budget!r}"
        )
    return IterationBudget(budget)
