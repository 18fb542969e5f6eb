"""What the contract of an environment promises of its run: what stands in for what, what is there
when, and what is kept of a rollout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_kit import Written, configured, ran, table

from batch_runner.regrade import regrade
from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.rl import faults
from hermes_rl.rl.loading import env_rows, load_environment, open_environment, settle_env
from hermes_rl.rl.trial import first_tasks

Write = Callable[..., Written]

TASKS = """
def tasks(self, split, seed):
    yield make_task("say it", id="one", toolsets=["none"], oracle='["yes"]')
"""
REWARD = """
async def compute_reward(self, task, trajectory, ctx):
    return 1.0
"""


@pytest.mark.parametrize(
    ("said", "turns", "seconds"),
    [({}, 7, 60.0), ({"max_turns": 3}, 3, 60.0), ({"max_seconds": 5.0}, 7, 5.0)],
)
def test_each_limit_of_an_environment_stands_in_where_the_run_says_nothing(
    tmp_path: Path, write_env: Write, said: dict[str, Any], turns: int, seconds: float
) -> None:
    head = """
    from hermes_rl.config_agent import LimitsSection

    class Own(EnvConfig):
        limits: LimitsSection | None = LimitsSection(max_turns=7, max_seconds=60)
    """
    path = write_env(f"Config = Own\n{TASKS}{REWARD}", head).path
    config = configured(path, tmp_path / "run", None, agent={"limits": said})
    found = settle_env(config)[0].agent.limits
    assert (found.max_turns, found.max_seconds, found.max_tokens) == (turns, seconds, None)


TOOL = """
def tasks(self, split, seed):
    step = {"calls": [{"name": "pick", "arguments": {}}]}
    yield make_task("pick", toolsets=["none"], oracle=json.dumps([step, "done"]))

async def setup(self):
    self.words = ("up", "down")

def tools(self, task):
    async def pick(ctx, arguments):
        return ToolResult(text=word)

    word = self.words[0]
    form = {"type": "object", "properties": {}}
    return [tool(name="pick", description="Picks.", parameters=form, toolset="own")(pick)]

async def compute_reward(self, task, trajectory, ctx):
    return float(trajectory.tool_calls[0].result == "up")
"""


async def test_tools_may_use_what_setup_made(tmp_path: Path, write_env: Write) -> None:
    written = write_env(TOOL, "import json")
    await ran(written.path, tmp_path / "run", dataset={"repeats": 1})
    assert [row["reward"] for row in table(tmp_path / "run")] == [1.0]


def test_tasks_of_an_environment_with_a_judge_are_listed_without_one(write_env: Write) -> None:
    written = write_env(f"uses = ('judge',)\n{TASKS}{REWARD}")
    assert [task.id for task in first_tasks(written.path, 5)] == ["one"]


def test_what_is_no_file_in_a_package_is_no_part_of_its_identity(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    body = "class A(Environment):\n name = 'a'\n def tasks(self, *a): ...\n"
    body += " async def compute_reward(self, *a): ...\n"
    (package / "__init__.py").write_text(f"from hermes_rl.rl import *\n{body}")
    before = load_environment(str(package)).digest
    (package / "data").symlink_to(tmp_path / "gone")
    assert load_environment(str(package)).digest == before
    (package / "data").unlink()
    (package / "data").write_text("more")
    assert load_environment(str(package)).digest != before


@pytest.mark.parametrize(("column", "value"), [("position", 3), ("split", "'hard'")])
def test_columns_that_the_run_sets_are_not_overwritten_in_silence(
    tmp_path: Path, write_env: Write, column: str, value: Any
) -> None:
    body = f"def tasks(self, split, seed):\n    yield make_task('x', {column}={value})  # HERE\n"
    written = write_env(body + REWARD)
    config = configured(written.path, tmp_path / "run", None)
    assert config.env is not None
    with pytest.raises(UserError) as raised:
        list(env_rows(open_environment(config.env)))
    assert f"its own '{column}', which the run sets. Rename it" in str(raised.value)
    assert f"made_up.py:{written.line('# HERE')}" in str(raised.value)


SANDBOX = """
def tasks(self, split, seed):
    yield make_task("say it", oracle='["yes", "more"]')

async def start(self, task, ctx):
    ctx.state["started"] = (await ctx.sandbox.run("echo here", timeout_s=30)).output.strip()

async def reply(self, task, trajectory, ctx):
    if len(trajectory.answers) > 1:
        return None
    try:
        ctx.sandbox
    except UserError as error:
        ctx.state["replied"] = str(error)
    return "And?"

async def compute_reward(self, task, trajectory, ctx):
    assert ctx.state["started"] == "here"
    return float("only in start()" in ctx.state["replied"])
"""


async def test_the_sandbox_is_the_environments_in_start_alone(
    tmp_path: Path, write_env: Write
) -> None:
    written = write_env(SANDBOX, "from hermes_rl.errors import UserError")
    await ran(written.path, tmp_path / "run", dataset={"repeats": 1})
    assert [row["reward"] for row in table(tmp_path / "run")] == [1.0]


STATE = """
def tasks(self, split, seed):
    yield make_task("plain", id="plain", oracle='["yes"]')
    yield make_task("strange", id="strange", oracle='["yes"]')

async def start(self, task, ctx):
    ctx.state["left"] = [1, 2, 3]
    if task.id == "strange":
        ctx.state["place"] = object()

async def compute_reward(self, task, trajectory, ctx):
    return ctx.state["left"].pop() / 3
"""


async def test_a_state_is_kept_as_the_rollout_left_it_and_with_its_workspace_or_not_at_all(
    tmp_path: Path, write_env: Write
) -> None:
    """A grader that changes the state gives the same reward when it grades again; what cannot be
    stored leaves no archive behind that nothing could use."""
    run = tmp_path / "run"
    sections = {"run": {"keep_workspaces": True}, "dataset": {"repeats": 1}}
    report = await ran(write_env(STATE).path, run, **sections)
    assert report.done == 2
    plain, strange = (row["trajectory_id"] for row in table(run))
    kept = {path.name for path in (run / "workspaces").iterdir()}
    assert kept == {f"{plain}.json", f"{plain}.tar.gz"}
    assert json.loads((run / "workspaces" / f"{plain}.json").read_text()) == {"left": [1, 2, 3]}
    assert strange not in str(kept)


DRAWN = """
def tasks(self, split, seed):
    yield make_task("say it", oracle='["yes"]')

async def start(self, task, ctx):
    ctx.state["drawn"] = ctx.rng.random()

async def compute_reward(self, task, trajectory, ctx):
    drawn = ctx.rng.random()
    assert drawn != ctx.state["drawn"]
    return drawn
"""


async def test_what_a_grader_draws_it_draws_again_in_a_regrade(
    tmp_path: Path, write_env: Write
) -> None:
    run = tmp_path / "run"
    await ran(write_env(DRAWN).path, run, run={"keep_workspaces": True})
    assert len({row["reward"] for row in table(run)}) == 4
    done = await regrade(run)
    assert (done.graded, done.changed) == (4, 0)


def test_a_package_whose_name_begins_as_ours_is_the_users() -> None:
    theirs = f"{faults._PACKAGE.rstrip('/')}_more/env.py"
    code = compile("def fail():\n    1 / 0\n", theirs, "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    with pytest.raises(ZeroDivisionError) as raised:
        found["fail"]()
    assert "_more/env.py:2" in faults.describe_error("theirs", found["fail"], raised.value)


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("env: [one, two]", [], "run.yaml: 'env' is not a section. Put its keys below it"),
        ("env: dialogue", [], "run.yaml: 'env' is not a section"),
        (
            "env: {judge: [one]}",
            ["--judge", "m"],
            "'env.judge' must be a section with keys, not ['one']",
        ),
        (
            "env:\nmodel: {name: oracle}",
            ["--split", "no"],
            "unknown split 'no' (known: train, eval)",
        ),
        (
            "env:\n  judge:\n  user:\n",
            ["--judge", "m", "--split", "no"],
            "unknown split 'no' (known: train, eval)",
        ),
    ],
)
def test_a_section_that_is_none_is_said_of_its_file(
    tmp_path: Path,
    write_env: Write,
    capsys: pytest.CaptureFixture[str],
    text: str,
    flags: list[str],
    says: str,
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text + "\n")
    words = ["env", "process", str(write_env(TASKS + REWARD).path), "--model", "oracle"]
    assert main([*words, "--config", str(config), *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "--set" not in said


BARE = """
    class Config(EnvConfig):
        sandboxed: bool = False

    def tasks(self, split, seed):
        yield make_task("say it", id="a")

    async def compute_reward(self, task, trajectory, ctx):
        return 1.0
"""


async def test_an_environment_without_sandboxes_starts_none(
    tmp_path: Path, write_env: Write
) -> None:
    env = write_env(BARE).path
    report = await ran(env, tmp_path / "run", model={"name": "noop"})
    assert (report.done, report.given_up) == (4, 0)
    rows = table(tmp_path / "run")
    assert [row["reward"] for row in rows] == [1.0] * 4
    assert {row["sandbox"] for row in rows} == {None}
    assert {tuple(row["toolsets"]) for row in rows} == {()}


async def test_a_toolset_that_needs_a_sandbox_is_a_task_fault_without_one(
    tmp_path: Path, write_env: Write
) -> None:
    env = write_env(BARE).path
    tools = {"toolsets": ["terminal"]}
    await ran(env, tmp_path / "run", model={"name": "noop"}, agent=tools)
    rows = table(tmp_path / "run", "failures")
    assert {row["cause"] for row in rows} == {"task"}
    assert "terminal needs a sandbox, and this environment has none" in rows[0]["error"]


async def test_ctx_grading_without_a_sandbox_is_a_verifier_fault(
    tmp_path: Path, write_env: Write
) -> None:
    body = BARE.replace("return 1.0", 'return float((await ctx.grading.run("true")).ok)')
    await ran(write_env(body).path, tmp_path / "run", model={"name": "noop"})
    rows = table(tmp_path / "run", "failures")
    assert {row["cause"] for row in rows} == {"verifier"}
    assert "with `sandboxed`" in rows[0]["error"]
