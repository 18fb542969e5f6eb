"""The contract of an environment: defaults of the run, resources of methods, stored state."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import Lab, make_config

from batch_runner import regrade_run
from hermes_rl.cli import main
from hermes_rl.rl import first_tasks, load_environment, settle_env

TASKS = """
def tasks(self, split, seed):
    yield make_task("say it", id="one", toolsets=["none"], oracle='["yes"]')
"""
REWARD = """
async def compute_reward(self, task, trajectory, ctx):
    return 1.0
"""
ONCE: dict[str, Any] = {"repeats": 1}
LIMITED = """
from hermes_rl.config_agent import LimitsSection

class Limited(EnvConfig):
    limits: LimitsSection | None = LimitsSection(max_turns=7, max_seconds=60)
"""


@pytest.mark.parametrize(
    ("limits", "turns", "seconds"),
    [({}, 7, 60.0), ({"max_turns": 3}, 3, 60.0), ({"max_seconds": 5.0}, 7, 5.0)],
)
def test_limits_of_an_environment_are_defaults_of_the_run(
    lab: Lab, limits: dict[str, Any], turns: int, seconds: float
) -> None:
    path = lab.write(f"Config = Limited\n{TASKS}{REWARD}", LIMITED).path
    config = make_config(path, lab.out, None, agent={"limits": limits})
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
    return [tool(name="pick", description="Picks.", parameters=form, toolset="extra")(pick)]

async def compute_reward(self, task, trajectory, ctx):
    return float(trajectory.tool_calls[0].result == "up")
"""
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


@pytest.mark.parametrize(
    "body", [TOOL, SANDBOX], ids=["tools use data of setup", "the sandbox is only for start"]
)
async def test_resources_of_methods(lab: Lab, body: str) -> None:
    head = "import json\nfrom hermes_rl.errors import UserError"
    await lab.run(lab.write(body, head).path, dataset=ONCE)
    assert lab.row()["reward"] == 1.0


def test_tasks_of_an_environment_with_a_judge_are_listed_without_one(lab: Lab) -> None:
    written = lab.write(f"uses = ('judge',)\n{TASKS}{REWARD}")
    assert [task.id for task in first_tasks(written.path, 5)] == ["one"]


def test_a_dangling_link_does_not_change_the_identity(tmp_path: Path) -> None:
    package = tmp_path / "pack"
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


STATE = """
def tasks(self, split, seed):
    yield make_task("plain", id="plain", oracle='["yes"]')
    yield make_task("strange", id="strange", oracle='["yes"]')

async def start(self, task, ctx):
    ctx.state["left"] = [1, 2, 3]
    ctx.state["drawn"] = ctx.rng.random()
    if task.id == "strange":
        ctx.state["place"] = object()

async def compute_reward(self, task, trajectory, ctx):
    drawn = ctx.rng.random()
    assert drawn != ctx.state["drawn"]
    return drawn * ctx.state["left"].pop() / 3
"""


async def test_a_state_is_stored_unchanged_or_not_at_all(lab: Lab) -> None:
    """A regrade gives the same reward if the grader changes the state or draws random numbers.

    Without a storable state there is no archive of the workspace.
    """
    report = await lab.run(STATE, run={"keep_workspaces": True}, dataset=ONCE)
    assert report.done == 2
    plain = lab.rows()[0]["trajectory_id"]
    folder = lab.out / "workspaces"
    assert {path.name for path in folder.iterdir()} == {f"{plain}.json", f"{plain}.tar.gz"}
    assert json.loads((folder / f"{plain}.json").read_text())["left"] == [1, 2, 3]
    done = await regrade_run(lab.out)
    assert (done.graded, done.changed, done.not_kept) == (1, 0, 1)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
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
def test_an_invalid_section_is_reported_with_its_file(
    lab: Lab, capsys: pytest.CaptureFixture[str], text: str, flags: list[str], message: str
) -> None:
    config = lab.path / "run.yaml"
    config.write_text(text + "\n")
    command = ["env", "process", str(lab.write(TASKS + REWARD).path), "--model", "oracle"]
    assert main([*command, "--config", str(config), *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "--set" not in printed


BARE = """
class Config(EnvConfig):
    sandboxed: bool = False

def tasks(self, split, seed):
    yield make_task("say it", id="a")
"""


async def test_an_environment_without_sandboxes_starts_none(lab: Lab) -> None:
    report = await lab.run(BARE + REWARD, model={"name": "noop"})
    assert (report.done, report.given_up) == (4, 0)
    rows = lab.rows()
    assert [(r["reward"], r["sandbox"], r["toolsets"]) for r in rows] == [(1.0, None, [])] * 4


USES_GRADING = REWARD.replace("1.0", 'float((await ctx.grading.run("true")).ok)')


@pytest.mark.parametrize(
    ("reward", "tools", "cause", "message"),
    [
        (REWARD, ["terminal"], "task", "terminal needs a sandbox, and this environment has none"),
        (USES_GRADING, [], "verifier", "with `sandboxed`"),
    ],
)
async def test_use_of_an_absent_sandbox_is_a_fault(
    lab: Lab, reward: str, tools: list[str], cause: str, message: str
) -> None:
    await lab.run(BARE + reward, model={"name": "noop"}, agent={"toolsets": tools})
    rows = lab.rows("failures")
    assert {row["cause"] for row in rows} == {cause}
    assert message in rows[0]["error"]


LISTED = """
def tasks(self, split, seed):
    items = [{"id": "1", "content": "Look"}]
    steps = [{"calls": [{"name": "todo", "arguments": form}]} for form in ({"todos": items}, {})]
    yield make_task("plan", toolsets=["todo"], oracle=json.dumps([*steps, "done"]))

async def compute_reward(self, task, trajectory, ctx):
    read = json.loads(trajectory.messages[-2]["content"])
    return float(read["summary"]["pending"])
"""


async def test_an_environment_offers_the_todo_list_and_each_rollout_has_one(lab: Lab) -> None:
    path = lab.write(LISTED, "import json").path
    await lab.run(path, model={"name": "oracle"}, dataset={"repeats": 2})
    assert {(r["reward"], *r["toolsets"]) for r in lab.rows()} == {(1.0, "todo")}
