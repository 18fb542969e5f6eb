"""Requests as each dialect sends them, and what the servers of our tests refuse as the APIs do."""

import json
from functools import reduce

import msgspec
import pytest
from wire_kit import SERVERS, cases, decode

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Completion, Conversation, Endpoint, ModelRequest, Sampling, dialect_for

MODES = {"chat_completions": "m", "anthropic_messages": "claude-sonnet-4-5", "codex_responses": "m"}
ROWS = cases("requests")


def history_of(forms):
    return msgspec.convert(forms, list[Message])


def body_of(mode, messages, *, host="127.0.0.1:1", model=None, **fields):
    """The body of a request, and what the server of the dialect reads."""
    if "prefill" in fields:
        fields["prefill"] = tuple(history_of(fields["prefill"]))
    for name, kind in (("tools", tuple), ("adaptations", frozenset)):
        if name in fields:
            fields[name] = kind(fields[name])
    if "sampling" in fields:
        stop = tuple(fields["sampling"].get("stop", ()))
        fields["sampling"] = Sampling(**{**fields["sampling"], "stop": stop})
    conversation = Conversation(messages)
    request = ModelRequest(
        model=model or MODES[mode], conversation=conversation, call_id="c", **fields
    )
    sent = dialect_for(Endpoint(f"https://{host}/v1", api_mode=mode)).encode(request)
    return json.loads(sent), SERVERS[mode].decode_request(sent)


def at(body, path):
    """The part of a body at a path like `messages.0.role`; None where there is none."""
    parts = [int(part) if part.isdigit() else part for part in path.split(".")]
    return reduce(lambda form, part: form.get(part) if isinstance(form, dict) else form[part],
                  parts, body)  # fmt: skip


@pytest.mark.parametrize("row", [case for case in ROWS if "messages" in case.values[0]])
def test_requests_are_encoded(row):
    mode = row.get("mode", "chat_completions")
    messages = history_of(row["messages"])
    host = {"host": row["host"]} if "host" in row else {}
    body, read = body_of(mode, messages, **host, **row.get("fields", {}))
    sends = row.get("sends", {})
    assert {path: at(body, path) for path in sends} == sends
    assert not set(row.get("lacks", ())) & body.keys()
    assert body.keys() == set(row.get("keys", body))
    if "adaptations" not in row.get("fields", {}):
        assert list(read.tools) == row.get("fields", {}).get("tools", list(read.tools))


@pytest.mark.parametrize("row", [case for case in ROWS if "effort" in case.values[0]])
def test_effort_becomes_adaptive_or_budgeted_thinking(row):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "reasoning": row["effort"]}
    body, _ = body_of(
        "anthropic_messages",
        [UserMessage(content="u")],
        model=row["model"],
        sampling={**sampling, "max_tokens": row.get("most")},
    )
    thinking = row["thinking"]
    assert body.get("thinking") == thinking
    assert body.get("output_config", {}).get("effort") == row.get("level")
    free = thinking is None or thinking["type"] == "disabled"
    shaping = {"temperature", "top_p", "top_k"}
    assert shaping & body.keys() == (shaping if free else set())


@pytest.mark.parametrize(
    ("mode", "row"),
    [(mode, case.values[0]) for mode in ("anthropic_messages", "codex_responses")
     for case in cases("refusals", mode)],
)  # fmt: skip
def test_fake_server_refuses_what_the_api_refuses(mode, row):
    form = {
        "model": "m",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "u"}],
        "input": "u",
    }
    assert SERVERS[mode].decode_request(json.dumps(form).encode()).model == "m"
    with pytest.raises(ValueError) as refused:
        SERVERS[mode].decode_request(json.dumps({**form, **row["change"]}).encode())
    assert row["why"] in str(refused.value)


def test_responses_server_decodes_other_clients():
    form = {
        "model": "m",
        "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1",
             "output": [{"type": "input_text", "text": "out"}]},
        ],
    }  # fmt: skip
    assert list(SERVERS["codex_responses"].decode_request(json.dumps(form).encode()).messages) == [
        SystemMessage(content="d"),
        UserMessage(content="hi"),
        AssistantMessage(content="a", tool_calls=(ToolCall(id="1", name="t", arguments="{}"),)),
        ToolMessage(tool_call_id="1", name="t", content="out"),
    ]


# Cache markers of Messages


def marks_of(body):
    blocks = [*body.get("system", ()), *(b for m in body["messages"] for b in m["content"])]
    return [b["cache_control"] for b in blocks if "cache_control" in b]


@pytest.mark.parametrize(("cache", "marker"), [("5m", {}), ("1h", {"ttl": "1h"}), (None, None)])
def test_system_and_last_three_messages_are_marked(cache, marker):
    turns = [
        m for i in range(5) for m in (UserMessage(content=f"{i}"), AssistantMessage(content="ok"))
    ]
    messages = [SystemMessage(content="s"), *turns, UserMessage(content="end")]
    body, read = body_of("anthropic_messages", messages, cache=cache)
    marked = [i for i, m in enumerate(body["messages"]) if "cache_control" in m["content"][-1]]
    if cache is None:
        assert marks_of(body) == []
        return
    assert marks_of(body) == [{"type": "ephemeral", **marker}] * 4
    assert "cache_control" in body["system"][0]
    assert marked == [8, 9, 10]
    assert read.cache == cache


def test_thinking_and_empty_results_have_no_marker():
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    only = AssistantMessage(content=" ", reasoning_details=[thought])
    messages = [UserMessage(content="a"), only, UserMessage(content="b")]
    body, _ = body_of("anthropic_messages", messages, exact=True, cache="5m")
    assert len(marks_of(body)) == 2
    row = next(case.values[0] for case in ROWS if case.id == "a conversation of Messages")
    history = history_of(row["messages"][:-1])  # it ends with an empty result
    assert len(marks_of(body_of("anthropic_messages", history, cache="5m")[0])) == 4


KEYS = [
    ("api.anthropic.com", "k", {"x-api-key": "k"}),
    ("gateway.test", "k", {"x-api-key": "k", "authorization": "Bearer k"}),
    ("x.services.ai.azure.com", "k", {"x-api-key": "k"}),
    ("x.services.ai.azure.com", "eyJ.a.b", {"authorization": "Bearer eyJ.a.b"}),
    ("gateway.test", None, {}),
]


@pytest.mark.parametrize(("host", "key", "sent"), KEYS)
def test_messages_key_is_sent_in_the_expected_header(host, key, sent):
    endpoint = Endpoint(f"https://{host}", api_mode="anthropic_messages")
    headers = dialect_for(endpoint).headers(key)
    found = {name: headers[name] for name in ("x-api-key", "authorization") if name in headers}
    assert found == sent
    assert headers["anthropic-version"] == "2023-06-01"
    assert ("anthropic-beta" in headers) is (host == "api.anthropic.com")


@pytest.mark.parametrize(
    ("mode", "host", "most"),
    [
        ("chat_completions", "api.openai.com", 40),
        ("chat_completions", "mine.openai.azure.com", 40),
        ("chat_completions", "127.0.0.1:1", None),
        ("codex_responses", "api.openai.com", 64),
    ],
)
@pytest.mark.parametrize("chars", [40, 46, 64, 65])
def test_long_call_ids_are_shortened_per_provider(mode, host, most, chars):
    """vLLM gives `chatcmpl-tool-` and 32 digits."""
    call = ToolCall(id="x" * chars, name="t", arguments="{}")
    result = ToolMessage(tool_call_id=call.id, name="t", content="out")
    messages = [UserMessage(content="hi"), AssistantMessage(tool_calls=(call,)), result]
    _, read = body_of(mode, messages, host=host)
    _, called, answered = read.messages
    assert called.tool_calls[0].id == answered.tool_call_id
    if most is None or chars <= most:
        assert answered.tool_call_id == call.id
    else:
        assert len(answered.tool_call_id) <= 40


# Items of Responses in another order than ours

COMMENTED = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "a"},
    {"type": "message", "role": "assistant", "phase": "commentary",
     "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "b"},
    {"type": "function_call", "call_id": "2", "name": "t", "arguments": "{}"},
    {"type": "message", "role": "assistant", "phase": "final_answer",
     "content": [{"type": "output_text", "text": "Done."}]},
]  # fmt: skip


def test_items_are_replayed_in_original_order():
    mode, hi = "codex_responses", UserMessage(content="hi")
    form = {"id": "r", "status": "completed", "model": "m", "output": COMMENTED}
    answer = decode(json.dumps(form).encode(), mode=mode)
    message = answer.message
    assert message.content == "I look.\n\nDone."
    results = [ToolMessage(tool_call_id=i, name="t", content="") for i in "12"]
    sent = body_of(mode, [hi, message, *results])[0]["input"]
    assert sent[1:-2] == [
        {**item, "content": item["content"][0]["text"]} if "content" in item else item
        for item in COMMENTED
    ]
    again = decode(SERVERS[mode].encode_answer(answer, answer_id="resp_x"), mode=mode)
    assert again.message.reasoning_details == message.reasoning_details
    assert again.message.content == message.content
    # Notes that no longer fit the message are left out.
    for content, calls in (("Other.", 2), (message.content, 1)):
        changed = msgspec.structs.replace(
            message, content=content, tool_calls=message.tool_calls[:calls]
        )
        items = body_of(mode, [hi, changed, *results[:calls]], exact=True)[0]["input"][1:]
        assert [item["type"] for item in items][: 3 + calls] == [
            "reasoning", "reasoning", "message", *["function_call"] * calls
        ]  # fmt: skip


def test_refusal_is_a_separate_part():
    server = SERVERS["codex_responses"]
    sent = Completion(message=AssistantMessage(content="No."), finish_reason="refusal", usage=None)
    body = server.encode_answer(sent, answer_id="resp_1")
    (item,) = json.loads(body)["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "No."}]
    events = b"".join(server.encode_stream(sent, answer_id="resp_1"))
    for data, stream in ((body, False), (events, True)):
        got = decode(data, mode="codex_responses", stream=stream)
        assert (got.message, got.finish_reason) == (sent.message, "refusal")
