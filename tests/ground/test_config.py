"""Configuration: unknown keys are refused, and every message names the place and the fix."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.config import (
    ModelConfig,
    RunConfig,
    load_config,
    parse_assignment,
    parse_config,
    set_key,
    to_yaml,
)
from hermes_rl.errors import UserError

GOOD: dict[str, Any] = {"dataset": {"path": "x.jsonl"}, "model": {"name": "m"}}
INF, PRICE = float("inf"), {"input": 1, "output": 1}
NO_NAME = "not the name of a variable"


def test_the_resolved_configuration_round_trips() -> None:
    config = parse_config({**GOOD, "agent": {"limits": {"max_turns": 3}}})
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_endpoints_prices_and_mixes_round_trip_without_key_values(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "m: {input: 0.1, output: 2, long: {above: 9, input: 1, output: 4}}\nn: null\n"
    )
    config = parse_config(
        {
            **GOOD,
            "model": {"mix": {"m": 1, "n": 2.5}},
            "endpoint": {
                "provider": "mine",
                "api_key_env": ["KEY_A", "KEY_B"],
                "prices": f"@{prices}",
                "fallbacks": ["o", {"model": "p", "provider": "groq"}],
            },
            "providers": {"mine": {"base_url": "https://h.example/v1", "top_k": False}},
        }
    )
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
    assert config.endpoint.key_names == ("KEY_A", "KEY_B")
    price = config.endpoint.prices["m"]
    assert price is not None
    assert str(price.input) == "0.1"
    assert config.endpoint.prices["n"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"modle": {}}, "unknown key 'modle'"),
        ({"model": {"name": "m", "temprature": 1}}, "unknown key 'model.temprature'"),
        ({"agent": {"limits": {"turns": 1}}}, "'agent.limits.max_turns'"),
        ({"model": {}}, "'model.name' is missing"),
        ({"model": {"name": "m", "temperature": -1}}, "'model.temperature'"),
        ({"model": {"mix": {"a": 0}}}, "'model.mix.a'"),
        ({"model": {"mix": {}}}, "'model.mix' must not be empty"),
        ({"model": {"mix": {"a": 1, "noop": 1}}}, "'model.mix' holds noop"),
        ({"model": {"name": "noop", "mix": {"a": 1}}}, "cannot be called noop"),
        ({"endpoint": {"places": {"o": {}}}}, "'endpoint.places' holds o"),
        ({"endpoint": {"fallbacks": ["local"]}}, "'endpoint.fallbacks' holds local"),
        ({"endpoint": {"fallbacks": ["b"]}, "agent": {"preset": "rl"}}, "than rl"),
        ({"endpoint": {"fallbacks": ["b"]}, "model": {"name": "oracle"}}, "which needs none"),
        ({"endpoint": {"fallbacks": [{"provider": "x"}]}}, "fallbacks.0.model' is missing"),
        ({"endpoint": {"fallbacks": [{"model": "x", "base_url": "http://u:p@h"}]}}, "a password"),
        ({"endpoint": {"prices": {"m": {"input": -1, "output": 1}}}}, "'endpoint.prices.m.input'"),
        ({"endpoint": {"prices": "prices.yaml"}}, "or @FILE"),
        ({"endpoint": {"prices": "@absent.yaml"}}, "Check endpoint.prices"),
        ({"providers": {"p": {"speed": 1}}}, "'providers.p.speed'"),
        ({"sandbox": {"backend": "none"}}, "--allow-unsandboxed"),
        ({"endpoint": {"base_url": "http://me:secret@h/v1"}}, "holds a user, a password"),
        ({"endpoint": {"base_url": "http://h/v1?key=secret"}}, "or a query"),
        ({"endpoint": {"base_url": "http://user:pw-secret@[::1", "provider": "vllm"}}, "base_url"),
        ({"endpoint": {"base_url": "http://[::1"}}, "'endpoint.base_url"),
        ({"endpoint": {"outage_seconds": INF}}, "'endpoint.outage_seconds"),
        ({"endpoint": {"rates": {"tokens": INF}}}, "'endpoint.rates"),
        ({"endpoint": {"prices": {"m": {"input": "1e300", "output": 1}}}}, "'endpoint.prices"),
        (
            {"endpoint": {"prices": {"m": {**PRICE, "long": {"above": 5, "input": 3}}}}},
            "'endpoint.prices",
        ),
        ({"model": {"name": "m", "temperature": INF}}, "'model.temperature"),
        ({"model": {"name": "m", "max_tokens": 10**22}}, "max_tokens"),
        ({"model": {"name": "m", "reasoning": "a\udcff"}}, "not valid UTF-8 text"),
        ({"agent": {"limits": {"max_seconds": INF}}}, "'agent.limits"),
        ({"agent": {"limits": {"max_turns": 10**22}}}, "'agent.limits"),
        ({"run": {"publish_every_s": INF}}, "'run.publish_every_s"),
        ({"run": {"budget_usd": 1e300}}, "'run.budget_usd"),
        ({"run": {"unit_budget_usd": 1e300}}, "'run.unit_budget_usd"),
        ({"run": {"budget_tokens": 10**22}}, "'run.budget_tokens"),
        ({"endpoint": {"api_key_env": "sk-proj-secret"}}, NO_NAME),
        ({"endpoint": {"api_key_env": ["GOOD", "sk-proj-secret"]}}, NO_NAME),
        ({"endpoint": {"fallbacks": [{"model": "f", "api_key_env": "sk-proj-secret"}]}}, NO_NAME),
        ({"providers": {"mine": {"api_key_env": "sk-proj-secret"}}}, NO_NAME),
    ],
)
def test_invalid_configuration_is_one_short_line_without_secrets(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_config({**GOOD, **change}, "my.yaml")
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert len(text) < 200
    assert "secret" not in text
    text.encode()


def test_set_creates_sections_and_parses_values_as_yaml() -> None:
    data: dict[str, Any] = {}
    for text in ("model.temperature=0.5", "agent.toolsets=[terminal]", "run.retry_failed=true"):
        set_key(data, *parse_assignment(text))
    assert data == {
        "model": {"temperature": 0.5},
        "agent": {"toolsets": ["terminal"]},
        "run": {"retry_failed": True},
    }
    with pytest.raises(UserError, match=r"section\.key=value"):
        parse_assignment("model.temperature")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "must hold sections"),
        (
            "run:\n  workers: 1\nmodel:\n  name: m\nrun:\n  out: x\n",
            "yaml:5: duplicate key 'run'",
        ),
        ("run:\n  workers: 1\n  workers: 2\n", "yaml:3: duplicate key 'workers'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_config(path)
    with pytest.raises(UserError, match="Check --config"):
        load_config(tmp_path / "absent.yaml")
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not valid UTF-8 text"):
        load_config(path)


def test_a_system_prompt_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be brief.")
    config = parse_config({**GOOD, "agent": {"system_prompt": f"@{path}"}})
    assert config.agent.system_prompt == "Be brief."
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
    for content, says in ((b"\xff", "not valid UTF-8 text"), (b"@all", "cannot begin with '@'")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=says):
            parse_config({**GOOD, "agent": {"system_prompt": f"@{path}"}})
    with pytest.raises(UserError, match="Check --system-prompt"):
        parse_config({**GOOD, "agent": {"system_prompt": f"@{tmp_path / 'absent'}"}})


def test_rows_passed_as_path_are_written_to_a_file() -> None:
    """The run's configuration names that file; the same rows give the same name."""
    rows = [{"prompt": "a"}, {"prompt": "b", "n": 1}]

    def path(value: Any, **more: Any) -> str:
        return RunConfig(dataset={"path": value, **more}, model={"name": "noop"}).dataset.path

    kept = path(rows)
    assert [json.loads(line) for line in Path(kept).read_text().splitlines()] == rows
    name = Path(kept).name
    assert Path(path(iter(rows))).name == Path(path(tuple(rows))).name == name
    endless = path(({"prompt": str(n)} for n in itertools.count()), limit=3)
    assert len(Path(endless).read_text().splitlines()) == 3
    assert path(Path("tasks.jsonl")) == "tasks.jsonl"
    bad = [{"prompt": "a"}, {"prompt": {1}}]
    with pytest.raises(UserError, match=r"dataset.path: row 2 is not JSON: .*set"):
        parse_config({"dataset": {"path": bad}, "model": {"name": "noop"}})


def test_python_configurations_are_validated_alike(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--allow-unsandboxed"):
        RunConfig.model_validate({**GOOD, "sandbox": {"backend": "none"}})
    path = tmp_path / "system.txt"
    path.write_text("Be brief.")
    config = RunConfig.model_validate({**GOOD, "agent": {"system_prompt": f"@{path}"}})
    assert config.agent.system_prompt == "Be brief."


def test_budgets_of_unused_models_are_refused() -> None:
    mix = {"model": {"mix": {"a": 1, "claude": 1}}, "dataset": {"path": "x.jsonl"}}
    where = {
        "places": {"claude": {"provider": "anthropic", "model": "claude-opus-5-5"}},
        "fallbacks": ["b"],
    }
    for key in ("model_budgets", "model_token_budgets"):
        for name in ("a", "b", "claude-opus-5-5"):
            parse_config({**mix, "endpoint": where, "run": {key: {name: 1}}})
        for name in ("claude", "c"):
            with pytest.raises(UserError, match=f"{key}' holds {name}, but the run asks a, b, cl"):
                parse_config({**mix, "endpoint": where, "run": {key: {name: 1}}})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: RunConfig(**GOOD, modle={}),
            "RunConfig: unknown key 'modle' (did you mean 'model'?)",
        ),
        (
            lambda: RunConfig(dataset={"path": "x"}, model={"name": "m", "temprature": 1}),
            "RunConfig: unknown key 'model.temprature' (did you mean 'model.temperature'?)",
        ),
        (
            lambda: ModelConfig(name="m", temperature="hot"),
            "ModelConfig: 'temperature' must be a number, not 'hot'",
        ),
        (
            lambda: ModelConfig(name="m", transport="htp"),
            "ModelConfig: 'transport' must be 'http' or 'sdk', not 'htp' (did you mean 'http'?)",
        ),
    ],
)
def test_python_errors_equal_those_of_the_command(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == says
    assert isinstance(refused.value, UserError)


def test_errors_of_model_config_show_no_key() -> None:
    with pytest.raises(ValueError, match="api_keyy") as refused:
        ModelConfig(name="m", api_keyy="sk-secret")  # type: ignore[call-arg]
    assert "sk-secret" not in str(refused.value)
    with pytest.raises(ValueError, match="'api_key' must be") as wrong:
        ModelConfig(name="m", api_key=90210)  # type: ignore[arg-type]
    assert "90210" not in str(wrong.value)
    for address in ("http://[x", "http://user:pw-secret@host/v1"):
        with pytest.raises(ValueError, match="base_url") as bad:
            ModelConfig(name="m", base_url=address)
        assert "secret" not in str(bad.value)


@pytest.mark.parametrize("key", ["tokens", "prompt_cache"])
def test_yaml_off_is_accepted(key: str) -> None:
    dotted, value = parse_assignment(f"endpoint.{key}=off")
    data: dict[str, Any] = {**GOOD}
    set_key(data, dotted, value)
    config = parse_config(data)
    assert getattr(config.endpoint, key) == "off"
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
