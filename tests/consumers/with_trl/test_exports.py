"""TRL trains on the exports: conversations and tokens by SFTTrainer, rollouts by GRPOTrainer."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def trained_texts(words: Any, labels: Sequence[Sequence[int]]) -> list[str]:
    return [words.decode([i for i in row if i != -100]) for row in labels]


def sft(told: Told, name: str, folder: Path, cache: str, **settings: Any) -> SFTTrainer:
    words = byte_tokenizer(told.folder)
    trainer = SFTTrainer(
        model=tiny_model(len(words)),
        args=SFTConfig(
            output_dir=str(folder),
            max_length=None,
            per_device_train_batch_size=2,
            **QUICK,
            **settings,
        ),
        train_dataset=load(told.export(name), cache),
        processing_class=words,
    )
    assert 0 < trainer.train().training_loss < 20  # ln(259) = 5.6 for random weights
    return trainer


def test_sft_trains_on_what_the_policy_said(told: Told, tmp_path: Path, cache: str) -> None:
    trainer = sft(told, "trl", tmp_path, cache, assistant_only_loss=True)
    labels = [row["labels"] for row in trainer.train_dataset]
    told.check(trained_texts(trainer.processing_class, labels))


def test_sft_trains_on_the_exact_tokens(told: Told, tmp_path: Path, cache: str) -> None:
    trainer = sft(told, "trl-tokens", tmp_path, cache)
    labels = [row["labels"] for row in trainer.train_dataset]
    told.check(trained_texts(trainer.processing_class, labels))


def test_grpo_trains_on_rollouts_that_were_made_elsewhere(
    told: Told, tmp_path: Path, cache: str
) -> None:
    """The rollout_func of docs/training.md: it hands out the rows of each prompt in turn."""
    rows = load(told.export("trl-grpo"), cache).filter(lambda row: row["branch_index"] == 0)
    seen: list[dict[str, Any]] = []

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        waiting = list(rows)
        chosen = []
        for prompt in prompts:
            row = next(row for row in waiting if row["prompt"] == prompt)
            waiting.remove(row)
            chosen.append(row)
        seen.extend(chosen)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
        return {name: [row[name] for row in chosen] for name in names}

    def reward(reward: list[float], **_: Any) -> list[float]:
        return reward

    words = byte_tokenizer(told.folder)
    model = tiny_model(len(words))
    before = {name: value.clone() for name, value in model.named_parameters()}
    prompts = [row["prompt"] for row in rows][::2]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            num_generations=2,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            **QUICK,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=words,
        rollout_func=rollout_func,
    )
    trainer.train()
    assert len(seen) == 8
    assert Counter(row["reward"] for row in seen) == {0.0: 4, 1.0: 4}
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    masked = [
        [i for i, own in zip(row["completion_ids"], row["env_mask"], strict=True) if own]
        for row in load(told.export("trl-grpo"), cache)
    ]
    told.check([words.decode(ids) for ids in masked])
    for row in rows:
        own = [p for p, own in zip(row["logprobs"], row["env_mask"], strict=True) if own]
        assert set(own) == {-0.5}
