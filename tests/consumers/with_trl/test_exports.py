"""TRL trains on the exports: SFTTrainer on messages and tokens, GRPOTrainer on rollouts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ExportedRun
from datasets import Dataset, load_dataset
from trainer_side import QUICK, byte_tokenizer, tiny_model
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def load(path: str, cache: str) -> Dataset:
    return load_dataset("parquet", data_files=path, split="train", cache_dir=cache)


def train_sft(run: ExportedRun, name: str, folder: Path, cache: str, **settings: Any) -> SFTTrainer:
    tokenizer = byte_tokenizer(run.folder)
    trainer = SFTTrainer(
        model=tiny_model(len(tokenizer)),
        args=SFTConfig(
            output_dir=str(folder),
            max_length=None,
            per_device_train_batch_size=2,
            **QUICK,
            **settings,
        ),
        train_dataset=load(run.export(name), cache),
        processing_class=tokenizer,
    )
    assert 0 < trainer.train().training_loss < 20  # ln(259) = 5.6 for random weights
    return trainer


@pytest.mark.reads("trl")
def test_sft_trains_on_sampled_texts(exported_run: ExportedRun, tmp_path: Path, cache: str) -> None:
    trainer = train_sft(exported_run, "trl", tmp_path, cache, assistant_only_loss=True)
    tokenizer = trainer.processing_class
    exported_run.check(
        [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in trainer.train_dataset]
    )


@pytest.mark.reads("trl-tokens")
def test_sft_trains_on_the_exact_tokens(
    exported_run: ExportedRun, tmp_path: Path, cache: str
) -> None:
    trainer = train_sft(exported_run, "trl-tokens", tmp_path, cache)
    exported_run.check_tokens(
        (row["input_ids"], [label != -100 for label in row["labels"]])
        for row in trainer.train_dataset
    )


class GradientRecorder:
    """Records which tokens the loss of a step depends on, with a hook on the model.

    The gradient is zero for the log-probability of a token that is not trained on.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Ids, and the gradients of their log-probabilities, by row and position."""

    def __call__(self, _model: Any, _args: Any, arguments: dict[str, Any], out: Any) -> None:
        """Run after each forward pass."""
        if out.log_probs.requires_grad:
            ids = arguments["input_ids"].clone()
            out.log_probs.register_hook(lambda gradient: self.steps.append((ids, gradient)))

    def trained(self) -> list[tuple[list[int], list[bool]]]:
        """The ids of each row of the one step, and which of them are trained."""
        ((ids, gradient),) = self.steps
        places = gradient.shape[1]  # the first id may have no gradient
        assert places in (ids.shape[1], ids.shape[1] - 1)
        return list(zip(ids[:, -places:].tolist(), (gradient != 0).tolist(), strict=True))


def rollout_func_of(rows: Dataset) -> Any:
    """The rollout_func of docs/training.md, which returns the rows of each prompt in turn."""

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        waiting = list(rows)
        chosen = []
        for prompt in prompts:
            row = next(row for row in waiting if row["prompt"] == prompt)
            waiting.remove(row)
            chosen.append(row)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
        return {name: [row[name] for row in chosen] for name in names}

    return rollout_func


@pytest.mark.reads("trl-grpo")
def test_grpo_trains_on_tokens_that_were_sampled_before(
    exported_run: ExportedRun, tmp_path: Path, cache: str
) -> None:
    """The gradient of the step shows which tokens it trains on."""
    rows = load(exported_run.export("trl-grpo"), cache)
    rows = rows.filter(lambda row: row["branch_index"] == 0)
    prompts: list[Any] = []
    for row in rows:
        if row["prompt"] not in prompts:
            prompts.append(row["prompt"])
    tokenizer = byte_tokenizer(exported_run.folder)
    model = tiny_model(len(tokenizer))
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda reward, **_: reward,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            num_generations=2,
            per_device_train_batch_size=len(rows),
            learning_rate=1e-2,
            **QUICK,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        rollout_func=rollout_func_of(rows),
    )
    recorder = GradientRecorder()
    model.register_forward_hook(recorder, with_kwargs=True)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    later = [row for row in load(exported_run.export("trl-grpo"), cache) if row["branch_index"]]
    more = [(row["completion_ids"], row["env_mask"]) for row in later]
    exported_run.check_tokens([*recorder.trained(), *more])
    sampled = [p for facts in exported_run.truth.values() for lps in facts["logprobs"] for p in lps]
    written = [
        p
        for row in load(exported_run.export("trl-grpo"), cache)
        for p, is_trained in zip(row["logprobs"], row["env_mask"], strict=True)
        if is_trained
    ]
    assert sorted(written) == pytest.approx(sorted(sampled), abs=1e-5)
    rewards = [facts["reward"] for facts in exported_run.truth.values()]
    assert Counter(row["reward"] for row in rows) == Counter(rewards)
