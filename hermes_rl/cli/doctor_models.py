"""`hermes-rl doctor models`: known providers, embedded models, and what one endpoint can do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.cli.finding import Finding, library
from hermes_rl.errors import HermesError, UserError

if TYPE_CHECKING:
    from hermes_rl.config import RunConfig
    from hermes_rl.config_endpoint import EndpointSection
    from hermes_rl.models.endpoint import Endpoint
    from hermes_rl.models.providers.capabilities import Capabilities, ProbeCall


@dataclass(frozen=True)
class Asked:
    """The endpoint to look at, as options name it."""

    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    api_mode: str | None = None
    config: Path | None = None
    """A configuration file: its providers, and the endpoint where options say nothing."""


def models(asked: Asked = Asked()) -> list[Finding]:
    """What there is; with a model named, what it can do instead. That asks it, which costs a few
    hundred tokens.

    Raises: UserError for an endpoint that cannot work or a key that is not set.
    """
    if asked.model is not None:
        return _explored(asked)
    return [*_providers(asked), *_printed_keys(asked), *_embedded(), *_dialects()]


def _config(asked: Asked) -> RunConfig:
    """What options and file say of an endpoint, held to the rules of a run. Raises: UserError."""
    from hermes_rl.config import load_config, parse_config

    data = load_config(asked.config) if asked.config else {}
    where = data.get("endpoint") or {}
    if not isinstance(where, dict):
        raise UserError(f"{asked.config}: 'endpoint' is {where!r}: write a section")
    model = data.get("model")
    extra = model.get("extra_body") if isinstance(model, dict) else None
    names = ("provider", "base_url", "api_key_env", "api_mode")
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if "provider" in given or "base_url" in given:
        where = {k: v for k, v in where.items() if k not in names}
    kept = {k: v for k, v in where.items() if k not in ("fallbacks", "places")}
    return parse_config(
        {
            "dataset": {"path": "smoke"},
            "model": {"name": asked.model or "any", "extra_body": extra or {}},
            "endpoint": {**kept, **given},
            "providers": data.get("providers") or {},
        },
        str(asked.config or "doctor"),
    )


def _providers(asked: Asked) -> list[Finding]:
    from hermes_rl.models.providers.table import DEFAULT_MODE, known_providers

    config = _config(asked) if asked.config else None
    own = config.providers if config else {}
    printed = config.endpoint.key_commands if config else {}
    found = []
    for entry in known_providers({name: form.model_dump() for name, form in own.items()}).values():
        key = entry.api_key_env
        held = bool(key and (key in printed or os.environ.get(key)))
        has = "comes from a command" if key in printed else f"is {'set' if held else 'not set'}"
        words = [
            entry.base_url or "",
            entry.api_mode or DEFAULT_MODE,
            f"{key} {has}" if key else "no key needed",
            entry.note,
        ]
        text = "; ".join(word for word in words if word)
        found.append(Finding("providers", entry.name, held or None, text))
    return found


def _printed_keys(asked: Asked) -> list[Finding]:
    """Whether the commands of a configuration print keys, and how long these live."""
    if asked.config is None:
        return []
    import time

    from hermes_rl.models.key_command import KeyCommand, ends_at

    found = []
    for name, command in _config(asked).endpoint.key_commands.items():
        try:
            ends = ends_at(KeyCommand(name, command).run())
        except UserError as error:
            found.append(Finding("keys", name, False, str(error)))
            continue
        left = "" if ends is None else f", which ends in {(ends - time.time()) / 60:.0f} min"
        found.append(Finding("keys", name, True, f"its command prints a key{left}"))
    return found


def _embedded() -> list[Finding]:
    from hermes_rl.models.local import LOCAL_MODELS, find_weights
    from hermes_rl.models.local.weights import cache_folder

    engine = library("models", "xllamacpp", "pip install 'hermes-rl[local]' for --model local")
    found = [Finding("models", "engine", engine.good or None, engine.text)]
    for name in LOCAL_MODELS:
        weights = find_weights(name)
        path = cache_folder(os.environ) / weights.file
        size = f"{weights.bytes / 1e6:,.0f} MB"
        where = f"weights in {path}" if path.exists() else f"{size} are fetched at the first use"
        found.append(Finding("models", name, None, f"{weights.description}; {where}"))
    return found


def _dialects() -> list[Finding]:
    from hermes_rl.models.client import DIALECTS
    from hermes_rl.models.providers.prices import list_prices

    table = list_prices()
    known = sum(price is not None for prices in table.values() for price in prices.values())
    newest = max(p.read for prices in table.values() for p in prices.values() if p is not None)
    return [
        Finding("models", "dialects", None, f"{', '.join(DIALECTS)}, each over http and sdk"),
        Finding("models", "prices", None, f"{known} list prices, read {newest}"),
    ]


def _explored(asked: Asked) -> list[Finding]:
    from hermes_rl.aio import run_sync
    from hermes_rl.models.providers.capabilities import explore
    from hermes_rl.models.providers.routing import Keys, find_keys
    from hermes_rl.models.providers.targets import first_endpoint, targets_of

    assert asked.model is not None
    config = _config(asked)
    where = config.endpoint
    target = targets_of(where, config.providers, extra=config.model.extra_body)[0]
    keys = find_keys([target.place], os.environ, where.key_commands)
    endpoint = first_endpoint(where, target.place, Keys(keys))
    try:
        found = run_sync(explore(endpoint, asked.model, target.prices, target.extra))
        exact = _exact(where, endpoint, asked.model)
    except HermesError as error:
        return [Finding("endpoint", endpoint.host, False, str(error))]
    provider = target.place.provider or "no known provider"
    head = Finding("endpoint", endpoint.host, None, f"{provider}, {endpoint.api_mode}")
    return [head, *_findings(found), *exact, *_calls(found.calls)]


def _exact(where: EndpointSection, endpoint: Endpoint, model: str) -> list[Finding]:
    """How a run would get its ids from prompts of ids, where a tokenizer is named.

    Raises: UserError for a tokenizer that cannot be had, or a way that is not there.
    """
    if where.tokenizer is None or where.tokens in ("off", "chat"):
        return []
    from hermes_rl.aio import run_sync
    from hermes_rl.models.tokens.renderer import load_renderer
    from hermes_rl.models.tokens.selection import Search

    search = Search(endpoint, model, load_renderer(where.tokenizer))
    plan = run_sync(search.plan(where.tokens))
    return [Finding("endpoint", "exact tokens", plan.exact or None, t) for t in plan.lines()]


def _findings(found: Capabilities) -> list[Finding]:
    ids = f"in {found.token_ids}'s spelling" if found.token_ids else None
    looks: tuple[tuple[str, bool | None, dict[bool | None, str]], ...] = (
        ("listed", found.listed, {None: "it keeps no list of models"}),
        ("answers", found.answers, {}),
        ("tools", found.tools, {False: "it was asked to call one and did not"}),
        ("streaming", found.streaming, {}),
        ("usage", found.usage, {}),
        ("usage in streams", found.usage_in_streams, {}),
        ("cached tokens", found.cached_tokens, {False: "usage does not tell them"}),
    )
    words = {True: "yes", False: "no", None: "not known"}
    told = [
        Finding(
            "endpoint", name, good if name in _NEEDED else good or None, own.get(good, words[good])
        )
        for name, good, own in looks
    ]
    kind = found.logprobs or "none"
    return [
        *told,
        Finding("endpoint", "logprobs", bool(found.logprobs) or None, kind),
        Finding("endpoint", "token ids", bool(ids) or None, ids or "none"),
    ]


_NEEDED = ("answers", "tools")
"""Without these no run can work."""


def _calls(calls: tuple[ProbeCall, ...]) -> list[Finding]:
    found = []
    for call in calls:
        counts = call.usage or {}
        tokens = f"{_n(counts.get('input_tokens'))} in, {_n(counts.get('output_tokens'))} out"
        cost = "unpriced" if call.cost_usd is None else f"${call.cost_usd:.6f}"
        text = call.error or f"{tokens}, {cost}, {call.latency_s:.2f} s"
        found.append(Finding("calls", call.what, None, text))
    return found


def _n(count: float | None) -> str:
    return "?" if count is None else f"{count:,}"
