"""Providers: found by name or host, extended by users; keys are sent only to their provider."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.config_endpoint import EndpointSection, ProviderSection
from hermes_rl.errors import UserError
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.providers import (
    Keys,
    Place,
    find_keys,
    find_quirks,
    known_providers,
    resolve,
    shipped,
)
from hermes_rl.models.wire import ChatCompletions, Quirks


def place(custom: dict[str, Any] | None = None, **settings: Any) -> Place:
    sections = {n: ProviderSection(**form) for n, form in (custom or {}).items()}
    return resolve(EndpointSection(**settings), known_providers(sections))


def test_known_providers() -> None:
    recorded = (
        "openai anthropic openrouter nous vllm sglang llama.cpp ollama lmstudio together groq"
    )
    assert set(shipped()) >= {*recorded.split(), "deepseek", "azure", "bedrock", "vertex"}
    for name in ("vllm", "sglang", "llama.cpp", "ollama", "lmstudio"):
        assert place(provider=name).loopback, "no key leaves this machine"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_known_provider_resolves_by_name(name: str) -> None:
    entry = shipped()[name]
    if entry.needs_address:
        with pytest.raises(UserError, match=rf"{name} has one address per user.*--base-url"):
            place(provider=name)
        return
    found = place(provider=name)
    assert found.base_url == entry.base_url
    assert found.key_needed is bool(entry.api_key_env)
    reported = place(base_url=found.base_url)
    assert reported.provider == (None if found.loopback else name)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "chat_completions"),
        ({"provider": "anthropic"}, "anthropic_messages"),
        ({"provider": "anthropic", "api_mode": "chat_completions"}, "chat_completions"),
        ({"base_url": "https://api.anthropic.com"}, "anthropic_messages"),
        ({"base_url": "https://api.deepseek.com/anthropic"}, "anthropic_messages"),
        ({"base_url": "https://api.deepseek.com/anthropic/"}, "anthropic_messages"),
        ({"base_url": "http://127.0.0.1:1/v1/messages"}, "anthropic_messages"),
        ({"base_url": "http://127.0.0.1:1/v1/responses"}, "codex_responses"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "chat_completions"),
        ({"base_url": "http://anthropic.example/v1"}, "chat_completions"),
        ({"base_url": "http://h/v1/messages", "api_mode": "codex_responses"}, "codex_responses"),
    ],
)
def test_the_dialect_is_argument_then_provider_then_address(
    settings: dict[str, Any], mode: str
) -> None:
    assert place(**settings).api_mode == mode


@pytest.mark.parametrize(
    ("address", "provider"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://mine.openai.azure.com/openai/v1", "azure"),
        ("https://bedrock-mantle.us-east-1.api.aws/v1", "bedrock"),
        ("https://us-central1-aiplatform.googleapis.com/v1/projects/p", "vertex"),
        ("https://api.openai.com.example.com/v1", None),
        ("https://example.com/api.openai.com", None),
        ("https://ec2-1-2-3-4.us-east-1.compute.amazonaws.com/v1", None),
        ("https://openai.azure.com.example.com/v1", None),
        ("http://127.0.0.1:8000/v1", None),
    ],
)
def test_host_identifies_its_provider_and_key(address: str, provider: str | None) -> None:
    found = place(base_url=address)
    assert found.provider == provider
    assert bool(found.key_names) is (provider is not None)


def test_users_extend_the_table() -> None:
    custom = {
        "mine": {
            "base_url": "https://llm.example.com/v1",
            "api_key_env": "MINE",
            "max_tokens_field": "max_completion_tokens",
        },
        "openai": {"api_key_env": "OTHER_KEY"},
    }
    mine = place(custom, base_url="https://llm.example.com/v2")
    assert (mine.provider, mine.key_names) == ("mine", ("MINE",))
    assert mine.quirks.max_tokens_field == "max_completion_tokens"
    openai = place(custom)
    assert openai.key_names == ("OTHER_KEY",)
    assert openai.base_url == "https://api.openai.com/v1"
    with pytest.raises(UserError, match=r"unknown provider 'nobody'.*'providers'"):
        place(custom, provider="nobody")


def test_missing_keys_are_named() -> None:
    two = place(provider="openai", api_key_env="A, B,A")
    assert two.key_names == ("A", "B")
    assert find_keys([two], {"A": "1", "B": "2"}) == {"A": "1", "B": "2"}
    with pytest.raises(UserError, match="the variable B is not set"):
        find_keys([two], {"A": "1"})
    with pytest.raises(UserError, match=r"no key for h\.example: .*--api-key-env"):
        find_keys([place(base_url="https://h.example/v1")], {})
    local = place(base_url="http://127.0.0.1:1/v1")
    assert find_keys([local], {"OPENAI_API_KEY": "1"}) == {}
    assert Keys({}).of(local) == {"no-key": None}
    remote_vllm = place(provider="vllm", base_url="https://gpu.example/v1")
    assert find_keys([remote_vllm], {}) == {}
    assert "sk-1" not in repr(Keys({"A": "sk-1"}))


def test_key_lists_and_fallback_names_are_parsed() -> None:
    section = EndpointSection.model_validate(
        {"api_key_env": ["A", "B"], "fallbacks": ["m2", {"model": "m3", "provider": "groq"}]}
    )
    assert section.key_names == ("A", "B")
    assert [f.model for f in section.fallbacks] == ["m2", "m3"]


@given(st.text("abcdefghijklmnopqrstuvwxyz.-", min_size=1, max_size=30))
def test_similar_hosts_are_not_recognized_as_providers(host: str) -> None:
    found = place(base_url=f"https://{host}.example/v1")
    assert found.provider is None
    assert found.key_names == ()


@pytest.mark.parametrize(("host", "sent"), [("api.openai.com", False), ("gpu.example", True)])
def test_neutral_filters_are_not_sent_to_providers_without_them(host: str, sent: bool) -> None:
    everything = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)
    request = ModelRequest(model="m", conversation=Conversation(), call_id="c")
    dialect = ChatCompletions(find_quirks(host))
    body = json.loads(dialect.encode(replace(request, sampling=everything)))
    assert ("top_k" in body, "min_p" in body, body["top_p"]) == (sent, sent, 1.0)
    wanted = json.loads(dialect.encode(replace(request, sampling=Sampling(top_k=5))))
    assert wanted["top_k"] == 5  # the server may refuse it, but the client never drops it


def test_quirks_default_to_those_of_the_provider() -> None:
    streamed = ModelRequest(model="m", conversation=Conversation(), call_id="c", stream=True)
    plain = json.loads(ChatCompletions().encode(streamed))
    assert plain["stream_options"] == {"include_usage": True}
    picky = json.loads(ChatCompletions(Quirks(stream_options=False)).encode(streamed))
    assert "stream_options" not in picky
    assert find_quirks("api.deepseek.com:443").replay_reasoning == "reasoning_content"
