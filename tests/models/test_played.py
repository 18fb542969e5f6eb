"""The played models go through the same caller and are recorded like any other."""

import json
import subprocess
import sys

from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage
from hermes_rl.models import Conversation, ModelRequest, NoopClient, OracleClient, no_cost


async def test_oracle_makes_one_terminal_call(kit):
    events = kit.Events()
    calling = kit.caller(OracleClient("echo 3 > count.txt"), events, price=no_cost)
    conversation = await kit.rollout(calling, model="oracle")
    assert [type(m).__name__ for m in conversation][1:] == [
        "AssistantMessage", "ToolMessage", "AssistantMessage",
    ]  # fmt: skip
    (call,) = conversation[1].tool_calls
    assert call.name == "terminal"
    assert json.loads(call.arguments) == {"command": "echo 3 > count.txt"}
    assert isinstance(conversation[2], ToolMessage)
    assert conversation[-1].content == "I ran the task's oracle."
    assert [(x.outcome, x.cost_usd, x.usage.total_tokens) for x in events.ends] == [
        ("ok", 0.0, 0),
        ("ok", 0.0, 0),
    ]
    assert [x.max_input_tokens for x in events.starts] == [0, 0]


async def test_missing_oracle_is_reported(kit):
    calling = kit.caller(OracleClient(None), kit.Events())
    conversation = await kit.rollout(calling, model="oracle")
    assert conversation[-1] == AssistantMessage(content="This task has no oracle.")


async def test_noop_answers_at_once(kit):
    pieces, events = [], kit.Events()
    calling = kit.caller(NoopClient(), events)
    conversation = await kit.rollout(calling, model="noop", on_delta=pieces.append)
    assert len(conversation) == 2
    assert pieces == [conversation[-1].content]
    assert events.ends[0].cost_usd is None


def test_import_of_models_loads_no_transport():
    """Heavy packages load when the first client of their kind is made."""
    code = (
        "import sys, hermes_rl.models.client, hermes_rl.models.calls.caller\n"
        "import hermes_rl.models.played\n"
        "print([m for m in ('aiohttp', 'openai', 'httpx2', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


async def test_assistant_messages_in_the_prompt_are_not_oracle_steps(kit):
    calling = kit.caller(OracleClient("true"), kit.Events())
    quoted = (
        UserMessage(content="before"),
        AssistantMessage(content="done before"),
        UserMessage(content="now"),
    )
    request = ModelRequest(model="oracle", conversation=Conversation(quoted), call_id="")
    answer = await calling.call(request, turn=1)
    assert [c.name for c in answer.message.tool_calls] == ["terminal"]
