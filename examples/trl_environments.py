"""TRL's GRPOTrainer plays an environment itself, through its `environment_factory`.

    trl vllm-serve --model Qwen/Qwen3-0.6B
    python examples/trl_environments.py gsm8k_python --model Qwen/Qwen3-0.6B

TRL generates the answers with its own engine and template and trains on what it sampled; tasks,
tools, sandboxes and rewards are the environment's. An environment that answers as a user, scores
whole groups or has other tools for each task needs `rollout_func` (trl_grpo.py), which also keeps
runs: nothing is recorded here.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hermes_rl.rl import TrlEnvironments


@contextmanager
def open_trainer(
    env: str, model: str, out: Path, group_size: int, tasks: int, **args: Any
) -> Iterator[GRPOTrainer]:
    """Yield the trainer while the environment is open. `args`: of GRPOConfig."""
    config = GRPOConfig(str(out), num_generations=group_size, **args)
    with TrlEnvironments(env, group_size=group_size) as environments:
        yield GRPOTrainer(
            model,
            environments.rewards,
            config,
            Dataset.from_list(environments.rows(tasks)),
            environment_factory=environments,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="a name, or FILE.py:CLASS")
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--out", type=Path, default=Path("runs/trl-environments"))
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--tasks", type=int, default=1000, help="of the environment, from the first"
    )
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--max-completion-length", type=int, default=2048)
    arguments = vars(parser.parse_args())
    with open_trainer(**arguments, use_vllm=True, vllm_mode="server") as trainer:
        trainer.train()
