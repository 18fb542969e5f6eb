"""Mistakes in environments are reported in one line with file and line, and give no reward."""

import asyncio
from typing import Any

import pytest
from runs import Lab, start_server

from hermes_rl.errors import UserError
from hermes_rl.rl import faults, first_tasks, load_environment, write_evaluation

TASKS = """
def tasks(self, split, seed):
    yield make_task("Say hello.", id="hello")
"""
REWARD = """
async def compute_reward(self, task, trajectory, ctx):
    return 1.0
"""
NOOP: Any = {"model": {"name": "noop"}}
ONCE: Any = {**NOOP, "dataset": {"repeats": 1}}


def check_line(error: object, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1][5]  # HERE", "IndexError: list index out of range"),
        ("return json.loads('{')  # HERE", "raised JSONDecodeError"),
        ("return None  # HERE", "returned None; return a number or Rewards"),
        ('return "good"  # HERE', "returned str 'good'"),
        ("return float('nan')  # HERE", "not finite"),
        ("return 1.5  # HERE", "returned the reward 1.5, outside reward_range [0.0, 1.0]"),
        ("return -0.1  # HERE", "outside reward_range"),
        ("return Rewards([])  # HERE", "without parts"),
        ("return Rewards([part('x', 1.0, turn=2)])  # HERE", "turns 1 to 1"),
        ("return Rewards([part('x', 1.0, turn=0)])  # HERE", "turns 1 to 1"),
        ("return Rewards([part('x', 1, weight=float('inf'))])  # HERE", "not finite"),
        ("return Rewards([0.5])  # HERE", "make its parts with part(name, score)"),
        ("raise CannotJudge('the reference is gone')", "the reference is gone"),
        ("return ctx.sandbox.info  # HERE", "ctx.grading"),
    ],
)
async def test_a_bug_in_compute_reward_has_the_cause_verifier(
    lab: Lab, body: str, message: str
) -> None:
    method = f"async def compute_reward(self, task, trajectory, ctx):\n    {body}\n"
    written = lab.write(f"{TASKS}\n{method}", "import json")
    report = await lab.run(written.path, **NOOP)
    assert (report.done, report.given_up, report.causes) == (0, 4, {"verifier": 4})
    assert lab.rows() == []
    rows = lab.rows("failures")
    assert len(rows) == 4, "the attempt is not repeated: grading would fail again"
    for row in rows:
        assert (row["reward"], row["cause"], row["owner"]) == (None, "verifier", "infrastructure")
        check_line(row["error"], message)
        if "HERE" in body:
            check_line(row["error"], "environment made_up: compute_reward() ", "made_up.py:")
        if "raised" in row["error"]:
            check_line(row["error"], f"made_up.py:{written.line('HERE')})")


async def test_code_that_cancels_its_task_fails_its_attempts_and_the_run_goes_on(lab: Lab) -> None:
    """As libraries do whose time limits leak a cancellation."""
    stop = "asyncio.current_task().cancel()\n    await asyncio.sleep(0)"
    method = f"async def compute_reward(self, task, trajectory, ctx):\n    {stop}\n"
    env = lab.write(f"{TASKS}\n{method}", "import asyncio").path
    async with asyncio.timeout(60):
        report = await lab.run(env, **ONCE)
    assert (report.given_up, set(report.causes)) == (1, {"harness"})
    for row in lab.rows("failures"):
        check_line(row["error"], "cancelled the task that it runs in")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def tasks(self, split, seed):\n    return 5", "returned int; yield tasks"),
        ("def tasks(self, split, seed):\n    yield 1 / 0  # HERE", "ZeroDivisionError"),
        ("def tasks(self, split, seed):\n    yield {'prompt': 'x'}  # HERE", "yields dict"),
        ("def tasks(self, split, seed):\n    yield make_task('')  # HERE", "'prompt' is empty"),
        (
            "def tasks(self, split, seed):\n    yield make_task('x', position=3)  # HERE",
            "a column 'position', which the run sets. Rename it",
        ),
        (
            "def tasks(self, split, seed):\n    yield make_task('x', split='hard')  # HERE",
            "a column 'split', which the run sets. Rename it",
        ),
        ("def tasks(self, split, seed):\n    return iter(())", "no rows"),
        (f"{TASKS}\ndef tools(self, task):\n    return ['terminal']", "tools() returned str"),
        (f"{TASKS}\ndef tools(self, task):\n    return task.tools  # HERE", "AttributeError"),
        (f"{TASKS}\nasync def setup(self):\n    {{}}['key']  # HERE", "setup() raised KeyError"),
        (f"{TASKS}\nuses = ('judge',)", "calls a model as judge: set env.judge.name"),
        (f"{TASKS}\nendless = True", "has endless tasks. Set their number with --limit"),
        (f"{TASKS}\nsplits = ('test',)", "unknown split 'train' (known: test)"),
    ],
)
async def test_invalid_environments_are_reported_before_the_run(
    lab: Lab, body: str, message: str
) -> None:
    written = lab.write(f"{body}\n{REWARD}")
    async with start_server() as server:
        with pytest.raises(UserError) as raised:
            await lab.run(written.path, server, dataset={"limit": None})
    check_line(raised.value, message)
    if "# HERE" in body:
        check_line(raised.value, "environment made_up", f"made_up.py:{written.line('# HERE')}")
    assert server.entries == [] or "setup" in body, "only workers call setup()"
    assert not list(lab.out.glob("trajectories/*"))


PICKY = """
from pydantic import field_validator

class Picky(EnvConfig):
    words: int = 3

    @field_validator("words")
    @classmethod
    def look(cls, value):
        return {}[value]  # HERE
"""


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        ("import no_such_module_here  # HERE", "", "ModuleNotFoundError"),
        ("def broken(:  # HERE", "", "SyntaxError"),
        ("1 / 0  # HERE", "", "ZeroDivisionError"),
        (PICKY, "Config = Picky", "environment made_up: Picky() raised KeyError"),
    ],
)
async def test_import_and_configuration_errors_have_file_and_line(
    lab: Lab, head: str, body: str, message: str
) -> None:
    written = lab.write(f"{body}\n{TASKS}{REWARD}", head)
    with pytest.raises(UserError) as raised:
        await lab.run(written.path, **NOOP, env={"config": {"words": 5}})
    check_line(raised.value, message, f"made_up.py:{written.line('HERE')}")


TOOL = """
@tool(name="dice", description="d", parameters={"type": "object"}, toolset="games")
async def dice(ctx, args):
    return ToolResult(text=ctx.env["nothing"])  # HERE
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def start(self, task, ctx):\n    ctx.missing  # HERE", "start() raised Attribute"),
        ("async def reply(self, task, t, ctx):\n    return [][0]  # HERE", "reply() raised Index"),
        ("async def reply(self, task, t, ctx):\n    return 7  # HERE", "reply() returned int"),
        ("def tools(self, task):\n    return [dice]", "dice() raised KeyError"),
    ],
)
async def test_a_bug_in_other_methods_has_the_cause_task(lab: Lab, body: str, message: str) -> None:
    env = lab.write(f"{TASKS}{REWARD}{body}", TOOL).path
    calls = {"calls": [{"name": "dice"}]} if "dice" in body else "Hello."
    async with start_server(policy=lambda request: calls) as server:
        report = await lab.run(env, server, dataset={"repeats": 1})
    assert report.causes == {"task": 1}
    row = lab.row("failures")
    assert row["owner"] == "task"
    check_line(row["error"], "environment made_up", message, "made_up.py:")


STREAM = """
class Config(EnvConfig):
    sandboxed: bool = False
    group_size: int = 1

def tasks(self, split, seed):
    for number in range(600):
        yield make_task("More.", id=str(number))
    raise KeyError("no more")  # HERE
"""


async def test_a_stream_that_raises_keeps_finished_rollouts(lab: Lab) -> None:
    written = lab.write(STREAM + REWARD)
    report = await lab.run(written.path, **NOOP, dataset={"limit": None})
    assert (report.stopped, report.exit_code) == ("dataset", 2)
    check_line(report.detail, "tasks() raised KeyError", f"made_up.py:{written.line('HERE')}")
    assert lab.rows()
    report = await lab.run(written.path, **NOOP, dataset={"limit": 600})
    assert (report.done, report.failed_attempts) == (600, 0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'words': 3, 'found': float((run.trajectories['reward'] == 1).sum())}", None),
        (
            "{'words': float('nan')}",
            "evaluate() did not return a mapping of names to finite numbers",
        ),
        ("5", "evaluate() did not return a mapping"),
        ("run.nothing", "evaluate() raised AttributeError"),
    ],
)
async def test_metrics_of_evaluate_are_checked(
    lab: Lab, returned: str, message: str | None
) -> None:
    body = f"{TASKS}{REWARD}\nasync def evaluate(self, run):\n    return {returned}\n"
    report = await lab.run(body, **NOOP, env={"mode": "evaluate", "split": "eval"})
    assert report.done == 1
    if message is None:
        metrics = await write_evaluation(lab.out)
        assert (metrics["words"], metrics["found"], metrics["reward"]) == (3, 1, 1)
        return
    with pytest.raises(UserError) as raised:
        await write_evaluation(lab.out)
    check_line(raised.value, "environment made_up", message, "made_up.py:")
    assert not (lab.out / "metrics.json").exists()


@pytest.mark.parametrize("use", ["judge", "user"])
async def test_an_unused_model_is_reported_before_its_key(lab: Lab, use: str) -> None:
    place = {use: {"name": "gpt-5", "api_key_env": "A_KEY_THAT_IS_NOT_SET"}}
    with pytest.raises(UserError) as raised:
        await lab.run(TASKS + REWARD, **NOOP, env=place)
    check_line(raised.value, f"calls no model as {use}", f"Leave out env.{use} (--{use})")
    may = lab.write(f"can_use = ({use!r},)\n{TASKS}{REWARD}", name="may").path
    with pytest.raises(UserError, match="A_KEY_THAT_IS_NOT_SET"):
        await lab.run(may, **NOOP, env=place)
    assert (await lab.run(may, **NOOP)).done == 4


ONE = """
class A(Environment):
    name = "a"
    def tasks(self, *a): ...
"""
TWO = ONE + "    async def compute_reward(self, *a): ...\nclass B(A):\n    name = 'b'\n"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("", "nowhere", "unknown environment 'nowhere' (known: "),
        ("", "some/folder", "neither a Python file nor a package"),
        ("", "{}/absent.py", "no such file"),
        (TWO, "{}/env.py", "which Environment? (found: A, B). Add :Class"),
        (TWO, "{}/env.py:C", "no Environment 'C' (found: A, B)"),
        (ONE, "{}/env.py", "A lacks compute_reward."),
        (ONE, "{}/env.py:A", "A lacks compute_reward."),
        ("class A(Environment):\n name = 'a'", "{}/env.py", "A lacks compute_reward and tasks."),
        ("class A:\n name = 'a'", "{}/env.py", "no Environment in it. Derive a class from"),
    ],
)
def test_names_without_an_environment_are_reported(
    lab: Lab, code: str, name: str, message: str
) -> None:
    (lab.path / "env.py").write_text(f"from hermes_rl.rl import *\n{code}\n")
    with pytest.raises(UserError) as raised:
        load_environment(name.format(lab.path))
    check_line(raised.value, message)
    if code == TWO:
        assert load_environment(f"{lab.path}/env.py:B").cls.name == "b"


def test_an_invalid_reward_range_is_reported(lab: Lab) -> None:
    with pytest.raises(UserError) as caught:
        first_tasks(lab.write(f"{TASKS}{REWARD}").path, 1, reward_range=[1, 0])
    assert str(caught.value).endswith(
        "env.config: reward_range takes two numbers, the smaller one first"
    )


def test_packages_with_a_similar_name_are_user_code() -> None:
    path = f"{faults._PACKAGE.rstrip('/')}_more/env.py"
    found: dict[str, Any] = {}
    exec(compile("def fail():\n    1 / 0\n", path, "exec"), found)
    with pytest.raises(ZeroDivisionError) as raised:
        found["fail"]()
    assert "_more/env.py:2" in faults.describe_error("similar", found["fail"], raised.value)


@pytest.mark.parametrize("where", ["description", "parameters"])
async def test_a_tool_that_cannot_be_sent_is_refused_before_anything_runs(
    lab: Lab, where: str
) -> None:
    fields = {"description": '"Seek."', "parameters": '{"type": "object"}'}
    fields[where] = fields[where].replace("e", "\\ud800e", 1)
    tool = f"""
def tools(self, task):
    made = dict(name="look", handler=None, toolset="made", needs_sandbox=False)
    return [Tool(**made, description={fields["description"]}, parameters={fields["parameters"]})]
"""
    written = lab.write(f"{TASKS}\n{tool}\n{REWARD}", "from hermes_rl.tools import Tool")
    async with start_server(policy=lambda request: "Hello.") as server:
        with pytest.raises(UserError) as refused:
            await lab.run(written.path, server)
        assert not server.requests
    check_line(refused.value, "returned 'look', whose schema is not valid Unicode text", "tools()")


async def test_a_reply_with_lone_surrogates_is_sent_with_replacements(lab: Lab) -> None:
    reply = """
async def reply(self, task, trajectory, ctx):
    text = "a\\ud800b"
    return None if trajectory.turns > 1 else (text, UserMessage(content=text))[ctx.member]
"""
    written = lab.write(f"{TASKS}\n{reply}\n{REWARD}")
    async with start_server(policy=lambda request: "Hello.") as server:
        await lab.run(written.path, server, dataset={"repeats": 2})
    rows = lab.rows()
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    for row in rows:
        assert '"a\ufffdb"' in row["messages"][-2]
