"""The rollout that an environment sees, with its own state and random numbers."""

import json
import re
from pathlib import Path
from typing import Any

from runs import EXAMPLES, Lab, count_answers, first_prompt, run_environment, start_server, table

from hermes_rl.rl import Rollout
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan, ServedRequest

FOUR_ANSWERS = """
def tasks(self, split, seed):
    for number in range(6):
        yield make_task(f"Number {number}.", id=str(number), toolsets=["terminal"])

async def reply(self, task, trajectory, ctx):
    assert trajectory.end_reason is None
    return "Continue." if len(trajectory.answers) < 4 else None

async def compute_reward(self, task, trajectory, ctx):
    return Rewards([part("seen", 0.5, detail=repr(trajectory))])
"""


def scripted_policy(request: ServedRequest) -> Any:
    """Valid and invalid calls, cut answers, several answers, text with a call."""
    number, turn = int(re.findall(r"\d+", first_prompt(request))[0]), count_answers(request)
    bad = {"name": "terminal", "arguments": "{no json"}
    steps: list[Any] = [
        {"text": "So.", "run": f"echo {number}"},
        {"calls": [bad, {"name": "nothing", "arguments": {"a": [1.5]}}]} if number % 2 else "One.",
        "Two.",
        {"text": "Three, and", "finish": "length"} if number == 4 else "Three.",
    ]
    return steps[turn] if turn < len(steps) else "Enough."


async def test_a_rollout_is_equal_from_events_and_from_its_row(lab: Lab) -> None:
    async with start_server(policy=scripted_policy) as server:
        await lab.run(FOUR_ANSWERS, server, dataset={"limit": None, "repeats": 1})
    rows = lab.rows()
    assert [row["task_id"] for row in rows] == list("012345")
    for row in rows:
        seen = row["rewards"][0]["detail"]
        assert seen == repr(Rollout.of_row(row)), row["task_id"]
        rollout = Rollout.of_row(row)
        assert rollout.answers[-1] == rollout.final_response
        assert rollout.tool_calls[0].ok
        if int(row["task_id"]) % 2:
            assert [(use.name, use.parsed, use.ok) for use in rollout.tool_calls[1:]] == [
                ("terminal", False, False), ("nothing", True, False),
            ]  # fmt: skip
    ends = {row["task_id"]: (row["end_reason"], row["truncated"]) for row in rows}
    assert ends["4"] == ("output_truncated", True)
    assert ends["0"] == ("answered", False)


NUDGED = """
def tasks(self, split, seed):
    yield make_task("Speak.", id="one", toolsets=["terminal"])

async def compute_reward(self, task, trajectory, ctx):
    return Rewards([part("seen", 0.5, detail=repr(trajectory.answers))])
"""


async def test_answers_exclude_messages_of_the_harness(lab: Lab) -> None:
    steps: list[Any] = [{"run": "echo 1"}, {"text": ""}, "At last."]
    async with start_server(policy=lambda request: steps[min(count_answers(request), 2)]) as server:
        await lab.run(NUDGED, server, agent={"preset": "datagen"}, dataset={"repeats": 1})
    row = lab.row()
    assert any(i["synthetic"] and i["role"] == "assistant" for i in row["message_info"])
    assert row["rewards"][0]["detail"] == repr(("At last.",))
    assert Rollout.of_row(row).answers == ("At last.",)


STATE = """
def tasks(self, split, seed):
    for number in range(8):
        yield make_task(f"Number {number}.", id=str(number), toolsets=["none"])

def tools(self, task):
    return [add]

async def start(self, task, ctx):
    ctx.state.update(total=0, drawn=ctx.rng.random(), seed=ctx.seed)

async def compute_reward(self, task, trajectory, ctx):
    assert ctx.state["total"] == 3 * int(task.id), "no other rollout changes it"
    assert (ctx.split, ctx.position) == ("train", int(task.id))
    return Rewards([part("drawn", ctx.state["drawn"])], {"then": ctx.rng.random()})
"""

ADD = """
@tool(name="add", description="d", toolset="t", parallel=True,
      parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
async def add(ctx, args):
    ctx.env["total"] += args["n"]
    return ToolResult(text=str(ctx.env["total"]))
"""


def adding_policy(request: ServedRequest) -> Any:
    number = int(re.findall(r"\d+", first_prompt(request))[0])
    call = {"name": "add", "arguments": {"n": number}}
    return [{"calls": [call, call]}, {"calls": [call]}, "Done."][count_answers(request)]


async def test_each_rollout_has_its_own_state_and_random_numbers(lab: Lab) -> None:
    written = lab.write(STATE, ADD)
    drawn = []
    for place, faults in (("a", FaultPlan()), ("b", FaultPlan(rates={"unavailable": 0.3}))):
        config = FakeConfig(plays={"policy": adding_policy}, faults=faults)
        async with FakeServer(config) as server:
            report = await run_environment(
                written.path, lab.path / place, server, dataset={"limit": None}
            )
        assert report.done == 32, report.causes
        drawn.append(
            {
                row["unit_id"]: (row["reward"], row["metrics"][0]["value"], row["seed"])
                for row in table(lab.path / place)
            }
        )
    assert drawn[0] == drawn[1], "retries change nothing"
    assert len(set(drawn[0].values())) == 32, "members of a group differ"


async def test_the_class_in_the_docs_works(tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "environments.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "adding.py").write_text(code)
    report = await run_environment(tmp_path / "adding.py", tmp_path / "run", env={"seed": 3})
    assert (report.solved, report.done) == (16, 16)
    await run_environment(
        tmp_path / "adding.py",
        tmp_path / "noop",
        model={"name": "noop"},
        env={"seed": 3, "mode": "evaluate"},
    )
    assert [row["reward"] for row in table(tmp_path / "noop")] == [0.0] * 4
    offered = [json.loads(row["tools"]) for row in table(tmp_path / "run")]
    assert offered == [[]] * 16
