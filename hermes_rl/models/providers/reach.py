"""A look at the endpoints of a run before it starts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from hermes_rl.config import RunConfig
from hermes_rl.errors import AuthError
from hermes_rl.models.providers.exact import find_plan
from hermes_rl.models.providers.probe import Probed, probe
from hermes_rl.models.providers.routing import Keys, Target
from hermes_rl.models.providers.table import Place
from hermes_rl.models.providers.targets import (
    asks_endpoint,
    first_endpoint,
    targets_by_model,
)


async def reach_models(config: RunConfig, keys: Keys) -> Probed | None:
    """Ask each place of the run's models for its list, which costs no token; where token ids are
    wanted also how they are had, with a few calls of one token; with `run.probe` full also one
    model what it can do. Fallbacks are not looked at: they are for when others are down.

    Returns: what the first model's place says; None when it was not asked or refused the key.

    Args:
        keys: of the run.

    Raises: Outage when nobody answers at an address; UserError when token ids were asked for in a
    way that is not there.
    """
    if not asks_endpoint(config.model.name, config.endpoint):
        plan = await find_plan(config, Keys())
        return None if plan is None else Probed(None, tokens=plan)
    routes = targets_by_model(config)
    model = min(routes)
    said: dict[Place, Probed] = {}
    with contextlib.suppress(AuthError):
        for targets in routes.values():
            place = targets[0].place
            if place not in said:
                said[place] = await probe(first_endpoint(config.endpoint, place, keys))
    first = routes[model][0]
    if first.place not in said:
        return None
    probed = replace(said[first.place], tokens=await find_plan(config, keys))
    if config.run.probe == "free":
        return probed
    return replace(probed, found=await _explored(config, model, first, keys))


async def _explored(config: RunConfig, model: str, target: Target, keys: Keys) -> dict[str, Any]:
    from hermes_rl.models.providers.capabilities import explore

    endpoint = first_endpoint(config.endpoint, target.place, keys)
    found = await explore(endpoint, target.model or model, target.prices, target.extra)
    return {"model": model, **found.as_dict()}
