"""The switches of a run's agent: part of what a run is, and of what its rows say."""

from typing import Any

import pytest

from hermes_rl.agent import WORDINGS
from hermes_rl.config import parse_config
from hermes_rl.definitions import adapt_identity, adapt_switches
from hermes_rl.errors import UserError
from hermes_rl.identity import digest
from hermes_rl.wiring import identity_of, policy_of

from .conftest import Open, script

CUT = {"text": "One, ", "finish": "length"}


def config(**agent: Any) -> Any:
    return parse_config({"dataset": {"path": "x"}, "model": {"name": "m"}, "agent": agent})


def test_a_switch_is_part_of_the_configuration() -> None:
    plain, same, other = (
        config(),
        config(switches={"continue_output": True}),
        config(switches={"continue_output": False}),
    )
    assert digest(identity_of(plain)) == digest(identity_of(same)) != digest(identity_of(other))
    assert not policy_of(other).continue_output
    assert policy_of(config(preset="rl", switches={"tool_loop_limit": 7})).tool_loop_limit == 7


def test_default_command_timeout_depends_on_the_run_version() -> None:
    def seconds(model: str = "m", **agent: Any) -> int:
        data = {"dataset": {"path": "x"}, "model": {"name": model}, "agent": agent}
        return policy_of(parse_config(data)).command_timeout_s

    assert (seconds(), seconds(preset="rl"), seconds(preset="interactive")) == (60, 60, 180)
    assert (seconds("local"), seconds("oracle")) == (30, 180)
    assert seconds("local", switches={"command_timeout_s": 90}) == 90


async def test_command_timeout_is_enforced_and_reported_to_the_model(stage: Open) -> None:
    agent = {"toolsets": ["terminal"], "switches": {"command_timeout_s": 1}}
    opened = await stage(backend="none", agent=agent)
    row = await opened.attempt({"prompt": script({"run": "sleep 30"}, "done")})
    assert row.end_reason == "answered"
    assert "timed out after 1 s" in " ".join(row.messages)
    assert "Default 1, maximum 600." in str(row.tools)


def test_embedded_model_does_not_continue_a_repetition() -> None:
    def policy(**agent: Any) -> Any:
        data = {"dataset": {"path": "x"}, "model": {"name": "local-tiny"}, "agent": agent}
        return policy_of(parse_config(data))

    assert not policy().continue_output
    assert not policy().reask_cut_calls
    assert policy().retry_empty
    assert policy(switches={"continue_output": True}).continue_output


def test_harness_texts_are_part_of_the_configuration() -> None:
    assert "texts" in identity_of(config())["agent"]


# As a run directory of version 0.1.0 has them, written before there was the switch `wording`.
OLD_TEXTS = "9440e1810271cc973009f983fc81ebc50bb47c86ee2b18398f1b8ee1880447fd"
OLD_TOOLS = "8f07cf4d76676746777794c8eda8b881b6f27676b0818a9d7c860f7d3c6e04d0"
OLD_SYSTEM = "1451d8bf49067723945033bed16a9bdef2523479d0f5e0631972aaff62ef4539"


async def test_a_resumed_run_keeps_its_texts(stage: Open) -> None:
    now = config(toolsets=["terminal"])
    before = identity_of(now)
    for switch in ("wording", "command_timeout_s"):
        del before["agent"]["preset"][switch]
    before["agent"] |= {"texts": OLD_TEXTS, "tools": OLD_TOOLS}
    before["agent"]["system_prompt"] = OLD_SYSTEM
    resumed = adapt_switches(now, before)
    assert adapt_identity(before, identity_of(resumed)) == before
    assert digest(identity_of(now)) != digest(before)
    switches = resumed.agent.switches
    opened = await stage(backend="none", agent={"toolsets": [], "switches": switches})
    row = await opened.attempt({"prompt": script(CUT, "two.")})
    assert WORDINGS[1].messages.cut_text in row.messages[3]
    assert WORDINGS[1].without_tools in row.messages[0]
    opened = await stage(backend="none", agent={"toolsets": ["terminal"], "switches": switches})
    row = await opened.attempt({"prompt": script("done")})
    assert "Long output loses its middle." in row.tools
    assert "Default 180, at most 600." in row.tools
    with pytest.raises(UserError, match=r"agent\.switches\.wording must be from 1 to 3, not 9"):
        identity_of(config(switches={"wording": 9}))


def test_an_unknown_switch_is_refused_in_one_line() -> None:
    bad = config(switches={"continue": True})
    with pytest.raises(
        UserError, match=r"agent\.switches: unknown switch 'continue' \(did you mean"
    ):
        identity_of(bad)
    with pytest.raises(UserError, match=r"'agent\.switches\.retry_empty"):
        config(switches={"retry_empty": "perhaps"})


async def test_rows_have_the_joined_answer_and_discarded_ones(stage: Open) -> None:
    opened = await stage(backend="none", agent={"toolsets": []})
    row = await opened.attempt({"prompt": script([{"text": ""}, CUT], "two.")})
    assert (row.end_reason, row.final_response, row.turns) == ("answered", "One, two.", 2)
    assert [c.error for c in row.calls] == ["discarded: empty answer", None, None]
    assert [c.turn for c in row.calls] == [1, 1, 2]
    assert [i.synthetic for i in row.message_info] == [False, False, False, True, False]
    served = opened.server.entries
    assert [c.call_id for c in row.calls] == [e.call_id for e in served]
    assert row.usage.total_tokens == sum(e.prompt_tokens + e.completion_tokens for e in served)
    assert row.metrics == {"discarded_answers": 1.0, "continued_answers": 1.0}


async def test_rl_ends_each_with_its_reason(stage: Open) -> None:
    opened = await stage(backend="none", agent={"toolsets": [], "preset": "rl"})
    row = await opened.attempt({"prompt": script(CUT, "two.")})
    assert (row.end_reason, row.final_response, row.truncated) == (
        "output_truncated",
        "One, ",
        True,
    )
    row = await opened.attempt({"prompt": script({"text": ""}, "two.")}, 1)
    assert (row.end_reason, row.final_response, len(row.calls)) == ("empty_response", "", 1)


async def test_batch_runs_read_project_files_only_when_switched_on(stage: Open) -> None:
    row = {"prompt": script("done"), "files": {"AGENTS.md": "Use tabs."}}
    for switches, system in (({}, ""), ({"context_files": True}, "Use tabs.")):
        opened = await stage(backend="none", agent={"switches": switches})
        attempt = await opened.attempt(row)
        assert attempt.end_reason == "answered"
        assert ("Use tabs." in attempt.messages[0]) is bool(system)
