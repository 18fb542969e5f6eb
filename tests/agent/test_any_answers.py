"""Whatever the model answers: whole conversations, whole books, bounded runs."""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.agent import LATEST, PRESETS, WORDINGS, AgentResult, Limits, Policy, run_agent
from hermes_rl.aio import LoopThread
from hermes_rl.errors import ENDINGS, ModelError
from hermes_rl.messages import AssistantMessage, Message, ToolMessage, UserMessage
from hermes_rl.models import Endpoint, connect
from hermes_rl.record import Trajectory
from hermes_rl.testing import FakeServer
from hermes_rl.tools import Tool, ToolContext, ToolResult

from .conftest import Rig, row_of

TEXTS = WORDINGS[LATEST].messages

MAX_TURNS = 6
MOST_CALLS = 20
"""Calls for one turn: each of the tries, all used up."""

ITEM = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}
TEXT = st.sampled_from(["", " ", "Some text of the answer, long enough to be cut. " * 3])
CALL = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["look", "Look", "functions.look", "nope", "", "todo"]),
        "arguments": st.sampled_from([{}, {"a": 1}, "", "{", '{"a": 1', "{,}", "[1]", "null"]),
    },
)
MORE: dict[str, st.SearchStrategy[Any]] = {
    "reasoning": st.just("Let me think. " * 4),
    "details": st.just([ITEM]),
    "field": st.sampled_from(["reasoning", "think"]),
    "finish": st.sampled_from(["length", "length", "stop", "refusal"]),
    "fault": st.sampled_from(["cut", "reset", "no_usage", "server_error"]),
}
CALLS = st.lists(CALL, min_size=1, max_size=3)
ANSWER = st.one_of(
    st.fixed_dictionaries({"text": TEXT}, optional=MORE),
    st.fixed_dictionaries({"text": TEXT, "calls": CALLS}, optional=MORE),
    st.fixed_dictionaries({"text": TEXT, "calls": CALLS}),
    st.fixed_dictionaries({"text": TEXT, "finish": st.just("length")}),
)
STEP = st.one_of(ANSWER, st.lists(ANSWER, min_size=2, max_size=6))
SWITCHES = [name for name, value in vars(PRESETS["datagen"]).items() if value is True]
POLICY = st.one_of(
    st.sampled_from(list(PRESETS.values())),
    st.dictionaries(st.sampled_from(SWITCHES), st.booleans()).map(PRESETS["datagen"].switched),
)


async def look(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    return ToolResult("seen")


TOOLS = {
    name: Tool(name, "", {"type": "object"}, look, "x", needs_sandbox=False, parallel=True)
    for name in ("look", "todo")
}


class Bench:
    """A server and a client on a loop of their own, for many runs."""

    def __init__(self, home: LoopThread) -> None:
        self.home, self.server = home, FakeServer()
        self.numbers = itertools.count()
        home.run(self.server.__aenter__())
        client = connect(Endpoint(self.server.base_url))
        self.close_client = client.aclose
        self.rig = Rig(self.server, client, None, TOOLS)

    def close(self) -> None:
        self.home.run(self.close_client())
        self.home.run(self.server.aclose())

    def play(
        self, steps: list[Any], policy: Policy, stream: bool
    ) -> tuple[AgentResult | None, Trajectory]:
        """A run, or None where a call failed for good; and its row."""
        parts = self.rig.parts(policy=policy, stream=stream, limits=Limits(max_turns=MAX_TURNS))
        # The last step is never reached: it makes scripts differ, and so their counts of tries.
        script = [*steps, *["done"] * 99, str(next(self.numbers))]
        prompt = [UserMessage(content="Do it.\nSCRIPT: " + json.dumps(script))]
        result: AgentResult | None = None
        with contextlib.suppress(ModelError):
            result = self.home.run(run_agent(parts, prompt))
        return result, row_of(self.rig.log, result)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with LoopThread() as home:
        bench = Bench(home)
        yield bench
        bench.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=1, max_size=9), POLICY, st.booleans())
def test_any_answers(bench: Bench, steps: list[Any], policy: Policy, stream: bool) -> None:
    first = len(bench.server.entries)
    result, row = bench.play(steps, policy, stream)
    served = bench.server.entries[first:]
    check_usage(row, served)
    check_calls(row)
    assert len(row.calls) <= (MAX_TURNS + 2) * MOST_CALLS
    assert row.turns <= MAX_TURNS
    if result is None:
        return
    assert result.end_reason in ENDINGS
    assert result.turns == row.turns
    assert row.final_response == result.final_response
    assert row.final_response not in TEXTS.as_list()
    check_conversation(result.messages, result.end_reason)
    discarded = [c for c in row.calls if (c.error or "").startswith("discarded: ")]
    assert result.metrics.get("discarded_answers", 0) == len(discarded)
    if policy.name == "rl":
        assert not discarded
        assert not any(info.synthetic for info in row.message_info)


def check_usage(row: Trajectory, served: list[Any]) -> None:
    """Each request of the server's log is a call of the row, with the same tokens."""
    assert [c.call_id for c in row.calls] == [e.call_id for e in served]
    known = [e for e in served if e.reported]
    assert (row.usage.input_tokens or 0) == sum(e.prompt_tokens for e in known)
    assert (row.usage.output_tokens or 0) == sum(e.completion_tokens for e in known)
    unknown = [e for e in served if e.outcome != "refused" and not e.reported]
    assert row.usage.unknown_calls == len(unknown)


def check_calls(row: Trajectory) -> None:
    """Each answer in the conversation is that of exactly one call of its turn; every other call
    failed, or its answer is said to be thrown away."""
    said = Counter(i.turn for i in row.message_info if i.role == "assistant" and not i.synthetic)
    asked = [c for c in row.calls if c.purpose != "probe"]
    kept = Counter(c.turn for c in asked if c.error is None and c.outcome == "ok")
    begun = Counter(c.turn for c in row.calls if (c.error or "").startswith("AnswerInterrupted: "))
    assert said == kept + begun


def check_conversation(messages: list[Message], end_reason: str) -> None:
    """User and assistant take turns; each result follows its call."""
    waiting: list[str] = []
    last: Message | None = None
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id == waiting.pop(0)
        else:
            assert not waiting
            assert type(message) is not type(last)
        if isinstance(message, AssistantMessage):
            waiting = [call.id for call in message.tool_calls]
        last = message
    # Calls of a cut or refused answer, or of a summary, are recorded and not run.
    assert not waiting or end_reason in ("output_truncated", "refused", "max_turns")
