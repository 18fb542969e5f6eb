"""A task stream gives the same rows with any number of workers; the identity of environments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs import (
    EXAMPLES,
    count_answers,
    events,
    first_prompt,
    make_config,
    report_of,
    run_environment,
    run_flags,
    start,
    start_server,
    table,
)

from batch_runner import resolve_settings
from hermes_rl.errors import StoreError, UserError
from hermes_rl.rl import first_tasks
from hermes_rl.store import load_run
from hermes_rl.testing import ServedRequest

MATH = EXAMPLES / "math_tool.py"
MAY_DIFFER = (
    "timing", "started_at", "finished_at", "tool_stats", "calls", "trajectory_id", "run_id",
    "root_trajectory_id", "endpoint", "attempt", "metrics", "sandbox",
)  # fmt: skip


def guessing_policy(request: ServedRequest) -> Any:
    """Be right if the number to add is even."""
    a, b, c = (int(part.strip("?,")) for part in first_prompt(request).split()[2::2])
    steps: list[Any] = [
        {"calls": [{"name": "calculate", "arguments": {"operation": "add", "a": a, "b": b}}]},
        f"ANSWER {a * b + c - c % 2}",
    ]
    return steps[count_answers(request)]


def comparable_rows(out: Path) -> dict[str, dict[str, Any]]:
    return {
        row["unit_id"]: {k: v for k, v in row.items() if k not in MAY_DIFFER} for row in table(out)
    }


async def test_more_tasks_continue_a_run_and_another_stream_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with start_server(policy=guessing_policy) as server:
        first = await run_environment(MATH, out, server, dataset={"limit": 2})
        second = await run_environment(MATH, out, server, dataset={"limit": 3})
        assert (first.done, second.done) == (8, 12)
        assert {(row["row_index"], row["repeat"]) for row in table(out)} == {
            (index, repeat) for index in range(3) for repeat in range(4)
        }
        for changed in ({"seed": 1}, {"split": "eval"}, {"config": {"largest": 500}}):
            with pytest.raises(StoreError, match=r"made with env\."):
                await run_environment(MATH, out, server, env=changed)
        config = out / "run.yaml"
        again = await start("process", "--config", config)
        assert report_of(await events(again))["done"] == 12
        assert await again.wait() == 0


async def test_concurrency_does_not_change_the_rows(tmp_path: Path) -> None:
    async with start_server(policy=guessing_policy) as server:
        for concurrency in (1, 64):
            await run_environment(
                MATH,
                tmp_path / str(concurrency),
                server,
                run={"concurrency": concurrency},
                dataset={"limit": 12},
            )
    rows = comparable_rows(tmp_path / "1")
    assert len(rows) == 48
    assert rows == comparable_rows(tmp_path / "64")
    assert {row["reward"] for row in rows.values()} == {0.0, 1.0}


@pytest.mark.slow
async def test_ray_workers_do_not_change_the_rows(tmp_path: Path, cluster: dict[str, str]) -> None:
    """A package with relative imports, in other processes."""
    package = tmp_path / "my_math"
    package.mkdir()
    (package / "__init__.py").write_text("from .environment import MathTool\n")
    (package / "environment.py").write_text(MATH.read_text())
    async with start_server(policy=guessing_policy) as server:
        for workers in (0, 1):
            out = tmp_path / str(workers)
            process = await start(
                *("process", package, *run_flags(out, server, "--limit", "3")),
                *("--workers", str(workers)),
                env=cluster,
            )
            seen = await events(process)
            assert await process.wait() == 0, (await process.stderr.read()).decode()[-2000:]
            assert report_of(seen)["done"] == 12
    rows = comparable_rows(tmp_path / "0")
    assert len(rows) == 12
    assert rows == comparable_rows(tmp_path / "1")


BESIDE = """
import os
from shop.words import WORD, heavy
from hermes_rl.rl import EnvConfig, Environment, Rewards, make_task, part

class Config(EnvConfig):
    sandboxed: bool = False

class Shop(Environment[Config]):
    name = "shop"
    Config = Config

    def tasks(self, split, seed):
        yield make_task("say it", id="one", oracle=f'["{WORD}"]')

    async def compute_reward(self, task, trajectory, ctx):
        cpu = await ctx.cpu(heavy, 2)
        return Rewards([part("answer", float(trajectory.final_response == WORD))],
                       {"worker": os.getpid(), "cpu": cpu})
"""


@pytest.mark.slow
def test_ray_workers_import_modules_from_the_working_directory(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "mod.py").write_text(BESIDE)
    (tmp_path / "shop" / "words.py").write_text("WORD = 'yes'\ndef heavy(n):\n    return n * 21\n")
    code = "import os, sys; from hermes_rl.cli import main; print(os.getpid()); sys.exit(main())"
    arguments = ["env", "process", "shop.mod:Shop", "--model", "oracle", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments, "--repeats", "2", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, **cluster},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = load_run(tmp_path / "run").trajectories["metrics"].tolist()
    assert [found["cpu"] for found in metrics] == [42.0, 42.0]
    assert int(done.stdout.split()[0]) not in {int(found["worker"]) for found in metrics}


def test_a_task_stream_is_the_same_in_every_process() -> None:
    code = (
        "import sys, msgspec; from hermes_rl.rl.trial import first_tasks; "
        "sys.stdout.buffer.write(msgspec.json.encode(first_tasks(sys.argv[1], 50)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(MATH)],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        timeout=60,
    ).stdout
    assert other == msgspec.json.encode(first_tasks(MATH, 50))
    assert len(other) > 5_000
    assert first_tasks(MATH, 5) != first_tasks(MATH, 5, seed=1)
    assert first_tasks(MATH, 5) != first_tasks(MATH, 5, split="eval")


def test_identity_covers_code_data_configuration_and_models(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .environment import MathTool\n")
    may = MATH.read_text().replace("endless = ", 'can_use = ("judge",)\n    endless = ')
    (package / "environment.py").write_text(may)
    (package / "words.txt").write_text("one two")

    def identity(**section: Any) -> str:
        return resolve_settings(
            make_config(package, tmp_path / "run", None, env=section)
        ).config_hash

    first = identity()
    (package / "README.md").write_text("New words for people.")
    (package / "test_it.py").write_text("def test(): ...")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert identity() == first
    judge = {"name": "critic", "base_url": "http://127.0.0.1:1/v1"}
    judged = identity(judge=judge)
    assert judged != first
    assert identity(judge={**judge, "base_url": "http://127.0.0.1:2/v1"}) == judged
    assert identity(judge={**judge, "temperature": 0.5}) != judged
    for changed in ({"seed": 1}, {"split": "eval"}, {"config": {"largest": 5}}):
        assert identity(**changed) != first
    (package / "words.txt").write_text("one three")
    assert identity() != first


def test_an_environment_sets_defaults_of_the_run(tmp_path: Path) -> None:
    def settled(**sections: Any) -> Any:
        return resolve_settings(make_config(MATH, tmp_path / "run", None, **sections)).config

    plain = settled()
    assert (plain.dataset.repeats, plain.agent.preset, plain.agent.toolsets) == (4, "rl", ())
    assert plain.agent.system_prompt.startswith("Solve the task with the calculator")
    assert settled(env={"mode": "evaluate"}).dataset.repeats == 1
    changed = settled(dataset={"repeats": 2}, agent={"preset": "datagen", "system_prompt": "Hi."})
    assert (changed.dataset.repeats, changed.agent.preset, changed.agent.system_prompt) == (
        2, "datagen", "Hi.",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"env.config: unknown key 'larges' \(did you mean 'larg"):
        settled(env={"config": {"larges": 3}})
    with pytest.raises(UserError, match="reward_range takes two numbers"):
        settled(env={"config": {"reward_range": [1, 0]}})
