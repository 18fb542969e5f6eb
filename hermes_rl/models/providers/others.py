"""Models that an environment asks beside the policy: where they are, and their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, RunConfig
from hermes_rl.config_endpoint import ModelPlace
from hermes_rl.errors import AuthError, UserError
from hermes_rl.models.providers.probe import probe
from hermes_rl.models.providers.routing import Keys, Target, find_keys
from hermes_rl.models.providers.table import Place
from hermes_rl.models.providers.targets import (
    asks_endpoint,
    first_endpoint,
    keys_of,
    targets_by_model,
    targets_of,
)

USES = ("judge", "user")


def others_of(config: RunConfig) -> dict[str, ModelPlace]:
    """Purpose -> model, for those that the run names.

    Raises: UserError for a model that no endpoint serves.
    """
    if config.env is None:
        return {}
    found = {use: place for use in USES if (place := getattr(config.env, use)) is not None}
    for use, place in found.items():
        own = place.base_url is None and place.provider is None
        if place.name in PLAYED_MODELS or (own and place.name in LOCAL_MODELS):
            raise UserError(
                f"env.{use}.name is {place.name}, which no endpoint serves. Name another model"
            )
    return found


def other_targets(config: RunConfig) -> dict[str, tuple[Target, ...]]:
    """Purpose -> where its calls go. Raises: UserError."""
    where = config.endpoint
    return {
        use: targets_of(
            where.model_copy(update={"places": {place.name: place.place}, "fallbacks": ()}),
            config.providers,
            place.name,
        )
        for use, place in others_of(config).items()
    }


def all_keys(config: RunConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All keys that a run needs, also those of its environment's models, by the variable that holds
    them. Blocking where commands print some (`find_keys`).

    Raises: UserError when one is not set, or its command fails.
    """
    places = [target.place for targets in other_targets(config).values() for target in targets]
    _refuse_idle(config, places)
    own = keys_of(config, environ)
    left = {k: v for k, v in config.endpoint.key_commands.items() if k not in own}
    return {**find_keys(places, {**environ, **own}, left), **own}


def _refuse_idle(config: RunConfig, others: Sequence[Place]) -> None:
    """Raises: UserError for a command of a key that no endpoint of the run asks for."""
    if not asks_endpoint(config.model.name, config.endpoint):
        return
    routes = targets_by_model(config).values()
    places = [*others, *(target.place for targets in routes for target in targets)]
    asked = {name for place in places for name in place.key_names}
    for name in config.endpoint.key_commands:
        if name not in asked:
            known = ", ".join(sorted(asked)) or "none: name it with --api-key-env"
            raise UserError(
                f"'endpoint.key_commands' holds {name}, which the run does not ask for ({known})"
            )


async def reach_others(config: RunConfig, keys: Keys) -> None:
    """Ask each of their places for its models, which costs no token.

    Raises: Outage when nobody answers at an address.
    """
    asked = {targets[0].place for targets in other_targets(config).values()}
    for place in asked:
        try:
            await probe(first_endpoint(config.endpoint, place, keys))
        except AuthError:
            pass  # the run itself stops for it, resumable
