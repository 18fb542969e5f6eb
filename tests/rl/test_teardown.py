"""`close` is called once per process, however the process ends; reward code has a limit."""

import asyncio
import signal
from typing import Any

import pytest
from runs import Lab, events, run_flags, start, start_server

from hermes_rl.errors import UserError
from hermes_rl.rl import Policy, Selection, rollouts
from hermes_rl.testing import FakeServer

BODY = """
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

def tasks(self, split, seed):
    for n in range(100):
        yield make_task(f"Number {n}.", id=f"n{n}")

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member % 2)

def note(self, text):
    with open(Path(__file__).with_name("log"), "a") as file:
        file.write(text + "\\n")

async def setup(self):
    self.note("setup")

async def close(self):
    self.note("close")
"""
HEAD = "import asyncio\nfrom pathlib import Path\n"


def log_of(lab: Lab) -> list[str]:
    return (lab.path / "log").read_text().splitlines()


def talk() -> FakeServer:
    return start_server(policy=lambda request: "Well.")


async def run(lab: Lab, body: str, server: FakeServer, *, head: str = HEAD, **env: Any) -> Any:
    path = lab.write(body, head).path
    return await lab.run(
        path, server, env={"name": str(path), **env}, dataset={"limit": 2, "repeats": 2}
    )


async def test_close_is_called_once_after_the_last_rollout(lab: Lab) -> None:
    async with talk() as server:
        report = await run(lab, BODY, server)
    assert report.done == 4
    assert log_of(lab) == ["setup", "close"]


@pytest.mark.parametrize("method", ["setup", "close"])
async def test_close_is_called_after_a_failed_setup_and_its_faults_end_no_run(
    lab: Lab, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    note = f'self.note("{method}")\n'
    body = BODY.replace(note, note + '    raise OSError("no such port")\n')
    async with talk() as server:
        if method == "setup":
            with pytest.raises(UserError, match="no such port"):
                await run(lab, body, server)
        else:
            assert (await run(lab, body, server)).done == 4
            assert "close() raised OSError: no such port" in caplog.text
    assert log_of(lab) == ["setup", "close"]


@pytest.mark.parametrize("signals", [1, 2])
async def test_close_is_called_after_interrupts(lab: Lab, signals: int) -> None:
    path = lab.write(BODY, HEAD).path
    async with talk() as server:
        process = await start("process", path, *run_flags(lab.out, server))
        await events(process, until=2)
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
        await asyncio.wait_for(process.communicate(), 120)
    assert log_of(lab) == ["setup", "close"]


async def test_close_is_called_when_a_live_stream_is_left(lab: Lab) -> None:
    path = lab.write(BODY, HEAD).path
    config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    async with talk() as server:
        policy = Policy(model="policy", base_url=server.base_url, tokens="off")
        async with rollouts(str(path), policy, out=lab.out, group_size=2, config=config) as stream:
            await anext(stream)
    assert log_of(lab) == ["setup", "close"]


async def test_reward_code_that_hangs_is_no_verdict(lab: Lab) -> None:
    body = BODY.replace("return float", "await asyncio.sleep(ctx.member * 1000); return float")
    async with talk() as server:
        report = await run(lab, body, server, reward_seconds=0.5)
    assert (report.done, report.given_up) == (2, 2)
    (one, other) = lab.rows("failures")
    assert (one["cause"], other["cause"]) == ("verifier", "verifier")
    assert "compute_reward() ran for more than 0.5 s" in one["error"]


HANGS = {
    "a sleep": "time.sleep(1000)",
    "a loop": "pass",
    "a regular expression": "re.match('(a+)+b', 'a' * 60)",
    "a program": "subprocess.run(['sleep', '1000'])",
}


@pytest.mark.parametrize(
    ("kind", "hang"),
    [*(("async def", hang) for hang in HANGS), ("def", "a loop"), ("def", "a program")],
)
async def test_reward_code_that_blocks_ends_at_its_limit_and_others_continue(
    lab: Lab, kind: str, hang: str
) -> None:
    """A plain function runs in a process, and is killed there with what it started."""
    method = BODY[BODY.index("async def compute_reward") : BODY.index("def note")]
    blocks = method.replace("    return", f"    while ctx.member: {HANGS[hang]}\n    return")
    body = BODY.replace(method, blocks.replace("async def", kind))
    path = lab.write(body, HEAD + "import re, subprocess, time\n").path
    env = {"name": str(path), "reward_seconds": 2.0}
    async with talk() as server:
        report = await lab.run(path, server, env=env, dataset={"limit": 1, "repeats": 2})
    assert (report.done, report.given_up) == (1, 1)
    (failed,) = lab.rows("failures")
    assert failed["cause"] == "verifier"
    assert "compute_reward() ran for more than 2 s" in failed["error"]
    assert "made_up.py:" in failed["error"]


def test_a_loop_in_a_reward_is_interrupted_on_another_thread_too(lab: Lab) -> None:
    """The loop of `sync()` has a thread of its own, which gets no signals."""
    body = BODY.replace("    return float", "    while ctx.member: pass\n    return float")
    path = lab.write(body, HEAD).path
    config = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    config["env"] = {"reward_seconds": 1.0}
    policy = Policy(model="noop", tokens="off")
    more: dict[str, Any] = {"group_size": 2, "limit": 1, "selection": Selection(min_valid=1)}
    with rollouts(str(path), policy, out=lab.out, config=config, **more).sync() as stream:
        (group,) = stream
    assert [member.valid for member in group.members] == [True, False]


async def test_a_plain_score_group_runs_in_a_process_with_setup_and_keeps_the_state(
    lab: Lab,
) -> None:
    group = """
def score_group(self, task, members, ctx):
    assert os.getpid() != self.driver, "in a process"
    return [member.member / 4 for member in members]
"""
    body = BODY.replace('    self.note("setup")', "    self.driver = os.getppid()\n")
    async with talk() as server:
        await run(lab, body + group, server, head=HEAD + "import os\n")
    assert [g["rewards"] for g in lab.groups().values()] == [[0.0, 0.25], [0.0, 0.25]]


async def test_a_score_group_that_hangs_leaves_its_row_with_the_error(lab: Lab) -> None:
    hang = """
async def score_group(self, task, members, ctx):
    await asyncio.sleep(1000)
"""
    async with talk() as server:
        await run(lab, BODY + hang, server, reward_seconds=0.5)
    groups = lab.groups()
    assert set(groups) == {"n0", "n1"}
    assert all("score_group() ran for more than 0.5 s" in g["error"] for g in groups.values())


async def test_ctrl_c_ends_a_program_whose_tasks_are_being_loaded(lab: Lab) -> None:
    loads = """
def tasks(self, split, seed):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(60)
    yield make_task("What is it?")

async def compute_reward(self, task, trajectory, ctx):
    return 1.0
"""
    env = lab.write(loads, "import sys, time").path
    process = await start("process", env, "--model", "noop", "--out", lab.out)
    async with asyncio.timeout(60):
        while b"loading" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(45):
        assert await process.wait() == 130
