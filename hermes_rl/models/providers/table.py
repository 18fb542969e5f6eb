"""The table of providers, with their addresses and quirks. Users can extend it.

The provider is `endpoint.provider`, or is recognized by the host of `base_url`, except for loopback
addresses. The user's settings override the provider's. The dialect is the configured one, else the
provider's, else follows from the path of the address (`/anthropic`, `/messages`, `/responses`),
else is `chat_completions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import msgspec.yaml

from hermes_rl.config_endpoint import PlacedSection, ProviderSection, split_names, variables_of
from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.models.endpoint import check_address
from hermes_rl.models.wire import Quirks

DEFAULT_PROVIDER = "openai"
DEFAULT_MODE = "chat_completions"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PLACEHOLDER = re.compile(r"[A-Z]{4,}")
"""Capitalized words in an address: the user has to replace them."""

_MODES_BY_PATH = (
    (re.compile(r"/anthropic(/v1)?$|/messages$"), "anthropic_messages"),
    (re.compile(r"/responses$"), "codex_responses"),
    (re.compile(r"/chat/completions$"), "chat_completions"),
)
_QUIRKS = tuple(f.name for f in fields(Quirks))


@dataclass(frozen=True)
class Provider:
    """One entry of the table."""

    name: str
    base_url: str | None = None
    hosts: tuple[str, ...] = ()
    api_key_env: str | None = None
    """The variable that holds its key; empty if it needs none."""
    api_mode: str | None = None
    quirks: Quirks = field(default_factory=Quirks)
    note: str = ""

    @property
    def needs_address(self) -> bool:
        """Whether the user has to set the address."""
        return self.base_url is None or bool(_PLACEHOLDER.search(self.base_url))

    def at(self, host: str) -> bool:
        """Return whether a host belongs to this provider."""
        return any(fnmatchcase(host.lower(), pattern) for pattern in self.hosts)


@dataclass(frozen=True)
class Place:
    """A resolved endpoint, without model and keys."""

    provider: str | None
    """None if unknown."""
    base_url: str
    api_mode: str
    key_names: tuple[str, ...] = ()
    """Variables that hold the keys."""
    key_needed: bool = False
    """Whether a key is required."""
    quirks: Quirks = field(default_factory=Quirks)
    ca_file: str | None = None
    proxy: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """As configured; `$NAME` refers to a variable."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables in proxy and headers -> the setting that uses each."""
        texts = {f"endpoint.headers.{name}": text for name, text in self.headers}
        return variables_of({**texts, "endpoint.proxy": self.proxy or ""})

    @property
    def host(self) -> str:
        """Its host, without port."""
        return urlsplit(self.base_url).hostname or ""

    @property
    def loopback(self) -> bool:
        """Whether it is on this machine."""
        return self.host in LOOPBACK

    @property
    def price_provider(self) -> str | None:
        """The provider with the applicable list prices, if there is one."""
        return None if self.loopback else self.provider


def resolve(section: PlacedSection, providers: Mapping[str, Provider] | None = None) -> Place:
    """Resolve an endpoint's provider, address and dialect. Nothing is sent.

    Raises: UserError for an unknown provider, or a missing or invalid address.
    """
    known = shipped() if providers is None else providers
    if section.base_url is not None:
        check_address(section.base_url)
    provider = _provider(section, known)
    address = section.base_url or provider.base_url
    if address is None:
        raise UserError(f"{provider.name} has no fixed address. Set it with --base-url")
    if section.base_url is None and provider.needs_address:
        raise UserError(
            f"{provider.name} has one address per user. Set yours: --base-url {address}"
        )
    path = urlsplit(address).path.rstrip("/")
    by_path = (mode for form, mode in _MODES_BY_PATH if form.search(path))
    place = Place(
        provider=provider.name or None,
        base_url=address,
        api_mode=section.api_mode or provider.api_mode or next(by_path, DEFAULT_MODE),
        key_names=split_names(section.api_key_env),
        quirks=provider.quirks,
        ca_file=section.ca_file,
        proxy=section.proxy,
        headers=tuple(sorted((name.lower(), text) for name, text in section.headers.items())),
    )
    if place.key_names or section.api_key_env == "":
        return replace(place, key_needed=bool(place.key_names))
    needed = provider.api_key_env != "" and not place.loopback
    return replace(place, key_names=split_names(provider.api_key_env), key_needed=needed)


def _provider(section: PlacedSection, known: Mapping[str, Provider]) -> Provider:
    """Return the provider of an endpoint; one without a name if it is unknown."""
    if section.provider is not None:
        if section.provider not in known:
            raise UserError(
                f"{unknown('provider', section.provider, sorted(known))}. "
                "Add it under 'providers' in the configuration, or give --base-url"
            )
        return known[section.provider]
    if section.base_url is None:
        return known[DEFAULT_PROVIDER]
    return _provider_at(urlsplit(section.base_url).hostname or "", known)


def _provider_at(host: str, known: Mapping[str, Provider]) -> Provider:
    return next((p for p in known.values() if p.at(host)), Provider(""))


def find_quirks(host: str) -> Quirks:
    """Return the quirks of the provider at a host (and port)."""
    return _provider_at(host.partition(":")[0], shipped()).quirks


@lru_cache(maxsize=1)
def shipped() -> Mapping[str, Provider]:
    """Return the shipped providers (`providers.yaml`), read once."""
    text = files(__package__).joinpath("providers.yaml").read_bytes()
    return {name: _read_provider(name, form) for name, form in msgspec.yaml.decode(text).items()}


def known_providers(
    user_providers: Mapping[str, ProviderSection] | None = None,
) -> dict[str, Provider]:
    """The shipped providers with the user's: new ones, and other facts of known ones."""
    table = dict(shipped())
    for name, section in (user_providers or {}).items():
        table[name] = _read_provider(name, section.model_dump(exclude_none=True), table.get(name))
    return table


def _read_provider(name: str, form: Mapping[str, Any], old: Provider | None = None) -> Provider:
    """Read an entry from plain data, extending an older one."""
    base = old or Provider(name)
    quirks = replace(base.quirks, **{k: form[k] for k in _QUIRKS if k in form})
    plain = {k: form[k] for k in ("base_url", "api_key_env", "api_mode", "note") if k in form}
    hosts = tuple(form["hosts"]) if "hosts" in form else base.hosts
    if old is None and "hosts" not in form and form.get("base_url"):
        host = urlsplit(form["base_url"]).hostname or ""
        hosts = () if host in LOOPBACK else (host,)
    return replace(base, quirks=quirks, hosts=hosts, **plain)
