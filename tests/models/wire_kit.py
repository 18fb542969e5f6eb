"""What the tests of models share: both sides of each dialect, by its name, and budgets."""

import json
from pathlib import Path

import msgspec
import pytest

from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, Endpoint, ModelRequest, dialect_for
from hermes_rl.models.rate import Budget, Lease, LeaseGrant
from hermes_rl.models.wire import ReplyHead
from hermes_rl.testing import WIRES

HERE = Path(__file__).parent
SERVERS = {wire.dialect.name: wire.dialect for wire in WIRES.values()}
JSON = {"content-type": "application/json", "x-request-id": "r-1"}
SSE = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": "r-1"}
KEY = "my-own/key+1234"
"""Only whoever knows it can hide it."""


def request(messages, model="m", **fields):
    conversation = Conversation(list(messages))
    return ModelRequest(model=model, conversation=conversation, call_id="test-call", **fields)


def client_side(mode):
    return dialect_for(Endpoint("http://h/v1", api_mode=mode, api_key=KEY))


def encode(messages, *, mode, **fields):
    """The body of a request."""
    return client_side(mode).encode(request(messages, **fields))


def decode(data, headers=None, *, mode="chat_completions", turn=1, size=None, **fields):
    """An answer through the client's decoder, in pieces of `size` bytes.

    Args:
        headers: of the answer; None means those of a stream if `stream` is asked for, else JSON.
        turn: messages in the request.
        fields: of the request.
    """
    headers = (SSE if fields.get("stream") else JSON) if headers is None else headers
    model_request = request([UserMessage(content="x")] * turn, **fields)
    decoder = client_side(mode).decoder(model_request, ReplyHead(headers, 0.1))
    size = size or len(data) or 1
    for at in range(0, len(data), size):
        decoder.feed(data[at : at + size])
    return decoder.finish()


def budget_of(**amounts):
    """A run's budget with so much in each of its budgets (`run_tokens`, `model_NAME_usd`, ...)."""
    leases = {}
    for name, amount in amounts.items():
        budget = name.replace("_", ":")
        leases[budget] = Lease(budget)
        leases[budget].take_grant(LeaseGrant(budget=budget, add=amount, most=amount))
    return Budget(leases)


# Streams of the Messages API


def messages_event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def messages_stream(*events, stop="end_turn", usage=None):
    start = {"id": "msg_1", "model": "m", "usage": {"input_tokens": 5, "output_tokens": 1}}
    return b"".join(
        (
            messages_event("message_start", message=start),
            *events,
            messages_event(
                "message_delta",
                delta={"stop_reason": stop},
                usage={"output_tokens": 9} if usage is None else usage,
            ),
            messages_event("message_stop"),
        )
    )


def messages_block(index, start, *deltas):
    return b"".join(
        (
            messages_event("content_block_start", index=index, content_block=start),
            *(messages_event("content_block_delta", index=index, delta=d) for d in deltas),
            messages_event("content_block_stop", index=index),
        )
    )


def cases(file, table=None):
    """The rows of a YAML file, or of one table in it, as parameters of a test; `id` names a row."""
    rows = msgspec.yaml.decode((HERE / f"{file}.yaml").read_bytes())
    rows = rows if table is None else rows[table]
    return [pytest.param(row, id=row.get("id", str(n))) for n, row in enumerate(rows, 1)]
