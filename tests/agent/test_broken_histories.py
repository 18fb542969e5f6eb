"""Histories with flaws are repaired in what is sent, wherever they come from, and kept as written
in the record."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import Hooks
from hermes_rl.agent import PRESETS
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolMessage,
    UserMessage,
    conversation_from_openai,
    to_openai,
    with_unique_ids,
)
from hermes_rl.models import Conversation, Endpoint, ModelRequest, connect
from hermes_rl.models.prepare import NO_RESULT, ORPHAN, prepare
from hermes_rl.sessions import FileSession
from hermes_rl.tasks import parse_row
from hermes_rl.testing import FakeConfig, FakeServer, wire_of

from .conftest import Make, Rig, say

MODES = ["chat_completions", "anthropic_messages", "codex_responses"]
STRICT = "anthropic_messages"
"""A wire that refuses every flaw."""


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "terminal", "arguments": "{}"}}


FLAWS: dict[str, list[dict[str, Any]]] = {
    "two users": [{"role": "user", "content": "one more"}],
    "two answers": [{"role": "assistant", "content": t} for t in ("first", "second")],
    "orphan": [{"role": "tool", "tool_call_id": "gone", "name": "terminal", "content": "orphan"}],
    "no result": [{"role": "assistant", "content": "", "tool_calls": [call("c1")]}],
    "late result": [
        {"role": "assistant", "content": "", "tool_calls": [call("c2")]},
        {"role": "user", "content": "between"},
        {"role": "tool", "tool_call_id": "c2", "name": "terminal", "content": "late"},
    ],
    "empty": [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "after an empty message"},
        {"role": "user", "content": ""},
    ],
}


def broken(name: str) -> list[dict[str, Any]]:
    """A history with that flaw; the fake server plays on behind any number of answers."""
    return [{"role": "user", "content": say(*["Fine."] * 9)}, *FLAWS[name]]


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    return [m["content"] for m in messages if m["content"].strip()]


class Spied(FakeServer):
    """Keeps the messages of each request."""

    def __init__(self, config: FakeConfig | None = None) -> None:
        super().__init__(config)
        self.seen: list[list[Message]] = []

    def handle(self, connection: Any, request: Any) -> None:
        wire = wire_of(request.path)
        if request.method == "POST" and wire is not None:
            self.seen.append(list(wire.dialect.decode_request(request.body).messages))
        super().handle(connection, request)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_history_from_outside_is_taken(make: Make, flaw: str, mode: str) -> None:
    with make(api_mode=mode) as agent:
        result = agent.run_conversation("And now?", conversation_history=broken(flaw))
        assert (result["final_response"], result["end_reason"]) == ("Fine.", "answered")
        kept = [m for m in result["messages"] if m["role"] != "system"]
        assert kept == [*broken(flaw), *kept[-2:]]  # as it was written
        assert kept[-2] == {"role": "user", "content": "And now?"}
        again = agent.run_conversation("More?", conversation_history=result["messages"])
        assert again["final_response"] == "Fine."


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_session_is_taken(make: Make, flaw: str, tmp_path: Path) -> None:
    session = FileSession(tmp_path / "s.jsonl")
    session.append(0, conversation_from_openai(broken(flaw)), "error")
    session.close()
    with make(api_mode=STRICT, session=tmp_path / "s.jsonl") as agent:
        assert agent.chat("And now?") == "Fine."


@pytest.mark.parametrize("preset", ["datagen", "rl"])
@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_row_is_taken_by_check_and_by_a_run(rig: Rig, flaw: str, preset: str) -> None:
    row = parse_row({"prompt": [*broken(flaw), {"role": "user", "content": "Go."}]}, 0, "r")
    assert row.error is None
    assert row.task is not None
    client = connect(Endpoint(rig.server.base_url, api_mode=STRICT))
    rig.client = client
    try:
        ran = await rig.run(list(row.task.prompt), policy=PRESETS[preset], sandbox=rig.sandbox)
    finally:
        await client.aclose()
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "Fine.")
    added = [to_openai(e.message) for e in ran.added() if e.turn == 0][1:]
    written = [*broken(flaw), {"role": "user", "content": "Go."}]
    if preset == "datagen":
        assert added == written
    else:  # the record is what was sent
        assert all(any(text in one["content"] for one in added) for text in texts_of(written))


pieces = st.sampled_from([message for flaw in FLAWS.values() for message in flaw])


@settings(deadline=None, max_examples=40)
@given(forms=st.lists(pieces, max_size=10), prefill=st.lists(pieces, max_size=4))
def test_any_broken_history_is_legal_on_each_wire_and_keeps_its_texts(
    forms: list[dict[str, Any]], prefill: list[dict[str, Any]]
) -> None:
    """The fake server refuses what the strictest provider of each wire refuses."""
    whole = [{"role": "user", "content": "begin"}, *forms, {"role": "user", "content": "end"}]
    messages = with_unique_ids([*conversation_from_openai([*prefill, *whole])])
    ahead, history = tuple(messages[: len(prefill)]), messages[len(prefill) :]

    async def send() -> list[list[Message]]:
        async with Spied(FakeConfig(script="noop")) as server:
            for mode in MODES:
                client = connect(Endpoint(server.base_url, api_mode=mode))
                model_request = ModelRequest(
                    model="noop", conversation=Conversation(history), call_id=mode, prefill=ahead
                )
                assert (await client.complete(model_request)).finish_reason == "stop"
                await client.aclose()
            return server.seen

    for seen in asyncio.run(send()):
        check_order(seen)
        sent = json.dumps([to_openai(m) for m in seen])
        assert all(json.dumps(text)[1:-1] in sent for text in texts_of([*prefill, *whole]))


def check_order(messages: list[Message]) -> None:
    """User and assistant take turns; the results of each call come directly behind it."""
    waiting: set[str] = set()
    before: Message | None = None
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id in waiting
            waiting.remove(message.tool_call_id)
        else:
            assert not waiting
            assert type(message) is not type(before)
            assert message.content or isinstance(message, AssistantMessage)
        if isinstance(message, AssistantMessage):
            waiting = {c.id for c in message.tool_calls}
        before = message
    assert not waiting


def test_the_model_reads_what_is_missing(make: Make) -> None:
    seen: list[list[Message]] = []

    def note(request_messages: list[Any]) -> None:
        seen.append(prepare(conversation_from_openai(request_messages)))

    with make(hooks=Hooks(pre_api_request=note), toolsets=()) as agent:
        history = [*broken("orphan"), *FLAWS["no result"]]
        agent.run_conversation("And now?", conversation_history=history)
    first, calling, stub, _ = seen[0][1:]
    assert isinstance(first, UserMessage)
    assert str(first.content).endswith(f"{ORPHAN}\norphan")
    assert isinstance(calling, AssistantMessage)
    assert isinstance(stub, ToolMessage)
    assert stub.content == NO_RESULT


def test_the_system_messages_of_a_history_are_one_prompt(make: Make) -> None:
    history = [{"role": "system", "content": text} for text in ("One.", "Two.")]
    with make(toolsets=()) as agent:
        result = agent.run_conversation(say("Fine."), conversation_history=history)
    assert result["messages"][0] == {"role": "system", "content": "One.\n\nTwo."}
    assert len(result["messages"]) == 3
