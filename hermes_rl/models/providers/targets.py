"""From the configuration to what calls can be sent to: places, keys, prices, targets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, RunConfig
from hermes_rl.config_endpoint import (
    EndpointSection,
    ModelPlace,
    PlaceSection,
    PriceSection,
    ProviderSection,
    extra_of,
)
from hermes_rl.errors import UserError
from hermes_rl.models.endpoint import Endpoint, Timeouts
from hermes_rl.models.providers.prices import ModelPrice, PriceTable, price_table, read_price
from hermes_rl.models.providers.routing import Keys, Target, find_keys
from hermes_rl.models.providers.table import Place, Provider, known_providers, resolve
from hermes_rl.models.wire import NO_FIELD, refuse_own

_MIX_STEPS = 1 << 52


def asks_endpoint(model: str, where: EndpointSection) -> bool:
    """Whether a model is asked at an endpoint, and not played or embedded."""
    return not (model in PLAYED_MODELS or (model in LOCAL_MODELS and where.base_url is None))


def targets_of(
    where: EndpointSection,
    own: Mapping[str, ProviderSection] | None = None,
    model: str | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    stop: Sequence[str] = (),
) -> tuple[Target, ...]:
    """Where the calls of a unit go: its model's place first, then the fallbacks.

    Args:
        own: the user's providers.
        model: as it was drawn for the unit; without it the run's own place is first.
        extra: further body fields of the run's own endpoint (`model.extra_body`).
        stop: the run's stop texts (`model.stop`).

    Raises: UserError for a provider that is unknown or has no address, fields that are not free, or
        stop texts where the wire has no field for them.
    """
    known = _providers(own)
    prices = _prices(where.prices)
    targets = []
    for said in (where.places.get(model or ""), *where.fallbacks):
        place = _place(where, said, known)
        own_extra = extra_of(extra, said)
        refuse_own(own_extra, place.api_mode)
        if stop and "stop" in NO_FIELD.get(place.api_mode, ()):
            raise UserError(
                f"'model.stop' has no field in {place.api_mode}. Take it out, or use "
                "--api-mode chat_completions"
            )
        name = said.model if said else None
        targets.append(Target(place, name, _table(place, prices), own_extra))
    return tuple(targets)


def _place(
    where: EndpointSection, said: PlaceSection | None, known: Mapping[str, Provider]
) -> Place:
    if said is None:
        return resolve(where, known)
    if said.provider is not None or said.base_url is not None:
        return resolve(said, known)
    return resolve(where.model_copy(update=said.place_keys()), known)


def targets_by_model(config: RunConfig) -> dict[str, tuple[Target, ...]]:
    """`targets_of` for each model that a run may draw."""
    models = config.model.mix or (config.model.name,)
    own, extra, stop = config.providers, config.model.extra_body, config.model.stop
    return {n: targets_of(config.endpoint, own, n, extra, stop) for n in models}


def keys_of(config: RunConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All keys that a run needs, by the variable that holds them; none for a model that asks no
    endpoint.

    Raises: UserError when a needed one is not set.
    """
    if not asks_endpoint(config.model.name, config.endpoint):
        return {}
    routes = targets_by_model(config).values()
    places = [target.place for targets in routes for target in targets]
    return find_keys(places, environ, config.endpoint.key_commands)


def endpoint_base(where: EndpointSection) -> Endpoint:
    """What all endpoints of a run have in common."""
    return Endpoint(
        base_url="",
        transport=where.transport,
        timeouts=Timeouts(first_byte_s=where.first_byte_seconds, idle_s=where.idle_seconds),
    )


def first_endpoint(where: EndpointSection, place: Place, keys: Keys) -> Endpoint:
    """A place with the first of its keys."""
    return keys.endpoint(endpoint_base(where), place)


def drawn_model(config: RunConfig, seed: int) -> str:
    """The model of a unit: the run's, or one of its mix, by the unit's seed alone.

    Weights are shares of their sum; the order in which they are written does not matter.
    """
    mix = config.model.mix
    if not mix:
        return config.model.name
    data = hashlib.sha256(f"model mix,{seed}".encode()).digest()
    point = int.from_bytes(data[:8]) % _MIX_STEPS / _MIX_STEPS * sum(mix.values())
    reached = 0.0
    names = sorted(mix)
    for name in names:
        reached += mix[name]
        if point < reached:
            return name
    return names[-1]


def _providers(own: Mapping[str, ProviderSection] | None) -> dict[str, Provider]:
    return known_providers({name: form.model_dump() for name, form in (own or {}).items()})


def _prices(own: Mapping[str, PriceSection | None]) -> dict[str, ModelPrice | None]:
    return {
        name: None if form is None else read_price(form.model_dump(exclude_none=True))
        for name, form in own.items()
    }


def _table(place: Place, own: Mapping[str, ModelPrice | None]) -> PriceTable:
    return price_table(place.seller, own, reported=place.quirks.reports_cost)


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
