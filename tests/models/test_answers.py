"""Chat Completions: answers from servers of many habits."""

import json

import pytest

from hermes_rl.messages import AssistantMessage
from hermes_rl.models import TokenCapture
from hermes_rl.testing import encode_event
from hermes_rl.usage import Usage

# Answers: habits of providers


@pytest.mark.parametrize(
    ("message", "content", "reasoning", "raw"),
    [
        ({"content": None}, "", None, None),
        ({"content": "a", "reasoning_content": "r", "reasoning": "r"}, "a", "r", None),
        ({"content": "a", "reasoning": {"odd": 1}, "thinking": "t"}, "a", "t", None),
        ({"content": "a", "reasoning_content": ""}, "a", None, None),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]},
                         {"type": "text", "text": "a"}]}, "a", "r", None,
        ),
        ({"content": None, "refusal": "I will not."}, "I will not.", None, None),
        ({"content": "<think>r</think>a"}, "a", "r", "<think>r</think>a"),
        ({"content": "\n<think>\nr\n</think>\n\na"}, "a", "r", "\n<think>\nr\n</think>\n\na"),
        ({"content": "r\n</think>\n\na"}, "a", "r", "r\n</think>\n\na"),
        ({"content": "<think>cut off"}, "", "cut off", "<think>cut off"),
        ({"content": "see <think>x</think>"}, "see <think>x</think>", None, None),
        ({"content": "<think></think>a"}, "a", "", "<think></think>a"),
        ({"content": "<think>r</think>a", "reasoning": "s"}, "<think>r</think>a", "s", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_text_and_reasoning(kit, message, content, reasoning, raw, stream):
    body = kit.stream_of(message) if stream else kit.answer_with(message)
    got = kit.decode(body, kit.SSE if stream else kit.JSON, stream=stream).message
    assert got == AssistantMessage(content=content, reasoning_content=reasoning, raw_content=raw)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_in_its_own_words_is_named_so(kit, stream):
    message = {"content": None, "refusal": "I will not."}
    body = kit.stream_of(message) if stream else kit.answer_with(message)
    got = kit.decode(body, kit.SSE if stream else kit.JSON, stream=stream)
    assert got.finish_reason == "refusal"


def made(kit, *deltas):
    """(id, name, arguments) of the calls that deltas of tool_calls make."""
    pieces = [{"tool_calls": d} for d in deltas]
    return [
        (c.id, c.name, c.arguments)
        for c in kit.decode(kit.stream_of(*pieces), kit.SSE, stream=True).message.tool_calls
    ]


def piece(arguments=None, name=None, **fields):
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {k: v for k, v in function.items() if v is not None}}


def test_calls_by_index_interleaved(kit):
    assert made(
        kit,
        [piece(name="a", arguments="", index=0, id="1"), piece(name="b", index=1, id="2")],
        [piece('{"x"', index=1), piece("{", index=0)],
        [piece(":1}", index=1), piece("}", index=0)],
    ) == [("1", "a", "{}"), ("2", "b", '{"x":1}')]


def test_calls_without_index(kit):
    assert made(
        kit, [piece(name="a", id="1", arguments="{")], [piece("}")], [piece("{}", name="b", id="2")]
    ) == [("1", "a", "{}"), ("2", "b", "{}")]


def test_whole_calls_that_all_have_index_0(kit):
    assert made(
        kit, [piece("{}", name="a", index=0, id="1")], [piece("[]", name="a", index=0, id="2")]
    ) == [("1", "a", "{}"), ("2", "a", "[]")]


def test_names_and_ids_repeated_in_every_piece(kit):
    assert made(
        kit, [piece("{", name="a", index=0, id="1")], [piece("}", name="a", index=0, id="1")]
    ) == [("1", "a", "{}")]


def test_arguments_as_an_object(kit):
    message = {"tool_calls": [piece({"x": 1}, name="a", id="1")]}
    assert kit.decode(kit.answer_with(message)).message.tool_calls[0].arguments == '{"x":1}'
    assert made(kit, [piece({"x": 1}, name="a", id="1", index=0)]) == [("1", "a", '{"x":1}')]


def test_the_form_before_tool_calls(kit):
    message = {"content": None, "function_call": {"name": "a", "arguments": "{}"}}
    (call,) = kit.decode(kit.answer_with(message)).message.tool_calls
    assert (call.name, call.arguments) == ("a", "{}")
    first = {"function_call": {"name": "a", "arguments": "{"}}
    body = kit.stream_of(first, {"function_call": {"arguments": "}"}})
    (call,) = kit.decode(body, kit.SSE, stream=True).message.tool_calls
    assert (call.name, call.arguments) == ("a", "{}")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2}, (9, None, None, 2, None)),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details":
             {"cached_tokens": 4, "cache_write_tokens": 3}}, (9, 4, 3, 2, None),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 8,
             "prompt_cache_miss_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}},
            (9, 8, None, 2, 1),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 5}, (9, 5, None, 2, None)),
        # Reasoning beside the output, as one provider reports it
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 18,
             "completion_tokens_details": {"reasoning_tokens": 7}}, (9, None, None, 9, 7),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
         (9, None, None, 2, None)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 10},
         (9, None, None, 2, None)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (0, None, None, 0, None)),
        ({"prompt_tokens": 9}, None),
        ({"prompt_tokens": 9, "completion_tokens": None}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        ({"prompt_tokens": "9", "completion_tokens": 2}, None),
        ({"prompt_tokens": True, "completion_tokens": 2}, None),
        ({"prompt_tokens": 10**30, "completion_tokens": 2}, None),  # no row could hold it
        (None, None),
        ([], None),
    ],
)  # fmt: skip
def test_usage_spellings(kit, usage, expected):
    got = kit.decode(kit.answer_with({"content": "a"}, usage=usage)).usage
    if expected is None:
        assert got is None
    else:
        assert got == Usage(
            input_tokens=expected[0],
            cache_read_tokens=expected[1],
            cache_write_tokens=expected[2],
            output_tokens=expected[3],
            reasoning_tokens=expected[4],
        )


def test_the_last_of_running_totals_counts(kit):
    chunk = {"choices": [{"delta": {"content": "a"}}]}
    parts = [{**chunk, "usage": {"prompt_tokens": 5, "completion_tokens": n}} for n in (1, 2, 3)]
    body = b"".join(encode_event(json.dumps(p).encode()) for p in parts) + encode_event(b"[DONE]")
    answer = kit.decode(body, kit.SSE, stream=True)
    assert answer.usage == Usage(input_tokens=5, output_tokens=3)
    assert json.loads(answer.usage_raw) == {"prompt_tokens": 5, "completion_tokens": 3}


def test_an_empty_usage_at_the_end_does_not_take_back_what_was_told(kit):
    counts = {"prompt_tokens": 3, "completion_tokens": 1}
    first = {"choices": [{"delta": {"content": "x"}}], "usage": counts}
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {}}
    data = b"".join(encode_event(json.dumps(form).encode()) for form in (first, last))
    usage = kit.decode(data, kit.SSE, stream=True).usage
    assert usage == Usage(input_tokens=3, output_tokens=1)


def test_numbers_too_large_to_be_token_fields_are_none(kit):
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [10**40]}
    choice["logprobs"] = {"content": [{"logprob": 10**400}]}
    got = kit.decode(json.dumps({"choices": [choice]}).encode(), kit.JSON)
    assert (got.message.content, got.tokens) == ("x", None)


def test_token_ids_of_vllm_and_sglang(kit):
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}
    vllm = {"prompt_token_ids": [1, 2], "choices": [
        {"message": {"content": "ab"}, "token_ids": [3, 4], "logprobs": logprobs}]}  # fmt: skip
    sglang = {"choices": [
        {"message": {"content": "ab"}, "prompt_token_ids": [1, 2], "response_token_ids": [3, 4],
         "logprobs": logprobs}]}  # fmt: skip
    expected = TokenCapture(
        prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -1.0), logprobs_kind="unknown"
    )
    for form in (vllm, sglang):
        assert kit.decode(json.dumps(form).encode()).tokens == expected


def test_signed_reasoning_blocks_of_a_stream_are_joined(kit):
    blocks = [
        {"type": "reasoning.text", "index": 0, "text": "let "},
        {"type": "reasoning.text", "index": 0, "text": "me", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ]
    body = kit.stream_of(*({"reasoning_details": [b]} for b in blocks))
    assert kit.decode(body, kit.SSE, stream=True).message.reasoning_details == [
        {"type": "reasoning.text", "index": 0, "text": "let me", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ]


def test_a_stream_is_complete_with_its_finish_reason(kit):
    whole = kit.stream_of({"content": "a"}, done=False)
    assert kit.decode(whole, kit.SSE, stream=True).message.content == "a"
