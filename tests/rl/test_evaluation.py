"""The files of `evaluate` for the tools of Atropos: metrics.json and samples.jsonl."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import Lab, evaluate_run, first_prompt, start_server

from hermes_rl.cli import main
from hermes_rl.testing import ServedRequest

COUNTED = """
class Config(EnvConfig):
    sandboxed: bool = False

def tasks(self, split, seed):
    for n in range(3):
        yield make_task(f"Number {n}?", id=f"n{n}", answer=n)

async def compute_reward(self, task, trajectory, ctx):
    return float(trajectory.final_response == str(task.metadata["answer"]))

async def evaluate(self, run):
    return {"longest": max(len(text) for text in run.trajectories["final_response"])}
"""


def counting_policy(request: ServedRequest) -> Any:
    """Answer 0 correctly, 1 incorrectly, and be cut at 2."""
    number = int(first_prompt(request).split()[1].rstrip("?"))
    return ["0", "zero", {"text": "2", "finish": "length"}][number]


WITH_SETUP = """
class Config(EnvConfig):
    sandboxed: bool = False

async def setup(self):
    with open(NOTES, "a") as notes:
        notes.write("set up\\n")
    self.model = [1.0]

def tasks(self, split, seed):
    yield make_task("say it", id="one", oracle='["yes"]')

async def compute_reward(self, task, trajectory, ctx):
    return self.model[0] * await ctx.cpu(abs, -0.5)

async def score_group(self, task, members, ctx):
    self.model.append(await ctx.cpu(abs, -2.0))
    return [self.model[0] for member in members]

async def evaluate(self, run):
    return {"seen": sum(self.model)}
"""


def test_setup_runs_once_for_rollouts_groups_and_evaluation(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, out = lab.path / "notes", lab.out
    env = str(lab.write(WITH_SETUP, f"NOTES = {str(notes)!r}").path)
    flags = ["--model", "oracle", "--workers", "0", "--out", str(out), "--repeats", "2"]
    assert main(["env", "evaluate", env, *flags]) == 0
    assert notes.read_text() == "set up\n"
    assert json.loads((out / "metrics.json").read_bytes())["results"]["all"]["seen"] == 3.0
    metrics = out / "metrics.json"
    metrics.unlink()
    with late_reader(metrics, monkeypatch) as texts:  # all rollouts are done: it only evaluates
        assert main(["env", "evaluate", env, *flags, "--json"]) == 0
    assert json.loads(texts[-1].splitlines()[-1])["event"] == "report"
    assert notes.read_text() == "set up\n" * 2


@contextmanager
def late_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make stdout a full pipe that is read once a file exists; collects what was read."""
    readable, writable = os.pipe()
    os.write(writable, b"\n" * fcntl.fcntl(writable, fcntl.F_GETPIPE_SZ))
    texts: list[str] = []

    def read() -> None:
        bound = time.monotonic() + 120
        while not path.exists() and time.monotonic() < bound:
            time.sleep(0.05)
        texts.append("" if path.exists() else f"no {path}")
        with os.fdopen(readable) as pipe:
            texts.append(pipe.read())

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        with os.fdopen(writable, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            yield texts
        reading.result()
    assert texts[0] == ""


async def test_evaluation_files_have_the_field_names_of_atropos(lab: Lab) -> None:
    out = lab.out
    async with start_server(policy=counting_policy) as server:
        await lab.run(
            lab.write(COUNTED, name="counted").path,
            server,
            env={"mode": "evaluate", "split": "eval"},
            model={"temperature": 0.25, "max_tokens": 77},
            dataset={"limit": None},
        )
    results, samples = await evaluate_run(out)
    assert set(results) == {"atropos|counted_eval|0", "all"}
    assert results["atropos|counted_eval|0"] == results["all"]
    assert results["all"]["solved"] == pytest.approx(2 / 3)
    assert results["all"]["longest"] == 4
    content = json.loads((out / "metrics.json").read_bytes())
    assert set(content) == {"config_general", "results"}
    general = content["config_general"]
    assert set(general) == {"model_name", "total_evaluation_time_seconds", "generation_parameters"}
    assert isinstance(general["total_evaluation_time_seconds"], str)
    sent = {"temperature": 0.25, "top_p": 1.0, "top_k": -1, "max_tokens": 77, "max_new_tokens": 77}
    assert general["generation_parameters"] == sent
    assert (out / "evaluate_config.yaml").read_text() == (out / "run.yaml").read_text()
    first, wrong, cut = samples
    assert (first["score"], first["correct"], first["finish_reason"]) == (1.0, True, "stop")
    assert (wrong["score"], wrong["correct"], wrong["finish_reason"]) == (0.0, False, "stop")
    assert (cut["correct"], cut["finish_reason"]) == (True, "length")
    assert (first["question"], first["model_response"]) == ("Number 0?", "0")
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    assert [s["metadata"]["answer"] for s in samples] == [0, 1, 2]
