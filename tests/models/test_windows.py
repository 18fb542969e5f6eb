"""Context windows that endpoints name, and agents that know them before a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.aio import LoopThread
from hermes_rl.messages import ToolMessage
from hermes_rl.models import Endpoint
from hermes_rl.models.providers import read_windows
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

LLAMA = {"id": "q.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131_072}}
STUDIO = {"id": "m", "owned_by": "organization_owner"}
TWO = {"id": "m", "context_length": 200_000, "top_provider": {"context_length": 131_072}}
LISTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "vLLM": ({"/v1/models": {"data": [{"id": "m", "max_model_len": 8_192}]}}, {"m": 8_192}),
    "OpenRouter": ({"/v1/models": {"data": [TWO, {"id": "n"}]}}, {"m": 131_072}),
    "Groq": ({"/v1/models": {"data": [{"id": "m", "context_window": 9_000}]}}, {"m": 9_000}),
    "llama.cpp": (
        {
            "/v1/models": {"data": [LLAMA]},
            "/props": {"default_generation_settings": {"n_ctx": 4_096}},
        },
        {"": 4_096},
    ),
    "an older llama.cpp": ({"/v1/models": {"data": [LLAMA]}, "/props": {}}, {}),
    "LM Studio": (
        {
            "/v1/models": {"data": [STUDIO]},
            "/api/v0/models": {
                "data": [
                    {"id": "m", "max_context_length": 32_768, "loaded_context_length": 4_096},
                    {"id": "n", "max_context_length": 32_768},
                ]
            },
        },
        {"m": 4_096},
    ),
    "no list": ({"/v1/models": {"error": "none"}}, {}),
    "no numbers": (
        {
            "/v1/models": {
                "data": [{"id": "m", "max_model_len": n} for n in (None, 0, -1, "9", True)]
            }
        },
        {},
    ),
}


@pytest.mark.parametrize("provider", LISTS)
async def test_what_an_endpoint_lists_is_read_and_nothing_is_guessed(provider: str) -> None:
    pages, windows = LISTS[provider]
    async with FakeServer(FakeConfig(pages=pages)) as server:
        assert await read_windows(Endpoint(server.base_url)) == windows


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
names = st.sampled_from(
    ["data", "id", "owned_by", "top_provider", "max_model_len", "n_ctx", "context_length", "x"]
)
values = st.recursive(
    leaves | st.sampled_from(["llamacpp", "organization_owner"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(listed=values, props=values)
def test_any_list_gives_windows_or_none(listed: Any, props: Any) -> None:
    pages = {"/v1/models": listed, "/props": props, "/api/v0/models": props}

    async def read() -> dict[str, int]:
        async with FakeServer(FakeConfig(pages=pages)) as server:
            return await read_windows(Endpoint(server.base_url))

    with LoopThread() as home:
        windows = home.run(read())
    assert all(isinstance(name, str) and size > 0 for name, size in windows.items())


class Counted(dict[str, Any]):
    """Pages that count how often they are read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


async def test_an_agent_at_a_server_that_would_truncate_silently_stays_within_its_window() -> None:
    """It refuses nothing, so only its list says how large the window is."""

    def play(request: ServedRequest) -> Any:
        if not request.tools:
            return "## Done\nThe steps so far."
        seen = [m.content for m in request.messages if isinstance(m, ToolMessage)]
        number = int(seen[-1].split()[1]) + 1 if seen else 1
        calls = [{"name": "work", "arguments": {"number": number}}]
        return "Done." if number > 40 else {"text": f"Now {number}.", "calls": calls}

    def work(number: int) -> str:
        """Do a step."""
        return f"step {number} " + "x" * 400

    pages = Counted(
        LISTS["vLLM"][0] | {"/v1/models": {"data": [{"id": "m", "max_model_len": 3_000}]}}
    )
    async with FakeServer(FakeConfig(plays={"m": play}, pages=pages)) as server:
        model = ModelConfig(name="m", base_url=server.base_url)
        async with AIAgent(model, toolsets=[], tools=[work]) as agent:
            result = await agent.run("Do all steps.")
            await agent.run("Again.", conversation_history=[])
        assert result["end_reason"] == "answered"
        assert 1_500 < max(entry.prompt_tokens for entry in server.entries) < 3_000
    assert pages.reads == 1
