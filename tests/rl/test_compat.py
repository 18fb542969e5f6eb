"""`hermes_rl.rl.compat.BaseEnv`: an environment of Atropos runs after its import is changed."""

import asyncio
import gc
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from api_kit import Api
from atropos_requests import trainer

from hermes_rl.testing import ExactConfig, ExactEngine, FaultPlan, chat_of, write_tiny_tokenizer

ENVIRONMENT = '''
"""An environment written for Atropos; only its import is changed."""

import asyncio

from hermes_rl.rl.compat import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class Sums(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(group_size=4, use_wandb=False, total_steps=3, max_num_workers=4)
        return config, [APIServerConfig(model_name="toy", base_url="unset", health_check=False)]

    async def setup(self):
        self.number = 0
        self.failed = False
        self.evaluated = asyncio.Event()

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectory(self, item):
        if item == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("once")
        if item > 2 and self.config.steps_per_eval == 1:
            await self.evaluated.wait()
        prompt = f'Number {item}.\\nSCRIPT: ["one", "two {item}"]\\n'
        messages = [{"role": "user", "content": prompt}]
        async with self.server.managed_server() as managed:
            for _ in range(2):
                answer = await managed.chat_completion(messages=messages, n=1, max_tokens=20)
                text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": "Continue."})
            (node,) = managed.get_state()["nodes"]
        self.scored = getattr(self, "scored", 0) + 1
        item = ScoredDataItem(
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
            scores=float(self.scored % 3),
            messages=messages[:-1],
        )
        return item, []

    async def evaluate(self, *args, **kwargs):
        if self.config.steps_per_eval == 1 and not self.evaluated.is_set():
            self.evaluated.set()
            raise RuntimeError("no eval set")
        answer = await self.server.chat_completion(
            messages=[{"role": "user", "content": 'SCRIPT: ["yes"]\\n'}], split="eval"
        )
        good = answer.choices[0].message.content == "yes"
        await self.evaluate_log({"eval/good": float(good)}, samples=[{"good": good}])


if __name__ == "__main__":
    Sums.cli()
'''


@asynccontextmanager
async def engine_at(folder: Path) -> AsyncIterator[ExactEngine]:
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    async with ExactEngine(ExactConfig(tokenizer=tokenizer), chat=chat_of(tokenizer)) as engine:
        yield engine


async def run(folder: Path, *arguments: str, program: str = ENVIRONMENT) -> tuple[int | None, str]:
    """Exit code and output of the environment's command."""
    (folder / "sums_env.py").write_text(program)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "sums_env.py", *arguments,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, out.decode()


def check(group: dict[str, Any], engine: ExactEngine) -> None:
    """Masks and log-probabilities are those of the engine's log."""
    sampled = {tuple(entry.sampled_ids): entry for entry in engine.truth}
    for ids, mask, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        assert all(m in (-100, i) for i, m in zip(ids, mask, strict=True))
        assert all((p == 1.0) == (m == -100) for p, m in zip(logprobs, mask, strict=True))
        answers: list[list[int]] = [[]]
        for m in mask:
            if m != -100:
                answers[-1].append(m)
            elif answers[-1]:
                answers.append([])
        answers = [answer for answer in answers if answer]
        assert len(answers) == 2
        assert all(tuple(answer) in sampled for answer in answers)


async def test_process_writes_groups_with_sampled_ids(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        engine.faults = FaultPlan(seed=1, rates={"server_error": 0.3})
        options = ("--openai.base_url", engine.base_url, "--env.total_steps=5")
        code, out = await run(tmp_path, "process", *options)
        assert code == 0, out
        groups = [json.loads(line) for line in (tmp_path / "data/sums.jsonl").open()]
        assert len(groups) == 5
        for group in groups:
            check(group, engine)
            assert len(group["messages"]) == 4
        assert f"{engine.base_url}: Error code: 500" in out
    assert "; trying again" in out
    assert "once" in out  # the rollout that failed was made again


async def test_serve_sends_groups_until_the_last_step(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        with Api(tmp_path) as api:
            assert api.post("/register", trainer(batch_size=8, max_token_len=512))[0] == 200
            api.get("/batch")
            options = ("--openai.base_url", engine.base_url, f"--env.rollout_server_url={api.url}")
            options = (*options, "--env.steps_per_eval=1")  # while four items are running
            serving = asyncio.create_task(run(tmp_path, "serve", *options))
            groups: list[dict[str, Any]] = []
            while not serving.done():
                groups += api.get("/batch")["batch"] or ()
                await asyncio.sleep(0.1)
            code, out = await serving
        assert code == 0, out
        assert re.search(r"evaluation at step \d+ failed: no eval set", out)
        assert len(groups) >= 6
        for group in groups:
            assert len(set(group["scores"])) > 1
            check(group, engine)


async def test_evaluate_writes_metrics(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        options = ("--openai.base_url", engine.base_url, "--env.data_dir_to_save_evals", "evals")
        code, out = await run(tmp_path, "evaluate", *options)
    assert code == 0, out
    written = json.loads((tmp_path / "evals/metrics.json").read_text())
    assert written["results"] == {
        "atropos|sums_eval|0": {"eval/good": 1.0},
        "all": {"eval/good": 1.0},
    }
    assert json.loads((tmp_path / "evals/samples.jsonl").read_text()) == {"good": True}


@pytest.mark.parametrize(
    ("arguments", "answer", "file"),
    [
        ("srve", "no command srve: serve, process or evaluate", ""),
        ("serve group_size=4", "no option group_size", ""),
        ("serve --group_size=4", "no option --group_size", ""),
        ("serve --env.group_sise=4", "no option --env.group_sise", ""),
        ("serve --env.group_size=many", "--env.group_size: Input should be a valid integer", ""),
        ("serve --env.group_size=[", "--env.group_size: Input should be a valid integer", ""),
        ("process --env.group_size -2", "--env.group_size: Input should be greater", ""),
        ("serve --openai.base_url=", "no model server. Name one with --openai.base_url", ""),
        ("serve --config absent.yaml", "absent.yaml: no such file", ""),
        ("serve --config env.yaml", "env.yaml:2: not valid YAML", "{"),
        ("serve --config env.yaml", "env.yaml: must hold sections", "[1, 2]"),
        ("serve --config env.yaml", "--config: 3 in place of the keys", "env: 3"),
        ("serve --config env.yaml", "--config: 3 in place of the keys", "openai: [3]"),
        ("serve --config env.yaml", "no option --env.group_sise", "env: {group_sise: 4}"),
        ("serve --config env.yaml", "no option --openai.url", "openai: [{url: x}]"),
        ("serve --env.rollout_server_url=here", "here: no URL of a trajectory API", ""),
        (
            "process --openai.base_url={url}/none",
            "16 items in a row failed, the last one: http",
            "",
        ),
        (  # text that YAML reads as a number, a date and a mapping
            "evaluate --openai.base_url={url}/none --openai.model_name=7 --openai.api_key=a:"
            " --env.wandb_name 2026-01-01",
            "/none/chat/completions: Error code: 404",
            "",
        ),
        (
            "process --openai.base_url={url} --env.data_path_to_save_groups=env.yaml/x",
            "File exists: 'env.yaml'",
            "{}",
        ),
    ],
)
async def test_a_mistake_is_one_line(
    arguments: str,
    answer: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    loop_reports: list[dict[str, Any]],
) -> None:
    monkeypatch.chdir(tmp_path)
    if file:
        Path("env.yaml").write_text(file + "\n")
    names: dict[str, Any] = {"__name__": "sums_env"}
    exec(ENVIRONMENT, names)
    async with AsyncExitStack() as stack:
        if "{url}" in arguments:
            engine = await stack.enter_async_context(engine_at(tmp_path))
            arguments = arguments.replace("{url}", engine.base_url)
        monkeypatch.setattr(sys, "argv", ["sums_env.py", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(names["Sums"].cli)
    for _ in range(3):  # clients that were not closed
        gc.collect()
        await asyncio.sleep(0)
    assert loop_reports == []
    assert "never retrieved" not in caplog.text
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")
    assert answer in error


async def test_ctrl_c_ends_a_wait_for_the_api(tmp_path: Path) -> None:
    options = ("--env.rollout_server_url", "http://127.0.0.1:9")
    (tmp_path / "sums_env.py").write_text(ENVIRONMENT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "sums_env.py", "serve", *options,
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert b"trying again until it answers" in await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = await process.communicate()
    assert (process.returncode, error) == (130, b"")


async def test_the_environment_of_the_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/atropos.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    async with engine_at(tmp_path) as engine:
        options = ("process", "--openai.base_url", engine.base_url, "--env.total_steps", "2")
        code, out = await run(tmp_path, *options, program=program)
    assert code == 0, out
    groups = [json.loads(line) for line in (tmp_path / "data/doubles.jsonl").open()]
    sampled = sorted(tuple(entry.sampled_ids) for entry in engine.truth)
    trained = [[m for m in mask if m != -100] for group in groups for mask in group["masks"]]
    assert len(trained) == 8
    assert sorted(map(tuple, trained)) == sampled
