"""TRL's AsyncGRPOTrainer trains on rollouts of an environment while further rollouts run.

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --weight-transfer-config '{"backend": "nccl"}'
    python examples/trl_async_grpo.py gsm8k_python --model Qwen/Qwen3-0.6B

The environment owns tasks, tools and rewards. TRL sends its weights to the server. The same command
continues after a crash, from the last checkpoint.
"""

import argparse
import asyncio
import queue
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from hermes_rl.rl import Policy, RolloutStream, Row, RowFeed, rollouts


def make_sample(row: Row) -> RolloutSample:
    """One sequence for TRL. A rollout whose history forked has several, with one advantage."""
    return RolloutSample(
        prompt=[],
        completion=row.member.trajectory["messages"],
        input_ids=np.array(row.segment.input_ids, np.int64),
        completion_mask=np.array(row.segment.loss_mask, np.int64),
        old_log_probs=np.array(row.logprobs, np.float32),
        advantage=row.member.advantage,
        model_version=row.version or 0,
        group_id=row.group.row_index,
        metrics={"reward": row.member.reward, "reward_std": row.group.std},
    )


class RolloutWorker(RowFeed, TrainerCallback):
    """TRL's RolloutWorkerProtocol. As a callback of the trainer it acknowledges groups."""

    def __init__(self, stream: RolloutStream, policy: Policy, max_staleness: int) -> None:
        super().__init__(stream, policy, max_staleness=max_staleness, make=make_sample)
        self.rollout_buffer, self.metrics_queue = self.queue, queue.Queue()
        self.policy, self.check_health = policy, self.check

    def update_model_version(self, model_version: int) -> None:
        asyncio.run(self.policy.set_version(model_version))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # A batch ahead and a row that did not fit are trained in one of the next two steps.
        self.acknowledge(step=state.global_step + 2)


def make_trainer(
    env: str, model: str, server: str, out: Path, group_size: int, weights: Any = None, **args: Any
) -> tuple[AsyncGRPOTrainer, str | None]:
    """Return the trainer and its last checkpoint. `weights`: a WeightTransferProtocol of yours."""
    config = AsyncGRPOConfig(str(out / "trl"), vllm_server_base_url=server, **args)
    checkpoint = get_last_checkpoint(config.output_dir) if (out / "trl").is_dir() else None
    step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    rows = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    tasks = config.max_inflight_tasks  # by default, as many as are not stale when they are trained
    tasks = tasks if tasks > 0 else max(group_size, rows * (config.max_staleness - 2))
    policy = Policy(model=model, base_url=f"{server}/v1", tokenizer=model)
    stream = rollouts(
        env,
        policy,
        out=out / "rollouts",
        group_size=group_size,
        concurrency=tasks,
        ahead=1,
        resume_step=step,
        config={"model": {"temperature": config.temperature}},
    )
    worker = RolloutWorker(stream, policy, config.max_staleness)
    trainer = AsyncGRPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""]}),  # not used
        callbacks=[worker],
        rollout_worker=worker,
        weight_transfer=weights,
    )
    trainer.model_version = step // config.weight_sync_steps
    return trainer, checkpoint


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="a name, or FILE.py:CLASS")
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=100)
    trainer, checkpoint = make_trainer(**vars(parser.parse_args()))
    trainer.train(resume_from_checkpoint=checkpoint)
