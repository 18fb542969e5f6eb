"""The server side of anthropic_messages: what it reads, and what it refuses as the API does."""

import json

import pytest

from hermes_rl.testing import AnthropicServer

# The server's side


REFUSED = [
    ({"messages": []}, "at least one message"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": " "}]}, "must be non-empty"),
    ({"messages": [{"role": "user", "content": []}]}, "non-empty content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "unexpected `tool_use_id`",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "input": {}}]},
                {"role": "user", "content": "no result"},
            ]
        },
        "without `tool_result`",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
            ]
            * 2
        },
        "ids must be unique",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "greater than"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "1024"),
    ({"thinking": {"type": "adaptive"}, "temperature": 0.5}, "thinking is enabled"),
    (
        {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}] * 5},
        "maximum of 4",
    ),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED)
def test_the_server_refuses_what_the_api_refuses(change, why):
    body = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "u"}]}
    assert AnthropicServer().decode_request(json.dumps(body).encode()).model == "m"
    with pytest.raises(ValueError, match=why):
        AnthropicServer().decode_request(json.dumps({**body, **change}).encode())
