"""codex_responses: answers of servers of many habits and broken answers."""

import json

import pytest
import wire_kit

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models import TokenCapture
from hermes_rl.testing import encode_event
from hermes_rl.usage import Usage


def said(text="hi", **fields):
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content, **fields}


def called(call_id="call_1", arguments="{}", **fields):
    named = {"call_id": call_id, "name": "t", "arguments": arguments}
    return {"type": "function_call", **named, **fields}


def thought(text=None, encrypted=None):
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": encrypted}


def response(*output, status="completed", **fields):
    return {"id": "resp_1", "model": "m-1", "status": status, "output": list(output), **fields}


def stream(*events):
    return b"".join(encode_event(json.dumps(form).encode(), form["type"]) for form in events)


def done(index, item):
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def ended(kind="completed", **form):
    return {"type": f"response.{kind}", "response": {"id": "resp_1", "model": "m-1", **form}}


def decode(data, **fields):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return wire_kit.decode(data, mode="codex_responses", **fields)


def both_ways(*output, **fields):
    """The answer as a body, after checking that its stream, byte by byte, says the same."""
    whole = decode(response(*output, **fields))
    events = stream(*(done(i, item) for i, item in enumerate(output)), ended(**{
        k: v for k, v in response(*output, **fields).items() if k != "output"
    }))  # fmt: skip
    assert decode(events, stream=True, size=1) == whole
    return whole


# Answers


@pytest.mark.parametrize(
    ("output", "message", "reason"),
    [
        ([said()], AssistantMessage(content="hi"), "stop"),
        ([said("a"), said("b")], AssistantMessage(content="a\n\nb"), "stop"),
        (
            [{"type": "message", "content": [{"type": "output_text", "text": "a"},
                                             {"type": "output_text", "text": "b"}]}],
            AssistantMessage(content="ab"), "stop",
        ),
        (
            [{"type": "message", "content": [{"type": "refusal", "refusal": "I will not."}]}],
            AssistantMessage(content="I will not."), "refusal",
        ),
        (
            [thought("hm"), said()],
            AssistantMessage(content="hi", reasoning_content="hm"), "stop",
        ),
        (
            [thought("a", "x"), thought("b"), called()],
            AssistantMessage(
                reasoning_content="a\n\nb",
                tool_calls=(ToolCall(id="call_1", name="t", arguments="{}"),),
                reasoning_details=[thought("a", "x")],
            ),
            "tool_calls",
        ),
        (  # reasoning in the open, as self-hosted models give it
            [{"type": "reasoning", "id": "r", "summary": [],
              "content": [{"type": "reasoning_text", "text": "hm"}]}, said()],
            AssistantMessage(
                content="hi", reasoning_content="hm",
                reasoning_details=[{"type": "reasoning", "id": "r", "summary": [],
                                    "content": [{"type": "reasoning_text", "text": "hm"}]}],
            ),
            "stop",
        ),
        ([said("<think>r</think>a")],
         AssistantMessage(content="a", reasoning_content="r", raw_content="<think>r</think>a"),
         "stop"),
        ([{"type": "web_search_call", "id": "ws"}, said()], AssistantMessage(content="hi"), "stop"),
        ([], AssistantMessage(), "stop"),
    ],
)  # fmt: skip
def test_items_make_a_message(output, message, reason):
    answer = both_ways(*output)
    if len([item for item in output if item.get("role")]) > 1:  # what a replay needs to know
        assert answer.message.reasoning_details == [{"type": "message", "chars": 1}] * 2
        message = AssistantMessage(content=message.content,
                                   reasoning_details=answer.message.reasoning_details)  # fmt: skip
    assert answer.message == message
    assert answer.finish_reason == reason
    assert answer.served_model == "m-1"
    assert answer.request_id == "r-1"


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ({"reason": "max_output_tokens"}, "length"),
        ({"reason": "content_filter"}, "content_filter"),
        ({"reason": "abort"}, "abort"),
        (None, "length"),
    ],
)
def test_incomplete_answers_keep_what_they_have(why, reason):
    output = [thought("hm"), said("half"), called(arguments='{"a')]
    answer = both_ways(*output, status="incomplete", incomplete_details=why)
    assert answer.finish_reason == reason
    assert answer.message.content == "half"
    assert answer.message.tool_calls[0].arguments == '{"a'
    assert both_ways(said(), status="cancelled").finish_reason == "abort"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 9, "output_tokens": 2}, (9, None, None, 2, None)),
        (
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4,
             "cache_write_tokens": 3}, "output_tokens": 2,
             "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 11},
            (9, 4, 3, 2, 1),
        ),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 2},
         (9, None, None, 2, None)),
        ({"input_tokens": 9}, None),
        ({"input_tokens": True, "output_tokens": 2}, None),
        (None, None),
    ],
)  # fmt: skip
def test_usage(usage, expected):
    answer = both_ways(said(), usage=usage)
    names = ("input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens",
             "reasoning_tokens")  # fmt: skip
    assert answer.usage == (expected and Usage(**dict(zip(names, expected, strict=True))))
    assert json.loads(answer.usage_raw or "null") == usage


def test_logprobs_of_the_text():
    part = {"type": "output_text", "text": "ab", "logprobs": [{"logprob": -0.5}, {"logprob": -1}]}
    answer = both_ways({"type": "message", "content": [part]})
    assert answer.tokens == TokenCapture(logprobs=(-0.5, -1.0))


# Streams


def test_the_item_counts_as_it_is_when_it_is_done():
    added = {"type": "response.output_item.added", "output_index": 0}
    data = stream(
        {**added, "item": thought(None, "ha")},
        done(0, thought("hm", "half and whole")),
        ended(status="completed"),
    )
    (item,) = decode(data, stream=True, size=1).message.reasoning_details
    assert item["encrypted_content"] == "half and whole"


def test_items_that_never_are_done_are_taken_from_the_end_or_built():
    grown = [
        {"type": "response.output_item.added", "output_index": 1,
         "item": called(arguments="", id="fc_1")},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "h"},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "m"},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"a"'},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": ":1}"},
        {"type": "response.output_text.delta", "output_index": 2, "delta": "he"},
        {"type": "response.output_text.delta", "output_index": 2, "delta": "y"},
    ]  # fmt: skip
    heard = []
    built = decode(stream(*grown, ended()), stream=True, on_delta=heard.append).message
    assert (built.content, built.reasoning_content) == ("hey", "hm")
    assert built.tool_calls == (ToolCall(id="call_1", name="t", arguments='{"a":1}'),)
    assert heard == ["he", "y"]
    given = decode(stream(*grown, ended(output=[said("whole")])), stream=True)
    assert given.message.content == "whole"
    got = decode(stream(done(None, said("no place")), ended(output=[])), stream=True)
    assert got.message.content == "no place"
