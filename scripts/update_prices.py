"""Write `hermes_rl/models/providers/genai_prices.json` from the package `genai-prices`.

    pip install genai-prices
    python scripts/update_prices.py            # write the table
    python scripts/update_prices.py --check    # only list prices that differ from prices.yaml

Run it before a release. `prices.yaml` holds the prices that were read from the vendors themselves
and always comes first; this table adds models that are not in it. A model is left out if its price
depends on anything but the tokens of text that its usage reports: the time, audio, images, several
tiers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.models.providers import DATE

PROVIDERS = {
    "anthropic": "anthropic",
    "openai": "openai",
    "google": "google",
    "xai": "x-ai",
    "groq": "groq",
    "together": "together",
}
"""Provider here -> provider in the package. The others sell at prices that change within a day or
by region, or are in no list."""

RATES = {
    "input_mtok": "input",
    "output_mtok": "output",
    "cache_read_mtok": "cache_read",
    "cache_write_mtok": "cache_write_5m",
    "cache_write_1h_mtok": "cache_write_1h",
}
EXTRAS = ("web_searches_kcount", "storage_searches_kcount")
"""Prices of server tools, which are not part of a model's tokens."""

_FACTS = ("source", "version", "read")
_OTHER_MEDIA = re.compile("audio|image|tts|realtime|transcri|embedding")
"""Models whose usage counts more than tokens of text."""

FOLDER = Path(__file__).parents[1] / "hermes_rl" / "models" / "providers"


def entry_of(prices: Any) -> dict[str, Any] | None:
    """Convert one price to the form of the table; None if the form cannot hold it."""
    values = getattr(prices, "__dict__", None)
    if values is None:  # a list: the price depends on the time
        return None
    set_values = {k: v for k, v in values.items() if v is not None and not k.startswith("_")}
    if set(set_values) - set(RATES) - set(EXTRAS) or not {"input_mtok", "output_mtok"} <= set(
        values
    ):
        return None
    entry: dict[str, Any] = {}
    long: dict[str, Any] = {}
    starts = set()
    for name, name_here in RATES.items():
        value = set_values.get(name)
        if value is None:
            continue
        if isinstance(value, Decimal):
            entry[name_here] = long[name_here] = text_of(value)
            continue
        if len(value.tiers) != 1:
            return None
        entry[name_here], long[name_here] = text_of(value.base), text_of(value.tiers[0].price)
        starts.add(value.tiers[0].start)
    if not {"input", "output"} <= set(entry) or len(starts) > 1:
        return None
    return {**entry, "long": {"above": starts.pop(), **long}} if starts else entry


def text_of(value: Decimal) -> str:
    """Write a price without an exponent or trailing zeros."""
    return format(value.normalize(), "f")


def names_of(match: Any) -> Iterator[str]:
    """Yield the names that a model matches exactly."""
    if hasattr(match, "equals"):
        yield match.equals
    for inner in getattr(match, "or_", ()):
        yield from names_of(inner)


def table_of(providers: Any) -> dict[str, dict[str, Any]]:
    """Return provider -> model -> entry, for the providers that are named here."""
    by_id = {provider.id: provider for provider in providers}
    table: dict[str, dict[str, Any]] = {}
    for name_here, id_there in PROVIDERS.items():
        models: dict[str, Any] = {}
        for model in by_id[id_there].models:
            entry = entry_of(model.prices)
            if entry is not None and not model.deprecated:
                names = {model.id, *names_of(model.match)}
                models |= {n: entry for n in names if not _OTHER_MEDIA.search(n)}
        table[name_here] = dict(sorted(models.items()))
    return table


def missing_in(checked: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models that no name in the checked table covers.

    Names without their date are looked up too, so a dated name is left out if its price is the same
    as that of the name without: a user's own price for that name must hold for it.
    """
    missing = {}
    for name, entry in models.items():
        undated = DATE.sub("", name)
        same = {**models, **checked}.get(undated)
        covered = undated != name and same is not None and _prices(same) == _prices(entry)
        if name not in checked and not covered:
            missing[name] = entry
    return missing


def _prices(entry: Mapping[str, Any]) -> dict[str, Decimal]:
    return {key: Decimal(str(entry[key])) for key in RATES.values() if key in entry}


def differences(table: Mapping[str, Mapping[str, Any]], checked: Mapping[str, Any]) -> list[str]:
    """Return a line for each model whose prices differ from those that were checked by hand."""
    lines = []
    for provider, models in table.items():
        known = checked.get(provider, {}).get("models", {})
        for name in sorted(set(models) & set(known)):
            here = {
                k: Decimal(str(v)) for k, v in (known[name] or {}).items() if k in RATES.values()
            }
            there = {k: Decimal(v) for k, v in models[name].items() if k in RATES.values()}
            if here and here != there:
                lines.append(
                    f"{provider}/{name}: prices.yaml {_rates(here)}; package {_rates(there)}"
                )
    return lines


def _rates(rates: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{name} {text_of(value)}" for name, value in rates.items())


def written(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table as JSON with one line per model, for readable diffs."""
    blocks = []
    for provider, form in table.items():
        models = [f"   {json.dumps(name)}: {json.dumps(e)}" for name, e in form["models"].items()]
        facts = ", ".join(f'"{key}": {json.dumps(form[key])}' for key in _FACTS)
        listed = ",\n".join(models)
        blocks.append(f' {json.dumps(provider)}: {{{facts}, "models": {{\n{listed}\n }}}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    """Read the package, print what differs, and write the table unless `--check` is set."""
    parser = argparse.ArgumentParser(
        description="Write the table of list prices from genai-prices."
    )
    parser.add_argument("--check", action="store_true", help="only print differing prices")
    check = parser.parse_args().check
    from genai_prices.data import providers

    table = table_of(providers)
    checked = yaml.safe_load((FOLDER / "prices.yaml").read_text(encoding="utf-8"))
    print("\n".join(differences(table, checked)) or "no price differs from prices.yaml")
    if check:
        return
    source = "https://github.com/pydantic/genai-prices"
    today = datetime.datetime.now(tz=datetime.UTC).date()
    added = {
        provider: {
            "source": source,
            "version": version("genai-prices"),
            "read": today.isoformat(),
            "models": missing_in(checked[provider]["models"], models),
        }
        for provider, models in table.items()
    }
    (FOLDER / "genai_prices.json").write_text(written(added), encoding="utf-8")
    count = sum(len(form["models"]) for form in added.values())
    print(f"{count} models from genai-prices {version('genai-prices')}")


if __name__ == "__main__":
    main()
