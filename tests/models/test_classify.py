"""Which typed error an answer is, by the texts that servers really send."""

import base64
import json
from email.utils import formatdate
from pathlib import Path
from typing import get_args

import pytest

from hermes_rl import errors as e
from hermes_rl.models import Endpoint, connect
from hermes_rl.models.errors import classify_in_answer, classify_response, retry_after, table
from hermes_rl.text import scrub

BODIES = [
    json.loads(line)
    for line in (Path(__file__).parent / "error_bodies.jsonl").read_text("utf-8").splitlines()
]
"""One error of a provider a line: `status` (200: inside an answer), `body`, `headers`, and what is
to be found: `reason`, `kind` where it is not the reason's own class, `retry_after`, and the facts
`output`, `context`, `prompt`, `images`, `refused`, `renamed`."""


def found_in(row):
    headers = row.get("headers", {})
    if row["status"] == 200:
        return classify_in_answer(row["body"], headers)
    body = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])
    return classify_response(row["status"], headers, body.encode())


@pytest.mark.parametrize(
    "row", BODIES, ids=[f"{n}-{r['provider']}-{r['reason']}" for n, r in enumerate(BODIES, 1)]
)
def test_reason_of_each_recorded_body(row):
    error = found_in(row)
    assert error.reason == row["reason"], str(error)
    kind = getattr(e, row["kind"]) if "kind" in row else table().kinds[row["reason"]]
    assert type(error) is kind
    assert error.facts == e.Facts(
        max_output_tokens=row.get("output"),
        context_limit=row.get("context"),
        prompt_tokens=row.get("prompt"),
        no_images=row.get("images", False),
        refused=tuple(row.get("refused", ())),
        completion_cap=row.get("renamed", False),
    )
    assert error.retry_after_s == row.get("retry_after")
    assert error.status == (None if row["status"] == 200 else row["status"])
    assert error.served is (row["status"] in (200, 502, 504, 520, 522, 524))


def test_recorded_bodies_cover_providers_and_reasons():
    assert len(BODIES) >= 150
    reasons = {row["reason"] for row in BODIES}
    # A certificate fails below HTTP; what is there beside it comes from bodies.
    assert reasons == set(get_args(e.Reason)) - {"ssl_cert_verification"}
    assert len({row["provider"] for row in BODIES}) >= 25


def test_every_reason_has_an_error_class_with_its_cause():
    assert set(table().kinds) == set(get_args(e.Reason))
    assert {kind.cause for kind in table().kinds.values()} <= set(e.CAUSES)
    for kind in table().kinds.values():
        assert kind("x").reason in get_args(e.Reason)
    assert e.RateLimited("x", reason="upstream_rate_limit").cause == "rate_limit"
    assert e.RateLimited("x").reason == "rate_limit"


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
    assert classify_response(429, headers, b"", now=NOW).retry_after_s == seconds


def test_keys_are_scrubbed():
    key = "my-own/key+format=1234"
    body = json.dumps(
        {"error": {"message": f"bad key {key}, sk-proj-abcdefgh123456 or\nBearer x.y"}}
    )
    text = str(classify_response(401, {}, body.encode(), secrets=(key,)))
    assert text == "401: bad key ***, *** or ***"


def test_a_key_in_base64_is_scrubbed():
    key = "my-own/key+format=1234"
    encoded = base64.b64encode(key.encode()).decode()
    assert scrub(f"sent {encoded}", (key,)) == "sent ***"


@pytest.mark.parametrize("bad", ["", "localhost:8000", "ftp://x/v1", "http://", "http://x:port/"])
def test_invalid_address_is_refused(bad):
    with pytest.raises(e.UserError, match="Use for example http://"):
        connect(Endpoint(bad))


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-é", ""])
def test_invalid_key_is_refused(key):
    with pytest.raises(e.UserError, match="API key") as caught:
        connect(Endpoint("http://127.0.0.1:1/v1", api_key=key))
    assert "secret" not in str(caught.value)


def test_unknown_modes_and_transports_are_refused():
    with pytest.raises(e.UserError, match="api_mode 'x' is unknown"):
        connect(Endpoint("http://127.0.0.1:1/v1", api_mode="x"))
    with pytest.raises(e.UserError, match="transport 'x' is unknown"):
        connect(Endpoint("http://127.0.0.1:1/v1", transport="x"))


def test_endpoint_repr_hides_secrets():
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
