"""The dialect anthropic_messages: what goes out, and a server that reads it."""

import json

import pytest
from messages_kit import HIDDEN, HISTORY, THOUGHT, TOOL, body_of, call, read, request, result

from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Sampling
from hermes_rl.models.wire import AnthropicMessages

# Requests


def test_a_conversation_on_the_wire():
    body = body_of(*HISTORY, UserMessage(content="And now?"), tools=(TOOL,), stream=True)
    assert body == {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32_000,
        "stream": True,
        "tools": [
            {
                "name": "terminal",
                "description": "Run.",
                "input_schema": TOOL["function"]["parameters"],
            }
        ],
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {
                "role": "assistant",
                "content": [
                    THOUGHT,
                    HIDDEN,
                    {"type": "text", "text": "I look."},
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "terminal",
                        "input": {"command": "ls"},
                    },
                    {"type": "tool_use", "id": "toolu_2", "name": "terminal", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "out"},
                    {"type": "tool_result", "tool_use_id": "toolu_2"},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    }


def test_what_is_sent_but_not_stored():
    body = body_of(
        *HISTORY[:2],
        ephemeral="Today is Monday.",
        prefill=(UserMessage(content="hi"), AssistantMessage(content="Hello.")),
    )
    assert body["system"] == [{"type": "text", "text": "Be brief.\n\nToday is Monday."}]
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]


def marks_of(body):
    blocks = [*body.get("system", ()), *(b for m in body["messages"] for b in m["content"])]
    return [b["cache_control"] for b in blocks if "cache_control" in b]


@pytest.mark.parametrize(("cache", "marker"), [("5m", {}), ("1h", {"ttl": "1h"})])
def test_system_and_the_last_three_are_marked(cache, marker):
    turns = [
        m for i in range(5) for m in (UserMessage(content=f"{i}"), AssistantMessage(content="ok"))
    ]
    asked = request(SystemMessage(content="s"), *turns, UserMessage(content="end"), cache=cache)
    body = json.loads(AnthropicMessages().encode(asked))
    assert marks_of(body) == [{"type": "ephemeral", **marker}] * 4
    assert "cache_control" in body["system"][0]
    marked = [i for i, m in enumerate(body["messages"]) if "cache_control" in m["content"][-1]]
    assert marked == [8, 9, 10]
    assert marks_of(body_of(*turns)) == []


def test_thinking_and_empty_results_carry_no_marker():
    body = body_of(*HISTORY, cache="5m")
    assert len(marks_of(body)) == 4
    assert read(*HISTORY, cache="1h").cache == "1h"
    only = AssistantMessage(content=" ", reasoning_details=[THOUGHT])
    asked = request(
        UserMessage(content="a"), only, UserMessage(content="b"), exact=True, cache="5m"
    )
    assert len(marks_of(json.loads(AnthropicMessages().encode(asked)))) == 2


IMAGES = [
    (
        {"url": "data:image/png;base64,aGk="},
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
    ),
    (
        {"url": "data:image/svg+xml,%3Csvg%3E"},
        {"type": "base64", "media_type": "image/svg+xml", "data": "PHN2Zz4="},
    ),
    ({"url": "https://x.test/a.png"}, {"type": "url", "url": "https://x.test/a.png"}),
    ("https://x.test/a.png", {"type": "url", "url": "https://x.test/a.png"}),
]


@pytest.mark.parametrize(("given_", "source"), IMAGES)
def test_images(given_, source):
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": given_}]
    (message,) = body_of(UserMessage(content=parts))["messages"]
    assert message["content"][1] == {"type": "image", "source": source}


def test_sent_without_signatures_and_grammar():
    adapted = frozenset({"no_signatures", "no_grammar"})
    sampling = Sampling(reasoning="high")
    body = body_of(*HISTORY, tools=(TOOL,), adaptations=adapted, sampling=sampling)
    assert body["messages"][1]["content"][0] == {"type": "text", "text": "I look."}
    assert "thinking" not in body  # each tool turn would have to begin with its thinking
    assert body["tools"][0]["input_schema"]["properties"] == {"command": {"type": "string"}}


def test_blocks_of_others_and_unsigned_thoughts_are_not_replayed():
    foreign = [
        {"type": "reasoning", "encrypted_content": "x"},
        {"type": "thinking", "thinking": "unsigned"},
        {"type": "reasoning.text", "text": "r", "signature": "s"},
    ]
    message = AssistantMessage(content="a", reasoning_details=[*foreign, THOUGHT])
    body = body_of(UserMessage(content="u"), message)
    assert body["messages"][1]["content"] == [THOUGHT, {"type": "text", "text": "a"}]


ARGUMENTS = [
    ('{"b":1,"a":2}', {"b": 1, "a": 2}),
    ("", {}),
    ("{oops", {"_unparsed": "{oops"}),
    ("[1]", {"_unparsed": "[1]"}),
]


@pytest.mark.parametrize(("arguments", "sent"), ARGUMENTS)
def test_arguments_are_always_an_object(arguments, sent):
    message = AssistantMessage(tool_calls=(call(1, arguments),))
    history = UserMessage(content="u"), message, result(1)
    (use,) = body_of(*history, exact=True)["messages"][1]["content"]
    assert use["input"] == sent
    understood = read(*history, exact=True).messages[1].tool_calls[0].arguments
    assert understood == (arguments or "{}")


def test_ids_and_names_of_other_providers_fit():
    odd = ToolCall(id="functions.terminal:0", name="a.b c", arguments="{}")
    history = (
        UserMessage(content="u"),
        AssistantMessage(tool_calls=(odd,)),
        ToolMessage(tool_call_id=odd.id, name=odd.name, content="x"),
    )
    body = body_of(*history)
    assert body["messages"][1]["content"][0]["id"] == "functions_terminal_0"
    assert body["messages"][1]["content"][0]["name"] == "a_b_c"
    assert body["messages"][2]["content"][0]["tool_use_id"] == "functions_terminal_0"


@pytest.mark.parametrize("first", [(), (AssistantMessage(content="Hello."),)])
def test_a_conversation_begins_with_the_user(first):
    body = body_of(SystemMessage(content="s"), *first, exact=True)
    assert body["messages"][0] == {
        "role": "user",
        "content": [{"type": "text", "text": "(start)"}],
    }
    assert len(body["messages"]) == 1 + len(first)


@pytest.mark.parametrize(("most", "streamed"), [(None, True), (21_333, False), (21_334, True)])
def test_long_answers_are_streamed_whoever_listens(most, streamed):
    body = body_of(UserMessage(content="u"), sampling=Sampling(max_tokens=most))
    assert body.get("stream", False) is streamed


def test_calls_of_tools_that_are_not_given_any_more():
    """As at the end of a budget: a last answer without tools."""
    body = body_of(*HISTORY)
    assert body["tools"] == [{"name": "terminal", "input_schema": {"type": "object"}}]
    assert body["tool_choice"] == {"type": "none"}
    assert "tools" not in body_of(UserMessage(content="u"))


def test_an_answer_to_go_on_from_ends_without_white_space():
    begun = AssistantMessage(content="The answer is \n", reasoning_details=[THOUGHT])
    body = body_of(UserMessage(content="u"), begun)
    assert body["messages"][-1]["content"] == [THOUGHT, {"type": "text", "text": "The answer is"}]
    later = body_of(UserMessage(content="u"), begun, UserMessage(content="And?"))
    assert later["messages"][1]["content"][-1]["text"] == "The answer is \n"


def test_nothing_blank_is_sent():
    body = body_of(UserMessage(content=" \n"), AssistantMessage(content=" ", tool_calls=(call(1),)))
    assert body["messages"][0]["content"] == [{"type": "text", "text": "(no content)"}]
    assert [b["type"] for b in body["messages"][1]["content"]] == ["tool_use"]


SAMPLED = [
    (Sampling(temperature=1.0, top_p=1.0, top_k=-1, seed=3, min_p=0.1), {}),
    (Sampling(temperature=0.0, top_k=5), {"temperature": 0.0, "top_k": 5}),
    (Sampling(top_p=0.9, stop=("END",)), {"top_p": 0.9, "stop_sequences": ["END"]}),
    (Sampling(max_tokens=77), {"max_tokens": 77}),
]


@pytest.mark.parametrize(("sampling", "sent"), SAMPLED)
def test_sampling(sampling, sent):
    body = body_of(UserMessage(content="u"), sampling=sampling)
    streamed = {} if sampling.max_tokens else {"stream": True}
    fixed = {name: body[name] for name in ("model", "messages")}
    assert body == {"max_tokens": 32_000, **streamed, **sent, **fixed}


def manual(budget):
    return {"type": "enabled", "budget_tokens": budget}


ADAPTIVE = {"type": "adaptive", "display": "summarized"}
EFFORTS = [
    ("claude-sonnet-4-5-20250929", "low", None, manual(4096), None),
    ("claude-opus-4-20250514", "high", None, manual(16_384), None),
    ("kimi-k2-thinking", "max", None, manual(24_000), None),
    ("claude-opus-4-1", "high", 4_000, manual(3_000), None),
    ("claude-opus-4-1", "2000", 64_000, manual(2_000), None),
    ("claude-opus-4-1", "low", 1_000, None, None),
    ("claude-opus-4-6", "high", None, ADAPTIVE, "high"),
    ("anthropic/claude-sonnet-5.5", "minimal", None, ADAPTIVE, "low"),
    ("claude-opus-5-20260801", "max", 1_000, ADAPTIVE, "max"),
    ("claude-opus-4-6", "none", None, {"type": "disabled"}, None),
    ("claude-fable-5-1", "none", None, None, None),
]


@pytest.mark.parametrize(("model", "effort", "most", "thinking", "level"), EFFORTS)
def test_thinking(model, effort, most, thinking, level):
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, reasoning=effort, max_tokens=most)
    body = body_of(UserMessage(content="u"), model=model, sampling=sampling)
    assert body.get("thinking") == thinking
    assert body.get("output_config", {}).get("effort") == level
    thinks = thinking is not None and thinking["type"] != "disabled"
    assert {"temperature", "top_p", "top_k"} & body.keys() == (
        set() if thinks else {"temperature", "top_p", "top_k"}
    )
    read(UserMessage(content="u"), model=model, sampling=sampling)


def test_the_key_goes_where_the_server_looks_for_it():
    own, other = AnthropicMessages("api.anthropic.com"), AnthropicMessages("gateway.test")
    assert own.headers("k")["x-api-key"] == "k"
    assert "authorization" not in own.headers("k")
    assert other.headers("k")["authorization"] == "Bearer k"
    azure = AnthropicMessages("x.services.ai.azure.com")
    assert {"x-api-key", "authorization"} & azure.headers("k").keys() == {"x-api-key"}
    assert {"x-api-key", "authorization"} & azure.headers("eyJ.a.b").keys() == {"authorization"}
    assert not {"x-api-key", "authorization"} & other.headers(None).keys()
    assert own.headers(None)["anthropic-version"] == "2023-06-01"
    assert "interleaved-thinking" in own.headers("k")["anthropic-beta"]
    assert "anthropic-beta" not in other.headers("k")
