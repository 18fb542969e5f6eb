"""`AIAgent` when a run fails: nothing that was paid for is lost."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import BillingError, UserError
from hermes_rl.events import CallStarted
from hermes_rl.sandboxes import Subprocess

from .conftest import Make, say


def test_an_error_after_paid_turns_returns_all_of_them(make: Make) -> None:
    steps = [{"run": f"echo {n} >> f"} for n in range(3)]
    steps += [[{"fault": "billing"}, {"run": "cat f"}], "There are three."]
    with make() as agent:
        result = agent.run_conversation(say(*steps))
        assert (result["completed"], result["end_reason"]) == (False, "error")
        named = {"class": "BillingError", "reason": "billing", "cause": "billing"}
        assert result["error"] == {**named, "message": "402: Insufficient credits."}
        assert [m["role"][0] for m in result["messages"]] == list("suatatat")
        assert [c["outcome"] for c in result["calls"]] == ["ok", "ok", "ok", "refused"]
        assert result["usage"]["total_tokens"] > 0
        assert result["usage"]["unknown_calls"] == 0
        json.dumps(result)
        # The turns are kept: the next message comes behind them, and finds the files.
        result = agent.run_conversation("Go on.")
    assert result["final_response"] == "There are three."
    assert [m["role"][0] for m in result["messages"]] == list("suatatatuata")
    assert json.loads(result["messages"][-2]["content"])["output"] == "0\n1\n2\n"
    assert result["error"] is None


def test_chat_raises_an_error_that_carries_the_result(make: Make) -> None:
    with make() as agent:
        with pytest.raises(BillingError) as caught:
            agent.chat(say({"run": "true"}, {"fault": "billing"}))
        assert caught.value.result is not None
        assert [c["outcome"] for c in caught.value.result["calls"]] == ["ok", "refused"]
        assert len(caught.value.result["messages"]) == 4
    late = [{"role": "user", "content": "y"}, {"role": "system", "content": "z"}]
    with make() as agent, pytest.raises(UserError, match="message 2 is a system") as early:
        agent.run_conversation("x", conversation_history=late)
    assert early.value.result is None


async def test_a_cancelled_run_keeps_its_turns(make: Make) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_event(event: Any) -> None:
        if isinstance(event, CallStarted) and event.turn == 2:
            loop.call_soon_threadsafe(asked.set)

    async with make(on_event=on_event) as agent:
        steps = {"run": "echo kept"}, [{"text": "late", "latency_s": 30}, "Yes."]
        running = asyncio.create_task(agent.run(say(*steps)))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        result = None
        async with asyncio.timeout(60):
            while result is None:  # the cancelled run ends on the agent's own loop
                try:
                    result = await agent.run("SCRIPT is off")
                except UserError:
                    await asyncio.sleep(0.01)
    assert [m["role"][0] for m in result["messages"]] == list("suatua")


@pytest.mark.parametrize("plain", ["none", "backend"])
def test_no_sandbox_is_refused_unless_allowed(make: Make, tmp_path: Path, plain: str) -> None:
    sandbox = Subprocess(state_dir=tmp_path) if plain == "backend" else plain
    with pytest.raises(UserError, match="allow_unsandboxed=True"):
        make(sandbox=sandbox, allow_unsandboxed=False)
    with make(sandbox=sandbox) as agent:
        assert agent.chat(say({"run": "true"}, "ok")) == "ok"
