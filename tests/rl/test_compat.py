"""`hermes_rl.rl.compat.BaseEnv`: an environment of Atropos runs after its import is changed."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from api_kit import Api
from atropos_requests import trainer

from hermes_rl.testing import ExactConfig, ExactEngine, chat_of, write_tiny_tokenizer

ENVIRONMENT = '''
"""An environment written for Atropos; only its import is changed."""

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

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectory(self, item):
        if item == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("once")
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


async def run(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Exit code and output of the environment's command."""
    program = folder / "sums_env.py"
    program.write_text(ENVIRONMENT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), *arguments,
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
        options = ("--openai.base_url", engine.base_url, "--env.total_steps=5")
        code, out = await run(tmp_path, "process", *options)
        assert code == 0, out
        groups = [json.loads(line) for line in (tmp_path / "data/sums.jsonl").open()]
        assert len(groups) == 5
        for group in groups:
            check(group, engine)
            assert len(group["messages"]) == 4
    assert "once" in out  # the rollout that failed was made again


async def test_serve_sends_groups_until_the_last_step(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        with Api(tmp_path) as api:
            assert api.post("/register", trainer(batch_size=8, max_token_len=512))[0] == 200
            api.get("/batch")
            options = ("--openai.base_url", engine.base_url, f"--env.rollout_server_url={api.url}")
            serving = asyncio.create_task(run(tmp_path, "serve", *options))
            groups: list[dict[str, Any]] = []
            while not serving.done():
                groups += api.get("/batch")["batch"] or ()
                await asyncio.sleep(0.1)
            code, out = await serving
        assert code == 0, out
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


async def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    code, out = await run(tmp_path, "serve", "--env.group_sise=4")
    assert (code, out.count("\n")) == (2, 1)
    assert "--env.group_sise" in out
    code, out = await run(tmp_path, "serve", "--env.group_size=many")
    assert (code, out.count("\n")) == (2, 1)
