"""Which typed error an answer is, by the texts that servers really send."""

import base64
import json
from email.utils import formatdate

import pytest

from hermes_rl import errors as e
from hermes_rl.models.classify import classify, retry_after, scrub
from hermes_rl.models.client import Endpoint, connect

OVERFLOWS = {
    "openai": (400, {"error": {
        "message": "This model's maximum context length is 128000 tokens. However, your messages"
        " resulted in 130011 tokens.", "type": "invalid_request_error", "param": "messages",
        "code": "context_length_exceeded"}}),
    "openai-new": (400, {"error": {
        "message": "Your input exceeds the context window of this model.",
        "type": "invalid_request_error", "code": "context_length_exceeded"}}),
    "vllm-old": (400, {
        "object": "error", "message": "This model's maximum context length is 4096 tokens. However,"
        " you requested 5000 tokens (4500 in the messages, 500 in the completion).",
        "type": "BadRequestError", "param": None, "code": 400}),
    "vllm": (400, {"error": {
        "message": "The decoder prompt (length 5000) is longer than the maximum model length of"
        " 4096. Make sure that `max_model_len` is no smaller than the number of text tokens.",
        "type": "BadRequestError", "param": None, "code": 400}}),
    "sglang": (400, {
        "object": "error", "message": "The input (5000 tokens) is longer than the model's context"
        " length (4096 tokens).", "type": "BadRequestError", "code": 400}),
    "sglang-total": (400, {
        "object": "error", "message": "Requested token count exceeds the model's maximum context"
        " length of 4096 tokens.", "type": "BadRequestError", "code": 400}),
    "llama.cpp": (400, {"error": {
        "code": 400, "message": "the request exceeds the available context size. try increasing it",
        "type": "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}}),
    "anthropic": (400, {
        "type": "error", "error": {"type": "invalid_request_error",
        "message": "prompt is too long: 213462 tokens > 200000 maximum"}}),
    "anthropic-total": (400, {
        "type": "error", "error": {"type": "invalid_request_error", "message":
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"}}),
    "openrouter": (400, {"error": {
        "code": 400, "message": "Provider returned error", "metadata": {
        "raw": "{\"error\":{\"message\":\"This endpoint's maximum context length is 32768\"}}"}}}),
    "as-500": (500, {"error": {
        "code": 500, "message": "Input length (9000) exceeds the maximum allowed length (8192)"}}),
    "as-413": (413, {"error": {"message": "prompt is too long", "type": "invalid"}}),
}  # fmt: skip

OTHERS = [
    (400, {"error": {"message": "Unsupported parameter: 'top_k'"}}, e.BadRequest),
    (400, {"error": {"message": "x", "code": "content_filter"}}, e.ContentFiltered),
    (400, {"error": {"message": "Your credit balance is too low"}}, e.BillingError),
    (400, {"error": {"message": "The model `gpt-9` does not exist"}}, e.ModelNotFound),
    (422, {"detail": [{"msg": "field required"}]}, e.BadRequest),
    (401, {"error": {"message": "maximum context length"}}, e.AuthError),
    (402, {"error": {"message": "pay"}}, e.BillingError),
    (403, {"error": {"message": "Insufficient quota"}}, e.BillingError),
    (403, {"error": {"message": "Country not supported"}}, e.AuthError),
    (404, {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}},
     e.ModelNotFound),
    (404, {"detail": "Not Found"}, e.ModelNotFound),
    (408, {}, e.ServerError),
    (409, {}, e.ServerError),
    (413, {}, e.PayloadTooLarge),
    (429, {"error": {"message": "Limit 30000 tokens per min, too many tokens"}}, e.RateLimited),
    (429, {"error": {"message": "x", "code": "insufficient_quota"}}, e.BillingError),
    (429, {"error": {"message": "You exceeded your current quota, please check your plan"}},
     e.BillingError),
    (429, {"error": {"type": "engine_overloaded"}}, e.Overloaded),
    (500, {"error": {"message": "CUDA error"}}, e.ServerError),
    (503, {"error": {"message": "The engine is currently overloaded"}}, e.Overloaded),
    (503, {"error": {"message": "Loading model"}}, e.ServerError),
    (529, {}, e.Overloaded),
    (599, {}, e.ServerError),
    (302, {}, e.BadRequest),
    (418, "I'm a teapot", e.BadRequest),
]  # fmt: skip


@pytest.mark.parametrize("name", OVERFLOWS)
def test_context_overflow(name):
    status, form = OVERFLOWS[name]
    assert type(classify(status, {}, json.dumps(form).encode())) is e.ContextOverflow


@pytest.mark.parametrize(("status", "form", "kind"), OTHERS)
def test_kinds(status, form, kind):
    error = classify(status, {"request-id": "r"}, json.dumps(form).encode())
    assert type(error) is kind
    assert (error.status, error.request_id) == (status, "r")


@pytest.mark.parametrize("body", [b"", b"<html>\xff oops</html>", b"[" * 50_000, b"null", b"7"])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_bodies_of_any_shape(status, body):
    error = classify(status, {}, body)
    assert str(error).startswith(str(status))
    assert "\n" not in str(error)
    assert len(str(error)) <= 500


@pytest.mark.parametrize(
    ("status", "served"), [(500, False), (502, True), (504, True), (429, False)]
)
def test_a_gateway_that_gave_up_may_hide_a_served_request(status, served):
    assert classify(status, {}, b"").served is served


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": formatdate(NOW + 90, usegmt=True)}, 90.0),
        ({"retry-after": formatdate(NOW - 90, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "x", "retry-after": "3"}, 3.0),
    ],
)
def test_retry_after(headers, seconds):
    assert retry_after(headers, NOW) == seconds
    assert classify(429, headers, b"", now=NOW).retry_after_s == seconds


def test_keys_are_scrubbed():
    key = "my-own/key+format=1234"
    body = json.dumps(
        {"error": {"message": f"bad key {key}, sk-proj-abcdefgh123456 or\nBearer x.y"}}
    )
    text = str(classify(401, {}, body.encode(), secrets=(key,)))
    assert text == "401: bad key ***, *** or ***"


def test_a_key_in_base64_is_scrubbed():
    key = "my-own/key+format=1234"
    encoded = base64.b64encode(key.encode()).decode()
    assert scrub(f"sent {encoded}", (key,)) == "sent ***"


@pytest.mark.parametrize("bad", ["", "localhost:8000", "ftp://x/v1", "http://", "http://x:port/"])
def test_an_address_that_cannot_work(bad):
    with pytest.raises(e.UserError, match="Use for example http://"):
        connect(Endpoint(bad))


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-é", ""])
def test_a_key_that_no_header_can_carry(key):
    with pytest.raises(e.UserError, match="API key") as caught:
        connect(Endpoint("http://127.0.0.1:1/v1", api_key=key))
    assert "secret" not in str(caught.value)


def test_unknown_modes_and_transports():
    with pytest.raises(e.UserError, match="api_mode 'x' is unknown"):
        connect(Endpoint("http://127.0.0.1:1/v1", api_mode="x"))
    with pytest.raises(e.UserError, match="transport 'x' is unknown"):
        connect(Endpoint("http://127.0.0.1:1/v1", transport="x"))


def test_what_an_endpoint_shows():
    endpoint = Endpoint(
        "https://user:hunter2@api.example.com:8443/v1/",
        api_key="sk-secret",
        headers={"x": "secret"},
    )
    assert endpoint.host == "api.example.com:8443"
    assert "secret" not in repr(endpoint)
    assert endpoint.url("/chat/completions").endswith(":8443/v1/chat/completions")
    assert Endpoint("http://h/v1/chat/completions").url("/chat/completions") == (
        "http://h/v1/chat/completions"
    )
    assert Endpoint("http://[::1]:80/v1").host == "[::1]:80"
