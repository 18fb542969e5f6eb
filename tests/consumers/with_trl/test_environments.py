"""TRL's GRPOTrainer plays an environment of hermes_rl through its `environment_factory`.

TRL's prompts, tool calls, masks and loss; only what the model samples is written here.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_model
from live_truth import Term, context, row_digest
from trainer_side import TEMPLATES, load_example, rows_of_batch
from trl import GRPOTrainer

from hermes_rl.testing import write_tiny_tokenizer

ROOT = Path(__file__).parents[3]
STEPS, SIZE, PROMPTS = 3, 4, 2
REWARDS = [1.0, 0.9, 0.0, 0.0]
"""Of the plans below: the tool and the right answer, the answer alone, a wrong one, a bad call."""


class Sampler:
    """A model of four plans. Its log is the truth: each prompt with what was sampled for it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.log: list[tuple[list[int], list[int], list[float]]] = []

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        made = []
        for at, prompt in enumerate(prompts):
            text = self.answer(self.tokenizer.decode(prompt), at % SIZE) + "<|im_end|>"
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            logprobs = [-1.0 - n / 1024 - len(self.log) / 16 for n in range(len(ids))]
            self.log.append((prompt, ids, logprobs))
            made.append((ids, logprobs))
        return [list(ids) for ids, _ in made], [list(p) for _, p in made]

    def answer(self, prompt: str, place: int) -> str:
        a, b, c = map(int, re.findall(r"What is (\d+) times (\d+), plus (\d+)\?", prompt)[-1])
        plan = int(found[-1]) if (found := re.findall(r"<think>\s*plan (\d)", prompt)) else place
        think = f"<think>\nplan {plan}\n</think>\n\n"
        results = prompt.count("<tool_response>")
        call: dict[str, Any] = {"name": "calculate"}
        match plan, results:
            case 0, 0:
                call["arguments"] = {"operation": "multiply", "a": a, "b": b}
            case 0, 1:
                assert f"<tool_response>\n{a * b}\n</tool_response>" in prompt
                call["arguments"] = {"operation": "add", "a": a * b, "b": c}
            case 3, 0:
                call["arguments"] = {"operation": "divide", "a": a}
            case 3, 1:
                assert "missing argument 'b'" in prompt.rsplit("<tool_response>", 1)[1]
                return think + "I give up."
            case 2, _:
                return think + "ANSWER 1"
            case _:
                return think + f"ANSWER {a * b + c}"
        return think + f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def rows(self) -> list[list[Term]]:
        """The loss terms of each rollout: a prompt that continues a row is a further turn of it."""
        rows: list[tuple[list[int], list[Term]]] = []
        for prompt, sampled, logprobs in self.log:
            row = next((row for row in rows if prompt[: len(row[0])] == row[0]), None)
            if row is None:
                rows.append(row := ([], []))
            ids = prompt + sampled
            row[1].extend(
                (context(ids[: len(prompt) + n]), token, p)
                for n, (token, p) in enumerate(zip(sampled, logprobs, strict=True))
            )
            row[0][:] = ids
        return [terms for _, terms in rows]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model and a tokenizer with Qwen 3's template in the words that TRL knows."""
    folder = write_tiny_tokenizer(tmp_path / "model", "qwen3")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tiny_model(folder)
    return folder


def test_grpo_trains_each_token_that_trl_samples_in_our_environment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[list[Term], float]] = []
    losses: list[float] = []
    inner = GRPOTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *more: Any, **other: Any) -> Any:
        trained.extend(rows_of_batch(inputs))
        loss = inner(self, model, inputs, *more, **other)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(GRPOTrainer, "compute_loss", compute_loss)
    example = load_example("trl_environments")
    opening = example.open_trainer(
        str(ROOT / "docs/examples/math_tool.py"),
        str(model),
        tmp_path / "out",
        group_size=SIZE,
        tasks=STEPS * PROMPTS,
        max_steps=STEPS,
        per_device_train_batch_size=SIZE * PROMPTS,
        max_completion_length=2048,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    with opening as trainer:
        sampler = Sampler(trainer.processing_class)
        monkeypatch.setattr(
            GRPOTrainer, "_generate_single_turn", lambda self, ids, *_, **__: sampler.sample(ids)
        )
        trainer.train()
    first = sampler.tokenizer.decode(sampler.log[0][0])
    assert "Solve the task with the calculator." in first
    assert "Calculate with two whole numbers." in first
    assert '"enum": ["add", "subtract", "multiply"]' in first
    assert len(losses) == STEPS
    truth = sampler.rows()
    assert len(truth) == len(trained) == STEPS * PROMPTS * SIZE
    digests = Counter(row_digest(terms, 0) for terms, _ in trained)
    assert digests == Counter(row_digest(terms, 0) for terms in truth)
    assert sum(len(t) for t, _ in trained) == sum(len(ids) for _, ids, _ in sampler.log)
    mean = sum(REWARDS) / SIZE
    std = (sum((r - mean) ** 2 for r in REWARDS) / (SIZE - 1)) ** 0.5
    expected = Counter(round((r - mean) / (std + 1e-4), 3) for r in REWARDS)
    found = Counter(round(advantage, 3) for _, advantage in trained)
    assert found == Counter({value: n * STEPS * PROMPTS for value, n in expected.items()})
