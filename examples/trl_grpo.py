"""TRL's GRPOTrainer trains on rollouts of an environment, through its `rollout_func`.

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --weight-transfer-config '{"backend": "nccl"}'
    python examples/trl_grpo.py gsm8k_python --model Qwen/Qwen3-0.6B

The environment owns tasks, tools and rewards; TRL sends its weights to the server. A rollout whose
history forked has several rows, so a batch is made of rows. The same command resumes the run.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from hermes_rl.rl import Policy, Row, RowFeed, rollouts


class Rollouts(TrainerCallback):
    """A `rollout_func`. As a callback of the trainer it opens and closes the stream."""

    def __init__(self, feed: RowFeed) -> None:
        self.feed = feed

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        self.batch: list[Row] = self.feed.take(len(prompts))
        assert len(self.batch) == len(prompts), "the environment has no further batch of rows"
        uses = trainer.args.steps_per_generation * trainer.num_iterations
        steps = math.ceil(uses / trainer.args.gradient_accumulation_steps)
        self.feed.acknowledge(step=trainer.state.global_step + steps)  # when it will be trained
        return {
            "prompt_ids": [row.prompt_ids for row in self.batch],
            "completion_ids": [row.completion_ids for row in self.batch],
            "logprobs": [row.logprobs[row.segment.prompt_len :] for row in self.batch],
            "env_mask": [row.completion_mask for row in self.batch],
            "member_reward": [row.member.reward for row in self.batch],
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.feed.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.feed.stop()


class RowTrainer(GRPOTrainer):
    """GRPOTrainer with the advantages of rollouts: TRL's own count each row as a rollout."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        made = super()._generate_and_score_completions(inputs)
        advantages = [row.member.advantage for row in self.rollout_func.batch]
        made["advantages"] = torch.tensor(advantages, device=made["advantages"].device)
        return made


def member_reward(completions: list[Any], member_reward: list[float], **_: Any) -> list[float]:
    """The reward of each row's rollout, for TRL's log."""
    return member_reward


def make_trainer(
    env: str, model: str, server: str, out: Path, group_size: int, **args: Any
) -> tuple[RowTrainer, str | None]:
    """Return the trainer and the checkpoint to continue from. `args`: of GRPOConfig."""
    config = GRPOConfig(str(out / "trl"), num_generations=2, vllm_server_base_url=server, **args)
    checkpoint = get_last_checkpoint(config.output_dir) if (out / "trl").is_dir() else None
    step = int(checkpoint.rpartition("-")[2]) if checkpoint else None
    policy = Policy(model=model, base_url=f"{server}/v1", tokenizer=model)
    stream = rollouts(
        env,
        policy,
        out=out / f"rollouts-{config.process_index}",  # each process has tasks of its own
        seed=config.process_index,
        group_size=group_size,
        concurrency=config.generation_batch_size,
        ahead=1,
        resume_step=step or 0,
        config={"model": {"temperature": config.temperature}},
    )
    func = Rollouts(RowFeed(stream, policy))
    prompts = Dataset.from_dict({"prompt": [""] * config.generation_batch_size})  # not used
    trainer = RowTrainer(model, member_reward, config, prompts, rollout_func=func, callbacks=[func])
    return trainer, checkpoint


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="a name, or FILE.py:CLASS")
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=100)
    made, checkpoint = make_trainer(**vars(parser.parse_args()), use_vllm=True, vllm_mode="server")
    made.train(resume_from_checkpoint=checkpoint)
