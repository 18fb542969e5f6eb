"""From places to routes: one client per place and key, one limiter per place, key and model.

A process opens its `Routing` once; every rollout takes the routes of its model from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from hermes_rl.config_endpoint import check_proxy, variable_of
from hermes_rl.errors import UserError
from hermes_rl.models.base import ModelClient
from hermes_rl.models.calls import Account, KeyPool, Route, Strategy
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.key_command import KeyCommand, LiveKey
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.providers.table import Place
from hermes_rl.models.rate import Share
from hermes_rl.models.wire import Quirks

NO_KEY = "no-key"
"""The account of an endpoint that needs no key."""


@dataclass(frozen=True)
class Target:
    """Where calls go, in order: first the run's own model, then its fallbacks."""

    place: Place
    model: str | None = None
    """None is the unit's model, which a mix may draw."""
    prices: PriceTable = field(default_factory=PriceTable)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body."""


@dataclass(frozen=True)
class Keys:
    """API keys by the variable that holds them. Text forms show the names."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    live: Mapping[str, LiveKey] = field(default_factory=dict, repr=False)
    """Those of them that a command prints anew."""

    @classmethod
    def renewed_by(cls, commands: Mapping[str, str], values: Mapping[str, str]) -> Keys:
        """Keys of which some have commands (`endpoint.key_commands`)."""
        named = {name: command for name, command in commands.items() if name in values}
        live = {n: LiveKey(KeyCommand(n, c), values[n]) for n, c in named.items()}
        return cls(values, live)

    def of(self, place: Place) -> tuple[tuple[str, str | None], ...]:
        """(variable, key) of each account of a place."""
        found = tuple((n, self.values[n]) for n in place.key_names if n in self.values)
        return found or ((NO_KEY, None),)

    def read(self, text: str) -> str:
        """A text as it is sent: `$NAME` is what that variable holds."""
        name = variable_of(text)
        return text if name is None else self.values[name]

    def endpoint(self, base: Endpoint, place: Place, account: str | None = None) -> Endpoint:
        """One account of a place.

        Args:
            base: what all endpoints have in common.
            account: the variable of its key; None is the place's first.
        """
        held = dict(self.of(place))
        name = next(iter(held)) if account is None else account
        proxy = place.proxy and self.read(place.proxy)
        if proxy:
            check_proxy(proxy, f"the value of {place.proxy}")
        return replace(
            base,
            base_url=place.base_url,
            api_key=held[name],
            live_key=self.live.get(name),
            api_mode=place.api_mode,
            quirks=place.quirks,
            ca_file=place.ca_file,
            proxy=proxy,
            headers={header: self.read(text) for header, text in place.headers},
        )


def find_keys(
    places: Sequence[Place],
    environ: Mapping[str, str] = os.environ,
    commands: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The keys of places, by variable: from the commands that print them, else the environment.
    Blocking where there are commands; each is run once.

    Raises: UserError that names the variable when a needed key is not set, or its command fails.
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
            f"endpoint.key_commands.{name} holds the key itself, and would be stored with the run. "
            "Name a command that finds it"
        )
    return key


class Seen(NamedTuple):
    """Of the first place of a model, for records."""

    api_mode: str
    endpoint: str
    """Host (and port)."""
    quirks: Quirks = Quirks()


class Routes(Protocol):
    """What a process can send its calls to."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no record may show, as of now."""
        ...

    def routes(self, model: str) -> tuple[Route, ...]:
        """Where the calls of a rollout with that model go, in order."""
        ...

    def seen(self, model: str) -> Seen:
        """What records say of where that model is."""
        ...


class Routing:
    """The routes of a process to endpoints.

    Args:
        targets: model -> where its calls go, in order. Of several models the first one's hold for
            names that are not there.
        keys: as `find_keys` returned them, maybe on another machine.
        share: limiters and cooldowns.
        base: what all endpoints have in common; address, key, mode and quirks are filled in.
        connect: makes the client of an endpoint; None makes an ordinary one.
    """

    def __init__(
        self,
        targets: Mapping[str, Sequence[Target]],
        keys: Keys,
        share: Share,
        *,
        base: Endpoint,
        strategy: Strategy = "fill_first",
        connect: Callable[[Endpoint], ModelClient] | None = None,
    ) -> None:
        self._targets = {model: tuple(places) for model, places in targets.items()}
        self._secrets: list[Iterable[str]] = []
        self._keys, self._share, self._strategy = keys, share, strategy
        self._base, self._make = base, connect
        self._stack = AsyncExitStack()
        self._clients: dict[tuple[Place, str], ModelClient] = {}
        self._routes: dict[str, tuple[Route, ...]] = {}
        for target in chain.from_iterable(self._targets.values()):
            self._connect(target.place)

    def _connect(self, place: Place) -> None:
        from hermes_rl.models.client import connect

        for name, _ in self._keys.of(place):
            if (place, name) in self._clients:
                continue
            endpoint = self._keys.endpoint(self._base, place, name)
            client = (self._make or connect)(endpoint)
            self._stack.push_async_callback(client.aclose)
            self._clients[place, name] = client
            self._secrets.append(endpoint.secrets)

    @property
    def secrets(self) -> tuple[str, ...]:
        """See `Routes.secrets`."""
        return tuple(dict.fromkeys(chain.from_iterable(self._secrets)))

    def routes(self, model: str) -> tuple[Route, ...]:
        """See `Routes.routes`."""
        if model not in self._routes:
            targets = self._of(model)
            self._routes[model] = tuple(self._route(t, t.model or model) for t in targets)
        return self._routes[model]

    def seen(self, model: str) -> Seen:
        """See `Routes.seen`."""
        place = self._of(model)[0].place
        client = next(c for (at, _), c in self._clients.items() if at == place)
        return Seen(client.api_mode, client.endpoint, place.quirks)

    def _of(self, model: str) -> tuple[Target, ...]:
        return self._targets.get(model) or next(iter(self._targets.values()))

    def _route(self, target: Target, model: str) -> Route:
        place = target.place
        accounts = [
            Account(
                name=name,
                client=client,
                limiter=self._share.limiter(client.endpoint, name, model),
            )
            for (at, name), client in self._clients.items()
            if at == place
        ]
        pool = KeyPool(
            accounts,
            self._share.cooldowns,
            scope=f"{accounts[0].client.endpoint} {model}",
            strategy=self._strategy,
        )
        return Route(model=model, accounts=pool, prices=target.prices, extra=target.extra)

    async def aclose(self) -> None:
        """Close the clients."""
        await self._stack.aclose()


class Sole:
    """The one route to a client that is made elsewhere (embedded, played)."""

    def __init__(self, client: ModelClient, share: Share, prices: PriceTable | None = None) -> None:
        self.secrets: tuple[str, ...] = ()
        self._client, self._share = client, share
        self._prices = prices or PriceTable()
        self._routes: dict[str, tuple[Route, ...]] = {}

    def routes(self, model: str) -> tuple[Route, ...]:
        """See `Routes.routes`."""
        if model not in self._routes:
            self._routes[model] = (self._route(model),)
        return self._routes[model]

    def seen(self, model: str) -> Seen:
        """See `Routes.seen`."""
        return Seen(self._client.api_mode, self._client.endpoint)

    def _route(self, model: str) -> Route:
        limiter = self._share.limiter(self._client.endpoint, NO_KEY, model)
        account = Account(name=NO_KEY, client=self._client, limiter=limiter)
        pool = KeyPool((account,), self._share.cooldowns, scope=f"{self._client.endpoint} {model}")
        return Route(model=model, accounts=pool, prices=self._prices)
