"""Classification of arbitrary bodies and exceptions."""

import json
import ssl
import string
from itertools import pairwise
from typing import get_args

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.models.errors import classify_exception, classify_in_answer, classify_response

KEY = "my-own/key+format=1234"
REASONS = get_args(e.Reason)

texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [KEY, f"bad key {KEY}\nBearer {KEY}", "rate limit", "model x not found", "{", "[1"]
    ),
    st.text(alphabet=string.printable, max_size=200),
)
names = st.sampled_from(
    ["error", "message", "code", "type", "status", "detail", "metadata", "raw", "errors", "data",
     "response", "provider_name", "n_ctx", "xException"]
) | st.text(max_size=5)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names, inner, max_size=5)
        | st.dictionaries(names, inner, max_size=3).map(json.dumps)
    ),
    max_leaves=20,
)
bodies = st.one_of(
    st.binary(max_size=300),
    values.map(lambda v: json.dumps(v).encode()),
    texts.map(lambda t: f"<html><title>{t}</title></html>".encode("utf-8", "replace")),
    values.map(lambda v: b"event: error\ndata: " + json.dumps(v).encode()),
)


def check(error):
    assert isinstance(error, e.ModelError)
    assert error.reason in REASONS
    assert error.cause in e.CAUSES
    text = str(error)
    assert KEY not in text
    assert len(text) <= 500
    assert text.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)
    for number in (error.facts.max_output_tokens, error.facts.context_limit):
        assert number is None or number >= 0


@settings(max_examples=300)
@given(status=st.integers(300, 599), body=bodies, kind=st.text(max_size=20))
def test_any_error_body_is_classified(status, body, kind):
    check(classify_response(status, {"x-amzn-errortype": kind}, body, secrets=(KEY,)))


@settings(max_examples=200)
@given(error=values)
def test_any_error_in_an_answer_is_classified(error):
    check(classify_in_answer(error, {}, secrets=(KEY,)))


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error":' * 20_000, b'"' * 70_000, b"{}" * 9])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_large_and_deep_error_bodies_are_bounded(status, body):
    check(classify_response(status, {}, body))


def chained(*errors):
    for outer, inner in pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


REQUEST = httpx2.Request("POST", "http://127.0.0.1:1/v1/chat/completions")


def of_sdk(status, form):
    import openai  # late: half a second, which few processes need

    response = httpx2.Response(
        status, json=form, headers={"Retry-After": "3", "x-request-id": "r"}, request=REQUEST
    )
    return openai.APIStatusError("boom", response=response, body=None)


def test_response_of_an_sdk_exception_is_classified():
    error = classify_exception(
        of_sdk(429, {"error": {"message": f"quota {KEY}", "code": "insufficient_quota"}}),
        secrets=(KEY,),
    )
    assert (type(error), error.status, error.reason) == (e.BillingError, 429, "billing")
    assert (error.retry_after_s, error.request_id) == (3.0, "r")
    assert KEY not in str(error)


def test_response_in_an_exception_chain_is_classified():
    deep = chained(
        RuntimeError("a"), ValueError("b"), KeyError("c"), TypeError("d"), of_sdk(529, {})
    )
    assert classify_exception(deep).reason == "overloaded"
    deeper = chained(RuntimeError("a"), deep)
    assert classify_exception(deeper) is None, "only five links are looked at"


def from_sdk(kind, *causes):
    """Of its exception with these causes: what makes it."""

    def make():
        import openai

        return chained(getattr(openai, kind)(request=REQUEST), *causes)

    return make


CERTIFICATE = ssl.SSLCertVerificationError(
    1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (from_sdk("APIConnectionError", httpx2.ConnectError("x"), CERTIFICATE),
         e.AuthError, "ssl_cert_verification"),
        (RuntimeError("SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer certificate"),
         e.AuthError, "ssl_cert_verification"),
        (from_sdk("APITimeoutError", httpx2.ReadTimeout("x")),
         e.ModelTimeout, "timeout"),
        (TimeoutError("slow"), e.ModelTimeout, "timeout"),
        (from_sdk("APIConnectionError", httpx2.ConnectError("refused"),
                  ConnectionRefusedError(111, "refused")), e.ConnectionLost, "timeout"),
        (httpx2.RemoteProtocolError("Server disconnected without sending a response."),
         e.ConnectionLost, "timeout"),
        (ConnectionResetError(104, "reset"), e.ConnectionLost, "timeout"),
        (ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR]"), e.ConnectionLost, "timeout"),
        (chained(RuntimeError("wrapped"), e.ContextOverflow("full")),
         e.ContextOverflow, "context_overflow"),
    ],
)  # fmt: skip
def test_exceptions_are_classified(error, kind, reason):
    found = classify_exception(error() if callable(error) else error)
    assert (type(found), found.reason) == (kind, reason)


def test_only_refused_connections_are_surely_not_served():
    refused = classify_exception(ConnectionRefusedError(111, "refused"))
    assert refused.served is False
    assert classify_exception(ConnectionResetError(104, "reset")).served is True


@pytest.mark.parametrize("bug", [ZeroDivisionError("x"), KeyError("message"), ValueError("bad")])
def test_other_exceptions_are_bugs(bug):
    assert classify_exception(bug) is None


def test_circular_exception_chain_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert classify_exception(one) is None
