"""An ephemeral system prompt and a prefill: the server sees them, no row and no journal does."""

import hashlib
from typing import Any

import msgspec
import pytest

from hermes_rl.config import parse_config
from hermes_rl.identity import digest
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolMessage
from hermes_rl.models import DIALECTS
from hermes_rl.testing import FakeServer, wire_of
from hermes_rl.wiring import identity_of

from .conftest import Journal, Open, script

NOW, SHOT = "Today is Monday, whose secret word is quince.", "An example of 41 plums."
KEYS: dict[str, Any] = {
    "ephemeral_system_prompt": NOW,
    "prefill": [
        {"role": "user", "content": SHOT},
        {"role": "assistant", "content": "So be it, 41 plums."},
    ],
    "system_prompt": "Be brief.",
    "limits": {"max_turns": 2},
}
TASK = {"prompt": "Do your steps."}


class Spied(FakeServer):
    """Keeps what it was asked."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.seen: list[Any] = []

    def handle(self, connection: Any, request: Any) -> None:
        wire = wire_of(request.path)
        if request.method == "POST" and wire is not None:
            self.seen.append(wire.dialect.decode_request(request.body))
        super().handle(connection, request)


@pytest.mark.parametrize("preset", ["datagen", "rl"])
@pytest.mark.parametrize("mode", DIALECTS)
async def test_ephemeral_texts_are_sent_with_every_call_and_never_stored(
    stage: Open, mode: str, preset: str
) -> None:
    where = {"api_mode": mode, "tokens": "off"}  # with the preset rl it would be asked for ids
    opened = await stage(
        backend="none", agent={**KEYS, "preset": preset}, endpoint=where, fake=Spied
    )
    journal = Journal()
    row = await opened.attempt(TASK, 0, journal)
    assert (row.end_reason, row.turns) == ("max_turns", 2)
    purposes = ["agent", "agent", "summary"] if preset == "datagen" else ["agent", "agent"]
    assert [call.purpose for call in row.calls] == purposes
    for model_request in opened.server.seen:
        system, *rest = model_request.messages
        assert isinstance(system, SystemMessage)
        assert system.content == f"Be brief.\n\n{NOW}"
        assert [m.content for m in rest[:3]] == [SHOT, "So be it, 41 plums.", TASK["prompt"]]
    assert len(opened.server.seen) == len(purposes)
    stored = msgspec.json.encode([row, *journal.events]).decode()
    assert "quince" not in stored
    assert "41 plums" not in stored
    assert row.prompt_sha256 == hashlib.sha256(NOW.encode()).hexdigest()
    assert [info.role for info in row.message_info][:3] == ["system", "user", "assistant"]


async def test_call_ids_of_prefill_and_task_are_distinguished(stage: Open) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    turn: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "out"},
        {"role": "assistant", "content": "So."},
    ]
    opened = await stage(
        backend="none",
        agent={"prefill": [{"role": "user", "content": SHOT}, *turn]},
        endpoint={"api_mode": "anthropic_messages"},  # refuses an id that comes twice
        fake=Spied,
    )
    task = {"prompt": [{"role": "user", "content": "u"}, *turn, {"role": "user", "content": "Go."}]}
    row = await opened.attempt(task)
    assert row.end_reason == "answered"
    model_request = opened.server.seen[0]
    calls = [
        c.id
        for m in model_request.messages
        if isinstance(m, AssistantMessage)
        for c in m.tool_calls
    ]
    assert calls[1] == "call_1" != calls[0]
    assert [m.tool_call_id for m in model_request.messages if isinstance(m, ToolMessage)] == calls


async def test_row_without_ephemeral_texts_has_no_hash(stage: Open) -> None:
    opened = await stage(backend="none")
    assert (await opened.attempt({"prompt": script("ok")})).prompt_sha256 is None


def test_ephemeral_texts_are_identity_by_content() -> None:
    base: dict[str, Any] = {"dataset": {"path": "rows"}, "model": {"name": "m"}}

    def identity(**agent: Any) -> Any:
        return identity_of(parse_config({**base, "agent": agent}))

    plain, prefill = identity(), KEYS["prefill"]
    assert identity(prefill=[], ephemeral_system_prompt=None) == plain
    one, two = identity(ephemeral_system_prompt=NOW), identity(prefill=prefill)
    other = identity(prefill=[prefill[0], {"role": "assistant", "content": "No."}])
    assert len({digest(x) for x in (plain, one, two, other)}) == 4
    assert NOW not in str(one)
    assert SHOT not in str(two)
