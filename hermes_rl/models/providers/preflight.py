"""What a run asks its endpoints before it starts, and the clients that follow from the answers."""

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
    asks_endpoint,
    other_targets,
    targets_by_model,
)
from hermes_rl.models.providers.table import Place
from hermes_rl.models.tokens import CHAT_MODE, NO_IDS, TokenPlan, Wanted

if TYPE_CHECKING:
    from hermes_rl.models.local import LocalEndpoint, LocalServer
    from hermes_rl.models.tokens import Renderer

Connect = Callable[[Endpoint], ModelClient]


async def reach_models(config: RunConfig, keys: Keys) -> EndpointReport | None:
    """Ask the place of each model, also of those that the run's environment asks, for its list of
    models, which costs no token.

    Where token ids are wanted, find out with a few calls of one token how to get them; with
    `run.probe` full, also what one model can do. Fallbacks are not requested: they are for outages.

    Returns: what the first model's place answers; None if it was not reached or refused the key,
        for which the run itself stops.

    Raises: Outage when nobody answers at an address; UserError when token ids were requested in a
        way that does not exist.
    """
    uses_endpoint = asks_endpoint(config.model.name, config.endpoint)
    routes = targets_by_model(config) if uses_endpoint else {}
    listed: dict[Place, tuple[str, ...] | None] = {}
    for targets in (*other_targets(config).values(), *routes.values()):
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


def wanted_ids(config: RunConfig) -> Wanted:
    """What a run asks for: `auto` means ids with the preset `rl` alone.

    Raises: UserError for a mix of models with one tokenizer.
    """
    where = config.endpoint
    if where.tokens == "auto" and config.agent.preset != "rl":
        return "off"
    by_ids = where.tokens in ("vllm", "sglang", "llamacpp") or where.tokenizer is not None
    if config.model.mix and by_ids and where.tokens not in ("off", "chat"):
        raise UserError(
            "endpoint.tokenizer is of one model, and model.mix has several. Use one model, or "
            "endpoint.tokens=chat"
        )
    return where.tokens


async def find_plan(config: RunConfig, keys: Keys) -> TokenPlan | None:
    """Ask the endpoint of the run's model how it gives ids; None where none are wanted.

    A key that is refused finds nothing: the run itself stops for it.

    Raises: UserError when a way that was asked for by name is not there.
    """
    wanted = wanted_ids(config)
    if wanted == "off" or config.model.name in PLAYED_MODELS:
        return None
    if not asks_endpoint(config.model.name, config.endpoint):
        return _checked(_embedded_plan(wanted), config)
    routes = targets_by_model(config)
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
    """Return the plan, which fits the rest of the configuration.

    Args:
        targets: the model's place, then its fallbacks.

    Raises: UserError for what does not go together with prompts of ids.
    """
    if plan.way in ("off", "chat"):
        return plan
    why = None
    if config.model.reasoning is not None:
        why = "model.reasoning is not told with prompts of ids: there the chat template decides"
    elif config.model.stop:
        why = "model.stop is a text, and prompts of ids stop at token ids"
    elif targets and targets[0].extra:
        why = "model.extra_body is of chat requests, and not told with prompts of ids"
    for other in targets[1:]:
        if other.place.base_url == targets[0].place.base_url and other.model != targets[0].model:
            why = why or (
                f"endpoint.tokenizer is not of the fallback {other.model}, which is at the same "
                "address: it would get another model's ids"
            )
    if why is not None:
        raise UserError(f"{why}. Leave it out, or use endpoint.tokens=chat")
    return plan


def _embedded_plan(wanted: Wanted) -> TokenPlan:
    """Of the embedded model. What its logprobs are of its answers say, or the first look at it.

    Raises: UserError for a way that it has not.
    """
    if wanted in ("vllm", "sglang"):
        raise UserError(
            f"endpoint.tokens={wanted}: the embedded model takes chat, or ids as llama.cpp does. "
            "Use llamacpp"
        )
    if wanted == "llamacpp":
        return TokenPlan(way="llamacpp")
    return TokenPlan(way="chat", spelling="vllm")


async def embedded_clients(
    name: str, where: EndpointSection, plan: TokenPlan | None, server: LocalServer
) -> Callable[[LocalEndpoint], ModelClient]:
    """How clients of the embedded model are made under a plan.

    Raises: UserError when its file holds no tokenizer that can be read, and none is named.
    """
    from hermes_rl.models.local import StepClient
    from hermes_rl.models.tokens import ChatIdsClient, client_for

    if plan is None or not plan.exact:
        return StepClient
    if plan.way == "chat":
        return lambda endpoint: ChatIdsClient(StepClient(endpoint))
    renderer = await asyncio.to_thread(_renderer, where, server.weights)
    # Which tools are offered is not known here: the client refuses them at the first call.
    probe = Probe(await server.endpoint(), name, renderer, tools=False)
    found = await probe.plan("llamacpp")
    return lambda endpoint: client_for(found, endpoint, renderer)


def exact_clients(where: EndpointSection, plan: TokenPlan | None, base_url: str) -> Connect:
    """How clients are made under a plan. Blocking: a tokenizer is read.

    Args:
        base_url: of the run's model. Prompts of ids go there alone: other places have other models.

    Raises: UserError when the tokenizer cannot be had.
    """
    if plan is None or not plan.exact:
        return connect
    from hermes_rl.models.tokens import client_for

    renderer = _renderer(where) if plan.way != "chat" else None

    def make(endpoint: Endpoint) -> ModelClient:
        chat = plan.way == "chat" and endpoint.api_mode == CHAT_MODE
        own = plan.way != "chat" and endpoint.base_url == base_url
        if not (chat or own):
            return connect(endpoint)
        known = endpoint.base_url == base_url  # elsewhere nobody looked what logprobs are of
        told = plan if known else msgspec.structs.replace(plan, logprobs="unknown")
        return client_for(told, endpoint, renderer)

    return make


def _renderer(where: EndpointSection, weights: Path | None = None) -> Renderer | None:
    """The renderer of the named tokenizer, else of the one in the embedded model's file."""
    from hermes_rl.models.tokens import load_renderer, renderer_of

    if where.tokenizer is not None:
        return load_renderer(where.tokenizer)
    if weights is None:
        return None
    from hermes_rl.models.local import read_tokenizer

    return renderer_of(read_tokenizer(weights))
