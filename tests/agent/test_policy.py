"""Presets, prompts, and the history that an agent keeps."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.agent import (
    LATEST,
    PRESETS,
    WORDINGS,
    continuable,
    preset,
    system_prompt,
    with_user,
)
from hermes_rl.errors import UserError
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    ToolMessage,
    UserMessage,
    check_prompt,
)
from hermes_rl.models import Sampling
from hermes_rl.models.prepare import repaired_roles

SETTINGS = (
    *("command_timeout_s", "name", "invalid_turn_limit", "sampling", "wording"),
    *("child_turns", "child_depth", "child_timeout_s"),
)


def test_rl_turns_every_switch_off() -> None:
    switches = {k: v for k, v in vars(PRESETS["rl"]).items() if k not in SETTINGS}
    assert len(switches) >= 14
    assert not any(switches.values())
    others = [vars(PRESETS[name]) for name in ("interactive", "datagen")]
    assert {k for k in switches if not all(o[k] for o in others)} == {
        "reuse_prior_text",
        "continue_cut_streams",
        "context_files",
        "children_share_turns",
        "child_sandbox",
    }


def test_single_switches() -> None:
    policy = preset("datagen").switched({"continue_output": False, "tool_loop_limit": None})
    assert not policy.continue_output
    assert policy.tool_loop_limit is None
    assert policy.retry_empty
    assert preset(policy) is policy
    assert preset("rl").switched({}) is preset("rl")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nudge": True}, "agent.switches: unknown switch 'nudge'"),
        ({"name": "x"}, "unknown switch"),
        ({"child_depth": 4}, "child_depth must be from 1 to 3, not 4"),
        ({"sampling": None}, "unknown switch"),
        ({"retry_empty": 3}, r"agent\.switches\.retry_empty must be true or false, not 3"),
        ({"tool_loop_limit": 0}, "must be a whole number from 1 or null, not 0"),
        ({"tool_loop_limit": True}, "must be a whole number from 1 or null"),
        ({"invalid_turn_limit": None}, "must be a whole number from 1, not None"),
    ],
)
def test_switches_that_cannot_be_set(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        preset("datagen").switched(changes)


def test_sampling_is_filled_up_and_never_overruled() -> None:
    rl = preset("rl")
    assert rl.complete(Sampling(temperature=0.0, seed=3)).as_dict() == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 3,
    }
    assert rl.complete(rl.complete(Sampling())) == rl.complete(Sampling())
    assert preset("datagen").complete(Sampling()) == Sampling()
    with pytest.raises(UserError, match="unknown preset"):
        preset("")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tools", [(), ("terminal",), ("terminal", "patch")])
def test_prompts_hold_nothing_volatile(name: str, tools: tuple[str, ...]) -> None:
    text = system_prompt(name, tools)
    assert text == system_prompt(name, tools)
    assert not re.search(r"\d|/|{|}|%", text + "".join(WORDINGS[LATEST].messages.as_list()))


def call(n: int) -> ToolCall:
    return ToolCall(id=str(n), name="x", arguments="{}")


TURN = st.one_of(
    st.builds(lambda t: [AssistantMessage(content=t)], st.text("ab", min_size=1, max_size=3)),
    st.builds(
        lambda n, t: [
            AssistantMessage(content=t, tool_calls=tuple(call(i) for i in range(n))),
            *(ToolMessage(tool_call_id=str(i), name="x", content="r") for i in range(n)),
        ],
        st.integers(1, 3),
        st.text(max_size=3),
    ),
)


@given(st.lists(TURN, max_size=5), st.booleans())
def test_any_end_can_be_gone_on_from(turns: list[list[Message]], dangling: bool) -> None:
    history: list[Message] = [UserMessage(content="first")]
    for turn in turns:
        if isinstance(history[-1], AssistantMessage):
            history.append(UserMessage(content="next"))
        history += turn
    if dangling and not isinstance(history[-1], AssistantMessage):
        history.append(AssistantMessage(content="", tool_calls=(call(9),)))
    kept = continuable(history)
    prompt = with_user(kept, "go on")
    assert repaired_roles(prompt) == prompt
    check_prompt(prompt)
    assert str(prompt[-1].content).endswith("go on")
    if isinstance(kept[-1], AssistantMessage):
        assert not kept[-1].tool_calls
