"""What calls cost: a dated table of list prices, and the user's own in their place.

A price is only ever taken from an entry that fits exactly; where no entry fits, or a count or a
price that is needed is missing, the cost is None and never a guess:

- Prices belong to a provider: the same model costs something else elsewhere. An endpoint whose
  provider is not known (a gateway, a server of one's own, a loopback address, the embedded model)
  is unpriced unless the user says what it costs.
- A name is looked up as it stands, then without its provider's own prefix (`openai/gpt-5` at
  `openai`), then without a date at its end (`-2025-08-07`, `-20251001`, `@20251001`). An entry that
  is null keeps a name from being found by the next rule. Nothing else is tried.
- The parts of a prompt are disjoint: read from the cache, written to it (for minutes or for an
  hour), and the rest. Output is billed as a whole: reasoning and rejected predictions are parts of
  it. Where a long prompt costs more, it does so for all tokens of its request.
- OpenRouter's answers say what they cost; that stands where the user gives no price.
- List prices of the standard service tier, without taxes, fees and discounts.
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
    """US dollars per million tokens; None is not known, or not charged apart."""

    input: Decimal
    """Prompt tokens that were neither read from a cache nor written to one."""
    output: Decimal
    """Sampled tokens, reasoning included."""
    cache_read: Decimal | None = None
    """None: the provider gives no discount, so cached tokens are not told apart."""
    cache_write_5m: Decimal | None = None
    """Written for minutes; all writes where a provider has one price for them."""
    cache_write_1h: Decimal | None = None

    def cost(self, usage: Usage) -> Decimal | None:
        """Return US dollars; None if a count or a price that is needed is missing."""
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        read = _part(usage.cache_read_tokens, self.cache_read)
        written = self._writes(usage)
        if read is None or written is None:
            return None
        fresh = usage.input_tokens - read[0] - written[0]
        if fresh < 0:
            return None
        total = fresh * self.input + usage.output_tokens * self.output
        return (total + read[1] + written[1]) / _MILLION

    def _writes(self, usage: Usage) -> tuple[int, Decimal] | None:
        """Tokens and millionths of a dollar of what was written to the cache."""
        short, long = self.cache_write_5m, self.cache_write_1h
        count, hour = usage.cache_write_tokens, usage.cache_write_1h_tokens
        if count is None and long is not None:
            return None
        if not count or long is None or short == long:
            return None if hour and long is None else _part(count, short)
        if hour is None or hour > count:
            return None
        if short is None:
            return None if count > hour else (count, hour * long)
        return count, (count - hour) * short + hour * long

    def worst(self, max_input: int, max_output: int, cache: CacheTime | None) -> Decimal:
        """The most that a call can cost. Writes for an hour only count where they are asked for."""
        inputs = [self.input, self.cache_read, self.cache_write_5m]
        if cache == "1h":
            inputs.append(self.cache_write_1h)
        dearest = max(rate for rate in inputs if rate is not None)
        return (max_input * dearest + max_output * self.output) / _MILLION


def _part(count: int | None, rate: Decimal | None) -> tuple[int, Decimal] | None:
    """A part of a prompt: its tokens and their price; None when either is needed and missing."""
    if rate is None:
        return None if count else (0, Decimal(0))
    return None if count is None else (count, count * rate)


@dataclass(frozen=True)
class ModelPrice:
    """One model's prices at one provider."""

    base: Rates
    above: int | None = None
    """Prompts of more tokens than this are billed by `long`, all their tokens."""
    long: Rates | None = None
    """None: long prompts cost something else, and it is not known."""
    output_max: int | None = None
    """The most output tokens that the model makes in a call."""
    source: str = ""
    read: str = ""
    """The day on which the price was read from its source."""

    def rates(self, prompt_tokens: int) -> Rates | None:
        """What a prompt of that length is billed by."""
        return self.long if self.above is not None and prompt_tokens > self.above else self.base


class PriceTable:
    """The prices that hold at one endpoint.

    Args:
        prices: model -> its price at this provider; None keeps the name unpriced.
        provider: name of the provider, None when it is not known.
        own: the user's prices, by `model` or `provider/model`; they come first.
        reported: this provider's answers say what they cost, which stands where there is no price.
    """

    def __init__(
        self,
        prices: Mapping[str, ModelPrice | None] | None = None,
        *,
        provider: str | None = None,
        own: Mapping[str, ModelPrice | None] | None = None,
        reported: bool = False,
    ) -> None:
        self._prices, self._own = prices or {}, own or {}
        self._reported = reported
        self._prefix = f"{provider}/" if provider else ""

    def find(self, model: str) -> ModelPrice | None:
        """A model's price; None when there is none that fits exactly."""
        bare = model.removeprefix(self._prefix)
        for name in (bare, DATE.sub("", bare)):
            own = (self._prefix + name, name) if self._prefix else (name,)
            for key in own:
                if key in self._own:
                    return self._own[key]
            if name in self._prices:
                return self._prices[name]
        return None

    def own_alone(self) -> PriceTable:
        """The user's prices without the provider's: for models that the provider does not serve."""
        return PriceTable(own=self._own)

    def cost(self, model: str, usage: Usage) -> Decimal | None:
        """What a call cost in US dollars; None when that is not known."""
        price = self.find(model)
        if price is None and self._reported and usage.reported_cost is not None:
            return Decimal(str(usage.reported_cost))
        rates = price.rates(usage.input_tokens or 0) if price else None
        return rates.cost(usage) if rates else None

    def price(self, model: str, usage: Usage) -> float | None:
        """`cost` as rows have it; a `hermes_rl.models.calls.caller.Price`."""
        cost = self.cost(model, usage)
        return None if cost is None else float(cost)

    def output_max(self, model: str) -> int:
        """The most output tokens of a call that names no bound: the model's own, where that is
        known, else what a budget has sent as one."""
        return self.known_output(model) or OUTPUT_MAX

    def known_output(self, model: str) -> int | None:
        """The most output tokens that a model makes in a call; None when that is not known."""
        price = self.find(model)
        return price.output_max if price else None

    def worst(
        self, model: str, max_input: int, max_output: int | None, cache: CacheTime | None = None
    ) -> Decimal | None:
        """The most that a call can cost; None when that is not known.

        Args:
            max_input: an upper bound on the prompt's tokens.
            max_output: the output tokens that the request allows; None has no bound.
            cache: how long the request asks its prefix to be kept.
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
    own: Mapping[str, ModelPrice | None] | None = None,
    *,
    reported: bool = False,
) -> PriceTable:
    """The shipped list prices of a provider with the user's own before them."""
    listed = list_prices().get(provider or "", {})
    return PriceTable(listed, provider=provider, own=own, reported=reported)


@lru_cache(maxsize=1)
def list_prices() -> Mapping[str, Mapping[str, ModelPrice | None]]:
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
    """One entry from plain data: rates, and optionally `long` with `above` and rates.

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
    given = {k: Decimal(str(form[k])) for k in _RATES if form.get(k) is not None}
    if any(not rate.is_finite() or rate < 0 for rate in given.values()):
        raise ValueError("a price is a number, 0 or more")
    return Rates(input=given.pop("input"), output=given.pop("output"), **given)
