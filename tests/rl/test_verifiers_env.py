"""The environment `Verifiers` against a stand-in for verifiers up to 0.3, which needs no install.

tests/consumers/with_protocols and with_verifiers have the same with the real package.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from runs import Lab, events, make_config, report_of, run_flags, start, start_server

from batch_runner import Silent, arun_batch
from hermes_rl.errors import UserError
from hermes_rl.rl import first_tasks
from hermes_rl.testing import FakeConfig, FakeServer

NAME = "hermes_rl.rl.verifiers_env:Verifiers"
TYPES = """
class ClientConfig:
    def __init__(self, api_base_url, api_key_var, max_retries):
        self.url = api_base_url + "/chat/completions"
"""
MODULE = """
import asyncio, json, os, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path

import numpy

ODD = {"array": numpy.float32(0.5), "values": {1, 2}}

print("noise on standard output")

class Made:
    def __init__(self, kinds, repeats=1):
        self.kinds = kinds * repeats

    def get_dataset(self):
        for number, kind in enumerate(self.kinds):
            prompt = [{"role": "user", "content": f"{kind} {number}"}]
            yield {"prompt": prompt, "kind": {1, 2} if kind == "set" else kind}

    def get_eval_dataset(self):
        return [{"prompt": "Judge me.", "kind": "single"}]

    async def run_rollout(self, row, client, model, sampling_args):
        Path("pids").open("a").write(f"{os.getpid()}\\n")
        def call(text):
            body = {"model": model, "messages": [{"role": "user", "content": text}]}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(client.url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        kind, truncated = row["kind"], False
        if kind == "dies" and not Path("died").exists():
            Path("died").touch()
            if not os.fork():
                time.sleep(600)
            os._exit(1)
        if kind == "raises":
            raise KeyError("lost")
        if kind in ODD:
            return {"reward": ODD[kind], "metrics": {"seen": ODD[kind]}}
        if kind == "leaves":
            raise asyncio.CancelledError("no more")
        if kind == "exits":
            sys.exit("no use")
        if kind == "blocks":
            child = subprocess.Popen(["sleep", "600"])
            Path("pids").open("a").write(f"{child.pid}\\n")
            Path("waiting").touch()
            time.sleep(600)
        if kind == "waits":
            try:
                Path("waiting").touch()
                await asyncio.sleep(600)
            finally:
                Path("cancelled").touch()
        if kind == "error":
            return {"error": {"error": "EnvError", "message": "no board"}}
        try:
            for n in range(9 if kind == "limit" else 1):
                answer = await asyncio.to_thread(call, f"{kind} {n}")
        except urllib.error.HTTPError as error:
            if "the model's context length" not in json.load(error)["error"]["message"]:
                raise
            answer = ""
        return {"reward": 0.75 if answer == "Well." else 0.25, "metrics": {"length": len(answer)}}

def load_environment(kinds=("single",), **more):
    return Made(kinds, **more)
"""


@pytest.fixture
def lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A folder with the environment `vf_made` and the stand-in."""
    (lab.path / "verifiers").mkdir()
    (lab.path / "verifiers" / "__init__.py").touch()
    (lab.path / "verifiers" / "types.py").write_text(TYPES)
    (lab.path / "vf_made.py").write_text(MODULE)
    (lab.path / "verifiers-0.3.0.dist-info").mkdir()
    about = "Name: verifiers\nVersion: 0.3.0\n"
    (lab.path / "verifiers-0.3.0.dist-info" / "METADATA").write_text(about)
    monkeypatch.setenv("PYTHONPATH", str(lab.path))
    monkeypatch.chdir(lab.path)
    return lab


def env_config(*kinds: str, **more: Any) -> dict[str, Any]:
    return {"id": "vf-made", "args": {"kinds": kinds, **more}}


async def roll_out(lab: Lab, *kinds: str, **sections: Any) -> dict[str, dict[str, Any]]:
    """Run one rollout of each kind; return the rows by the text of the task."""
    async with start_server(policy=lambda request: "Well.") as server:
        env = {"config": {**env_config(*kinds), "group_size": 1}}
        sections = {"dataset": {}, "env": env, **sections}
        config = make_config(NAME, lab.out, server, **sections)
        await arun_batch(config, progress=Silent())
    return {row["task_prompt"]: row for row in lab.rows("failures") + lab.rows()}


async def test_rewards_faults_and_limits_are_those_of_the_environment(lab: Lab) -> None:
    kinds = ("single", "error", "raises", "limit", "array", "values", "leaves", "exits")
    sections = {"dataset": {"limit": len(kinds)}, "agent": {"limits": {"max_turns": 3}}}
    rows = await roll_out(lab, *kinds, **sections)
    listed = [rows[f"{kind} {n}"] for n, kind in enumerate(kinds)]
    single, error, raises, limit, array, *odd = listed
    assert (array["reward"], array["metrics"]) == (0.5, [{"name": "seen", "value": 0.5}])
    assert [(row["cause"], row["error"].partition(": verifiers: ")[2]) for row in odd] == [
        ("task", "TypeError: Object of type set is not JSON serializable"),
        ("task", "CancelledError: no more"),
        ("task", "SystemExit: no use"),
    ]
    assert (single["reward"], single["end_reason"]) == (0.75, "answered")
    assert {"name": "length", "value": 5.0} in single["metrics"]
    assert (error["cause"], raises["cause"]) == ("task", "task")
    assert "no board" in error["error"]
    assert "KeyError: 'lost'" in raises["error"]
    assert (limit["reward"], limit["end_reason"], limit["turns"]) == (0.25, "max_turns", 3)


async def test_a_lost_process_is_started_again_for_the_next_attempt(lab: Lab) -> None:
    rows = await roll_out(lab, "dies", "single", run={"concurrency": 1})
    assert rows["dies 0"]["reward"] == rows["single 1"]["reward"] == 0.75
    pids = Path("pids").read_text().split()
    assert len(pids) == 3
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_a_cancelled_run_cancels_the_episode_and_leaves_no_process(lab: Lab) -> None:
    run = asyncio.ensure_future(roll_out(lab, "waits"))
    while not Path("waiting").exists():
        assert not run.done()
        await asyncio.sleep(0.02)
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run
    assert Path("cancelled").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pids").read_text()), 0)


@pytest.mark.slow
async def test_after_a_kill_only_rollouts_in_flight_are_paid_again(lab: Lab) -> None:
    config = env_config("single", repeats=8)
    flags = [f"env.config.{key}={value}" for key, value in config.items() if key != "args"]
    flags += ["env.config.args.kinds=[single]", "env.config.args.repeats=8"]
    more = [part for flag in (*flags, "env.config.group_size=1") for part in ("--set", flag)]
    plays = {"policy": lambda request: "Well."}
    async with FakeServer(FakeConfig(latency_s=0.05, plays=plays)) as server:
        arguments = ("process", NAME, *run_flags(lab.out, server, *more, "--concurrency", "2"))
        first = await start(*arguments)
        seen = await events(first, until=3)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        reported = {e["unit_id"] for e in seen if e["event"] == "attempt" and e["status"] == "ok"}
        again = await start(*arguments)
        later, _ = await asyncio.gather(events(again), again.wait())
        assert again.returncode == 0
        served = [entry.call_id for entry in server.entries]
    assert report_of(later)["done"] == 8
    assert not reported & {e["unit_id"] for e in later if e["event"] == "attempt"}
    calls = [call for row in lab.rows() + lab.rows("failures") for call in row["calls"]]
    ids = [call["call_id"] for call in calls]
    assert len(ids) == len({*ids}) <= 10
    assert len(served) == len({*served})
    assert {*served} <= {*ids}
    # A call is recorded before its request leaves, so that the kill may come between the two.
    assert {call["outcome"] for call in calls if call["call_id"] not in served} <= {"unknown"}


@pytest.mark.slow
async def test_after_a_kill_a_blocked_environment_and_what_it_started_end(lab: Lab) -> None:
    flags = ["env.config.id=vf_made", "env.config.args.kinds=[blocks]"]
    more = [part for flag in flags for part in ("--set", flag)]
    async with start_server(policy=lambda request: "Well.") as server:
        run = await start("process", NAME, *run_flags(lab.out, server, *more))
        while not Path("waiting").exists():
            assert run.returncode is None
            await asyncio.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        await run.wait()
    for pid in Path("pids").read_text().split():
        await until_ended(int(pid))


async def until_ended(pid: int) -> None:
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(pid)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"id": ""}, "name an environment"),
        ({"id": "vf_made", "python": "/no/such/python"}, "env.config.python: "),
        ({"id": "vf_made", "args": {"kind": 1}}, "unexpected keyword argument 'kind'"),
        ({"id": "vf_made", "args": {"kinds": ["set"]}}, "set is not JSON serializable"),
        ({"id": "vf_made:no_such"}, "vf_made has no function 'no_such'"),
        ({"id": "vf_made", "python": "/bin/echo"}, "its Python wrote b'-c"),
        ({"id": "vf_made", "python": "./writes_number"}, "its Python wrote b'7"),
        ({"id": "vf_no_such"}, "No module named 'verifiers.v1'"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line(
    lab: Lab, config: dict[str, Any], error: str
) -> None:
    Path("writes_number").write_text("#!/bin/sh\necho 7\n")
    Path("writes_number").chmod(0o755)
    with pytest.raises(UserError) as caught:
        first_tasks(NAME, 1, **config)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_are_tasks_and_splits_are_those_of_the_environment(lab: Lab) -> None:
    tasks = first_tasks(NAME, 9, **env_config("single", "limit", "error"), tasks=2)
    assert [(task.id, task.prompt_text) for task in tasks] == [
        ("row0", "single 0"),
        ("row1", "limit 1"),
    ]
    assert tasks[1].metadata["row"]["kind"] == "limit"
    (judged,) = first_tasks(NAME, 9, split="eval", **env_config())
    assert judged.prompt_text == "Judge me."
