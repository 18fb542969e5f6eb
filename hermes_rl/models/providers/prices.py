"""Prices of calls: a dated table of list prices, which users can override.

Only an exactly matching entry gives a price. Without one, or if a required count or price is
missing, the cost is None, never a guess:

- Prices belong to a provider: the same model may cost a different amount elsewhere. An endpoint
  with an unknown provider (a gateway, a private server, a loopback address, the embedded model) is
  unpriced unless the user configures prices.
- A name is looked up unchanged, then without its provider's prefix (`openai/gpt-5` at `openai`),
  then without a date at its end (`-2025-08-07`, `-20251001`, `@20251001`). A null entry stops the
  look-up.
- The parts of a prompt are disjoint: read from the cache, written to it (for minutes or for an
  hour), and the rest. Output is priced as a whole, including reasoning and rejected predictions. A
  higher price for long prompts applies to all tokens of the request.
- The cost that OpenRouter reports is used unless the user configures a price.
- List prices are of the standard service tier, without taxes, fees and discounts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec.json
import msgspec.yaml

from hermes_rl.models.base import CacheTime
from hermes_rl.models.rate import OUTPUT_MAX
from hermes_rl.usage import Usage

_MILLION = Decimal(1_000_000)
DATE = re.compile(r"(-\d{4}-\d{2}-\d{2}|[-@]20\d{6})$")
_RATES = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h")


@dataclass(frozen=True)
class Rates:
    """US dollars per million tokens; None if unknown, or not charged separately."""

    input: Decimal
    """Prompt tokens that were neither read from a cache nor written to one."""
    output: Decimal
    """Sampled tokens, reasoning included."""
    cache_read: Decimal | None = None
    """None: no discount, so cached tokens are not distinguished."""
    cache_write_5m: Decimal | None = None
    """Writes for minutes; all writes if the provider has one price."""
    cache_write_1h: Decimal | None = None

    def cost(self, usage: Usage) -> Decimal | None:
        """Return US dollars; None if a required count or price is missing."""
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        read = _price_part(usage.cache_read_tokens, self.cache_read)
        written = self._writes(usage)
        if read is None or written is None:
            return None
        fresh = usage.input_tokens - read[0] - written[0]
        if fresh < 0:
            return None
        total = fresh * self.input + usage.output_tokens * self.output
        return (total + read[1] + written[1]) / _MILLION

    def _writes(self, usage: Usage) -> tuple[int, Decimal] | None:
        """Return tokens and millionths of a dollar of cache writes."""
        short, long = self.cache_write_5m, self.cache_write_1h
        count, hour = usage.cache_write_tokens, usage.cache_write_1h_tokens
        if count is None and long is not None:
            return None
        if not count or long is None or short == long:
            return None if hour and long is None else _price_part(count, short)
        if hour is None or hour > count:
            return None
        if short is None:
            return None if count > hour else (count, hour * long)
        return count, (count - hour) * short + hour * long

    def worst(self, max_input: int, max_output: int, cache: CacheTime | None) -> Decimal:
        """Return the maximum cost of a call. Writes for an hour count only if the request asks for
        them."""
        inputs = [self.input, self.cache_read, self.cache_write_5m]
        if cache == "1h":
            inputs.append(self.cache_write_1h)
        most_expensive = max(rate for rate in inputs if rate is not None)
        return (max_input * most_expensive + max_output * self.output) / _MILLION


def _price_part(count: int | None, rate: Decimal | None) -> tuple[int, Decimal] | None:
    """Return tokens and price of a part of a prompt; None if one is required and missing."""
    if rate is None:
        return None if count else (0, Decimal(0))
    return None if count is None else (count, count * rate)


@dataclass(frozen=True)
class ModelPrice:
    """One model's prices at one provider."""

    base: Rates
    above: int | None = None
    """Longer prompts are priced by `long`, for all their tokens."""
    long: Rates | None = None
    """None: the different price of long prompts is unknown."""
    output_max: int | None = None
    """Maximum output tokens of the model per call."""
    source: str = ""
    read: str = ""
    """The day on which the price was read from its source."""

    def rates(self, prompt_tokens: int) -> Rates | None:
        """Return the rates for a prompt of this length."""
        return self.long if self.above is not None and prompt_tokens > self.above else self.base


class PriceTable:
    """The prices of one endpoint.

    Args:
        prices: model -> its price at this provider; None keeps the name unpriced.
        provider: name of the provider, if known.
        user_prices: by `model` or `provider/model`; they take precedence.
        reported: the provider's answers report their cost, which is used without a price.
    """

    def __init__(
        self,
        prices: Mapping[str, ModelPrice | None] | None = None,
        *,
        provider: str | None = None,
        user_prices: Mapping[str, ModelPrice | None] | None = None,
        reported: bool = False,
    ) -> None:
        self._prices, self._user_prices = prices or {}, user_prices or {}
        self._reported = reported
        self._prefix = f"{provider}/" if provider else ""

    def find(self, model: str) -> ModelPrice | None:
        """Return a model's price; None without an exact match."""
        bare = model.removeprefix(self._prefix)
        for name in (bare, DATE.sub("", bare)):
            user_prices = (self._prefix + name, name) if self._prefix else (name,)
            for key in user_prices:
                if key in self._user_prices:
                    return self._user_prices[key]
            if name in self._prices:
                return self._prices[name]
        return None

    def user_prices_only(self) -> PriceTable:
        """Return the table without list prices, for models that the provider does not serve."""
        return PriceTable(user_prices=self._user_prices)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        """Return the cost of a call in US dollars; None if unknown."""
        price = self.find(model)
        if price is None and self._reported and usage.reported_cost is not None:
            return Decimal(str(usage.reported_cost))
        rates = price.rates(usage.input_tokens or 0) if price else None
        return rates.cost(usage) if rates else None

    def price(self, model: str, usage: Usage) -> float | None:
        """Return `cost` as a float, as in rows."""
        cost = self.cost(model, usage)
        return None if cost is None else float(cost)

    def output_max(self, model: str) -> int:
        """Return the maximum output tokens of a call without a limit: the model's maximum if known,
        else the limit that a budget imposes."""
        return self.known_output(model) or OUTPUT_MAX

    def known_output(self, model: str) -> int | None:
        """Return the maximum output tokens of a model per call, if known."""
        price = self.find(model)
        return price.output_max if price else None

    def worst(
        self, model: str, max_input: int, max_output: int | None, cache: CacheTime | None = None
    ) -> Decimal | None:
        """Return the maximum cost of a call; None if unknown.

        Args:
            max_input: an upper bound on the prompt's tokens.
            max_output: the request's output limit; None if unlimited.
            cache: how long the request caches its prefix.
        """
        price = self.find(model)
        if price is None or max_output is None:
            return None
        held = {price.rates(0), price.rates(max_input)}
        if None in held:
            return None
        return max(r.worst(max_input, max_output, cache) for r in held if r is not None)


def price_table(
    provider: str | None,
    user_prices: Mapping[str, ModelPrice | None] | None = None,
    *,
    reported: bool = False,
) -> PriceTable:
    """Return the shipped list prices of a provider, overridden by the user's."""
    listed = read_list_prices().get(provider or "", {})
    return PriceTable(listed, provider=provider, user_prices=user_prices, reported=reported)


@lru_cache(maxsize=1)
def read_list_prices() -> Mapping[str, Mapping[str, ModelPrice | None]]:
    """Return provider -> model -> price: the shipped tables, read once.

    Prices in `prices.yaml` were read from the vendors and come first. `genai_prices.json` adds
    models from the package genai-prices (`scripts/update_prices.py` writes it).
    """
    folder = files(__package__)
    added = msgspec.json.decode(folder.joinpath("genai_prices.json").read_bytes())
    checked = msgspec.yaml.decode(folder.joinpath("prices.yaml").read_bytes())
    table: dict[str, dict[str, ModelPrice | None]] = {name: {} for name in checked}
    for name, form in (*added.items(), *checked.items()):
        known = {"source": form["source"], "read": str(form["read"])}
        for model, entry in form["models"].items():
            price = None if entry is None else read_price({**known, **entry})
            table[name][str(model)] = price
    return table


def read_price(form: Mapping[str, Any]) -> ModelPrice:
    """Read one entry from plain data: rates, and optionally `long` with `above` and rates.

    Raises: KeyError, ValueError, ArithmeticError.
    """
    long = form.get("long") or {}
    priced = {k: v for k, v in long.items() if k in _RATES and v is not None}
    return ModelPrice(
        base=_rates(form),
        above=int(long["above"]) if long else None,
        long=_rates(priced) if priced else None,
        output_max=int(form["output_max"]) if form.get("output_max") is not None else None,
        source=str(form.get("source", "")),
        read=str(form.get("read", "")),
    )


def _rates(form: Mapping[str, Any]) -> Rates:
    rates = {k: Decimal(str(form[k])) for k in _RATES if form.get(k) is not None}
    if any(not rate.is_finite() or rate < 0 for rate in rates.values()):
        raise ValueError("a price is a number, 0 or more")
    return Rates(input=rates.pop("input"), output=rates.pop("output"), **rates)
