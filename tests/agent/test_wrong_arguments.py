"""Arguments of `AIAgent` of a wrong kind: one line each, before anything is opened."""

from typing import Any

import pytest

from hermes_rl import AIAgent
from hermes_rl.errors import UserError
from hermes_rl.sandboxes import Bubblewrap, SandboxSpec, Subprocess

WRONG: dict[str, list[Any]] = {
    "toolsets": [5, "terminal", [5], [None], object()],
    "enabled_toolsets": [5, [5]],
    "disabled_toolsets": [5, "terminal", [5], ["nope"]],
    "tools": [5, [5], ["x"], object()],
    "preset": [5, None, [], object()],
    "limits": [5, "x", {"max_turns": 3}],
    "system": [5, b"x", ["a"]],
    "fallbacks": [5, [5], [{"x": 1}]],
    "on_event": [5, "x"],
    "on_delta": [5, "x"],
    "session": [5, b"x", ["a"], object()],
    "context": [5, {"nope": 1}, {"window": "x"}, object()],
    "hooks": [5, "x", {"pre_tool_call": 5}, []],
    "plugins": [5, "x", [5], object()],
    "otel": [5, "nope", True],
    "allow_unsandboxed": ["yes", 5],
    "max_iterations": ["x", 0, 2.5, True],
    "iteration_budget": ["x", 0, 2.5, True],
    "quiet_mode": [5, "x"],
    "save_trajectories": [5, b"x"],
    "ephemeral_system_prompt": [5, b"x"],
    "prefill_messages": [5, "x", [5], [{"role": "x"}]],
    "session_id": [5, b"x"],
    "approval": [5, "x"],
    "approval_callback": [5, "x"],
    "status_callback": [5, "x"],
    "no_such_thing": [5],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_a_wrong_kind_is_one_line(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(UserError) as caught:
            AIAgent("noop", **{name: value}).close()
        text = str(caught.value)
        assert "\n" not in text
        assert name.split("_")[-1][:6] in text.lower(), (value, text)


@pytest.mark.parametrize("model", [5, None, b"x", ["a"], {"name": "x"}])
def test_a_model_or_a_sandbox_of_a_wrong_kind_is_one_line(model: Any) -> None:
    with AIAgent(model) as agent, pytest.raises(UserError, match="give a name or a ModelConfig"):
        agent.chat("Hello.")
    with AIAgent("noop", sandbox=model or 5) as agent, pytest.raises(UserError, match="sandbox"):
        agent.chat("Hello.")


@pytest.mark.parametrize("value", ["a\udcffb", "\ud800", "a\0b"])
@pytest.mark.parametrize("backend", [Bubblewrap, Subprocess])
async def test_a_variable_that_no_process_takes_is_one_line(backend: Any, value: str) -> None:
    made = backend()
    with pytest.raises(UserError, match=r"env: 'X=.*' has a NUL or half of a character"):
        await made.lease(SandboxSpec(lease="x", env={"X": value}))
    await made.aclose()
