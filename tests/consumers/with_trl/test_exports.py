"""TRL trains on the exports: conversations and tokens by SFTTrainer, rollouts by GRPOTrainer."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Told
from datasets import Dataset, load_dataset
from trainer_side import byte_tokenizer, tiny_model
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

QUICK: dict[str, Any] = {
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": [],
}


def load(path: str, cache: str) -> Dataset:
    return load_dataset("parquet", data_files=path, split="train", cache_dir=cache)


def sft(run: Told, name: str, folder: Path, cache: str, **settings: Any) -> SFTTrainer:
    words = byte_tokenizer(run.folder)
    trainer = SFTTrainer(
        model=tiny_model(len(words)),
        args=SFTConfig(
            output_dir=str(folder),
            max_length=None,
            per_device_train_batch_size=2,
            **QUICK,
            **settings,
        ),
        train_dataset=load(run.export(name), cache),
        processing_class=words,
    )
    assert 0 < trainer.train().training_loss < 20  # ln(259) = 5.6 for random weights
    return trainer


@pytest.mark.reads("trl")
def test_sft_trains_on_what_the_policy_said(taught: Told, tmp_path: Path, cache: str) -> None:
    trainer = sft(taught, "trl", tmp_path, cache, assistant_only_loss=True)
    words = trainer.processing_class
    taught.check(
        [words.decode([i for i in row["labels"] if i != -100]) for row in trainer.train_dataset]
    )


@pytest.mark.reads("trl-tokens")
def test_sft_trains_on_the_exact_tokens(taught: Told, tmp_path: Path, cache: str) -> None:
    trainer = sft(taught, "trl-tokens", tmp_path, cache)
    taught.check_tokens(
        (row["input_ids"], [label != -100 for label in row["labels"]])
        for row in trainer.train_dataset
    )


class Watch:
    """Sees, by a hook on the model alone, which tokens the loss of a step depends on: it has no
    slope in the log-probability of one that it does not look at."""

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Ids, and slopes of their log-probabilities, by row and place."""

    def __call__(self, _model: Any, _args: Any, given: dict[str, Any], out: Any) -> None:
        """After each pass through the model."""
        if out.log_probs.requires_grad:
            ids = given["input_ids"].clone()
            out.log_probs.register_hook(lambda slope: self.steps.append((ids, slope)))

    def trained(self) -> list[tuple[list[int], list[bool]]]:
        """Of the one step: the ids of each row, and which of them are trained."""
        ((ids, slope),) = self.steps
        places = slope.shape[1]  # the first ids have none, or the last ones of all
        assert places in (ids.shape[1], ids.shape[1] - 1)
        return list(zip(ids[:, -places:].tolist(), (slope != 0).tolist(), strict=True))


def rollout_func_of(rows: Dataset) -> Any:
    """The rollout_func of docs/training.md: it hands out the rows of each prompt in turn."""

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
def test_grpo_trains_on_what_was_sampled_elsewhere(
    taught: Told, tmp_path: Path, cache: str
) -> None:
    """What the step learns from is read off its own gradient."""
    rows = load(taught.export("trl-grpo"), cache)
    rows = rows.filter(lambda row: row["branch_index"] == 0)
    prompts: list[Any] = []
    for row in rows:
        if row["prompt"] not in prompts:
            prompts.append(row["prompt"])
    words = byte_tokenizer(taught.folder)
    model = tiny_model(len(words))
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
        processing_class=words,
        rollout_func=rollout_func_of(rows),
    )
    watch = Watch()
    model.register_forward_hook(watch, with_kwargs=True)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    later = [row for row in load(taught.export("trl-grpo"), cache) if row["branch_index"]]
    more = [(row["completion_ids"], row["env_mask"]) for row in later]
    taught.check_tokens([*watch.trained(), *more])
    sampled = [p for facts in taught.truth.values() for own in facts["logprobs"] for p in own]
    written = [
        p
        for row in load(taught.export("trl-grpo"), cache)
        for p, own in zip(row["logprobs"], row["env_mask"], strict=True)
        if own
    ]
    assert sorted(written) == pytest.approx(sorted(sampled), abs=1e-5)
    worth = [facts["reward"] for facts in taught.truth.values()]
    assert Counter(row["reward"] for row in rows) == Counter(worth)
