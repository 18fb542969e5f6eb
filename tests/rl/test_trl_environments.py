"""`TrlEnvironments`: what TRL's `environment_factory` needs, played here as TRL does it.

tests/consumers/with_trl has the same with the real trainer.
"""

import inspect
import re
from typing import Any, get_type_hints

import pytest
from runs import EXAMPLES, Lab

from hermes_rl.errors import ToolError, UserError
from hermes_rl.rl import TrlEnvironments

MATH = str(EXAMPLES / "math_tool.py")
PLAIN = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

def tasks(self, split, seed):
    return [make_task(f"Number {n}.", id=f"n{n}") for n in range(3)]

async def compute_reward(self, task, trajectory, ctx):
    if trajectory.final_response == "break":
        raise RuntimeError("broken verifier")
    return 0.25 * ctx.member if trajectory.final_response == "member" else float(trajectory.turns)
"""


def test_use_outside_of_its_block_or_with_another_dataset_is_one_line() -> None:
    environments = TrlEnvironments(MATH)
    with pytest.raises(UserError, match="not open"):
        environments()
    with environments, pytest.raises(UserError, match="no column `index`"):
        environments().reset(prompt=[])


def answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_trl_gets_typed_methods_and_the_rewards_of_the_environment() -> None:
    with TrlEnvironments(MATH, group_size=2) as environments:
        (row, _) = environments.rows(2)
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["prompt"][1]["content"] == ""
        one, other = environments(), environments()
        found = dict(inspect.getmembers(type(one), inspect.isfunction))
        assert [name for name in found if name[0] != "_"] == ["calculate", "reset"]
        method: Any = found["calculate"].__get__(one)
        assert get_type_hints(method) == {"operation": str, "a": int, "b": int, "return": str}
        assert list(inspect.signature(method).parameters) == ["operation", "a", "b"]
        doc = inspect.getdoc(method) or ""
        assert doc.startswith("Calculate with two whole numbers.\n\nArgs:\n    operation: ")
        assert '(choices: ["add", "subtract", "multiply"])' in doc

        question = one.reset(**row)
        assert other.reset(**row) == question
        a, b, c = map(int, re.findall(r"\d+", question))
        assert method(operation="multiply", a=a, b=b) == str(a * b)
        assert "divide" in method(operation="divide", a=a, b=b), "the model reads its mistake"
        done = [answer(f"ANSWER {a * b + c}"), answer("ANSWER 0")]
        assert environments.rewards(done, [one, other], prompts=[]) == [1.0, 0.0]
        with pytest.raises(ToolError, match="the rollout is over"):
            method(operation="add", a=1, b=1)
        assert one.reset(index=1) != question


def test_failed_cut_and_numbered_rollouts_have_the_right_rewards(lab: Lab) -> None:
    path = lab.write(PLAIN).path
    with TrlEnvironments(str(path), group_size=2) as environments:
        made = [environments() for _ in range(4)]
        for number, env in enumerate(made):
            env.reset(index=number // 2)
        cut = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}]
        texts = [answer("break"), answer("member"), cut, answer("member")]
        assert environments.rewards(texts, made) == [None, 0.25, 1.0, 0.25]
        with pytest.raises(UserError, match="there are 3 tasks"):
            environments.rows(4)


@pytest.mark.parametrize(("rank", "rewards"), [("0", [0.0, 0.25]), ("1", [0.5, 0.75])])
def test_processes_that_share_a_group_have_different_members(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, rank: str, rewards: list[float]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with TrlEnvironments(str(lab.write(PLAIN).path), group_size=4) as environments:
        made = [environments() for _ in range(2)]
        for env in made:
            env.reset(index=0)
        assert environments.rewards([answer("member")] * 2, made) == rewards


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("async def reply(self, task, trajectory, ctx):\n    return None", "has `reply`"),
        ("async def score_group(self, task, members, ctx):\n    return None", "has `score_group`"),
        ("def tools(self, task):\n    return [named('reset')]", "the tool 'reset' cannot be"),
        (
            "def tools(self, task):\n    return [named('x')][: task.id == 'n1']",
            "task 1 has another",
        ),
    ],
)
def test_what_trl_cannot_hold_is_refused_in_one_line(lab: Lab, more: str, why: str) -> None:
    named = """
def named(name):
    async def handler(ctx, args):
        return "x"
    schema = {"type": "object", "properties": {}}
    return tool(name=name, description="x", parameters=schema, toolset="x")(handler)
"""
    path = lab.write(f"{PLAIN}\n{more}\n", head=named).path
    with (
        pytest.raises(UserError, match=re.escape(why)) as refused,
        TrlEnvironments(str(path)) as environments,
    ):
        environments().reset(index=1)
    assert "\n" not in str(refused.value)
