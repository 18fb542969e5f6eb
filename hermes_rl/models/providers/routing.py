"""Build routes from the configuration: places, keys, prices and clients of each model.

A process opens its `Routes` once; each rollout takes the routes of its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, RunConfig
from hermes_rl.config_agent import read_variables
from hermes_rl.config_endpoint import (
    EndpointSection,
    ModelPlace,
    PlaceSection,
    ProviderSection,
    check_proxy,
    extra_of,
    variable_of,
)
from hermes_rl.errors import HermesError, UserError
from hermes_rl.models.base import ModelClient
from hermes_rl.models.calls import Account, KeyPool, Route
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint, Timeouts
from hermes_rl.models.key_command import KeyCommand, RenewableKey
from hermes_rl.models.providers.listing import read_windows
from hermes_rl.models.providers.prices import PriceTable, price_table, read_price
from hermes_rl.models.providers.table import Place, Provider, known_providers, resolve
from hermes_rl.models.rate import Share
from hermes_rl.models.wire import UNSUPPORTED_SAMPLING, Quirks, refuse_reserved_fields
from hermes_rl.text import SECRETS

NO_KEY = "no-key"
"""The account name of an endpoint without a key."""
_MIX_STEPS = 1 << 52


def calls_endpoint(model: str, where: EndpointSection) -> bool:
    """Return whether a model is called at an endpoint, rather than played or embedded."""
    return not (model in PLAYED_MODELS or (model in LOCAL_MODELS and where.base_url is None))


def draw_model(config: RunConfig, seed: int) -> str:
    """Return the model of a unit: the run's, or one of its mix, drawn by the unit's seed.

    Weights are relative to their sum; their order does not matter.
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


@dataclass(frozen=True)
class Target:
    """A place, and a model there, that calls can be sent to."""

    place: Place
    model: str | None = None
    """None for the unit's model, which may be drawn from a mix."""
    prices: PriceTable = field(default_factory=PriceTable)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body."""


def resolve_targets(
    where: EndpointSection,
    user_providers: Mapping[str, ProviderSection] | None = None,
    model: str | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    stop: Sequence[str] = (),
) -> tuple[Target, ...]:
    """Return the targets of a unit's calls: its model's place, then the fallbacks.

    Args:
        model: drawn for the unit; without it the run's place is first.
        extra: extra body fields of the run's endpoint (`model.extra_body`).
        stop: the run's stop texts (`model.stop`).

    Raises: UserError for an unknown provider, a missing address, reserved fields, or stop texts
        that the wire does not support.
    """
    known = known_providers(user_providers)
    prices = {
        name: None if form is None else read_price(form.model_dump(exclude_none=True))
        for name, form in where.prices.items()
    }
    targets = []
    for named in (where.places.get(model or ""), *where.fallbacks):
        place = _place(where, named, known)
        fields = extra_of(extra, named)
        refuse_reserved_fields(fields, place.api_mode)
        if stop and "stop" in UNSUPPORTED_SAMPLING.get(place.api_mode, ()):
            raise UserError(
                f"'model.stop' has no field in {place.api_mode}. Remove it, or use "
                "--api-mode chat_completions"
            )
        table = price_table(place.price_provider, prices, reported=place.quirks.reports_cost)
        targets.append(Target(place, named.model if named else None, table, fields))
    return tuple(targets)


def _place(
    where: EndpointSection, named: PlaceSection | None, known: Mapping[str, Provider]
) -> Place:
    if named is None:
        return resolve(where, known)
    if named.provider is not None or named.base_url is not None:
        return resolve(named, known)
    return resolve(where.model_copy(update=named.place_keys()), known)


def resolve_targets_by_model(config: RunConfig) -> dict[str, tuple[Target, ...]]:
    """Return the targets of each model that a run may draw."""
    models = config.model.mix or (config.model.name,)
    user_providers, extra, stop = config.providers, config.model.extra_body, config.model.stop
    return {n: resolve_targets(config.endpoint, user_providers, n, extra, stop) for n in models}


def resolve_env_targets(config: RunConfig) -> dict[str, tuple[Target, ...]]:
    """Purpose (`judge`, `user`, `summary`, `vision`, `scoring.judges.0` and so on) -> where the
    calls go to the model that the run names for it beside the policy.

    Raises: UserError for a model that no endpoint serves; and as `resolve_targets`.
    """
    named = {use: getattr(config.env, use, None) for use in ("judge", "user")}
    places = {f"env.{use}": place for use, place in named.items()}
    places["agent.context.summary"] = config.agent.context.summary
    places["agent.vision"] = config.agent.vision
    found = {
        key.rpartition(".")[2]: place_targets(place, config.endpoint, config.providers, key)
        for key, place in places.items()
        if place is not None
    }
    for number, judge in enumerate(config.scoring.judges):
        key = f"scoring.judges.{number}"
        found[key] = place_targets(judge, config.endpoint, config.providers, key)
    return found


def place_targets(
    named: ModelPlace,
    where: EndpointSection,
    providers: Mapping[str, ProviderSection] | None = None,
    key: str = "context.summary",
) -> tuple[Target, ...]:
    """Where the calls go to a model beside the policy.

    Args:
        where: the endpoint of the policy.
        key: what names the model in the configuration, for the message.

    Raises: UserError for a model that no endpoint serves, and as `resolve_targets`.
    """
    at_runs = named.base_url is None and named.provider is None
    if named.name in PLAYED_MODELS or (at_runs and named.name in LOCAL_MODELS):
        raise UserError(f"{key}.name is {named.name}, which no endpoint serves. Name another model")
    only = {"places": {named.name: named.place}, "fallbacks": ()}
    return resolve_targets(where.model_copy(update=only), providers, named.name)


@dataclass(frozen=True)
class Keys:
    """API keys by the variable that holds them. The repr shows the names only."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    live: Mapping[str, RenewableKey] = field(default_factory=dict, repr=False)
    """The keys that a command renews."""

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            SECRETS.learn(name, value)

    @classmethod
    def renewed_by(cls, commands: Mapping[str, str], values: Mapping[str, str]) -> Keys:
        """Return keys, some of which have commands (`endpoint.key_commands`)."""
        live = {
            n: RenewableKey(KeyCommand(n, c), values[n]) for n, c in commands.items() if n in values
        }
        return cls(values, live)

    def of(self, place: Place) -> dict[str, str | None]:
        """Return variable -> key of each account of a place."""
        return {n: self.values[n] for n in place.key_names if n in self.values} or {NO_KEY: None}

    def _read(self, text: str) -> str:
        """Resolve `$NAME` to the value of that variable."""
        name = variable_of(text)
        return text if name is None else self.values[name]

    def endpoint(
        self, where: EndpointSection, place: Place, account: str | None = None
    ) -> Endpoint:
        """Return the endpoint for one account of a place.

        Args:
            where: the run's endpoint, which sets transport and timeouts of all places.
            account: the variable of its key; None for the place's first.
        """
        held = self.of(place)
        name = next(iter(held)) if account is None else account
        proxy = place.proxy and self._read(place.proxy)
        if proxy:
            check_proxy(proxy, f"the value of {place.proxy}")
        return Endpoint(
            base_url=place.base_url,
            api_key=held[name],
            live_key=self.live.get(name),
            transport=where.transport,
            timeouts=Timeouts(first_byte_s=where.first_byte_seconds, idle_s=where.idle_seconds),
            api_mode=place.api_mode,
            quirks=place.quirks,
            ca_file=place.ca_file,
            proxy=proxy,
            headers={header: self._read(text) for header, text in place.headers},
        )


def find_keys(
    places: Sequence[Place],
    environ: Mapping[str, str] = os.environ,
    commands: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the keys of places by variable, from commands or the environment. Commands block, and
    run once each.

    Raises: UserError that names the variable, if a required key is not set or its command fails.
    """
    found: dict[str, str] = {}
    for place in places:
        if place.key_needed and not place.key_names:
            raise UserError(
                f"no key for {place.host}: name the variable that holds it with --api-key-env NAME "
                "(a loopback endpoint needs none)"
            )
        for name in place.key_names:
            if name in found:
                continue
            if name in commands:
                found[name] = _printed(name, commands[name])
            elif key := environ.get(name):
                found[name] = key
            elif place.key_needed:
                raise UserError(f"no key: the variable {name} is not set. Set it, then run again")
        for name, use in place.variables.items():
            if not environ.get(name):
                raise UserError(f"'{use}': the variable {name} is not set. Set it, then run again")
            found[name] = environ[name]
    return found


def _printed(name: str, command: str) -> str:
    key = KeyCommand(name, command).run()
    if key in command:
        raise UserError(
            f"endpoint.key_commands.{name} contains the key itself, which the run would store. "
            "Set a command that looks it up"
        )
    return key


def collect_keys(config: RunConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return all keys that a run needs, including those of its environment's models and of MCP
    servers, by variable.
    Key commands block (`find_keys`).

    Raises: UserError if a key is not set, its command fails, or a command is for a key that no
        endpoint of the run uses.
    """
    commands = config.endpoint.key_commands
    uses_endpoint = calls_endpoint(config.model.name, config.endpoint)
    routes = [*resolve_env_targets(config).values()]
    if uses_endpoint:
        routes = [*resolve_targets_by_model(config).values(), *routes]
    places = [target.place for targets in routes for target in targets]
    names = {name for place in places for name in place.key_names}
    for name in commands:
        if uses_endpoint and name not in names:
            known = ", ".join(sorted(names)) or "none: name it with --api-key-env"
            raise UserError(
                f"'endpoint.key_commands' has {name}, which the run does not use ({known})"
            )
    return {**find_keys(places, environ, commands), **read_variables(config.mcp, environ)}


class ModelSource(NamedTuple):
    """The first place of a model, for records."""

    api_mode: str
    endpoint: str
    """Host (and port)."""
    quirks: Quirks = Quirks()


class Routes:
    """The clients of a process, one per place and key, with one limiter per place, key and model.

    Args:
        targets: model -> its targets in order. Those of the first model also serve unknown names.
        keys: from `find_keys`, possibly on another machine.
        share: limiters and cooldowns.
        where: the run's endpoint.
        make: creates the client of an endpoint.
    """

    def __init__(
        self,
        targets: Mapping[str, Sequence[Target]],
        keys: Keys,
        share: Share,
        where: EndpointSection,
        make: Callable[[Endpoint], ModelClient] = connect,
    ) -> None:
        self._targets, self._share = targets, share
        self._strategy = where.key_strategy
        self._secrets: list[Iterable[str]] = []
        self._stack = AsyncExitStack()
        self._clients: dict[Place, dict[str, ModelClient]] = {}
        self._routes: dict[str, tuple[Route, ...]] = {}
        self._endpoints: dict[Place, Endpoint] = {}
        """Of the first account."""
        self._windows: dict[Place, dict[str, int]] = {}
        self._asking: list[asyncio.Task[None]] = []
        for place in dict.fromkeys(t.place for t in chain.from_iterable(targets.values())):
            accounts = self._clients[place] = {}
            for name in keys.of(place):
                endpoint = keys.endpoint(where, place, name)
                self._endpoints.setdefault(place, endpoint)
                accounts[name] = make(endpoint)
                self._stack.push_async_callback(accounts[name].aclose)
                self._secrets.append(endpoint.secrets)

    @classmethod
    def to(cls, client: ModelClient, share: Share, prices: PriceTable | None = None) -> Routes:
        """Return routes to a single client that is created and closed elsewhere (embedded,
        played)."""
        target = Target(Place(None, "", client.api_mode), prices=prices or PriceTable())
        routes = cls({}, Keys(), share, EndpointSection())
        routes._targets = {"": (target,)}
        routes._clients[target.place] = {NO_KEY: client}
        return routes

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no record may show."""
        return tuple(dict.fromkeys(chain.from_iterable(self._secrets)))

    def routes(self, model: str) -> tuple[Route, ...]:
        """Return the routes of a rollout with this model, in order."""
        if model not in self._routes:
            targets = self._of(model)
            self._routes[model] = tuple(self._route(t, t.model or model) for t in targets)
        return self._routes[model]

    def ask_windows(self) -> None:
        """Ask the endpoints for the context windows of their models, in the background: no call
        waits for that. Once; the routes have the answers when they come."""
        if not self._asking:
            self._asking = [asyncio.create_task(self._ask(place)) for place in self._endpoints]

    async def _ask(self, place: Place) -> None:
        with contextlib.suppress(HermesError, TimeoutError, OSError):
            found = await read_windows(self._endpoints[place])
            self._windows.setdefault(place, {}).update(found)

    def seen(self, model: str) -> ModelSource:
        """Return the first place of a model, for records."""
        place = self._of(model)[0].place
        client = next(iter(self._clients[place].values()))
        return ModelSource(client.api_mode, client.endpoint, place.quirks)

    def _of(self, model: str) -> Sequence[Target]:
        return self._targets.get(model) or next(iter(self._targets.values()))

    def _route(self, target: Target, model: str) -> Route:
        accounts = [
            Account(
                name=name,
                client=client,
                limiter=self._share.limiter(client.endpoint, name, model),
            )
            for name, client in self._clients[target.place].items()
        ]
        pool = KeyPool(
            accounts,
            self._share.cooldowns,
            scope=f"{accounts[0].client.endpoint} {model}",
            strategy=self._strategy,
        )
        windows = self._windows.setdefault(target.place, {})
        return Route(model, pool, target.prices, target.extra, windows=windows)

    async def aclose(self) -> None:
        """Close the clients."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._stack.aclose()
