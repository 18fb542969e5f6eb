"""Where the calls of a unit go: mixes, prices, keys."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_runner import Prices
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.models.providers import (
    collect_keys,
    draw_model,
    resolve_targets,
    resolve_targets_by_model,
)
from hermes_rl.testing import FakeConfig, FakeServer
from hermes_rl.wiring import identity_of

from .conftest import Open, script

ROW = {"prompt": script({"run": "true"}, "done")}


def config(**sections: object) -> RunConfig:
    return parse_config({"dataset": {"path": "x"}, **sections})


def test_the_shares_of_a_mix_are_its_weights() -> None:
    weights = {"a": 6, "b": 3, "c": 1}
    mixed = config(model={"mix": weights})
    shares = Counter(draw_model(mixed, seed) for seed in range(10_000))
    assert shares.keys() == weights.keys()
    for name, weight in weights.items():
        assert abs(shares[name] / 10_000 - weight / 10) < 0.02


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(min_size=1), st.floats(1e-6, 1e6), min_size=1, max_size=5),
    st.integers(0, 2**31 - 1),
)
def test_draw_depends_only_on_seed_and_weights(weights: dict[str, float], seed: int) -> None:
    names = {f"m-{name}": weight for name, weight in weights.items()}
    drawn = draw_model(config(model={"mix": names}), seed)
    assert drawn in names
    again = dict(reversed(names.items()))
    assert draw_model(config(model={"name": "other", "mix": again}), seed) == drawn


def test_the_weights_of_a_mix_are_identity_and_fallbacks_and_prices_are_not() -> None:
    plain = identity_of(config(model={"mix": {"a": 1, "b": 1}}))
    assert identity_of(config(model={"name": "x", "mix": {"b": 1, "a": 1}})) == plain
    assert identity_of(config(model={"mix": {"a": 1, "b": 2}})) != plain
    where = {"fallbacks": ["c"], "prices": {"a": {"input": 1, "output": 1}}, "provider": "groq"}
    assert identity_of(config(model={"mix": {"a": 1, "b": 1}}, endpoint=where)) == plain


async def test_drawn_model_is_fixed_and_recorded(stage: Open) -> None:
    s = await stage(backend="none", model={"mix": {"left": 1, "right": 1}})
    rows = [await s.attempt({**ROW, "id": str(i)}, i) for i in range(8)]
    assert {row.model for row in rows} == {"left", "right"}
    for row in rows:
        assert {call.model for call in row.calls} == {row.model}
        assert list(row.served_models) == [row.model]
    again = await s.attempt({**ROW, "id": "0"}, 0)
    assert again.model == rows[0].model


async def test_local_server_has_only_user_prices(
    stage: Open,
) -> None:
    priced = await stage(
        backend="none",
        endpoint={
            "prices": {"fake": {"input": 3, "output": 15, "cache_read": 1}},
            "provider": "openai",
        },
    )
    row = await priced.attempt(ROW)
    expected = sum(
        (c.input_tokens or 0) * 3 - (c.cache_read_tokens or 0) * 2 + (c.output_tokens or 0) * 15
        for c in row.calls
    )
    assert row.cost_usd == pytest.approx(expected / 1e6)
    assert row.unpriced_calls == 0
    unpriced = await stage(backend="none", model={"name": "gpt-5"}, endpoint={"provider": "openai"})
    row = await unpriced.attempt(ROW)
    assert row.cost_usd is None
    assert row.unpriced_calls == len(row.calls) == 2


async def test_key_is_read_from_its_variable_and_never_shown(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRST_KEY", "sk-first-secret")
    monkeypatch.setenv("SECOND_KEY", "sk-second-secret")
    s = await stage(
        backend="none",
        server=FakeConfig(key="sk-first-secret"),
        endpoint={"api_key_env": "FIRST_KEY,SECOND_KEY"},
    )
    row = await s.attempt(ROW)
    assert row.end_reason == "answered"
    shown = s.context.scrub("sk-first-secret sk-second-secret")
    assert shown == "[secret FIRST_KEY] [secret SECOND_KEY]"
    assert "secret" not in repr(s.context)


def test_fallbacks_default_to_the_runs_endpoint() -> None:
    mine = config(
        model={"name": "m"},
        endpoint={
            "provider": "groq",
            "api_key_env": "A,B",
            "fallbacks": [
                "m2",
                {"model": "m3", "api_key_env": "C"},
                {"model": "claude-opus-5", "provider": "anthropic"},
                {"model": "m5", "base_url": "http://127.0.0.1:9/v1/messages"},
            ],
        },
    )
    first, same, keyed, claude, local = resolve_targets(mine.endpoint, mine.providers)
    assert first.model is None
    assert same.place == first.place
    assert (keyed.place.key_names, keyed.place.base_url) == (("C",), first.place.base_url)
    assert claude.place.api_mode == "anthropic_messages"
    assert claude.prices.find("claude-opus-5") is not None
    assert (local.place.api_mode, local.place.key_names) == ("anthropic_messages", ())
    keys = {"A": "1", "B": "2", "C": "3", "ANTHROPIC_API_KEY": "4"}
    assert collect_keys(mine, {**keys, "OTHER": "5"}) == keys


async def test_answers_of_a_fallback_are_recorded_per_call(stage: Open) -> None:
    price = {"input": 1, "output": 2, "cache_read": 1}
    s = await stage(
        backend="none",
        server=FakeConfig(models=("good",)),
        model={"name": "bad"},
        endpoint={"fallbacks": ["good"], "prices": {"good": price}},
    )
    row = await s.attempt(ROW)
    assert row.end_reason == "answered"
    assert row.model == "bad"
    assert [call.model for call in row.calls] == ["bad", "good", "good"]
    assert [call.outcome for call in row.calls] == ["refused", "ok", "ok"]
    assert list(row.served_models) == ["good"]
    tokens = [(c.input_tokens or 0) + 2 * (c.output_tokens or 0) for c in row.calls]
    assert row.cost_usd == pytest.approx(sum(tokens) / 1e6)


async def test_refused_key_is_replaced_and_cools_down(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALE_KEY", "sk-stale-secret")
    monkeypatch.setenv("GOOD_KEY", "sk-good-secret")
    s = await stage(
        backend="none",
        server=FakeConfig(key="sk-good-secret"),
        endpoint={"api_key_env": "STALE_KEY,GOOD_KEY"},
    )
    first, second = [await s.attempt({**ROW, "id": str(i)}, i) for i in range(2)]
    assert first.end_reason == second.end_reason == "answered"
    assert [call.outcome for call in first.calls] == ["refused", "ok", "ok"]
    assert [call.outcome for call in second.calls] == ["ok", "ok"]
    assert s.context.share.cooldowns.left_s("STALE_KEY") == pytest.approx(300, abs=30)


def test_the_worked_example_of_the_docs_holds() -> None:
    page = Path(__file__).parents[2] / "docs" / "providers.md"
    blocks = page.read_text(encoding="utf-8").split("```yaml\n")[1:]
    forms = [yaml.safe_load(block.split("```")[0]) for block in blocks]
    whole, reached, vertex, azure, pinned, mix = forms
    example = parse_config(whole)
    first, same, claude = resolve_targets(example.endpoint, example.providers)
    assert first.place.key_names == ("GATEWAY_KEY_A", "GATEWAY_KEY_B")
    assert first.place.quirks.max_tokens_field == "max_completion_tokens"
    assert (same.model, same.place) == ("gpt-5-nano", first.place)
    for target in (first, same, claude):
        assert target.prices.find(target.model or example.model.name) is not None
    assert draw_model(parse_config({**mix, "dataset": {"path": "x"}}), 1) in mix["model"]["mix"]
    internal = parse_config({**reached, "model": {"name": "m"}, "dataset": {"path": "x"}}).endpoint
    (only,) = resolve_targets(internal)
    assert only.place.variables == {"GATEWAY_TOKEN": "endpoint.headers.x-gateway-token"}
    for form in (vertex, azure):
        cloud = parse_config({**form, "model": {"name": "m"}, "dataset": {"path": "x"}}).endpoint
        (only,) = resolve_targets(cloud)
        assert only.place.key_names == tuple(cloud.key_commands)
    routed = parse_config({**pinned, "dataset": {"path": "x"}})
    (only,) = resolve_targets_by_model(routed)["qwen/qwen3-coder"]
    assert only.extra["provider"]["allow_fallbacks"] is False


async def test_models_of_a_mix_may_use_several_endpoints(stage: Open) -> None:
    async with FakeServer(FakeConfig(models=("other-name",))) as other:
        s = await stage(
            backend="none",
            server=FakeConfig(models=("here",)),
            model={"mix": {"here": 1, "there": 1}},
            endpoint={"places": {"there": {"base_url": other.base_url, "model": "other-name"}}},
        )
        rows = [await s.attempt({**ROW, "id": str(i)}, i) for i in range(8)]
        addresses = {True: s.server.base_url, False: other.base_url}
    assert {row.model for row in rows} == {"here", "there"}
    for row in rows:
        assert row.end_reason == "answered"
        here = row.model == "here"
        assert row.endpoint in addresses[here]
        assert {call.model for call in row.calls} == {"here" if here else "other-name"}


def test_the_keys_and_prices_of_a_mix_are_those_of_its_places() -> None:
    mixed = config(
        model={"mix": {"gpt-5-mini": 1, "claude": 1}},
        endpoint={
            "places": {"claude": {"provider": "anthropic", "model": "claude-haiku-5-5"}},
            "fallbacks": ["gpt-5-nano"],
        },
    )
    keys = {"OPENAI_API_KEY": "1", "ANTHROPIC_API_KEY": "2"}
    assert collect_keys(mixed, keys) == keys
    assert Prices(mixed).unpriced() == []
    claude, fallback = resolve_targets_by_model(mixed)["claude"]
    assert (claude.model, claude.place.api_mode) == ("claude-haiku-5-5", "anthropic_messages")
    assert fallback.place.provider == "openai"


@pytest.mark.parametrize("prefilled", [False, True])
async def test_repeated_call_ids_do_not_break_a_strict_fallback(
    stage: Open, prefilled: bool
) -> None:
    """All of its calls are `call_0`, then a filter makes way for Anthropic's wire, which refuses a
    conversation that has an id twice."""
    again = {"calls": [{"id": "call_0", "arguments": {"command": "echo $((6 * 7))"}}]}
    two = {"calls": [*again["calls"], {"id": "call_1", "arguments": {"command": "echo 2"}}]}
    steps = ({**again, "text": "I look."}, two, [{"text": "", "fault": "content_filter"}, again])
    function = {"name": "terminal", "arguments": "{}"}
    example: list[dict[str, Any]] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "tool_calls": [{"id": "call_0", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "out"},
        {"role": "assistant", "content": "So."},
    ]
    request = script(*["never"] * 2 * prefilled, *steps)
    example[0]["content"] = request
    s = await stage(
        backend="none",
        model={"name": "main"},
        agent={"prefill": example if prefilled else [], "toolsets": ["terminal"]},
        endpoint={"fallbacks": [{"model": "spare", "api_mode": "anthropic_messages"}]},
    )
    row = await s.attempt({"prompt": "Go." if prefilled else request})
    assert (row.end_reason, row.error) == ("answered", None)
    assert [call.model for call in row.calls] == ["main"] * 3 + ["spare"] * 2
    messages = [json.loads(message) for message in row.messages]
    made = [call["id"] for m in messages for call in m.get("tool_calls", ())]
    assert len(set(made)) == len(made) == 4
    assert (made[0] == "call_0") is not prefilled
    assert "call_1" in made
    answers = [m for m in messages if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in answers] == made
    results = [json.loads(m["content"].splitlines()[0]) for m in answers]  # a warning may follow
    assert [result["output"].strip() for result in results] == ["42", "42", "2", "42"]
