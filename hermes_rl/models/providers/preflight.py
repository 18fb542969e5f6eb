"""Checks of endpoints before a run starts, and the clients that result from them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hermes_rl.config import PLAYED_MODELS, RunConfig
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import AuthError, UserError
from hermes_rl.models.base import ModelClient
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.providers.probe import (
    EndpointReport,
    Probe,
    list_models,
)
from hermes_rl.models.providers.routing import (
    Keys,
    Target,
    calls_endpoint,
    resolve_env_targets,
    resolve_targets_by_model,
)
from hermes_rl.models.providers.table import Place
from hermes_rl.models.tokens import CHAT_MODE, NO_IDS, TokenPlan, Wanted

if TYPE_CHECKING:
    from hermes_rl.models.local import LocalEndpoint, LocalServer
    from hermes_rl.models.tokens import Renderer

Connect = Callable[[Endpoint], ModelClient]


async def check_endpoints(config: RunConfig, keys: Keys) -> EndpointReport | None:
    """Request the list of models, which costs no token, from each endpoint of the run.

    This includes the endpoints of the environment's models, not the fallbacks. If token ids are
    wanted, a few calls of one token find out how to get them. With `run.probe: full`, more calls
    find the capabilities of one model.

    Returns: the report on the first model's endpoint; None if that is not needed, or it refused the
        key, in which case the run itself stops.

    Raises: Outage if an endpoint is unreachable; UserError if token ids were requested in an
        unavailable way.
    """
    uses_endpoint = calls_endpoint(config.model.name, config.endpoint)
    routes = resolve_targets_by_model(config) if uses_endpoint else {}
    listed: dict[Place, tuple[str, ...] | None] = {}
    for targets in (*resolve_env_targets(config).values(), *routes.values()):
        place = targets[0].place
        if place not in listed:
            with contextlib.suppress(AuthError):
                listed[place] = await list_models(keys.endpoint(config.endpoint, place))
    if not uses_endpoint:
        plan = await find_plan(config, keys)
        return None if plan is None else EndpointReport(None, tokens=plan)
    model = min(routes)
    first = routes[model][0]
    if first.place not in listed:
        return None
    plan, capabilities = await find_plan(config, keys), None
    if config.run.probe == "full":
        endpoint = keys.endpoint(config.endpoint, first.place)
        probe = Probe(endpoint, first.model or model, extra=first.extra, prices=first.prices)
        capabilities = replace(await probe.capabilities(), model=model)
    return EndpointReport(listed[first.place], capabilities, plan)


def wanted_token_ids(config: RunConfig) -> Wanted:
    """Return how the run wants token ids: `auto` means ids with the preset `rl` only.

    Raises: UserError for a mix of models with one tokenizer.
    """
    where = config.endpoint
    if where.tokens == "auto" and config.agent.preset != "rl":
        return "off"
    by_ids = where.tokens in ("vllm", "sglang", "llamacpp") or where.tokenizer is not None
    if config.model.mix and by_ids and where.tokens not in ("off", "chat"):
        raise UserError(
            "endpoint.tokenizer belongs to one model, and model.mix has several. Use one model, or "
            "endpoint.tokens=chat"
        )
    return where.tokens


async def find_plan(config: RunConfig, keys: Keys) -> TokenPlan | None:
    """Find out how the model's endpoint returns ids; None if none are wanted.

    With a refused key nothing is found: the run itself stops for it.

    Raises: UserError if a way that was requested by name is unavailable.
    """
    wanted = wanted_token_ids(config)
    if wanted == "off" or config.model.name in PLAYED_MODELS:
        return None
    if not calls_endpoint(config.model.name, config.endpoint):
        return _checked(_embedded_plan(wanted), config)
    routes = resolve_targets_by_model(config)
    model = min(routes)
    target = routes[model][0]
    endpoint = keys.endpoint(config.endpoint, target.place)
    renderer = await asyncio.to_thread(_renderer, config.endpoint)
    try:
        tools = config.agent.toolsets != () or config.agent.distribution is not None
        probe = Probe(endpoint, target.model or model, renderer, tools, target.extra)
        found = await probe.plan(wanted)
    except AuthError:
        return NO_IDS
    return _checked(found, config, routes[model])


def _checked(plan: TokenPlan, config: RunConfig, targets: Sequence[Target] = ()) -> TokenPlan:
    """Check a plan against the rest of the configuration, and return it.

    Args:
        targets: the model's place, then its fallbacks.

    Raises: UserError for options that prompts of ids do not support.
    """
    if plan.way in ("off", "chat"):
        return plan
    why = None
    if config.model.reasoning is not None:
        why = "model.reasoning is not sent with prompts of ids: the chat template decides"
    elif config.model.stop:
        why = "model.stop is text, and prompts of ids stop at token ids"
    elif config.model.images:
        why = "model.images shows the model images, which prompts of ids cannot hold"
    elif targets and targets[0].extra:
        why = "model.extra_body applies to chat requests, and is not sent with prompts of ids"
    for other in targets[1:]:
        if other.place.base_url == targets[0].place.base_url and other.model != targets[0].model:
            why = why or (
                f"endpoint.tokenizer does not belong to the fallback {other.model} at the same "
                "address: it would get another model's ids"
            )
    if why is not None:
        raise UserError(f"{why}. Remove it, or use endpoint.tokens=chat")
    return plan


def _embedded_plan(wanted: Wanted) -> TokenPlan:
    """Return the plan of the embedded model. Its answers, or a probe, tell the kind of its
    logprobs.

    Raises: UserError for a way that it does not support.
    """
    if wanted in ("vllm", "sglang"):
        raise UserError(
            f"endpoint.tokens={wanted}: the embedded model supports chat and llamacpp. Use llamacpp"
        )
    if wanted == "llamacpp":
        return TokenPlan(way="llamacpp")
    return TokenPlan(way="chat", spelling="vllm")


async def embedded_clients(
    name: str, where: EndpointSection, plan: TokenPlan | None, server: LocalServer
) -> Callable[[LocalEndpoint], ModelClient]:
    """Return a factory for clients of the embedded model under a plan.

    Raises: UserError if its file has no readable tokenizer, and none is configured.
    """
    from hermes_rl.models.local import StepClient
    from hermes_rl.models.tokens import ChatIdsClient, client_for

    if plan is None or not plan.exact:
        return StepClient
    if plan.way == "chat":
        return lambda endpoint: ChatIdsClient(StepClient(endpoint))
    renderer = await asyncio.to_thread(_renderer, where, server.weights)
    # The offered tools are not known here: the client refuses them at the first call.
    probe = Probe(await server.endpoint(), name, renderer, tools=False)
    found = await probe.plan("llamacpp")
    return lambda endpoint: client_for(found, endpoint, renderer)


def exact_clients(where: EndpointSection, plan: TokenPlan | None, base_url: str) -> Connect:
    """Return a factory for clients under a plan. Blocking: it reads a tokenizer.

    Args:
        base_url: of the run's model. Prompts of ids go only there: other places have other models.

    Raises: UserError if the tokenizer is unavailable.
    """
    if plan is None or not plan.exact:
        return connect
    from hermes_rl.models.tokens import client_for

    renderer = _renderer(where) if plan.way != "chat" else None

    def make(endpoint: Endpoint) -> ModelClient:
        chat = plan.way == "chat" and endpoint.api_mode == CHAT_MODE
        by_ids = plan.way != "chat" and endpoint.base_url == base_url
        if not (chat or by_ids):
            return connect(endpoint)
        probed = endpoint.base_url == base_url
        used = plan if probed else msgspec.structs.replace(plan, logprobs="unknown")
        return client_for(used, endpoint, renderer)

    return make


def _renderer(where: EndpointSection, weights: Path | None = None) -> Renderer | None:
    """Return the renderer of the configured tokenizer, or of the embedded model's file."""
    from hermes_rl.models.tokens import build_renderer, load_renderer

    if where.tokenizer is not None:
        return load_renderer(where.tokenizer)
    if weights is None:
        return None
    from hermes_rl.models.local import read_tokenizer

    return build_renderer(read_tokenizer(weights))
