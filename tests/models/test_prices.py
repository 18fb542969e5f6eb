"""Prices: parts are disjoint, nothing is guessed, nothing is negative."""

import re
from dataclasses import fields
from datetime import date
from decimal import Decimal
from importlib.resources import files

import msgspec.json
import msgspec.yaml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.models.providers import (
    ModelPrice,
    PriceTable,
    Rates,
    price_table,
    read_list_prices,
    read_price,
)
from hermes_rl.models.wire import read_chat_usage
from hermes_rl.usage import Usage

MILLION = 1_000_000
ALL = Rates(
    input=Decimal("2"),
    output=Decimal("10"),
    cache_read=Decimal("0.20"),
    cache_write_5m=Decimal("2.50"),
    cache_write_1h=Decimal("4"),
)
UNPRICED_AND_UNREPORTED = {
    ("cache_read", "cache_read_tokens"),
    ("cache_write_1h", "cache_write_1h_tokens"),
}
"""A part without a separate price is priced with the rest."""

tokens = st.integers(0, 1 << 40)
rates = st.decimals(0, 1000, places=4)
full_rates = st.builds(
    Rates,
    input=rates,
    output=rates,
    cache_read=rates,
    cache_write_5m=rates,
    cache_write_1h=rates,
)


def usage(fresh: int, read: int, short: int, hour: int, output: int) -> Usage:
    return Usage(
        input_tokens=fresh + read + short + hour,
        cache_read_tokens=read,
        cache_write_tokens=short + hour,
        cache_write_1h_tokens=hour,
        output_tokens=output,
        reasoning_tokens=output,
    )


@given(full_rates, tokens, tokens, tokens, tokens, tokens)
def test_cost_is_the_sum_of_disjoint_parts(
    price: Rates, fresh: int, read: int, short: int, hour: int, output: int
) -> None:
    parts = (
        usage(fresh, 0, 0, 0, 0),
        usage(0, read, 0, 0, 0),
        usage(0, 0, short, 0, 0),
        usage(0, 0, 0, hour, 0),
        usage(0, 0, 0, 0, output),
    )
    alone = [price.cost(part) for part in parts]
    assert None not in alone
    whole = price.cost(usage(fresh, read, short, hour, output))
    assert whole == sum(one for one in alone if one is not None)
    assert whole is not None
    assert whole >= 0
    bound = price.worst(fresh + read + short + hour, output, "1h")
    assert whole <= bound


@given(
    st.sampled_from([None, *(f.name for f in fields(Rates) if f.name not in ("input", "output"))]),
    st.sampled_from([None, *Usage.__struct_fields__]),
    st.integers(1, MILLION),
)
def test_a_missing_price_or_count_is_never_guessed(
    price: str | None, count: str | None, n: int
) -> None:
    known = {f.name: getattr(ALL, f.name) for f in fields(Rates) if f.name != price}
    form = usage(n, n, n, n, n)
    reported = {f: getattr(form, f) for f in Usage.__struct_fields__ if f != count}
    cost = Rates(**known).cost(Usage(**reported))
    needed = price is not None or count not in (None, "reasoning_tokens", "reported_cost")
    assert (cost is None) == (needed and (price, count) not in UNPRICED_AND_UNREPORTED)


def test_cache_writes_are_split_only_if_prices_differ() -> None:
    single = Rates(Decimal(2), Decimal(10), cache_write_5m=Decimal("2.5"))
    written = Usage(input_tokens=MILLION, output_tokens=0, cache_write_tokens=MILLION)
    assert single.cost(written) == Decimal("2.5")
    plain = Rates(Decimal(2), Decimal(10))
    assert plain.cost(written) is None
    assert plain.cost(Usage(input_tokens=MILLION, output_tokens=MILLION)) == 12
    more = Usage(input_tokens=1, output_tokens=0, cache_read_tokens=2, cache_write_tokens=0)
    assert ALL.cost(more) is None  # a provider's error


def test_long_prompt_price_applies_to_all_tokens() -> None:
    table = price_table("google")
    short = Usage(input_tokens=200_000, output_tokens=0, cache_read_tokens=0)
    long = Usage(input_tokens=200_001, output_tokens=0, cache_read_tokens=0)
    assert table.cost("gemini-2.5-pro", short) == Decimal("0.25")
    assert table.cost("gemini-2.5-pro", long) == Decimal("0.5000025")
    assert table.worst("gemini-2.5-pro", 200_001, 0) == Decimal("0.5000025")
    unknown = PriceTable({"m": ModelPrice(ALL, above=10)})
    assert unknown.cost("m", usage(11, 0, 0, 0, 1)) is None
    assert unknown.worst("m", 11, 1) is None
    assert unknown.worst("m", 10, 1) is not None


@pytest.mark.parametrize(
    ("provider", "model", "found"),
    [
        ("openai", "gpt-5-mini", True),
        ("openai", "gpt-5-mini-2025-08-07", True),
        ("openai", "openai/gpt-5-mini", True),
        ("anthropic", "claude-haiku-4-5-20251001", True),
        ("anthropic", "claude-haiku-4-5@20251001", True),
        ("openai", "gpt-5-mini-latest", False),
        ("openai", "gpt-5-mini-0807", False),
        ("openai", "gpt-5-mini-2025", False),
        ("openai", "GPT-5-mini", False),
        ("openai", "gpt-5-mini:free", False),
        ("openai", "gpt-4o-2024-05-13", False),
        ("openrouter", "openai/gpt-5-mini", False),
        ("groq", "gpt-oss-120b", False),
        ("anthropic", "gpt-5-mini", False),
        (None, "gpt-5-mini", False),
        ("vllm", "gpt-5-mini", False),
    ],
)
def test_model_names_match_only_by_documented_rules(
    provider: str | None, model: str, found: bool
) -> None:
    assert (price_table(provider).find(model) is not None) is found


def test_user_prices_take_precedence() -> None:
    dear, cheap = (ModelPrice(Rates(Decimal(n), Decimal(n))) for n in (9, 1))
    call = Usage(input_tokens=MILLION, output_tokens=0)
    assert price_table("openai", {"gpt-5": dear}).cost("gpt-5-2025-08-07", call) == 9
    assert price_table(None, {"gpt-5": dear}).cost("gpt-5", call) == 9
    both = {"openai/gpt-5": cheap, "gpt-5": dear}
    assert price_table("openai", both).cost("gpt-5", call) == 1
    assert price_table("groq", both).cost("gpt-5", call) == 9
    assert price_table("openai", {"gpt-5": None}).find("gpt-5") is None
    exact = {"gpt-5-2025-08-07": cheap, "gpt-5": dear}
    assert price_table("openai", exact).cost("gpt-5-2025-08-07", call) == 1


def test_reported_cost_is_used_only_when_currency_is_usd() -> None:
    call = Usage(input_tokens=1, output_tokens=1, reported_cost=0.0014)
    assert price_table("openrouter", reported=True).cost("any/model", call) == Decimal("0.0014")
    assert price_table("vllm").cost("any/model", call) is None
    custom = {"any/model": ModelPrice(Rates(Decimal(1), Decimal(1)))}
    table = price_table("openrouter", custom, reported=True)
    assert table.cost("any/model", call) == Decimal("0.000002")
    form = {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.0014}
    assert read_chat_usage(form) == call
    assert read_chat_usage({**form, "cost": "free"}) == Usage(input_tokens=1, output_tokens=1)
    silent = Usage(input_tokens=1, output_tokens=1)
    assert price_table("openrouter", reported=True).cost("any/model", silent) is None


def test_rejected_predictions_and_reasoning_count_once_as_output() -> None:
    details = {"reasoning_tokens": 30, "rejected_prediction_tokens": 20}
    form = {"prompt_tokens": 0, "completion_tokens": 100, "completion_tokens_details": details}
    stated = read_chat_usage({**form, "prompt_tokens_details": {"cached_tokens": 0}})
    assert stated is not None
    assert price_table("openai").cost("gpt-5", stated) == Decimal("0.001")


def test_worst_case_needs_an_output_limit() -> None:
    table = PriceTable({"m": ModelPrice(ALL)})
    assert table.worst("m", MILLION, MILLION) == Decimal("12.5")
    assert table.worst("m", MILLION, MILLION, "1h") == Decimal("14")
    assert table.worst("m", MILLION, None) is None
    assert table.worst("n", MILLION, 1) is None


def test_vendor_prices_precede_package_prices() -> None:
    folder = files("hermes_rl.models.providers")
    checked = msgspec.yaml.decode(folder.joinpath("prices.yaml").read_bytes())
    added = msgspec.json.decode(folder.joinpath("genai_prices.json").read_bytes())
    assert set(added) <= set(checked)
    for provider, form in added.items():
        assert form["models"]
        assert not set(form["models"]) & set(checked[provider]["models"])
        assert (form["version"], form["read"]) > ("", "2026-01-01")
    table = read_list_prices()
    assert table["google"]["gemini-3.6-flash"] is None
    assert table["openai"]["gpt-3.5-turbo"] == read_price(
        {**added["openai"], **added["openai"]["models"]["gpt-3.5-turbo"]}
    )


def test_every_shipped_price_has_source_and_date() -> None:
    table = read_list_prices()
    known = [p for models in table.values() for p in models.values() if p is not None]
    assert len(known) >= 25
    for price in known:
        assert re.match(r"https://\S+$", price.source)
        assert date(2026, 1, 1) <= date.fromisoformat(price.read) <= date.today()
        assert 0 < price.base.input <= price.base.output <= 1000
        if price.base.cache_read is not None:
            assert price.base.cache_read < price.base.input
