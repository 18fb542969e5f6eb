"""Inconsistent answers are failed calls and never repaired into a row."""

import json

import pytest

from hermes_rl.errors import BadRequest, ModelAborted, ModelError, ProtocolError
from hermes_rl.models import Completion, Conversation, ModelRequest
from hermes_rl.models.tokens import ROUTES, TokenWire
from hermes_rl.models.wire import ReplyHead
from hermes_rl.usage import Usage

PROMPT = (1, 2, 3)
REQUEST = ModelRequest("m", Conversation(), "c", logprobs=True, prompt_ids=PROMPT)


def vllm(**choice) -> dict:
    logprobs = {"token_logprobs": [-1.0, -0.5], "tokens": ["token_id:7", "token_id:8"]}
    fields = {"token_ids": [7, 8], "prompt_token_ids": [1, 2, 3], "logprobs": logprobs}
    return {"id": "i", "choices": [{"index": 0, "finish_reason": "stop", **fields, **choice}]}


def generate(**choice) -> dict:
    content = [{"token": "token_id:7", "logprob": -1.0}, {"token": "token_id:8", "logprob": -0.5}]
    fields = {"token_ids": [7, 8], "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"request_id": "i", "choices": [{**fields, **choice}]}


def sglang(ids=(7, 8), **meta) -> dict:
    triples = [[-1.0, 7, None], [-0.5, 8, None]]
    ended = {"type": "stop", "matched": 8}
    fields = {"output_token_logprobs": triples, "finish_reason": ended, "prompt_tokens": 3}
    form = {"text": "", "meta_info": {**fields, **meta}}
    return form if ids is None else {**form, "output_ids": list(ids)}


def llamacpp(**more) -> dict:
    reported = [{"id": 7, "logprob": -1.0}, {"id": 8, "logprob": -0.5}]
    fields = {"tokens": [7, 8], "completion_probabilities": reported, "tokens_evaluated": 3}
    return {**fields, "stop_type": "eos", "truncated": False, **more}


def read(wire: str, form: object) -> Completion:
    decoder = TokenWire(wire).decoder(REQUEST, ReplyHead({}))
    decoder.feed(form if isinstance(form, bytes) else json.dumps(form).encode())
    return decoder.finish()


WHOLE = {"vllm": vllm(), "vllm_generate": generate(), "sglang": sglang(), "llamacpp": llamacpp()}


@pytest.mark.parametrize("wire", ROUTES)
def test_complete_answer_is_read(wire):
    answer = read(wire, WHOLE[wire])
    assert answer.tokens.prompt_ids == PROMPT
    assert answer.tokens.completion_ids == (7, 8)
    assert answer.tokens.logprobs == (-1.0, -0.5)
    assert answer.finish_reason == "stop"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("wire", "form", "text"),
    [
        ("vllm", vllm(prompt_token_ids=[1, 1, 2, 3]), "another prompt than it was sent"),
        ("vllm", vllm(token_ids=None), "no token ids"),
        ("vllm", vllm(token_ids=[7, "8"]), "no token ids"),
        ("vllm", vllm(token_ids=[7, 1 << 31]), "no token ids"),
        ("vllm", vllm(token_ids=[7]), "of different tokens"),
        ("vllm", vllm(token_ids=[7, 9]), "of different tokens"),
        ("vllm", vllm(logprobs={"token_logprobs": [-1.0]}), "1 logprobs for 2 tokens"),
        ("vllm", {**vllm(), "usage": {"prompt_tokens": 4}}, "read 4 prompt tokens"),
        ("vllm", {**vllm(), "usage": {"completion_tokens": 3}}, "counted 3 sampled tokens, gave 2"),
        ("vllm_generate", generate(token_ids=[7]), "of different tokens"),
        ("vllm_generate", generate(token_ids=[8, 7]), "of different tokens"),
        ("vllm_generate", {**generate(), "usage": {"prompt_tokens": 4}}, "read 4 prompt tokens"),
        ("sglang", {"text": "", "output_ids": [7, 8]}, "not an answer of sglang_generate"),
        ("sglang", sglang(prompt_tokens=4), "read 4 prompt tokens and was sent 3"),
        ("sglang", sglang(completion_tokens=1), "counted 1 sampled tokens, gave 2"),
        ("sglang", sglang(ids=(7, 9)), "of different tokens"),
        ("sglang", sglang(ids=(7,), finish_reason={"type": "stop"}), "of different tokens"),
        ("sglang", sglang(ids=(7,), finish_reason={"type": "length"}), "of different tokens"),
        ("llamacpp", llamacpp(tokens_evaluated=4), "read 4 prompt tokens and was sent 3"),
        ("llamacpp", llamacpp(tokens_predicted=3), "counted 3 sampled tokens, gave 2"),
        ("llamacpp", llamacpp(truncated=True), "cut the prompt"),
        *((wire, form, None) for wire in ROUTES for form in ([], {}, 3, b"<html>", b"{")),
        *((wire, {"choices": [], "meta_info": None}, None) for wire in ROUTES),
    ],
)
def test_inconsistent_answers_are_refused(wire, form, text):
    with pytest.raises(ProtocolError, match=text) as refused:
        read(wire, form)
    assert refused.value.served


REPORTED = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 1},
    "cost": 0.25,
}


@pytest.mark.parametrize("form", [vllm(), generate()])
def test_reported_usage_is_used(form):
    wire = "vllm_generate" if "request_id" in form else "vllm"
    answer = read(wire, {**form, "usage": REPORTED})
    assert json.loads(answer.usage_raw) == REPORTED
    assert answer.usage == Usage(
        input_tokens=3,
        cache_read_tokens=1,
        output_tokens=2,
        reasoning_tokens=1,
        reported_cost=0.25,
    )
    assert read(wire, form).usage == Usage(input_tokens=3, output_tokens=2)


def test_stop_token_known_only_from_logprobs_is_included():
    """The golden case of an end token off by one."""
    assert read("sglang", sglang(ids=(7,))).tokens.completion_ids == (7, 8)
    assert read("sglang", sglang(ids=None)).tokens.completion_ids == (7, 8)
    assert read("sglang", sglang(output_token_logprobs=None)).tokens.completion_ids == (7, 8)


@pytest.mark.parametrize(
    ("wire", "form"),
    [
        ("vllm", vllm(logprobs=None)),
        ("vllm", vllm(logprobs={"token_logprobs": [-1.0, None]})),
        ("vllm", vllm(logprobs={"token_logprobs": [-1.0, -9999.0]})),
        ("vllm", vllm(logprobs={"token_logprobs": [-1.0, 0.7]})),
        ("vllm_generate", generate(logprobs=None)),
        ("vllm_generate", generate(logprobs={"content": [{"logprob": -1.0}, {}]})),
        ("sglang", sglang(output_token_logprobs=[[None, 7, None], [-0.5, 8, None]])),
        ("llamacpp", llamacpp(completion_probabilities=[{"id": 8, "logprob": -0.5}])),
        ("llamacpp", llamacpp(completion_probabilities=[])),
    ],
)
def test_incomplete_logprobs_are_discarded(wire, form):
    answer = read(wire, form)
    assert answer.tokens.completion_ids == (7, 8)
    assert answer.tokens.logprobs is None


def test_error_in_an_answer_is_typed():
    with pytest.raises(ModelError, match="the engine is dead"):
        read("vllm", {"error": {"message": "the engine is dead", "code": 500}})


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_abort_is_reported_per_engine(wire):
    form = (
        vllm(finish_reason="abort")
        if wire == "vllm"
        else sglang(finish_reason={"type": "abort", "message": "no"})
    )
    assert read(wire, form).finish_reason == "abort"
    assert ModelAborted.transient  # what a caller makes of it is tried again


def events(
    wire: str, *forms: object, cut: int | None = None, end: bool = True
) -> Completion | None:
    """What is read of a stream that ends after `cut` bytes."""
    parts = [b"data: " + json.dumps(form).encode() + b"\n\n" for form in forms]
    body = b"".join((*parts, *([b"data: [DONE]\n\n"] if end else [])))
    decoder = TokenWire(wire).decoder(REQUEST, ReplyHead({"content-type": "text/event-stream"}))
    decoder.feed(body[:cut])
    if cut is None or decoder.done:
        return decoder.finish()
    return decoder.cut_off()


def sglang_events(count: int, form: str, *, trimmed: bool = False) -> list[dict]:
    """A stream of SGLang; its last id is the end token 8."""
    ids = [*(7,) * (count - 1), 8]
    triples = [[-(n + 1) / 8, token, None] for n, token in enumerate(ids)]
    made = []
    for n in range(1, count + 1):
        last = n == count
        shown = ids[:n] if form == "cumulative" else ids[n - 1 : n]
        made.append(
            {
                "output_ids": shown[:-1] if last and trimmed else shown,
                "meta_info": {
                    "completion_tokens": n,
                    "prompt_tokens": 3,
                    "weight_version": "3",
                    "finish_reason": {"type": "stop", "matched": 8} if last else None,
                    "output_token_logprobs": triples[n - 1 : n]
                    if form == "incremental"
                    else triples[:n],
                },
            }
        )
    return made


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("form", ["cumulative", "incremental", "mixed"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sglang_streams_of_every_form_are_read_up_to_the_byte_where_they_end(form, count, trimmed):
    forms = sglang_events(count, form, trimmed=trimmed)
    ids = (*(7,) * (count - 1), 8)
    logprobs = tuple(-(n + 1) / 8 for n in range(count))
    whole = events("sglang", *forms)
    assert whole.tokens.completion_ids == ids
    assert whole.tokens.logprobs == logprobs
    assert (whole.finish_reason, whole.policy_version) == ("stop", "3")
    assert whole.usage.output_tokens == count
    ends = [sum(len(json.dumps(one)) + 8 for one in forms[:n]) for n in range(count + 1)]
    for cut in range(ends[-1] + 14):
        there = sum(cut >= end for end in ends[1:])
        answer = events("sglang", *forms, cut=cut)
        if not there:
            assert answer is None
            continue
        assert answer.tokens.completion_ids == ids[:there]
        assert answer.tokens.logprobs == logprobs[:there]
        assert answer.finish_reason == ("stop" if there == count else "abort")
        assert (answer.usage is None) == (there < count)


def test_a_stream_that_ends_within_an_event_as_if_it_were_complete_is_cut_off():
    decoder = TokenWire("sglang").decoder(REQUEST, ReplyHead({"content-type": "text/event-stream"}))
    first, second, _ = sglang_events(3, "cumulative")
    decoder.feed(b"data: " + json.dumps(first).encode() + b"\n\ndata: ")
    decoder.feed(json.dumps(second).encode()[:-9])
    answer = decoder.finish()
    assert (answer.tokens.completion_ids, answer.finish_reason) == ((7,), "abort")


def llamacpp_events(*sent: int, of: int, end: bool = True) -> list[dict]:
    """A stream of llama.cpp: the numbers of the tokens that have an event, of so many."""
    made = [
        {
            "tokens": [n],
            "stop": False,
            "tokens_predicted": n,
            "tokens_evaluated": 3,
            "completion_probabilities": [{"id": n, "prob": 0.5, "top_probs": []}],
        }
        for n in sent
    ]
    last = {"tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": of}
    return [*made, last] if end else made


@pytest.mark.parametrize("end", [True, False])
def test_a_stream_of_llamacpp_that_leaves_out_ids_is_no_answer(end):
    answer = events("llamacpp", *llamacpp_events(1, 2, of=2, end=end), cut=None, end=False)
    assert answer.tokens.completion_ids == (1, 2)
    assert answer.finish_reason == ("length" if end else "abort")
    with pytest.raises(ModelAborted, match="the stream left out 1 of 3 ids"):
        events("llamacpp", *llamacpp_events(1, 3, of=3, end=end), end=False)
    if end:  # the last token has no event
        with pytest.raises(ModelAborted, match="the stream left out 1 of 2 ids"):
            events("llamacpp", *llamacpp_events(1, of=2), end=False)


def test_a_refusal_in_a_stream_is_one():
    refused = {"type": "abort", "message": "top_k is odd", "status_code": 400}
    with pytest.raises(BadRequest, match="top_k is odd"):
        events("sglang", {"output_ids": [], "meta_info": {"finish_reason": refused}})
