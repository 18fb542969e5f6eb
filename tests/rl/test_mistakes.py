"""Mistakes in somebody's environment: said in one line with their place, and never a reward."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, ran, table

from hermes_rl.errors import UserError
from hermes_rl.rl.evaluation import write_evaluation
from hermes_rl.rl.loading import load_environment
from hermes_rl.rl.trial import first_tasks
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

GOOD_TASKS = """
def tasks(self, split, seed):
    yield make_task("Say hello.", id="hello")
"""
GOOD_REWARD = """
async def compute_reward(self, task, trajectory, ctx):
    return 1.0
"""
Write = Callable[..., Written]


def one_line(error: BaseException, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    return [1][5]  # HERE", "IndexError: list index out of range"),
        ("    return None  # HERE", "returned None; return a number or Rewards"),
        ('    return "good"  # HERE', "returned str 'good'"),
        ("    return float('nan')  # HERE", "not finite"),
        ("    return 1.5  # HERE", "returned the reward 1.5, outside reward_range [0.0, 1.0]"),
        ("    return -0.1  # HERE", "outside reward_range"),
        ("    return Rewards([])  # HERE", "without parts"),
        ("    return Rewards([part('x', 1.0, turn=2)])  # HERE", "turns 1 to 1"),
        ("    return Rewards([part('x', 1.0, turn=0)])  # HERE", "turns 1 to 1"),
        ("    return Rewards([part('x', 1, weight=float('inf'))])  # HERE", "not finite"),
        ("    return Rewards([0.5])  # HERE", "make its parts with part(name, score)"),
        ("    raise CannotJudge('the reference is gone')", "the reference is gone"),
        ("    return ctx.sandbox.info  # HERE", "ctx.grading"),
    ],
)
async def test_a_bug_in_compute_reward_is_the_verifiers_fault(
    tmp_path: Path, write_env: Write, body: str, says: str
) -> None:
    written = write_env(
        f"{GOOD_TASKS}\nasync def compute_reward(self, task, trajectory, ctx):\n{body}\n"
    )
    report = await ran(written.path, tmp_path / "run", model={"name": "noop"})
    assert (report.done, report.given_up, report.causes) == (0, 4, {"verifier": 4})
    assert table(tmp_path / "run") == []
    rows = table(tmp_path / "run", "failures")
    assert len(rows) == 4, "judging again would say the same: no attempt is paid for it"
    for row in rows:
        assert (row["reward"], row["cause"], row["owner"]) == (None, "verifier", "infrastructure")
        one_line(ValueError(row["error"]), says)
        if "CannotJudge" not in body:
            place = "environment made_up: compute_reward() ", "made_up.py:"
            one_line(ValueError(row["error"]), *place)


async def test_the_line_of_an_exception_is_the_users_own(tmp_path: Path, write_env: Write) -> None:
    head = """
    import json

    def helper(text):
        return json.loads(text)  # HERE
    """
    body = (
        f"{GOOD_TASKS}\nasync def compute_reward(self, task, trajectory, ctx):\n    helper('{{')\n"
    )
    written = write_env(body, head)
    await ran(written.path, tmp_path / "run", model={"name": "noop"}, dataset={"repeats": 1})
    (row,) = table(tmp_path / "run", "failures")
    one_line(ValueError(row["error"]), "JSONDecodeError", f"made_up.py:{written.line('HERE')})")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def tasks(self, split, seed):\n    return 5", "returned int; yield tasks"),
        ("def tasks(self, split, seed):\n    yield 1 / 0  # HERE", "ZeroDivisionError"),
        ("def tasks(self, split, seed):\n    yield {'prompt': 'x'}  # HERE", "yields dict"),
        ("def tasks(self, split, seed):\n    yield make_task('')  # HERE", "'prompt' is empty"),
        ("def tasks(self, split, seed):\n    return iter(())", "no rows"),
        (f"{GOOD_TASKS}\ndef tools(self, task):\n    return ['terminal']", "tools() returned str"),
        (f"{GOOD_TASKS}\ndef tools(self, task):\n    return task.tools  # HERE", "AttributeError"),
        (
            f"{GOOD_TASKS}\nasync def setup(self):\n    {{}}['key']  # HERE",
            "setup() raised KeyError",
        ),
        (f"{GOOD_TASKS}\nuses = ('judge',)", "asks a model as judge: set env.judge.name"),
        (f"{GOOD_TASKS}\nendless = True", "no end of tasks. Say how many with --limit"),
        (f"{GOOD_TASKS}\nsplits = ('test',)", "unknown split 'train' (known: test)"),
    ],
)
async def test_what_cannot_work_is_said_before_anything_runs(
    tmp_path: Path, write_env: Write, body: str, says: str
) -> None:
    written = write_env(f"{body}\n{GOOD_REWARD}")
    async with FakeServer(FakeConfig()) as server:
        with pytest.raises(UserError) as raised:
            await ran(written.path, tmp_path / "run", server, dataset={"limit": None})
    one_line(raised.value, says)
    if "# HERE" in body:
        one_line(raised.value, "environment made_up", f"made_up.py:{written.line('# HERE')}")
    assert server.entries == [] or "setup" in body, "only a worker sets an environment up"
    assert not list((tmp_path / "run").glob("trajectories/*"))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
async def test_code_that_cannot_be_imported(
    tmp_path: Path, write_env: Write, head: str, says: str
) -> None:
    written = write_env(GOOD_TASKS + GOOD_REWARD, head)
    with pytest.raises(UserError) as raised:
        await ran(written.path, tmp_path / "run", model={"name": "noop"})
    one_line(raised.value, says, f"made_up.py:{written.line(head)}")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("async def start(self, task, ctx):\n    ctx.missing  # HERE", "start() raised Attribute"),
        ("async def reply(self, task, t, ctx):\n    return [][0]  # HERE", "reply() raised Index"),
        ("async def reply(self, task, t, ctx):\n    return 7  # HERE", "reply() returned int"),
    ],
)
async def test_a_bug_around_the_agent_is_the_tasks_fault(
    tmp_path: Path, write_env: Write, body: str, says: str
) -> None:
    written = write_env(f"{GOOD_TASKS}{GOOD_REWARD}{body}")
    report = await ran(
        written.path, tmp_path / "run", model={"name": "noop"}, dataset={"repeats": 1}
    )
    assert report.causes == {"task": 1}
    (row,) = table(tmp_path / "run", "failures")
    assert row["owner"] == "task"
    one_line(ValueError(row["error"]), "environment made_up", says, "made_up.py:")


async def test_a_bug_in_a_tool_is_no_mark_for_the_model(tmp_path: Path, write_env: Write) -> None:
    head = """
    @tool(name="dice", description="d", parameters={"type": "object"}, toolset="games")
    async def dice(ctx, args):
        return ToolResult(text=ctx.env["nothing"])  # HERE
    """
    written = write_env(f"{GOOD_TASKS}{GOOD_REWARD}def tools(self, task):\n    return [dice]", head)
    plays: Any = {"policy": lambda request: {"calls": [{"name": "dice"}]}}
    async with FakeServer(FakeConfig(plays=plays)) as server:
        report = await ran(written.path, tmp_path / "run", server, dataset={"repeats": 1})
    assert report.causes == {"task": 1}
    (row,) = table(tmp_path / "run", "failures")
    one_line(ValueError(row["error"]), "dice() raised KeyError", "made_up.py")


async def test_a_bug_in_a_validator_of_its_config(tmp_path: Path, write_env: Write) -> None:
    head = """
    from pydantic import field_validator

    class Picky(EnvConfig):
        words: int = 3

        @field_validator("words")
        @classmethod
        def look(cls, given):
            return {}[given]  # HERE
    """
    written = write_env(f"Config = Picky\n{GOOD_TASKS}{GOOD_REWARD}", head)
    sections: Any = {"model": {"name": "noop"}, "env": {"config": {"words": 5}}}
    with pytest.raises(UserError) as raised:
        await ran(written.path, tmp_path / "run", **sections)
    one_line(raised.value, "environment made_up: Picky() raised KeyError", "made_up.py:")
    assert f"made_up.py:{written.line('HERE')}" in str(raised.value)


async def test_a_stream_that_breaks_off_keeps_what_was_done(
    tmp_path: Path, write_env: Write
) -> None:
    head = """
    class Config(EnvConfig):
        sandboxed: bool = False
        group_size: int = 1
    """
    tasks = """
    Config = Config

    def tasks(self, split, seed):
        for number in range(600):
            yield make_task("Go on.", id=str(number))
        raise KeyError("no more")  # HERE
    """
    written = write_env(textwrap.dedent(tasks) + GOOD_REWARD, head)
    noop: Any = {"model": {"name": "noop"}, "dataset": {"limit": None}}
    report = await ran(written.path, tmp_path / "run", **noop)
    assert (report.stopped, report.exit_code) == ("dataset", 2)
    one_line(
        UserError(report.detail), "tasks() raised KeyError", f"made_up.py:{written.line('HERE')}"
    )
    done = len(table(tmp_path / "run"))
    assert done > 0
    whole: Any = {**noop, "dataset": {"limit": 600}}
    report = await ran(written.path, tmp_path / "run", **whole)
    assert (report.done, report.failed_attempts) == (600, 0)


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("{'words': 3, 'found': float((run.trajectories['reward'] == 1).sum())}", None),
        ("{'words': float('nan')}", "evaluate() returned no mapping of names to finite numbers"),
        ("5", "evaluate() returned no mapping"),
        ("run.nothing", "evaluate() raised AttributeError"),
    ],
)
async def test_an_environments_own_metrics(
    tmp_path: Path, write_env: Write, returns: str, says: str | None
) -> None:
    body = f"{GOOD_TASKS}{GOOD_REWARD}\nasync def evaluate(self, run):\n    return {returns}\n"
    out = tmp_path / "run"
    sections: Any = {"env": {"mode": "evaluate", "split": "eval"}, "model": {"name": "noop"}}
    report = await ran(write_env(body).path, out, **sections)
    assert report.done == 1
    if says is not None:
        with pytest.raises(UserError) as raised:
            await write_evaluation(out)
        one_line(raised.value, "environment made_up", says, "made_up.py:")
        assert not (out / "metrics.json").exists()
        return
    metrics = await write_evaluation(out)
    assert (metrics["words"], metrics["found"], metrics["reward"]) == (3, 1, 1)


@pytest.mark.parametrize("use", ["judge", "user"])
async def test_a_model_that_nobody_asks_is_said_before_its_key_is_looked_for(
    tmp_path: Path, write_env: Write, use: str
) -> None:
    place = {"name": "gpt-5", "api_key_env": "A_KEY_THAT_NOBODY_HAS"}
    sections: Any = {"model": {"name": "noop"}, "env": {use: place}}
    with pytest.raises(UserError) as raised:
        await ran(write_env(GOOD_TASKS + GOOD_REWARD).path, tmp_path / "run", **sections)
    one_line(raised.value, f"asks no model as {use}", f"Leave out env.{use} (--{use})")
    may = write_env(f"can_use = ({use!r},)\n{GOOD_TASKS}{GOOD_REWARD}", name="may").path
    with pytest.raises(UserError, match="A_KEY_THAT_NOBODY_HAS"):
        await ran(may, tmp_path / "run", **sections)
    sections["env"] = {}
    assert (await ran(may, tmp_path / "run", **sections)).done == 4


def test_a_name_that_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown environment 'nowhere' \(known: .*file.py:Class"):
        load_environment("nowhere")
    with pytest.raises(UserError, match="no Python file and no package"):
        load_environment("some/folder")
    with pytest.raises(UserError, match="no such file"):
        load_environment(str(tmp_path / "absent.py"))
    (tmp_path / "two.py").write_text(
        "from hermes_rl.rl import *\n"
        "class A(Environment):\n name='a'\n def tasks(self, *a): ...\n"
        " async def compute_reward(self, *a): ...\n"
        "class B(A):\n name='b'\n"
    )
    with pytest.raises(UserError, match=r"which Environment\? \(found: A, B\). Add :Class"):
        load_environment(str(tmp_path / "two.py"))
    assert load_environment(f"{tmp_path}/two.py:B").cls.name == "b"
    with pytest.raises(UserError, match="no Environment 'C'"):
        load_environment(f"{tmp_path}/two.py:C")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "class A(Environment):\n name = 'a'\n def tasks(self, *a): ...",
            "A lacks compute_reward.",
        ),
        ("class A(Environment):\n name = 'a'", "A lacks compute_reward and tasks."),
        ("class A:\n name = 'a'", "no Environment in it. Derive a class from"),
    ],
)
def test_an_unfinished_environment_is_told_what_it_lacks(
    tmp_path: Path, code: str, says: str
) -> None:
    (tmp_path / "half.py").write_text(f"from hermes_rl.rl import *\n{code}\n")
    with pytest.raises(UserError) as caught:
        load_environment(str(tmp_path / "half.py"))
    one_line(caught.value, says)
    if "lacks" in says:
        with pytest.raises(UserError, match="A lacks"):
            load_environment(f"{tmp_path}/half.py:A")


def test_a_range_that_is_none_is_said_plainly(tmp_path: Path, write_env: Write) -> None:
    with pytest.raises(UserError) as caught:
        first_tasks(write_env(f"{GOOD_TASKS}{GOOD_REWARD}").path, 1, reward_range=[1, 0])
    assert str(caught.value).endswith(
        "env.config: reward_range takes two numbers, the smaller one first"
    )
